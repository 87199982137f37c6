"""Rate language models by token, and sentence encoders by embedding.

INT8 stands beside another exact kernel.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

from ...options import SageAttnProcessor
from ...reporting.layer_report import NOTHING_RAN
from .. import language
from .kept import FLOOR, OURS, REFERENCE, STOCK, own_settings, started
from .rating import Progress, Tick, another_kernel, averaged, go_on, ran, unseen
from .timing import Calls


CACHED = "int8, with an INT8 cache"
COMPARED = ("loss", "kl", "identical", "same_tokens")
REQUIRED = {  # {way: metrics} of every window's row
    STOCK: ("loss", "kl"), REFERENCE: ("loss",), FLOOR: COMPARED, OURS: (*COMPARED, "kv_bytes"),
    CACHED: ("loss", "identical", "same_tokens", "kv_bytes"),
}  # fmt: skip
CHUNK = 16  # tokens of a call that reads the INT8 cache
CASES = {STOCK: "stock", REFERENCE: "stock_fp32", OURS: "prefill", CACHED: "prefill_kv"}  # of results.csv
FIGURES: tuple[tuple[str, str, str, Callable[[list[float]], float]], ...] = (  # of rows, and of results.csv
    ("loss", "perplexity", "1", lambda losses: math.exp(statistics.fmean(losses))),
    ("identical", "identical_share", "1", statistics.fmean),
    ("same_tokens", "same_tokens", "1", statistics.median),
    ("lead", "lead_at_difference", "nats", statistics.median),
    ("kv_bytes", "kv_bytes_per_token", "B", statistics.median),
)


def rate_texts(
    model: Any,
    windows: torch.Tensor,
    config: SageAttnProcessor,
    folder: Path,
    *,
    name: str,
    writes: bool = True,
    chat: bool = False,
    new_tokens: int = 64,
    batch: int = 4,
    progress: Progress = unseen,
) -> dict[str, Any]:
    """Return a rating as of `rating.rate`, without pictures. The reference is the model in fp32.

    Args:
        windows: token ids, int64 [W, S]. name: of the model. writes: it is a language model, not a sentence encoder.
        chat: of `heldout_windows`. new_tokens: greedy ones after each window's first quarter.
    """
    written = {"chat": chat, "new_tokens": new_tokens} if writes else {}
    settings = own_settings(model, name, config) | {"windows": list(windows.shape), "batch": batch} | written

    def measure(part: slice, tick: Tick) -> list[dict[str, Any]]:
        own = windows[part]
        rows = _texts(model, own, config, new_tokens) if writes else _embeddings(model, own, config)
        tick()
        return [{"number": part.start + i, **row} for i, row in enumerate(rows)]

    required = REQUIRED if writes else dict.fromkeys((STOCK, FLOOR, OURS), ("distance",))
    state = started(folder, settings, [{}] * len(windows), required) | {"notes": []}
    return go_on(state, folder, len(windows), batch, measure, _of_texts if writes else _of_embeddings, progress, 1)


@torch.no_grad()
def _texts(model, part: torch.Tensor, config, new_tokens: int) -> list[dict[str, Any]]:
    """Return a row for each window."""
    prompts = part[:, : max(part.shape[1] // 4, 2)]
    chunk, batch = min(CHUNK, part.shape[1] - 1), len(part)
    options: dict[str, Any] = {"new_tokens": new_tokens, "chunk": chunk, "batch": batch}
    results = language.evaluate(model, part, prompts, config=config, **options)
    with another_kernel():
        loss = language.perplexity(model, part, batch=batch).losses
        text = language.greedy(model, prompts, new_tokens, batch=batch)
    found: dict[str, dict[str, Any]] = {
        way: {"loss": result.perplexity.losses, "first": result.first}
        for way, result in ((way, results[case]) for way, case in CASES.items() if case in results)
    }
    found.setdefault(REFERENCE, {"loss": found[STOCK]["loss"]})
    found[FLOOR] = {"loss": loss, "first": language.first_differences(text, results["stock"].tokens)}
    divergences, why = _divergences(model, part.to(model.device), config)
    cached = results["prefill_kv"]
    calls = Calls(cached.int8_calls, sum(cached.exact.values()), *cached.linear_calls, cached.cache_calls, why)
    rows = []
    for i in range(len(part)):
        own = {way: {"loss": values["loss"][i].item()} for way, values in found.items()}
        for way, kls in divergences.items():
            own[way]["kl"] = kls[i]
        for way in (FLOOR, OURS, CACHED):
            place = found[way]["first"][i]
            own[way] |= {"identical": float(place is None), "same_tokens": new_tokens if place is None else place}
        for way, case in ((OURS, "prefill"), (CACHED, "prefill_kv")):
            lead = results[case].margin[i]
            own[way] |= {"kv_bytes": results[case].kv_bytes_per_token} | ({} if lead is None else {"lead": lead})
        rows.append({"metrics": own, "calls": calls})
    return rows


def _divergences(model, part: torch.Tensor, config) -> tuple[dict[str, list[float]], str]:
    """Return KL divergences to the model in fp32, in nats per token of each window.

    Beside them `why`, the reasons of INT8's calls in 16 bit.
    """
    with language.float32_copy(model) as exact:
        wanted = _log_probabilities(exact, part)
    divergences, why = {}, ""
    for way, found, calls in _in_each_way(model, config, lambda: _log_probabilities(model, part)):
        divergences[way] = (wanted.exp() * (wanted - found)).sum(-1).mean(-1).tolist()
        why = calls.why if calls else why
    return divergences, why


def _log_probabilities(model, part: torch.Tensor) -> torch.Tensor:
    """Return log p of next tokens, fp64 [N, S - 1, V]."""
    logs: torch.Tensor = model(part[:, :-1], use_cache=False).logits.double().log_softmax(-1)
    return logs


@torch.no_grad()
def _embeddings(model, part: torch.Tensor, config) -> list[dict[str, Any]]:
    """Return a row for each window."""
    part = part.to(model.device)
    with language.float32_copy(model) as exact:
        wanted = language.embeddings(exact, part).double()
    cosine = torch.nn.functional.cosine_similarity
    rows: list[dict[str, Any]] = [{"metrics": {}, "calls": []} for _ in part]
    for way, found, calls in _in_each_way(model, config, lambda: language.embeddings(model, part)):
        for row, near in zip(rows, cosine(wanted, found.double(), dim=-1).tolist(), strict=True):
            row["metrics"][way], row["calls"] = {"distance": max(1 - near, 0.0)}, calls
    return rows


def _in_each_way(model, config, run: Callable[[], torch.Tensor]) -> Iterator[tuple[str, torch.Tensor, Calls | None]]:
    """Yield name, result and what ran in 8 bit, of stock, another exact kernel, and INT8."""
    from ...entry import apply

    yield STOCK, run(), None
    with another_kernel():
        found = run()
    yield FLOOR, found, None
    with apply(model, config) as handle:
        found, calls = run(), Calls.of(handle.report())
    yield OURS, found, calls


def _of_texts(rows: list[dict[str, Any]]) -> dict[str, Any]:
    summary = averaged(rows)
    if not ran(summary).ran:
        return {"summary": summary, "verdict": f"Not rated: {NOTHING_RAN}{ran(summary).reason}."}
    means = summary["means"]
    ratios = [_ratio(means, way) for way in (OURS, CACHED)]
    summary |= {"perplexity_ratio": ratios[0], "perplexity_ratio_cache": ratios[1]}
    ours, floor = (means[way]["kl"][0] for way in (OURS, FLOOR))
    same, others = (means[way]["identical"][0] for way in (CACHED, FLOOR))
    return {
        "summary": summary,
        "verdict": f"INT8 changes perplexity by a factor of {ratios[0]:.5f}, with an INT8 cache {ratios[1]:.5f}; "
        f"KL to fp32 is {ours:.2g} nats per token, where another exact kernel has {floor:.2g}; {same:.0%} of greedy "
        f"texts are the same as stock's, {others:.0%} with the other kernel; {ran(summary).in_words()}.",
    }


def _ratio(means: dict[str, Any], way: str) -> float:
    """Return a way's perplexity over stock's."""
    return math.exp(means[way]["loss"][0] - means[STOCK]["loss"][0])


def _of_embeddings(rows: list[dict[str, Any]]) -> dict[str, Any]:
    summary = averaged(rows)
    ours, floor, stock = (summary["means"][way]["distance"][0] for way in (OURS, FLOOR, STOCK))
    worst = max(row["metrics"][OURS]["distance"] for row in rows)
    said = (
        f"Embeddings in INT8 are {ours:.2g} from fp32's (1 - cosine, mean of {len(rows)} texts; worst {worst:.2g}), "
        f"where stock is {stock:.2g} and another exact kernel {floor:.2g}; {ran(summary).in_words()}."
    )
    verdict = said if ran(summary).ran else f"Not rated: {NOTHING_RAN}{ran(summary).reason}."
    return {"summary": summary | {"worst_distance": worst}, "verdict": verdict}


def append_rows(path: Path, name: str, state: dict[str, Any], config: Any, recipe: str) -> None:
    """Append the figures of `rate_texts` to results.csv, as cases of `name`. config: of the model."""
    from sage_kernels.results import append_row

    heads, length = config.num_attention_heads, state["settings"]["windows"][1]
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // heads
    kv_heads = getattr(config, "num_key_value_heads", None) or heads
    common = {"suite": "quality", "heads": heads, "kv_heads": kv_heads, "seq_q": length, "seq_k": length}
    common |= {"head_dim": head_dim, "causal": True} | ({"gpu": "cpu"} if state["settings"]["device"] == "cpu" else {})
    for way, case in CASES.items():
        if way == REFERENCE and state["settings"]["dtype"] == "torch.float32":
            continue  # it is stock
        is_ours = way in (OURS, CACHED)
        ran = {"case": f"{name}/{case}", "provider": "sage_kernels" if is_ours else "torch_sdpa"}
        ran |= {"recipe": recipe} if is_ours else {}
        if is_ours:
            ratio = round(_ratio(state["summary"]["means"], way), 6)
            append_row(
                path, **common, **ran, batch=len(state["rows"]), metric="perplexity_ratio", unit="1", median=ratio
            )
        for key, metric, unit, value in FIGURES:
            own = [row["metrics"][way][key] for row in state["rows"] if key in row["metrics"].get(way, {})]
            if own:
                found = round(value(own), 5)
                append_row(path, **common, **ran, batch=len(own), metric=metric, unit=unit, median=found)
