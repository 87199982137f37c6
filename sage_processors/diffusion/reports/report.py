"""Build the report of a handle: one row per attention layer, from counters on host and device."""

from __future__ import annotations

import sys
from collections import Counter
from typing import TYPE_CHECKING, Any

from sage_kernels.planning.rules import NEED_RUNS

from ...linears.report import LinearReport, notes_of, rows_of
from ...presets import heading
from ...reporting.layer_report import Column, LayerReport, column_16bit, grouped_table, remark_of, span, summed
from ...unsupported import OVERLAP_REMEDY, PAG_REMEDY, REMEDIES
from ..calls.mixed_calls import is_mixed, mixed_facts, mixed_note
from ..calls.processors import CALLS, EVENTS
from ..calls.sage_class import is_sage
from ..host.discovery import attention_modules
from ..host.dispatcher import without_ours
from ..host.rebind import attention_calls


if TYPE_CHECKING:
    from rich.table import Table


ACTIVE, REPLACED, NOT_SWAPPABLE = "active", "replaced", "not swappable"


class Report(LayerReport):
    """Result of `handle.report()`.

    Attributes:
        rows: one dict per layer, with the keys
            layer, processor: names.
            status: "active"; "replaced": another processor was put there, and the note says what handle.refresh()
                can do; "not swappable": attention that doesn't go through a processor's SDPA call and runs as in
                stock.
            recipe, scaling: number formats and source of the scales of its INT8 calls; None unless active.
            rotation: "hadamard" or "none", of its next INT8 call; None unless active.
            rotated_calls: INT8 calls with the Hadamard rotation.
            keep_noise: (low, high), the noise levels at which this layer runs in 16 bit, or (); None unless active.
            calls: INT8 calls.
            dynamic_calls: INT8 calls without a plan, with scales from the call itself; mean over the heads.
            fallbacks: {reason: calls of the model's own attention}. "window" and "kept": the options ask for it.
                "unfollowed": the options depend on steps or noise levels, and the forward belongs to no step of a
                followed scheduler. "replaced" counts forwards in which another processor was in place, whatever that
                processor did.
            clipped_fraction: fraction of K's elements beyond the planned scale ("beyond plan" in the table). Nothing
                was clipped: their tiles got a larger scale of their own.
            below_fraction: fraction of K's elements in tiles that took a smaller scale than planned. Their error is
                smaller; it is a sign of keys that became smaller.
            misfit_fraction: fraction of K's elements in heads whose planned centre and balance no longer fitted the
                call. These heads took both from a sample of the call, as a head without a plan does.
            v_clipped_fraction: fraction of V's elements that a recipe with V in FP8 did clip, at 7 times the largest
                value of the step that the scale was planned from.
            redone_fraction: of the query tiles that began with row maxima of the step before, the fraction that was
                computed again because the scores had moved too far. It costs time, not accuracy.
            skipped_fraction: fraction of the pairs of a query tile and a key tile that were skipped, of calls with
                lists (`skip`).
            lost_mean, lost_max: probability that the worst row of a query tile loses by its list. Measured when the
                tile is measured again, with the scores of that step and the list of earlier ones.
            beyond_limit: number of such measurements above the limit. Their heads visited all key tiles in that call.
            dense: {reason: INT8 calls without a list}. "masked" (or causal), "short" (few key tiles), "first_last"
                (steps in which `Skip` skips nothing), "unfollowed" (no step of a scheduler), "memory"
                and "calls" (more lists than are kept), "graph" (captured before there was a list), "parallel",
                "no_limit" (its skip_limit is 0).
            bytes_saved: bytes that the score matmul reads less than in 16 bit, if it reads Q and K once: calls x
                elements of the latest call.
            sent_bytes: bytes that this device sent to others, under context parallelism.
            mixed: None unless the recipe is "mixed". Else a dict: base, selector, action; share: of the visible blocks
                of the latest call, those acted on; block_map: with Mixed.keep_blocks, the fraction of samples and
                heads that acted on each block, a list over key blocks for each block of rows, else None.
            note: text with further facts.
        notes: list of texts about the handle as a whole.
        linears: linears.report.LinearReport with a row for every linear layer; None without 8-bit linear layers.
    """

    @property
    def bytes_saved(self) -> int:
        """Sum of the rows' bytes_saved."""
        return sum(row["bytes_saved"] for row in self.rows)

    def table(self) -> Table:
        """Return a rich.table.Table with one line for all layers of equal calls, formats and reasons."""
        rotated = any(row["rotation"] == "hadamard" or row["rotated_calls"] for row in self.rows)
        columns = [Column("calls\neach", lambda rows: str(rows[0]["calls"]), summed("calls"))]
        columns += [Column("rotated", lambda rows: span(rows, "rotated_calls"), summed("rotated_calls"))] * rotated
        skips = any(row["skipped_fraction"] or row["dense"] for row in self.rows)
        columns += [Column("skipped", lambda rows: f"{max(row['skipped_fraction'] for row in rows):.2g}")] * skips
        columns += [
            Column("dynamic", lambda rows: span(rows, "dynamic_calls"), summed("dynamic_calls")),
            column_16bit(),
            Column("beyond\nplan", lambda rows: f"{max(row['clipped_fraction'] for row in rows):.2g}"),
            Column("MB\nsaved", _megabytes, _megabytes),
        ]
        return grouped_table(self.title("INT8 attention"), self.rows, _kind, columns)

    def remarks(self) -> list[str]:
        """Return the notes of the rows, each once, with the layers concerned and the largest number."""
        plain = [row | {"note": _without_numbers(row)} for row in self.rows]
        said = LayerReport(plain).remarks()
        return said + [line for name, what in _PLAN_NOTES.items() for line in remark_of(what, self.rows, name)]


