"""Rate a language model by loss and KL divergence per token, beside another exact kernel."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from ...reporting.layer_report import NOTHING_RAN
from .. import language, metrics
from .rating import FLOOR, OURS, REFERENCE, STOCK, another_kernel


CACHED = "int8, with an INT8 cache"


@torch.no_grad()
def rate_language(
    model: Any,
    windows: torch.Tensor,
    prompts: torch.Tensor,
    *,
    name: str,
    new_tokens: int = 64,
    recipe: str = "qk_int8_pv_bf16",
    batch: int = 4,
    chunk: int = 16,
    on_call: Callable[[], None] | None = None,
) -> tuple[dict[str, Any], dict[str, language.Result]]:
    """Return a rating as of `rating.rate`, without pictures, and the results of `language.evaluate`.

    The reference is the model in fp32. Args: as of `language.evaluate`. name: of the model.
    """
    chunk = min(chunk, windows.shape[1] - 1)
    results = language.evaluate(
        model, windows, prompts, new_tokens=new_tokens, recipe=recipe, chunk=chunk, batch=batch, on_call=on_call
    )
    kls: dict[str, list[float]] = {way: [] for way in (STOCK, FLOOR, OURS)}
    floor_losses: list[float] = []
    with language.float32_copy(model) as exact:
        for part in windows.split(batch):
            part = part.to(model.device)
            wanted, _ = _log_probabilities(exact, part, "sdpa")
            for way, implementation in ((STOCK, "sdpa"), (FLOOR, "sdpa"), (OURS, language.MEASURED)):
                if way == FLOOR:
                    with another_kernel():
                        found, of_windows = _log_probabilities(model, part, implementation)
                    floor_losses += of_windows
                else:
                    found, _ = _log_probabilities(model, part, implementation)
                kls[way] += (wanted.exp() * (wanted - found)).sum(-1).mean(-1).tolist()
    losses = {
        REFERENCE: results.get("stock_fp32", results["stock"]).perplexity.losses.tolist(),
        STOCK: results["stock"].perplexity.losses.tolist(), FLOOR: floor_losses,
        OURS: results["prefill"].perplexity.losses.tolist(), CACHED: results["prefill_kv"].perplexity.losses.tolist(),
    }  # fmt: skip
    means = {way: {"loss": list(metrics.mean_interval(values))} for way, values in losses.items()}
    for way, values in kls.items():
        means[way]["kl"] = list(metrics.mean_interval(values))
    further = {
        key: list(metrics.paired_interval(own[OURS], own[FLOOR])) for key, own in (("loss", losses), ("kl", kls))
    }
    state: dict[str, Any] = {
        "settings": settings_of(model, windows, name, recipe),
        "summary": {
            "means": means, "ours_minus_floor": further, "int8_calls": results["prefill"].int8_calls,
            "perplexity_ratio": results["prefill"].ratio, "perplexity_ratio_cache": results["prefill_kv"].ratio,
            "identical_texts": results["prefill_kv"].identical,
        },
        "rows": [], "notes": [],
    }  # fmt: skip
    return state | {"verdict": _verdict(state["summary"])}, results


def settings_of(model: Any, windows: torch.Tensor, name: str, recipe: str) -> dict[str, Any]:
    """Return what a rating depends on, as rating.json has it."""
    return {"model": name, "windows": list(windows.shape), "recipe": recipe, "dtype": str(model.dtype)}


def _log_probabilities(model, part: torch.Tensor, implementation: str) -> tuple[torch.Tensor, list[float]]:
    """Return log p of next tokens, fp64 [N, S - 1, V], and each window's mean loss in nats per token."""
    with language.with_attention(model, implementation):
        logs = model(part[:, :-1], use_cache=False).logits.double().log_softmax(-1)
    return logs, (-logs.gather(-1, part[:, 1:, None])).mean((1, 2)).tolist()


def _verdict(summary: dict[str, Any]) -> str:
    if not summary["int8_calls"]:
        return f"Not rated: {NOTHING_RAN}."
    ours, floor = (summary["means"][way]["kl"][0] for way in (OURS, FLOOR))
    return (
        f"INT8 attention changes perplexity by a factor of {summary['perplexity_ratio']:.5f}, with an INT8 cache "
        f"{summary['perplexity_ratio_cache']:.5f}; KL to fp32 is {ours:.2g} nats per token, where another exact "
        f"kernel has {floor:.2g}; {summary['identical_texts']:.0%} of greedy texts are the same."
    )
