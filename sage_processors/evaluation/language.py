"""Compare a language model with INT8 attention and KV cache to stock: perplexity and greedy text."""

from __future__ import annotations

import copy
import inspect
import math
from collections.abc import Callable
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from ..options import SageAttnProcessor
from .held_out_text import EMBEDDED, KINDS, chat_ids, heldout_windows, load, load_tokenizer, locate


__all__ = [
    "EMBEDDED",
    "KINDS",
    "Perplexity",
    "Result",
    "cache_argument",
    "chat_ids",
    "embeddings",
    "evaluate",
    "first_differences",
    "greedy",
    "heldout_windows",
    "kv_bytes_per_token",
    "load",
    "load_tokenizer",
    "locate",
    "margins",
    "perplexity",
]
MEASURED = "sage_int8_measured"  # strict and without a minimum length, so that all that is measured runs in INT8
ONE_TOKEN = 2  # fewest queries of a prefill call; one token on a 16-bit cache is a decode step


@dataclass(frozen=True)
class Perplexity:
    """Perplexity of a model on text. losses: float64 [W], mean of -log p per window, in nats per token."""

    losses: torch.Tensor

    @property
    def value(self) -> float:
        return math.exp(self.losses.mean().item())

    def ratio(self, other: Perplexity) -> tuple[float, float]:
        """Return this perplexity over the other on the same windows, and the ratio's standard error."""
        difference = self.losses - other.losses
        ratio = math.exp(difference.mean().item())
        return ratio, ratio * difference.std().item() / math.sqrt(len(difference)) if len(difference) > 1 else math.nan


def cache_argument(function: Callable, cache: Any) -> dict[str, Any]:
    """Return a KV cache as the keyword argument that a model's forward expects; {} for None.

    It is called `past_key_values`, and `cache` in newer versions of transformers. The name must be right: a forward
    with **kwargs drops an unknown keyword silently.

    function: the forward, or, for `generate`, GenerationMixin.prepare_inputs_for_generation.
    """
    name = "cache" if "cache" in inspect.signature(function).parameters else "past_key_values"
    return {} if cache is None else {name: cache}