def _kind(row: dict[str, Any]) -> str:
    return f"{row['status']}: {row['recipe']}, {row['scaling']}" if row["status"] == ACTIVE else str(row["status"])


def _megabytes(rows: list[dict[str, Any]]) -> str:
    return f"{sum(row['bytes_saved'] for row in rows) / 1e6:.1f}"


def _without_numbers(row: dict[str, Any]) -> str:
    """Return a row's note without its numbers about the plan, which differ from layer to layer."""
    numbers = "; ".join(_plan_notes(row))
    return str(row["note"]).removesuffix(numbers).removesuffix("; ") if numbers else str(row["note"])


_UNPLANNED = dict.fromkeys(("recipe", "scaling", "rotation", "keep_noise", "mixed"))
_NO_COUNTS = dict.fromkeys(("calls", "rotated_calls", "beyond_limit", "bytes_saved", "sent_bytes"), 0)
# key of a row → key of a call site in `ScaleState.summary()`; the worst of a layer's sites is shown
_OF_SITES = {
    "clipped_fraction": "outside", "below_fraction": "below", "misfit_fraction": "misfit",
    "v_clipped_fraction": "clipped", "redone_fraction": "redone",
}  # fmt: skip
_OF_LISTS = ("skipped_fraction", "lost_mean", "lost_max")
_NO_SHARES = dict.fromkeys(("dynamic_calls", *_OF_SITES, *_OF_LISTS), 0.0)


def _row(layer: str, processor: Any, status: Any, note: str = "", **values: Any) -> Any:
    empty = _UNPLANNED | _NO_COUNTS | _NO_SHARES | {"fallbacks": {}, "dense": {}}
    return {"layer": layer, "processor": processor, "status": status} | empty | values | {"note": note}


def _events(processor: Any) -> dict[str, Any]:
    """Return the counts of calls that a processor made without a plan, and of those in 16 bit."""
    events = dict(zip(EVENTS, processor._sage.events.numbers(), strict=True))
    fallbacks = {name: count for name, count in events.items() if count and name not in CALLS}
    called = events["called"]
    return {
        "calls": called, "dynamic_calls": called, "rotated_calls": events["rotated"], "sent_bytes": events["sent"],
        "fallbacks": fallbacks,
    }  # fmt: skip


def _counted(layer: Any, summary: Any, skipped: Any = ()) -> dict[str, Any]:
    """Read the counters of a swapped layer.

    Args: summary: rows of ScaleState.summary(), or []. skipped: rows of SkipLists.summary(), or [].
    """
    own, found = layer.own, _events(layer.sage)
    planned = [summary[i] for i in layer.site_indices if i is not None]
    found["calls"] += sum(row["calls"] for row in planned)
    found["dynamic_calls"] += sum(row["dynamic_calls"] for row in planned)
    worst = {name: max([row[of] for row in planned], default=0.0) for name, of in _OF_SITES.items()}
    elements = [site.elements for site in own.sites if site.elements]
    per_call = sum(elements) / len(elements) if elements else 0
    saved = int(found["calls"] * per_call)  # one byte less per element
    return found | worst | _skipped(layer, skipped) | {"bytes_saved": saved}


def _skipped(layer: Any, summary: Any) -> dict[str, Any]:
    """Summarise skipped tiles of a layer: maxima over its call sites, and sums of counts."""
    rows = [summary[i] for i in layer.site_indices if i is not None and summary]
    dense: Counter[str] = Counter()
    for row in rows:
        dense.update(row["dense"])
    worst = {name: max([row[name] for row in rows], default=0.0) for name in _OF_LISTS}
    return worst | {"beyond_limit": sum(row["beyond"] for row in rows), "dense": dict(dense)}


