"""Time a whole picture, clip or text, stock and in INT8, from a few steps.

A call of few and one of more steps differ by what the steps between them take; the rest is the text encoder and the
decoder. Nothing waits for the GPU within a call, so its time is that of a user's call.
"""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

import torch

from ...options import SageAttnProcessor
from ..quality import generate


FEW = 2  # steps of the short call
ROUNDS = 3  # calls of either length; the median counts
WORTH_IT = 0.97  # of stock's time


class Timing(NamedTuple):
    """Time of one way to run a model.

    Attributes:
        total: seconds of a picture, clip or text. step: seconds of a step or token. rest: seconds of all else.
        first: seconds that the first call took longer: compiling, capturing, quantising weights.
        peak_gib: most GPU memory allocated at once, GiB; None on a CPU.
    """

    total: float
    step: float
    rest: float
    first: float
    peak_gib: float | None


def time_calls(
    call: Callable[[int], Any], steps: int, device: torch.device, *, few: int = FEW, more: int = 6, whole: bool = False
) -> Timing:
    """Time `call(steps)`, from calls of `few` and `more` steps, or, if `whole`, a call of all steps.

    Raises: ValueError unless 1 <= few < more.
    """
    if not 1 <= few < more:
        raise ValueError(f"more: got {more} steps, expected more than {few}")
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    first = _seconds(call, few, device)
    short, long = (statistics.median(_seconds(call, n, device) for _ in range(ROUNDS)) for n in (few, more))
    step = max(long - short, 0.0) / (more - few)
    rest = max(short - few * step, 0.0)
    total = rest + steps * step
    if whole:
        total = _seconds(call, steps, device)
        rest = max(total - steps * step, 0.0)
    peak = torch.cuda.max_memory_allocated(device) / 2**30 if device.type == "cuda" else None
    return Timing(total, step, rest, max(first - short, 0.0), peak)


def _seconds(call: Callable[[int], Any], steps: int, device: torch.device) -> float:
    synchronize = torch.cuda.synchronize if device.type == "cuda" else lambda device: None
    synchronize(device)
    began = time.perf_counter()
    call(steps)
    synchronize(device)
    return time.perf_counter() - began


def time_pipeline(
    pipe: Any, prompt: str, config: SageAttnProcessor, *, steps: int, arguments: dict[str, Any] | None = None,
    on_way: Callable[[str], None] = lambda way: None, **options: Any,
) -> tuple[dict[str, Timing], int]:  # fmt: skip
    """Return {"stock": Timing, "int8": Timing} of a pipeline, and the attention calls that ran in INT8.

    arguments: more for the pipeline's call. on_way: told the name of what is timed next. options: of `time_calls`.
    """
    from ...diffusion.handle import apply

    def call(number: int) -> None:
        generate(pipe, [prompt], [0], steps=number, **(arguments or {}))

    def run(way: str, swap: Callable[[], AbstractContextManager[Any]]) -> tuple[Timing, Any]:
        gc.collect()
        on_way(way)
        began = time.perf_counter()
        with swap() as handle:
            swapped = time.perf_counter() - began
            found = time_calls(call, steps, pipe.device, **options)
            return found._replace(first=found.first + swapped), handle and handle.report()

    stock, _ = run("stock", nullcontext)
    ours, report = run("int8", lambda: apply(pipe, config))
    return {"stock": stock, "int8": ours}, report.calls


def time_language(
    model: Any, *, recipe: str, prompt_tokens: int, new_tokens: int, on_way: Callable[[str], None] = lambda way: None,
    **options: Any,
) -> tuple[dict[str, Timing], int]:  # fmt: skip
    """Return {"stock": Timing, "int8": Timing} of a text, and the attention calls in INT8.

    INT8 is attention of prompts and the KV cache. Times of a step are those of a new token. options: of `time_calls`.
    """
    from transformers import GenerationMixin

    from ...language.attention import attention_report
    from ...language.kv_cache import Int8KVCache
    from ...language.names import name_of
    from ..language import cache_argument, with_attention

    ids = torch.arange(prompt_tokens, device=model.device)[None] * 7919 % model.config.get_text_config().vocab_size
    found = {}
    for way, name in (("stock", "sdpa"), ("int8", name_of(recipe))):

        def call(number: int, way: str = way) -> None:
            cache = Int8KVCache(model.config) if way == "int8" else None
            given = cache_argument(GenerationMixin.prepare_inputs_for_generation, cache)
            options = {"do_sample": False, "max_new_tokens": number, "min_new_tokens": number}
            model.generate(ids, attention_mask=torch.ones_like(ids), **given, **options)

        on_way(way)
        with with_attention(model, name):
            found[way] = time_calls(call, new_tokens, model.device, **options)
            calls = attention_report(model).calls if way == "int8" else 0
    return found, calls


def verdict(found: dict[str, Timing], calls: int, device: torch.device, what: str) -> str:
    """Return yes or no for this device in a sentence. what: "picture", "clip" or "text"."""
    stock, ours = found["stock"], found["int8"]
    ratio = ours.total / stock.total
    numbers = f"{ours.total:.2f} s a {what}, stock {stock.total:.2f} s ({ratio:.2f})"
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "a CPU"
    if not calls:
        return f"No: nothing of this model ran in INT8 attention on {name}, {numbers}."
    if device.type != "cuda":
        return f"No GPU, so INT8 ran in its reference, whose times say nothing about a GPU: {numbers}."
    memory = "" if ours.peak_gib is None else f", {ours.peak_gib:.1f} GiB for stock's {stock.peak_gib:.1f}"
    return f"{'Yes' if ratio <= WORTH_IT else 'No'}, on {name}: {numbers}{memory}."
