"""What linear layers really ran: one row per layer."""

from __future__ import annotations

from ..layer_report import LayerReport, empty_table, reasons
from .probe import relative_error
from .weights import CALLED, EVENTS, REMEDIES


class LinearReport(LayerReport):
    """Result of `LinearSwap.report()`, and `linears` of a handle's report.

    Attributes:
        rows: one dict per linear layer, with the keys
            layer: its name.
            status: "active"; else why it stays in 16 bit: "kept" (by the options), "small", "protected",
                "outside of the blocks".
            format: "int8", "fp8", or "int8_weights": the weight is in 8 bit, the activation as it is; None unless
                active.
            calls: calls in 8 bit. compiled_calls: forwards of the model in which torch.compile ran the layer, as far
                as they are known: those in which no layer was called eagerly.
            fallbacks: {reason: calls in 16 bit}.
            rel_l2: relative L2 error against the 16-bit layer, over what a probe that is on has compared; else None.
            bytes_saved: of the weight that was read, over all calls.
            note: what else to know.
        notes: about the model as a whole.
    """

    def table(self):
        """The rows as a rich.table.Table; layers that stay in 16 bit are summed up in one line a reason."""
        table = empty_table()
        table.title = "8-bit linear layers: what really ran"
        probed = any(row["rel_l2"] is not None for row in self.rows)
        for name in ("layer", "status", "format"):
            table.add_column(name, overflow="fold")
        for name in ("calls", "compiled", "exact", "MB saved", *(["rel. L2"] if probed else [])):
            table.add_column(name, justify="right")
        resting: dict[str, int] = {}
        for row in self.rows:
            if row["format"] is None:
                resting[row["status"]] = resting.get(row["status"], 0) + 1
                continue
            status = row["status"] + (f": {row['note']}" if row["note"] else "")
            numbers = (str(row["calls"]), str(row["compiled_calls"]), reasons(row["fallbacks"]))
            error = [] if row["rel_l2"] is None else [f"{row['rel_l2']:.2g}"]
            table.add_row(row["layer"], status, row["format"], *numbers, f"{row['bytes_saved'] / 1e6:.1f}", *error)
        for status, number in resting.items():
            table.add_row(f"{number} layers", f"16 bit: {status}", "-", "", "", "", "")
        table.add_section()
        saved = sum(row["bytes_saved"] for row in self.rows)
        compiled = str(sum(row["compiled_calls"] for row in self.rows))
        table.add_row("total", "", "", str(self.calls), compiled, reasons(self.fallbacks), f"{saved / 1e6:.1f}")
        return table


def rows_of(swap) -> list[dict]:
    """One row for every linear layer of a LinearSwap. Syncs."""
    rows = []
    forwards = swap.forwards_without_eager_calls()
    for choice in swap.choices:
        known = swap.state_of(choice.module)
        row = {"layer": choice.name, "status": "active", "format": None, "calls": 0, "compiled_calls": 0}
        row |= {"fallbacks": {}, "rel_l2": None, "bytes_saved": 0, "note": ""}
        if known is None:
            row["status"] = choice.why or "kept"
        else:
            events = dict(zip(EVENTS, known.events.numbers(), strict=True))
            row["format"], row["calls"] = known.format, events[CALLED]
            row["rel_l2"] = relative_error(known.probe)
            row["fallbacks"] = {name: n for name, n in events.items() if n and name != CALLED}
            traced = sum(known.events.traced.tolist())
            row["compiled_calls"] = max(0, forwards - traced)
            size = choice.module._parameters["weight"].element_size() - 1
            calls = row["calls"] + row["compiled_calls"]
            row["bytes_saved"] = calls * choice.module.in_features * choice.module.out_features * size
            notes = [REMEDIES["training"]] if choice.module.training else []
            notes += [REMEDIES["weight"]] if known.failed else []
            notes += ["16-bit weight dropped"] if known.dropped else []
            row["note"] = "; ".join(notes)
        rows.append(row)
    return rows