def _has_attention(forward: Any) -> bool:
    code = getattr(forward, "__code__", None)
    return code is not None and (attention_calls(forward) > 0 or "multi_head_attention_forward" in code.co_names)


_PLAN_NOTES = {
    "below_fraction": "of K's elements below plan",
    "misfit_fraction": "of K's elements in heads whose plan did not fit",
    "v_clipped_fraction": "of V's elements clipped",
    "redone_fraction": "of query tiles done again",
    "lost_max": "of a row's probability lost with tiles not visited",
}


def _plan_notes(counted: dict[str, Any]) -> list[str]:
    return [f"{counted[name]:.2g} {what}" for name, what in _PLAN_NOTES.items() if counted[name]]


def _noise_range_notes(span: Any) -> list[str]:
    return [f"16 bit at noise levels {span[0]:.4g} to {span[1]:.4g}"] if span else []


def _replaced_note(processor: Any, will_follow: bool) -> str:
    name, who = type(processor).__name__, "the next forward" if will_follow else "handle.refresh()"
    if is_sage(processor):  # diffusers makes new processors by `processor.__class__()`
        return f"{name} with default options was put here; {who} swaps it"
    if attention_calls(type(processor).__call__):
        return f"{name} was put here; {who} swaps it"
    only = "handle.refresh() can swap only what replaces it"
    return f"{name} was put here and has no SDPA call: {only}{_newer(processor)}"


def _newer(processor: Any) -> str:
    """Return advice to use the "2_0" class of diffusers with an SDPA call, if there is one; else ""."""
    kind = type(processor)
    newer = f"{kind.__name__}2_0"
    found = hasattr(sys.modules.get(kind.__module__), newer)
    return f", as {newer}: model.set_attn_processor({newer}())" if found else ""


def _active_row(denoiser: Any, layer: Any, counted: dict[str, Any], rotation: Any) -> dict[str, Any]:
    """Make the row of a layer that runs our processor. counted: of `_counted`."""
    own, label = layer.own.config, denoiser._label(layer.name)  # a layer may have a scaling of its own
    scaling, note = own.scaling.of_call, ""
    if own.scaling.is_planned and not is_mixed(own):
        unknown = [i is None for i in layer.site_indices] or [True]
        scaling = own.scaling.name if not all(unknown) else own.scaling.of_call
        mismatch = any(
            s.state is not None and s.seen_head_dim and (s.seen_kv_heads, s.seen_head_dim) != (s.kv_heads, s.head_dim)
            for s in layer.own.sites
        )
        if any(unknown) or mismatch:
            note = "heads not known in advance; handle.refresh() after a first run gives it planned scales"
    if patched := layer.own.patches.note():
        note = patched
    elif without_ours(getattr(layer.sage, "_attention_backend", None)) != layer.own.backend:
        note = REMEDIES["backend"]
    elif layer.module.training and own.training != "int8":
        note = REMEDIES["training"]
    rotated = "hadamard" if layer.own.rotated else "none"
    counted |= {"recipe": own.recipe, "scaling": scaling, "rotation": rotated, "keep_noise": own.keep.noise}
    said = [note or rotation.note(label)]
    if is_mixed(own):
        counted |= {"scaling": "per_token", "mixed": mixed_facts(own, layer.own.sites, denoiser.device)}
        said.append(mixed_note(counted["mixed"]))
    note = "; ".join(filter(None, [*said, *_noise_range_notes(own.keep.noise), *_plan_notes(counted)]))
    row: dict[str, Any] = _row(label, type(layer.module.processor).__name__, ACTIVE, note, **counted)
    return row


def _denoiser_rows(denoiser: Any, rotation: Any) -> list[dict[str, Any]]:
    summary = denoiser.state.summary() if denoiser.state is not None else []
    lists = denoiser.state.kept.skip_lists if denoiser.state is not None else None
    skipped = [] if lists is None else lists.summary()
    layers = {id(layer.module): layer for layer in denoiser.layers}
    rows, inside, will_follow = [], set(), denoiser.will_follow
    for name, module in attention_modules(denoiser.model):
        label, processor = denoiser._label(name), type(module.processor).__name__
        inside.add(id(module))
        layer = layers.get(id(module))
        counted = {} if layer is None else _counted(layer, summary, skipped)
        if layer is not None and module.processor is layer.sage:
            rows.append(_active_row(denoiser, layer, counted, rotation))
        elif layer is not None:
            rows.append(_row(label, processor, REPLACED, _replaced_note(module.processor, will_follow), **counted))
        elif not is_sage(module.processor) and attention_calls(type(module.processor).__call__):
            rows.append(_row(label, processor, REPLACED, f"{processor} is new; handle.refresh() swaps it"))
        else:
            note = f"{processor} has no SDPA call{_newer(module.processor)}"
            rows.append(_row(label, processor, NOT_SWAPPABLE, note))
    for name, module in denoiser.model.named_modules():
        if id(module) not in inside and _has_attention(type(module).forward):
            note = "attention in forward(), not in a processor"
            rows.append(_row(denoiser._label(name), type(module).__name__, NOT_SWAPPABLE, note))
    return rows


