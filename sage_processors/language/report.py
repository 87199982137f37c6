"""Counters and report of a transformers model's attention calls, in INT8 or in 16 bit with a reason."""

from __future__ import annotations

import functools
import inspect
from collections import Counter
from typing import TYPE_CHECKING, Any

import torch

import sage_kernels
from sage_kernels.compat import is_exporting

from ..linears.swap import swap_of
from ..patching.block_state import block_state
from ..reporting.event_counter import EventCounter, count_shared, shared_numbers
from ..reporting.fallbacks import Fallbacks
from ..reporting.layer_report import Column, LayerReport, column_16bit, grouped_table, reasons, span, summed
from .names import Implementation


if TYPE_CHECKING:
    from rich.table import Table


INT8, INT8_CACHE = "int8", "int8_cache"
EARLIER = "earlier"  # status of calls under a name that is no longer set
# Slots of a layer's counter: two ways of running in INT8, then the reasons for 16-bit attention.
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
REMEDIES = {
    "training": 'the module is in training mode: call model.eval(), or register_transformers(training="int8")',
    "gradient": 'a gradient is asked for: torch.no_grad(), or register_transformers(training="int8")',
    "no_backward": "PyTorch has no fused backward for such a call: 16 bit is the faster one to train there",
    "no_attention": "none of its layers takes an attention implementation, so nothing can run in INT8",
    "dropout": "dropout belongs to training: call model.eval()",
    "output_attentions": "INT8 attention never forms the weights: leave output_attentions out",
}
FALLBACKS = Fallbacks(
    EVENTS, "%s runs without INT8 (reason: %s%s); sage_processors.attention_report(model) lists all layers", REMEDIES
)

SHARED_COUNTER = (
    "transformers layers without a counter"  # shared counter of layers that were compiled before any eager call
)


class Calls(EventCounter):
    """Counter of the calls of one attention layer under one name.

    Attributes: implementation: the options of that name when the calls ran.
    """

    def __init__(self, implementation: Implementation, device: torch.device | str = "cpu"):
        super().__init__(len(EVENTS), device)
        self.implementation = implementation

    @property
    def by_event(self) -> dict[str, int]:
        """{event: number of calls} without zeros. Waits for the device."""
        return {event: number for event, number in zip(EVENTS, self.numbers(), strict=True) if number}


def count(module: Any, implementation: Implementation, event: str, device: torch.device) -> None:
    """Count a call of an attention module whose tensors are on `device`.

    Calls in an exported program are not counted. It runs without this package and would contain our counters.
    """
    if is_exporting():
        return
    slot = FALLBACKS.slot(event)
    # one counter for each name and its numbers: a name that is registered again with other options gets a new one
    counters = getattr(getattr(module, "_sage", None), "counters", None)
    counter = None if counters is None else counters.get((implementation.name, implementation.numbers))
    if counter is None:
        if torch.compiler.is_compiling():
            count_shared(SHARED_COUNTER, len(EVENTS), slot, device)
            return
        counter = give_counter(module, implementation, device)
    elif counter.traced.device != device and not torch.compiler.is_compiling():
        counter.to(device)
    counter.add(slot)


def _counters(module: Any) -> dict[tuple[str, str], Calls]:
    """Return the counters of an attention module, made if there are none."""
    found: dict[tuple[str, str], Calls] = vars(block_state(module)).setdefault("counters", {})
    return found


def _counts(module: Any) -> bool:
    return getattr(vars(module).get("_sage"), "counters", None) is not None


def give_counter(module: Any, implementation: Implementation, device: torch.device | str) -> Calls:
    """Return the counter of an attention module's calls under this name. Makes it if there is none."""
    counters = _counters(module)
    key = implementation.name, implementation.numbers
    return counters[key] if key in counters else counters.setdefault(key, Calls(implementation, device))


def counted(module: Any) -> dict[str, int]:
    """Return {event: number of calls} of a module under all names, without zeros. Waits for the device."""
    total: Counter[str] = Counter()
    for counter in (getattr(getattr(module, "_sage", None), "counters", None) or {}).values():
        total.update(counter.by_event)
    return dict(total)


def follow_choice(model: torch.nn.Module, implementations: dict[str, Implementation]) -> None:
    """Give every layer with counters one for the name that is set now, as compiled calls can't make one."""
    for module in model.modules():
        if _counts(module) and (chosen := implementations.get(_name_set(module))) is not None:
            give_counter(module, chosen, _device_of(module))


def _name_set(module: Any) -> Any:
    return getattr(getattr(module, "config", None), "_attn_implementation", None)


def _device_of(module: Any) -> torch.device | str:
    parameter = next(module.parameters(), None)
    return "cpu" if parameter is None or parameter.is_meta else parameter.device


def _code_names(member: Any) -> tuple[str, ...]:
    """Return the names that the code of a class's member reads; () if it is no function."""
    code = getattr(inspect.unwrap(member), "__code__", None) if inspect.isfunction(member) else None
    return () if code is None else code.co_names


@functools.cache
def _class_takes_implementations(kind: Any) -> bool:
    # left out: PreTrainedModel reads the table only to check a chosen name
    classes = (base for base in kind.__mro__ if base.__module__ != "transformers.modeling_utils")
    return any("ALL_ATTENTION_FUNCTIONS" in _code_names(member) for base in classes for member in vars(base).values())


def takes_implementations(module: Any) -> bool:
    """True if a method of the module's class looks up its attention implementation in transformers."""
    kind: Any = type(module)
    return _class_takes_implementations(kind)


def _attends_by_itself(module: Any) -> bool:
    names = _code_names(type(module).forward)
    return "Attention" in type(module).__name__ and ("softmax" in names or "scaled_dot_product_attention" in names)


