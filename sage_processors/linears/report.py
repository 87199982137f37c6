"""Report of the calls of linear layers: one row per layer."""

from __future__ import annotations

from torch import nn

from ..reporting.layer_report import Column, LayerReport, column_16bit, counts, grouped_table, share, span, summed
from .modules import is_replaced
from .probe import relative_error
from .weights.layers import layers_of_others, matrices_of_others, modules_in_compiled_parts
from .weights.linear_state import CALLED, EVENTS, FEW_ROWS, REMEDIES


TAKEN_IN = "The model was compiled as a part of code around it: call refresh() after its weights have changed."


ANOTHERS = "another's"


class LinearReport(LayerReport):
    """Report of the linear layers of one model: what really ran. Also `linears` of a handle's report.

    Attributes:
        rows: one dict per linear layer, with the keys
            layer: its name.
            status: "active" for 8 bit. For 16 bit the reason: "kept" (by the options), "small", "protected",
                "outside of the blocks". "another's" if the layer belongs to the swap of another model, which is a
                part of this one or has this one as a part.
            format: "int8", "fp8", or "int8_weights" (8-bit weight, 16-bit activation); None unless active.
            calls: number of calls in 8 bit.
            few_row_calls: number of calls with so few rows that only the weight is read in 8 bit.
            compiled_calls: number of forwards of the model in which torch.compile ran the layer, as far as known:
                forwards in which no layer was called eagerly. For a layer in a compiled part of the model, forwards
                in which this layer was not called eagerly.
            fallbacks: {reason: number of calls in 16 bit}.
            rel_l2: relative L2 error against the 16-bit layer, if a probe has compared it; else None.
            bytes_saved: bytes of weights that were not read, over all calls.
            note: remarks on the layer.
        notes: remarks on the model as a whole.
    """

    @property
    def ran(self) -> int:
        """Number of calls in 8 bit of every kind: also in compiled code, and of few rows."""
        return sum(row[name] for row in self.rows for name in ("calls", "few_row_calls", "compiled_calls"))

    @property
    def verdict(self) -> str:
        """One line, such as "100 % of linear calls in 8 bit (80 of 80); in 16 bit: 5 layers protected"."""
        few = sum(row["few_row_calls"] for row in self.rows)
        said = share("linear calls", "8 bit", self.ran, self.fallbacks)
        said += f"; {few} of few rows: the weight alone in 8 bit" * bool(few)
        idle = [row["status"] for row in self.rows if row["format"] is None]
        resting = counts(status for status in idle if status != ANOTHERS)
        lent = counts(status for status in idle if status == ANOTHERS)
        said = "; ".join([said] + [f"in 16 bit, not counted: {resting}"] * bool(resting))
        return "; ".join([said] + [f"counted elsewhere: {lent}"] * bool(lent))

    def table(self):
        """Return the rows in 8 bit as a rich.table.Table. Layers with equal calls and formats share a line."""
        rows = [row for row in self.rows if row["format"] is not None]
        columns = [
            Column("calls\neach", lambda rows: str(rows[0]["calls"]), summed("calls")),
            Column("compiled", lambda rows: span(rows, "compiled_calls"), summed("compiled_calls")),
            *[Column("few\nrows", lambda rows: span(rows, "few_row_calls"), summed("few_row_calls"))]
            * any(row["few_row_calls"] for row in rows),
            column_16bit(),
            Column("MB\nsaved", _megabytes, _megabytes),
        ]
        if any(row["rel_l2"] is not None for row in rows):
            columns.append(Column("rel.\nL2", _worst))
        return grouped_table(self.title("8-bit linear layers"), rows, lambda row: f"active: {row['format']}", columns)


def _megabytes(rows: list[dict]) -> str:
    return f"{sum(row['bytes_saved'] for row in rows) / 1e6:.1f}"


def _worst(rows: list[dict]) -> str:
    probed = [row["rel_l2"] for row in rows if row["rel_l2"] is not None]
    return f"{max(probed):.2g}" if probed else ""


def notes_of(swap) -> list[str]:
    """Return remarks on a model: weights without a row, blocks without postponed results, missing hooks."""
    found = layers_of_others(swap.model)
    kinds = ", ".join(dict.fromkeys(found))
    notes = [f"{len(found)} linear layers are of another kind and left to it: {kinds}."] if found else []
    matrices = matrices_of_others(swap.model, swap.min_features)
    if matrices:
        number, every = sum(n for _, n in matrices), sum(p.numel() for p in swap.model.parameters())
        kinds = ", ".join(dict.fromkeys(kind for kind, _ in matrices))
        notes.append(
            f"{number:,} parameters ({100 * number / every:.0f} % of the model's) stay in 16 bit and are not counted "
            f"above, as they are in no linear layer: {kinds}."
        )
    found = [block._sage.enclosure.obstacle_of(block) for block in swap.blocks]
    obstacles = dict.fromkeys(filter(None, found))
    if obstacles:
        count = sum(map(bool, found))
        notes.append(f"In {count} of {len(found)} blocks no result is postponed: {', '.join(obstacles)}.")
    without = sum(state.failed and state.failure == "memory" for state in swap.states())
    if without:
        notes.append(f"{without} linear layers run in 16 bit (memory): {REMEDIES['memory']}.")
    return notes + [TAKEN_IN] * any(state.shared.is_taken_in for state in swap.states())


def rows_of(swap) -> list[dict]:
    """Return one row for every linear layer of a LinearSwap. Syncs."""
    swap.count_replays()
    rows = []
    forwards, compiled_parts = swap.forwards_without_eager_calls(), modules_in_compiled_parts(swap.model)
    for choice in swap.choices:
        known = swap.state_of(choice.module)
        row = {"layer": choice.name, "status": "active", "format": None, "calls": 0, "compiled_calls": 0}
        row |= {"few_row_calls": 0, "fallbacks": {}, "rel_l2": None, "bytes_saved": 0, "note": ""}
        if known is None:
            row["status"] = choice.why or (ANOTHERS if choice.format != "none" else "kept")
        else:
            events = dict(zip(EVENTS, known.events.numbers(), strict=True))
            row["format"], row["calls"] = known.format, events[CALLED]
            row["rel_l2"], row["few_row_calls"] = relative_error(known.probe), events.pop(EVENTS[FEW_ROWS])
            row["fallbacks"] = {name: n for name, n in events.items() if n and name != CALLED}
            traced = sum(known.events.traced.tolist())
            compiled = max(0, forwards - traced)
            if id(choice.module) in compiled_parts:  # other layers were called from Python in the same forwards
                compiled = max(compiled, known.shared.forwards - sum(known.events.eager) - traced)
            if known.is_short_compiled:
                row["fallbacks"]["short"] = row["fallbacks"].get("short", 0) + compiled
            else:
                row["compiled_calls"] = compiled
            weight = choice.module._parameters.get("weight")
            size = 0 if weight is None else weight.element_size() - 1
            calls = row["calls"] + row["few_row_calls"] + row["compiled_calls"]
            row["bytes_saved"] = calls * choice.module.in_features * choice.module.out_features * size
            notes = [REMEDIES["training"]] if choice.module.training else []
            notes += (
                [REMEDIES["patched"]] if is_replaced(getattr(type(choice.module), "_sage_base", nn.Linear)) else []
            )
            notes += [REMEDIES[known.failure]] if known.failed else []
            notes += ["16-bit weight dropped"] if known.dropped else []
            row["note"] = "; ".join(notes)
        rows.append(row)
    return rows