def _table_notes(denoiser: Any) -> list[str]:
    name, scaling = denoiser.name or type(denoiser.model).__name__, denoiser.config.scaling.name
    if denoiser.frozen:
        return [f"Scales of {name} are frozen: runs start from one table, until handle.reset()."]
    if scaling in NEED_RUNS:
        return [
            f'Scales of {name} are not frozen: "{scaling}" plans from the step before, as "timestep" does, until '
            "handle.freeze_scales() or load_scales()."
        ]
    return []


def _guest_rows(denoiser: Any) -> list[dict[str, Any]]:
    """Make rows of Sage processors that a pipeline put in, each for several layers in turn."""
    rows = []
    for processor in denoiser.guests.values():
        own, name = processor._sage.config, type(processor).__name__
        kind = {"recipe": own.recipe, "scaling": own.scaling.of_call, "rotation": "none", "keep_noise": ()}
        said = "put there by the pipeline"
        rows.append(_row(denoiser._label(name), name, ACTIVE, said, **kind, **_events(processor)))
    return rows


def _follows(handle: Any, denoiser: Any) -> str:
    if not denoiser.follows_scheduler:
        return "the timestep argument of the model"
    several = len(handle.following.followed) > 1
    return f"whichever steps of {handle.following.names()}" if several else "the pipeline's scheduler"


def _replayed(name: str, graphs: Any) -> str:
    graphs.settle()
    text = f"{graphs.replays} forwards of {name} came from CUDA graphs{_listed(', eager ones: ', graphs.eager)}"
    if graphs.partly:
        text += f"; in {graphs.partly} more, {graphs.block_replays} blocks did"
        text += _listed(", eager ones: ", graphs.block_eager)
    if graphs.differing:
        text += f"; {graphs.differing} graphs were dropped (differs)"
    places = [f"{module} at {line}" for module, line in sorted(graphs.failures.lines.items())]
    if places:
        text += f"; not captured: {', '.join(places)}"
    return text + (f"; {graphs.memory / 2**30:.2f} GiB of memory." if graphs.memory else ".")


def _listed(before: str, reasons: Any) -> str:
    return before * bool(reasons) + ", ".join(f"{reason}: {number}" for reason, number in sorted(reasons.items()))


def build_report(handle: Any) -> Report:
    """Read the counters of a live handle. Waits for the device once per layer and state."""
    notes: list[str] = []
    rows = []
    for denoiser in handle._denoisers:
        rows += [*_denoiser_rows(denoiser, handle._rotation), *_guest_rows(denoiser)]
        name = denoiser.name or type(denoiser.model).__name__
        if denoiser.perturbed:
            notes.append(f'"replaced" in {name}: {PAG_REMEDY}.')
        if denoiser.state is not None:
            notes.append(f"Noise level of {name} follows {_follows(handle, denoiser)}.")
            notes += _table_notes(denoiser)
        strays = denoiser.forwards.strays if denoiser.follows_scheduler else 0
        if strays:
            notes.append(
                f"{strays} forwards of {name} belong to no step of {handle.following.names()} (unfollowed): "
                f"{REMEDIES['unfollowed']}."
            )
        if denoiser.graphs is not None:
            notes.append(_replayed(name, denoiser.graphs))
        misplaced = denoiser.forwards.misplaced
        if misplaced:
            notes.append(
                f"{misplaced} replays of a CUDA graph of {name} ran in steps that the options want in "
                f"another precision than the captured one (captured): {REMEDIES['captured']}."
            )
    notes += filter(None, [handle._kernels.note()])
    if handle.following.overlaps:
        notes.append(f"{handle.following.overlaps} steps of runs that overlap in several threads: {OVERLAP_REMEDY}.")
    if handle._pipe and handle._pipe() is None:
        notes.append("The pipeline of this handle was garbage-collected: the models that others keep stay swapped.")
    swapped = [denoiser.model for denoiser in handle._denoisers]
    for name, model in handle._models().items():
        if not any(model is known for known in swapped):
            notes.append(f"{name} came after the swap and runs its original attention; handle.refresh() swaps it.")
    swaps = [denoiser.linears for denoiser in handle._denoisers if denoiser.linears is not None]
    linears = [row for swap in swaps for row in rows_of(swap)], [line for swap in swaps for line in notes_of(swap)]
    return Report(rows, notes, LinearReport(*linears) if swaps else None, heading(handle.config))
