"""How often each attention layer of a transformers model ran in INT8, and why it did not."""

from __future__ import annotations

import functools
import inspect
from typing import TYPE_CHECKING, Any

import torch

import sage_kernels
from sage_kernels.compat import is_exporting

from ..event_counter import EventCounter, count_shared, shared_numbers
from ..layer_report import Column, LayerReport, exact_column, grouped_table, reasons, span, summed
from ..linears.swap import swap_of


if TYPE_CHECKING:
    from rich.table import Table


INT8, INT8_CACHE = "int8", "int8_cache"
# Slots of a layer's counter: two ways of running in INT8, then the reasons for exact attention.
EVENTS = (
    INT8,
    INT8_CACHE,
    *sage_kernels.REASONS,
    "training",
    "gradient",
    "no_backward",
    "short",
    "output_attentions",
    "unknown_argument",
    "window_without_mask",
    "softmax_scale",
    "sinks",
    "other",
)
_EVENT = {name: i for i, name in enumerate(EVENTS)}
REMEDIES = {
    "training": 'the module is in training mode: call model.eval(), or register_transformers(training="int8")',
    "gradient": 'a gradient is asked for: torch.no_grad(), or register_transformers(training="int8")',
    "no_backward": "PyTorch has no fused backward for such a call: 16 bit is the faster one to train there",
    "no_attention": "none of its layers asks for an implementation, nothing can run in INT8",
    "dropout": "dropout belongs to training: call model.eval()",
    "output_attentions": "INT8 attention never forms the weights: leave output_attentions out",
}

WHOSE = "transformers layers without a counter"  # compiled calls of layers that were never called eagerly


def count(module: Any, event: str, device: torch.device) -> None:
    """Count a call of an attention module. device: where the call's tensors are.

    Calls of an exported program are not counted: it runs without us, and would carry our counters along.
    """
    if is_exporting():
        return
    slot = _EVENT.get(event, _EVENT["other"])
    counter = getattr(module, "_sage_events", None)
    if counter is None:
        if torch.compiler.is_compiling():
            count_shared(WHOSE, len(EVENTS), slot, device)
            return
        counter = module._sage_events = EventCounter(len(EVENTS), device)
    elif counter.traced.device != device and not torch.compiler.is_compiling():
        counter.to(device)
    counter.add(slot)


def counted(module: Any) -> dict[str, int]:
    """{event: calls} of an attention module, without those that never happened. Syncs."""
    counter = getattr(module, "_sage_events", None)
    if counter is None:
        return {}
    return {event: number for event, number in zip(EVENTS, counter.numbers(), strict=True) if number}


def _code_names(member: Any) -> tuple[str, ...]:
    """Names that the code of a class's member reads; none if it is no function."""
    code = getattr(inspect.unwrap(member), "__code__", None) if inspect.isfunction(member) else None
    return () if code is None else code.co_names


@functools.cache
def _class_takes_implementations(kind: Any) -> bool:
    # PreTrainedModel names the table too, to check what is chosen
    classes = (base for base in kind.__mro__ if base.__module__ != "transformers.modeling_utils")
    return any("ALL_ATTENTION_FUNCTIONS" in _code_names(member) for base in classes for member in vars(base).values())


def takes_implementations(module: Any) -> bool:
    """Whether the module's class asks transformers for its attention implementation, in forward or a helper of it."""
    kind: Any = type(module)
    return _class_takes_implementations(kind)


def _attends_by_itself(module: Any) -> bool:
    names = _code_names(type(module).forward)
    return "Attention" in type(module).__name__ and ("softmax" in names or "scaled_dot_product_attention" in names)


class AttentionReport(LayerReport):
    """Result of `attention_report(model)`.

    Attributes:
        rows: one dict per attention layer, with the keys
            layer, module: its name in the model, its class.
            status: "active"; "not selected": its config names another implementation; "not swappable": its code
                takes no implementation, it runs as in stock.
            implementation: what its config names; None where the code takes none.
            recipe, scaling: what its INT8 calls run; None unless active.
            calls: INT8 calls, those on an INT8 cache included.
            cache_calls: calls that read keys and values from an INT8 cache.
            fallbacks: {reason: exact calls}. "short" is meant: INT8 saves nothing there.
            note: what else to know.
        notes: about the model as a whole.
        linears: linears.report.LinearReport after `quantize_linears(model)`, else None.
    """

    def table(self) -> Table:
        """The rows as a rich.table.Table: a line for all layers of equal calls, formats and reasons."""
        columns = [
            Column("calls\neach", lambda rows: str(rows[0]["calls"]), summed("calls")),
            Column("on INT8\ncache", lambda rows: span(rows, "cache_calls"), summed("cache_calls")),
            exact_column(),
        ]
        return grouped_table("INT8 attention: what really ran", self.rows, _kind, columns)


def _kind(row: dict[str, Any]) -> str:
    if row["status"] == "active":
        return f"active: {row['implementation']}, {row['recipe']}, {row['scaling']}"
    return f"{row['status']}: {row['implementation']}" if row["implementation"] else str(row["status"])


def _row(name: str, module: Any, implementations: Any) -> dict[str, Any]:
    config = getattr(module, "config", None)
    name_of_implementation = getattr(config, "_attn_implementation", None)
    options = implementations.get(name_of_implementation)
    events = counted(module)
    int8, int8_cache = events.pop(INT8, 0), events.pop(INT8_CACHE, 0)
    stays_exact = options is not None and module.training and options.training != "int8"
    note = REMEDIES["training"] if stays_exact else ""
    return {
        "layer": name,
        "module": type(module).__name__,
        "status": "not selected" if options is None else "active",
        "implementation": name_of_implementation,
        "recipe": None if options is None else options.recipe,
        "scaling": None if options is None else options.scaling,
        "calls": int8 + int8_cache,
        "cache_calls": int8_cache,
        "fallbacks": events,
        "note": note,
    }


def build_report(model: Any, implementations: dict[str, Any]) -> AttentionReport:
    """Read the counters of a model (one sync per layer), and give a counter to the layers that have none yet.

    implementations: {name: options} of ours.
    """
    rows, notes = [], []
    for name, module in model.named_modules():
        if takes_implementations(module):
            if getattr(module, "_sage_events", None) is None:
                parameter = next(module.parameters(), None)
                where = "cpu" if parameter is None else parameter.device
                module._sage_events = EventCounter(len(EVENTS), where)
            rows.append(_row(name, module, implementations))
        elif _attends_by_itself(module):
            rows.append(
                {"layer": name, "module": type(module).__name__, "status": "not swappable"}
                | dict.fromkeys(("implementation", "recipe", "scaling"))
                | {"calls": 0, "cache_calls": 0, "fallbacks": {}}
                | {"note": "attention in forward() that takes no implementation"}
            )
    if not any(row["status"] != "not swappable" for row in rows):
        notes.append(
            f"Nothing of this {type(model).__name__} can run in INT8: no layer takes an attention implementation of "
            "transformers."
        )
    unnamed = [sum(numbers) for numbers in zip(*shared_numbers(WHOSE).values(), strict=True)]
    by_event = {event: number for event, number in zip(EVENTS, unnamed, strict=False) if number}
    if by_event:
        notes.append(
            f"Compiled calls of layers, of any model in this process, that had no counter when they were compiled: "
            f"{reasons(by_event)}. attention_report(model) before torch.compile gives every layer its own."
        )
    swap = swap_of(model)
    return AttentionReport(rows, notes, None if swap is None else swap.report())
