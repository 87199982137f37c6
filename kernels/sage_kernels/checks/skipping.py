"""Input checks of lists of key tiles to skip."""

from __future__ import annotations

from typing import Any

import torch

from ..facts.recipe import RECIPES
from ..facts.skipping import CLOCK_FIELDS, TOTAL_FIELDS, SkipState, list_shape
from .tensors import check_fields, check_writable


def check_skip(
    skip: SkipState, q: torch.Tensor, k: torch.Tensor, state: Any, masking: tuple[Any, ...], recipe: str
) -> None:
    """Raise unless the lists fit this call, q [B, S_q, H, D] and k [B, S_kv, H_kv, D], and its device.

    masking: attn_mask, causal, window, softcap, sinks.
    """
    if not isinstance(skip, SkipState):
        raise TypeError(f"skip: got {type(skip).__name__}, expected sage_kernels.SkipState or None")
    if torch.compiler.is_compiling():
        raise NotImplementedError(
            "skip: got lists in code that torch.compile traces, expected a call outside of it or inside of an op"
        )
    if state is None:
        raise ValueError("skip: got lists without a state, expected state=, which keeps scales from step to step")
    if RECIPES[recipe].qk != "int8":
        raise NotImplementedError(
            f"skip: got lists with recipe {recipe!r}, expected one with Q and K in INT8: tiles are measured by those "
            "codes; leave skip out"
        )
    attn_mask, causal, window, softcap, sinks = masking
    if attn_mask is not None or causal or window is not None or softcap or sinks is not None:
        raise NotImplementedError(
            "skip: got lists beside a mask, band, soft cap or sinks, expected none of these; leave skip out"
        )
    for name in ("every", "block_q", "block_k"):
        value = getattr(skip, name)
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise ValueError(f"skip.{name}: got {value!r}, expected an int >= 1")
    if not isinstance(skip.compensates, bool):
        raise ValueError(f"skip.compensates: got {skip.compensates!r}, expected True or False")
    batch, seq_q, heads, _ = q.shape
    shape = list_shape(batch, heads, seq_q, k.shape[1], skip.block_q, skip.block_k)
    wanted = {
        "lists": (torch.int32, shape),
        "bound": (torch.float32, shape[:3]),
        "alarms": (torch.int32, (2, batch, heads)),
        "clock": (torch.int32, (CLOCK_FIELDS,)),
        "now": (torch.int32, ()),
        "limit": (torch.float32, ()),
        "totals": (torch.int64, (TOTAL_FIELDS,)),
    }
    remedy = "make lists for each shape with sage_kernels.new_skip_state"
    check_fields("skip", skip, wanted, lambda: wanted, q.device, remedy)
    for name in ("lists", "bound", "alarms", "clock", "totals"):
        check_writable(f"skip.{name}", getattr(skip, name))