@torch.no_grad()
def perplexity(
    model,
    windows: torch.Tensor,
    *,
    cache: Callable | None = None,
    prefill: int | None = None,
    chunk: int = 1,
    batch: int = 16,
) -> Perplexity:
    """Return the perplexity of all tokens except each window's first.

    With a cache, the first `prefill` tokens of a window go through the model in one call and the others `chunk` by
    `chunk`, so that they attend to the cache. Without one, a window is one call.

    Args:
        model: a causal language model. windows: token ids, int64 [W, S], S >= 2.
        cache: returns an empty cache, called for each batch, e.g. `lambda: Int8KVCache(model.config)`.
        prefill: 1 to S - 1; None: S // 8. chunk: tokens per later call, >= 1. batch: windows per call, >= 1.
    Raises: ValueError for arguments out of range, or windows longer than the model's positions.
    """
    _check_tokens(model, "windows", windows, 0)
    length = windows.shape[1] - 1  # nothing is predicted after the last token
    if length < 1:
        raise ValueError("windows: got windows of 1 token, expected at least 2")
    first = max(1, length // 8) if prefill is None else prefill
    if cache is None:
        first = length
    for name, value, largest in (("prefill", first, length), ("chunk", chunk, length), ("batch", batch, math.inf)):
        if not 1 <= value <= largest:
            raise ValueError(f"{name}: got {value}, expected 1 to {largest}")
    losses = []
    for part in windows.split(batch):
        part = part.to(model.device)
        past = None if cache is None else cache()
        given = cache_argument(model.forward, past)
        total = torch.zeros(len(part), dtype=torch.float64, device=part.device)
        starts = [0, *range(first, length, chunk)]
        for start, stop in zip(starts, [*starts[1:], length], strict=True):
            logits = model(part[:, start:stop], **given, use_cache=past is not None).logits
            expected = part[:, start + 1 : stop + 1]
            # of rows: along a vocabulary that is not the last dimension, a CPU's sums in fp32 lose digits
            loss = torch.nn.functional.cross_entropy(
                logits.float().flatten(0, 1), expected.flatten(), reduction="none"
            )
            total = total + loss.double().view(expected.shape).sum(1)
        losses.append((total / length).cpu())
    return Perplexity(torch.cat(losses))


@torch.no_grad()
def greedy(
    model, prompts: torch.Tensor, new_tokens: int, *, cache: Callable | None = None, batch: int = 16
) -> torch.Tensor:
    """Return the greedy continuation of each prompt, always `new_tokens` long.

    Args:
        prompts: int64 [P, S]. new_tokens: N >= 1. An end-of-text token is never chosen.
        cache, batch: as in `perplexity`; cache None: transformers' own cache.
    Returns: int64 [P, N] on the CPU.
    Raises: ValueError for arguments out of range, or more tokens than the model has positions.
    """
    from transformers import GenerationMixin

    for name, value in (("new_tokens", new_tokens), ("batch", batch)):
        if value < 1:
            raise ValueError(f"{name}: got {value}, expected at least 1")
    _check_tokens(model, "prompts", prompts, new_tokens)
    options = {"do_sample": False, "num_beams": 1, "max_new_tokens": new_tokens, "min_new_tokens": new_tokens}
    outputs = []
    for part in prompts.split(batch):
        part = part.to(model.device)
        past = None if cache is None else cache()
        given = cache_argument(GenerationMixin.prepare_inputs_for_generation, past)
        output = model.generate(part, attention_mask=torch.ones_like(part), **given, **options)
        outputs.append(output[:, part.shape[1] :].cpu())
    return torch.cat(outputs)


def first_differences(ours: torch.Tensor, stock: torch.Tensor) -> tuple[int | None, ...]:
    """Return the index of the first differing token in each row of two int64 [P, N]; None for equal rows."""
    if ours.shape != stock.shape:
        raise ValueError(f"ours: got shape {tuple(ours.shape)}, expected stock's {tuple(stock.shape)}")
    unequal = ours != stock
    return tuple(row.int().argmax().item() if row.any() else None for row in unequal)


@torch.no_grad()
def margins(model, prompts: torch.Tensor, tokens: torch.Tensor, *, batch: int = 16) -> torch.Tensor:
    """Return the margin of each greedy token: its logit minus the best other logit, in nats.

    Args: prompts: int64 [P, S]. tokens: int64 [P, N], the result of `greedy` for them. End-of-text tokens don't count
        as others, since `greedy` can't choose them.
    Returns: fp32 [P, N] on the CPU.
    """
    ends = model.generation_config.eos_token_id
    found = []
    for asked, taken in zip(prompts.cpu().split(batch), tokens.split(batch), strict=True):
        both = torch.cat([asked, taken], 1).to(model.device)
        logits = model(both[:, :-1], use_cache=False).logits[:, -tokens.shape[1] :].float()
        place = both[:, asked.shape[1] :, None]
        own = logits.gather(-1, place)[..., 0]
        logits[..., [] if ends is None else ends] = -torch.inf  # one id or several
        found.append((own - logits.scatter(-1, place, -torch.inf).amax(-1)).cpu())
    return torch.cat(found)


def kv_bytes_per_token(cache, dtype: torch.dtype | None = None) -> int:
    """Return the bytes that a filled cache holds for one token of one sequence, scales included.

    Args: cache: of transformers, or Int8KVCache. dtype: count as if keys and values had this dtype and no scales.
    Raises: ValueError for a cache without keys and values.
    """
    total = 0
    for layer in cache.layers:
        if dtype is None and hasattr(layer, "bytes_per_token"):
            total += layer.bytes_per_token()
        elif getattr(layer, "keys", None) is not None:  # other layers share keys, or have a state of fixed size
            both = (layer.keys, layer.values)  # [B, H_kv, S, D]
            total += sum(x.shape[1] * x.shape[3] * (dtype or x.dtype).itemsize for x in both)
    if not total:
        raise ValueError(f"cache: got a {type(cache).__name__} that holds no keys and values, expected a filled one")
    return total


@dataclass(frozen=True)
class Result:
    """One way of running the model, compared with stock attention.

    Attributes:
        name: "stock", "stock_fp32", "prefill" (INT8 attention, 16-bit or fp32 cache), "prefill_kv" (INT8 cache too).
        recipe: of the INT8 attention; empty for stock.
        perplexity: of the windows. ratio, ratio_error: its ratio to stock's, and the standard error over windows.
        tokens: int64 [P, N], the greedy continuations.
        first: per prompt, the index of the first token that differs from stock's, or None.
        margin: per prompt, stock's margin (see `margins`) at that index, in nats; None if no token differs.
        kv_bytes_per_token: of the cache, per sequence, measured.
        int8_calls, cache_calls: attention calls in INT8, and those of them that read an INT8 cache.
        linear_calls: calls of linear layers in 8 bit, and in 16 bit.
        exact: {reason: attention calls that ran in 16 bit or fp32}.
    """

    name: str
    recipe: str
    perplexity: Perplexity
    ratio: float
    ratio_error: float
    tokens: torch.Tensor
    first: tuple[int | None, ...]
    margin: tuple[float | None, ...]
    kv_bytes_per_token: int
    int8_calls: int
    cache_calls: int
    exact: dict[str, int]
    linear_calls: tuple[int, int]

    @property
    def identical(self) -> float:
        """Share of the prompts with the same continuation as stock, token by token."""
        return sum(place is None for place in self.first) / len(self.first)


def evaluate(
    model,
    windows: torch.Tensor,
    prompts: torch.Tensor,
    *,
    new_tokens: int = 256,
    recipe: str = "qk_int8_pv_bf16",
    config: SageAttnProcessor | None = None,
    prefill: int | None = None,
    chunk: int = 1,
    batch: int = 16,
) -> dict[str, Result]:
    """Run stock SDPA, INT8 attention, and INT8 attention with an INT8 cache on the same text and prompts.

    A model in 16 bit is also run with its weights in fp32 ("stock_fp32"), which shows the error of 16-bit rounding
    alone. INT8 attention runs at every length here, also for short prompts that `sage_int8` would leave in 16 bit.

    Args: windows, prefill, chunk, batch: as in `perplexity`. prompts, new_tokens: as in `greedy`.
        recipe: of sage_kernels.RECIPES. config: options of `apply` in place of INT8 attention alone with the recipe.
    Returns: {name: Result}, stock first. Afterwards the model has its own attention implementation again.
    Raises: ValueError as `perplexity` and `greedy`; sage_processors.UnsupportedAttentionError for a model with
        attention that INT8 can't do.
    """
    from transformers import DynamicCache

    import sage_kernels

    from ..entry import apply
    from ..language.attention import register_transformers
    from ..language.choice import refuse_without_attention
    from ..language.kv_cache import Int8KVCache

    rotation: Any = "hadamard" if recipe == sage_kernels.DEFAULT_RECIPE else "none"  # as the standard names have it
    register_transformers(MEASURED, recipe=recipe, min_tokens=ONE_TOKEN, on_unsupported="raise", rotation=rotation)
    refuse_without_attention(model, MEASURED)
    _check_tokens(model, "prompts", prompts, new_tokens)
    reading: dict[str, Any] = {"chunk": chunk, "prefill": prefill, "batch": batch}

    def own_cache():
        return DynamicCache(config=model.config)

    def int8_cache():
        return Int8KVCache(model.config)

    usual = partial(with_attention, name="sdpa")
    ours = partial(with_attention, name=MEASURED) if config is None else partial(apply, config=config)
    own_recipe = recipe if config is None else config.recipe

    def run(name, runner, swap, cache, reads_cache, stock=None, sure=None):
        with swap(runner):
            before = _calls(runner)
            text = perplexity(runner, windows, cache=cache if reads_cache else None, **reading)
            tokens = greedy(runner, prompts, new_tokens, cache=cache, batch=batch)
            after = _calls(runner)
            held = cache()
            with torch.no_grad():
                runner(prompts[:1].to(runner.device), **cache_argument(runner.forward, held), use_cache=True)
        reference = text if stock is None else stock.perplexity
        first = first_differences(tokens, tokens if stock is None else stock.tokens)
        margin = tuple(None if place is None else sure[i, place].item() for i, place in enumerate(first))
        exact = {
            reason: n - before[2].get(reason, 0) for reason, n in after[2].items() if n > before[2].get(reason, 0)
        }
        return Result(
            name, own_recipe if swap is ours else "", text, *text.ratio(reference), tokens, first, margin,
            kv_bytes_per_token(held), after[0] - before[0], after[1] - before[1], exact, after[3],
        )  # fmt: skip

    stock = run("stock", model, usual, own_cache, False)
    results = [stock]
    with usual(model):
        sure = margins(model, prompts, stock.tokens, batch=batch)
    if model.dtype in (torch.float16, torch.bfloat16):
        with float32_copy(model) as exact:
            results.append(run("stock_fp32", exact, usual, own_cache, False, stock, sure))
    results.append(run("prefill", model, ours, own_cache, False, stock, sure))
    results.append(run("prefill_kv", model, ours, int8_cache, True, stock, sure))
    return {result.name: result for result in results}


@contextmanager
def float32_copy(model):
    """Yield the model in fp32: itself, or a copy of a 16-bit one."""
    yield model if model.dtype == torch.float32 else copy.deepcopy(model).float()


@contextmanager
def with_attention(model, name: str):
    """Run a transformers model with this attention implementation."""
    before = model.config._attn_implementation
    model.set_attn_implementation(name)
    try:
        yield
    finally:
        model.set_attn_implementation(before)


def _calls(model) -> tuple[int, int, dict[str, int], tuple[int, int]]:
    """Return the calls of attention, of the cache and of linear layers.

    Attention calls in INT8 and on an INT8 cache, 16-bit ones by reason, and linear layers' calls.
    """
    from ..language.attention import attention_report

    report = attention_report(model)
    linears = (0, 0) if report.linears is None else (report.linears.ran, sum(report.linears.fallbacks.values()))
    return report.calls, sum(row["cache_calls"] for row in report.rows), report.fallbacks, linears


@torch.no_grad()
def embeddings(model, ids: torch.Tensor, mask: torch.Tensor | None = None) -> torch.Tensor:
    """Return a sentence encoder's embeddings, fp32 [N, features]: the mean over tokens, of length 1.

    Args: ids: int64 [N, S]. mask: 1 for tokens that count, [N, S]; None: all of them.
    """
    mask = torch.ones_like(ids) if mask is None else mask
    hidden = model(input_ids=ids, attention_mask=mask).last_hidden_state.float()
    counted = mask[..., None].float()
    return torch.nn.functional.normalize((hidden * counted).sum(1) / counted.sum(1), dim=-1)


def positions(model) -> int | None:
    """Return the most tokens that a model knows positions for; None without a limit."""
    rows: int | None = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    for name, module in model.named_modules():
        before = getattr(module, "padding_idx", None) if name.endswith("position_embeddings") else None
        if rows is not None and before is not None:  # RoBERTa's positions begin behind the one of padding
            return rows - before - 1
    return rows


def _check_tokens(model, name: str, tokens: torch.Tensor, more: int) -> None:
    """Raise ValueError unless tokens are ids [rows, length] and fit the model with `more` new ones."""
    if not isinstance(tokens, torch.Tensor) or tokens.dtype != torch.int64 or tokens.ndim != 2 or not tokens.numel():
        got = f"{tokens.dtype} {tuple(tokens.shape)}" if isinstance(tokens, torch.Tensor) else type(tokens).__name__
        raise ValueError(f"{name}: got {got}, expected token ids, int64 [rows, tokens], at least one row")
    room = positions(model)
    if room is not None and tokens.shape[1] + more > room:
        raise ValueError(
            f"{name}: got {tokens.shape[1]} tokens{f' and {more} new ones' if more else ''}, expected at most {room} "
            "together, the positions that the model knows"
        )