class AttentionReport(LayerReport):
    """Result of `attention_report(model)`.

    Attributes:
        rows: one dict for each attention layer and each implementation that ran in it. The implementation that is set
            now comes first. Keys:
            layer, module: name of the layer in the model, and its class.
            status: "active". "earlier": ran before another implementation was set. "not selected": the config names
                another implementation, whose calls are not counted. "not swappable": the layer's code takes no
                implementation and runs as in stock.
            implementation: name of the implementation; None if the code takes none.
            recipe, scaling: options of the INT8 calls; None if the implementation is not ours.
            numbers: recipe, scaling and any other option that decides an INT8 call's result, in words; None as recipe.
            calls: number of INT8 calls, including those on an INT8 cache.
            cache_calls: number of calls on an INT8 cache.
            fallbacks: {reason: number of calls in 16 bit}. Calls counted as "short" run in 16 bit on purpose, because
                INT8 saves nothing there.
            note: a remark on the layer, or "".
        notes: remarks on the whole model.
        linears: linears.report.LinearReport after `quantize_linears(model)`, else None.
    """

    @property
    def verdict(self) -> str:
        """One line on the calls under the names set now, followed by the calls under earlier names."""
        now, before = self._now, [row for row in self.rows if row["status"] == EARLIER]
        said = [LayerReport(now).verdict]
        others = dict.fromkeys(row["implementation"] for row in now if row["status"] == "not selected")
        if before and others:
            said = [f"Set now: {', '.join(map(str, others))}, whose calls are not counted"]
            if any(row["status"] == "active" for row in now):
                said.append(LayerReport(now).verdict)
        for name in dict.fromkeys(row["implementation"] for row in before):
            rows = [row for row in before if row["implementation"] == name]
            said.append(f"before, by {name}: {LayerReport(rows).verdict}")
        return "; ".join(said)

    def remarks(self) -> list[str]:
        """Return the notes of all rows but "earlier" ones, each once, with its layers."""
        return LayerReport(self._now).remarks()

    @property
    def _now(self) -> list[dict[str, Any]]:
        return [row for row in self.rows if row["status"] != EARLIER]

    def table(self) -> Table:
        """Return the rows as a rich.table.Table, in which equal layers share a line."""
        columns = [
            Column("calls\neach", lambda rows: str(rows[0]["calls"]), summed("calls")),
            Column("on INT8\ncache", lambda rows: span(rows, "cache_calls"), summed("cache_calls")),
            column_16bit(),
        ]
        return grouped_table(self.title("INT8 attention"), self.rows, _kind, columns)


def _kind(row: dict[str, Any]) -> str:
    said = [row["implementation"], row["numbers"]]
    return ": ".join([row["status"], ", ".join(filter(None, said))] if any(said) else [row["status"]])


def _row(name: str, module: Any, status: str, implementation: Any, ran: Calls | None) -> dict[str, Any]:
    """Return one row of the report.

    ran: the counter, if the implementation is ours. Else `implementation` is its name or None.
    """
    options = None if ran is None else ran.implementation
    events = {} if ran is None else ran.by_event
    int8, int8_cache = events.pop(INT8, 0), events.pop(INT8_CACHE, 0)
    is_set = options is not None and status != EARLIER
    stays_16bit = is_set and module.training and options.training != "int8"  # type: ignore[union-attr]
    return {
        "layer": name,
        "module": type(module).__name__,
        "status": status,
        "implementation": implementation if options is None else options.name,
        "recipe": None if options is None else options.recipe,
        "scaling": None if options is None else options.scaling,
        "numbers": None if options is None else options.numbers,
        "calls": int8 + int8_cache,
        "cache_calls": int8_cache,
        "fallbacks": events,
        "note": REMEDIES["training"] if stays_16bit else "",
    }


def _rows(name: str, module: Any, implementations: dict[str, Implementation]) -> list[dict[str, Any]]:
    """Return a layer's rows: the implementation set now, then earlier ones with any calls."""
    counters = _counters(module)
    chosen = implementations.get(_name_set(module))
    now = None if chosen is None else give_counter(module, chosen, _device_of(module))
    first = _row(name, module, "not selected" if now is None else "active", _name_set(module), now)
    before = [_row(name, module, EARLIER, None, ran) for ran in counters.values() if ran is not now]
    return [first, *(row for row in before if row["calls"] or row["fallbacks"])]


def build_report(model: Any, implementations: dict[str, Implementation]) -> AttentionReport:
    """Read the counters of a model into a report, and give a counter to each layer without one.

    Waits for the device, once per layer and name.

    Args: implementations: {name: options} of our names.
    """
    rows, notes = [], []
    for name, module in model.named_modules():
        if takes_implementations(module):
            rows += _rows(name, module, implementations)
        elif _attends_by_itself(module):
            row = _row(name, module, "not swappable", None, None)
            rows.append(row | {"note": "attention in forward() that takes no implementation"})
    if not any(row["status"] != "not swappable" for row in rows):
        notes.append(
            f"Nothing of this {type(model).__name__} can run in INT8: no layer takes an attention implementation of "
            "transformers."
        )
    unnamed = [sum(numbers) for numbers in zip(*shared_numbers(SHARED_COUNTER).values(), strict=True)]
    by_event = {event: number for event, number in zip(EVENTS, unnamed, strict=False) if number}
    if by_event:
        notes.append(
            f"Compiled calls of layers, of any model in this process, that had no counter when they were compiled: "
            f"{reasons(by_event)}. attention_report(model) before torch.compile gives every layer its own."
        )
    swap = swap_of(model)
    return AttentionReport(rows, notes, None if swap is None else swap.report())
