"""Report of the calls that ran through our back end of diffusers' dispatcher in this process."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch import nn

from ...reporting.event_counter import shared_numbers
from ...reporting.layer_report import Column, LayerReport, column_16bit, grouped_table, summed
from ..calls import backend
from ..host import dispatcher
from ..host.discovery import attention_modules, denoisers, is_pipeline, unwrap


if TYPE_CHECKING:
    from rich.table import Table


class BackendReport(LayerReport):
    """Result of `diffusers_backend_report()`.

    Attributes:
        rows: one dict per device that calls came from, with the keys
            device: such as "cuda:0". All models of the process are counted together, because a back end is not told
                which one calls it.
            recipe, scaling: of the latest registration. Counting started from zero there.
            calls: INT8 calls. In ring attention, each step around the ring is one.
            fallbacks: {reason: calls without INT8}.
            layer, status, note: as in other reports. Here always the device, "active" and "".
        notes: if the back end is registered and active, and which layers of the given model don't use it.
    """

    def table(self) -> Table:
        """Return a rich.table.Table with one line for all devices with equal calls."""
        columns = [Column("calls\neach", lambda rows: str(rows[0]["calls"]), summed("calls")), column_16bit()]
        return grouped_table(self.title("INT8 attention by diffusers' back end"), self.rows, _kind, columns)


def _kind(row: dict[str, Any]) -> str:
    return f"{row['recipe']}, {row['scaling']}"


def diffusers_backend_report(target: Any = None) -> BackendReport:
    """Report the calls of the back end since `register_diffusers_backend`. Waits for the device.

    Args: target: a pipeline or model of diffusers. The notes then name its layers that never use a back end.
    Raises: TypeError if target is something else.
    """
    rows, own = [], backend.options()
    for device, numbers in shared_numbers(backend.SHARED_COUNTER).items():
        events = {event: number for event, number in zip(backend.EVENTS, numbers, strict=True) if number}
        if events:
            calls = events.pop(backend.CALLED, 0)
            row: dict[str, Any] = {"device": str(device), "recipe": own.recipe, "scaling": own.scaling.name}
            rows.append(
                row | {"calls": calls, "fallbacks": events, "layer": str(device), "status": "active", "note": ""}
            )
    notes = [] if rows else ["No call came through the back end since it was registered."]
    if not dispatcher.is_registered():
        notes.append("The back end is not registered: sage_processors.register_diffusers_backend() does that.")
    elif dispatcher.is_active():
        notes.append(
            f"{dispatcher.NAME} is diffusers' active back end: in this process every model whose processors name none "
            "runs it."
        )
    for name, model in _models(target).items():
        notes += _notes_on(name, model)
    return BackendReport(rows, notes)


def _models(target: Any) -> dict[str, nn.Module]:
    if target is None:
        return {}
    if is_pipeline(target):
        return denoisers(target)
    model = unwrap(target)
    if not isinstance(model, nn.Module):
        raise TypeError(f"target: got {type(target).__name__}, expected a pipeline or model of diffusers")
    return {model.__class__.__name__: model}


def _notes_on(name: str, model: nn.Module) -> list[str]:
    from ..calls.sage_class import is_sage

    processors = [module.processor for _, module in attention_modules(model)]
    deaf = [x for x in processors if not hasattr(x, "_attention_backend") and not is_sage(x)]
    notes = []
    if deaf:
        kinds = ", ".join(sorted({type(x).__name__ for x in deaf}))
        notes.append(
            f"{len(deaf)} of {len(processors)} attention layers of {name} ask for no back end ({kinds}): they run as "
            "in stock. sage_processors.apply reaches them."
        )
    swapped = sum(is_sage(x) for x in processors)
    if swapped:
        notes.append(
            f"{swapped} of {len(processors)} attention layers of {name} are swapped by sage_processors.apply, whose "
            "rules win: handle.report() has them."
        )
    return notes
