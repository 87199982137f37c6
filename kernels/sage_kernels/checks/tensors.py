"""Checks of tensors that all ops share: dtype, device, strides, masks, gradients."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from ..compat import has_tangent, is_differentiating_forward


DTYPES = (torch.float16, torch.bfloat16, torch.float32)
MAX_HEAD_DIM = 256


def is_strided(x: torch.Tensor) -> bool:
    """Return True if the elements of a tensor lie in memory by strides.

    False for sparse and nested tensors, and for those in the blocked layout of some library.
    """
    return x.layout is torch.strided and not x.is_nested


def check_strided(name: str, x: torch.Tensor) -> None:
    """Raise TypeError unless x is a strided tensor."""
    if not is_strided(x):
        got = "a nested tensor" if x.is_nested else f"layout {x.layout}"
        raise TypeError(f"{name}: got {got}, expected a strided tensor; pass {name}.to_dense(), or pad it")


def check_tensor(
    name: str, x, dtypes: tuple[torch.dtype, ...], device: torch.device | None = None, rank: int | None = None,
    axes: str = "", remedy: str = "",
) -> None:  # fmt: skip
    """Raise unless x is a strided tensor of one of the dtypes, without a tangent.

    device, rank: where x has to be, and its number of dimensions; None: anywhere, any. axes: their names.
    remedy: what to do about another rank or dtype.
    """
    if not isinstance(x, torch.Tensor):
        raise TypeError(f"{name}: got {type(x).__name__}, expected a tensor {axes}".rstrip())
    check_strided(name, x)
    remedy = remedy and f"; {remedy}"
    if rank is not None and x.dim() != rank:
        raise ValueError(f"{name}: got rank {x.dim()} (shape {tuple(x.shape)}), expected rank {rank} {axes}{remedy}")
    if x.dtype not in dtypes:
        raise TypeError(f"{name}: got {x.dtype}, expected one of {dtypes}{remedy}")
    check_no_tangent(name, x)
    if device is not None and x.device != device:
        raise ValueError(f"{name}: got device {x.device}, expected {device}")


def check_fields(
    name: str, record: Any, fields: Iterable[str], wanted: Callable[[], dict], device, remedy: str
) -> None:
    """Raise unless fields of a record are contiguous tensors on a device.

    wanted: returns {field: (dtype, shape)}; called once all fields are known to be tensors.
    """
    for field in fields:
        if not isinstance(x := getattr(record, field), torch.Tensor):
            raise TypeError(f"{name}.{field}: got {type(x).__name__}, expected a torch.Tensor; {remedy}")
    for field, (dtype, shape) in wanted().items():
        x = getattr(record, field)
        if x.dtype != dtype or tuple(x.shape) != tuple(shape) or x.device != device or not x.is_contiguous():
            raise ValueError(
                f"{name}.{field}: got {x.dtype} {tuple(x.shape)} on {x.device}, expected contiguous {dtype} "
                f"{tuple(shape)} on {device}; {remedy}"
            )


def check_writable(name: str, x: torch.Tensor) -> None:
    """Raise for a view with its negative bit set: PyTorch would write to a copy of it."""
    if not torch.compiler.is_compiling() and x.is_neg():
        raise ValueError(
            f"{name}: got a view with its negative bit set, expected memory to write to; pass {name}.resolve_neg()"
        )


def check_no_tangent(name: str, x: torch.Tensor) -> None:
    """Raise where forward-mode differentiation would take the result for a constant."""
    if has_tangent(x):
        raise NotImplementedError(
            f"{name}: got a tangent (forward-mode differentiation), expected inference: there is no derivative; use "
            "scaled_dot_product_attention for that"
        )


def check_inference(name: str, x: torch.Tensor, remedy: str = "wrap the call in torch.no_grad()") -> None:
    """Raise where the result would need a gradient with respect to x, or a forward-mode derivative."""
    if torch.is_grad_enabled() and x.requires_grad:
        raise NotImplementedError(
            f"{name}: got requires_grad=True with grad enabled, expected inference: there is no backward; {remedy}"
        )
    check_no_tangent(name, x)


def broadcasts(mask: torch.Tensor, wanted: tuple[int, int, int, int]) -> bool:
    """Return True if an attention mask of 1 to 4 dimensions broadcasts to the shape."""
    return 1 <= mask.dim() <= 4 and all(
        got in (1, want) for got, want in zip(mask.shape, wanted[4 - mask.dim() :], strict=True)
    )


def check_mask(mask: Any, device: torch.device, wanted: tuple[int, int, int, int], axes: str) -> None:
    """Raise unless an attention mask fits and needs no gradient.

    wanted: the full shape. axes: the names of its dimensions, for the message.
    """
    if not isinstance(mask, torch.Tensor):
        raise TypeError(f"attn_mask: got {type(mask).__name__}, expected a bool or floating point tensor or None")
    check_strided("attn_mask", mask)
    if mask.device != device:
        raise ValueError(f"attn_mask: got device {mask.device}, expected q's {device}")
    if mask.dtype != torch.bool and mask.dtype not in DTYPES:
        raise TypeError(
            f"attn_mask: got dtype {mask.dtype}, expected bool (True: visible) or float16, bfloat16, float32; for 0/1 "
            "integers pass mask.bool()"
        )
    if not broadcasts(mask, wanted):
        raise ValueError(
            f"attn_mask: got shape {tuple(mask.shape)}, expected one that broadcasts to {axes} = {list(wanted)}"
        )
    check_inference("attn_mask", mask)


def check_sinks(sinks: Any, heads: int, device: torch.device) -> None:
    """Raise unless sinks are one logit a head, of inference."""
    if not isinstance(sinks, torch.Tensor):
        raise TypeError(f"sinks: got {type(sinks).__name__}, expected a floating point tensor [H]")
    check_strided("sinks", sinks)
    if not sinks.is_floating_point() or tuple(sinks.shape) != (heads,) or sinks.device != device:
        raise ValueError(
            f"sinks: got {sinks.dtype} {tuple(sinks.shape)} on {sinks.device}, expected a floating point tensor "
            f"[{heads}] (one logit a head) on {device}"
        )
    check_inference("sinks", sinks)


class _OfThread(threading.local):
    """State of one thread.

    Attributes:
        constant: the thread calls an op with tensors that were found to have no tangents.
    """

    constant = False


_of_thread = _OfThread()


@contextmanager
def without_tangents() -> Iterator[None]:
    """Context of a call of an op with tensors that were checked for tangents: see `check_called_below`."""
    before, _of_thread.constant = _of_thread.constant, True
    try:
        yield
    finally:
        _of_thread.constant = before


def check_called_below(op: str) -> None:
    """Raise where user code calls an op of `torch.ops` by name under forward-mode differentiation.

    A transform of torch.func hides tangents from an op's implementation, and sets the tangents of its result to zero.
    """
    if is_differentiating_forward() and not _of_thread.constant:
        raise NotImplementedError(
            f"torch.ops.sage_kernels.{op}: got a call under forward-mode differentiation, expected inference: there "
            "is no derivative; call the function of sage_kernels, which tells tangents from constants, or "
            "scaled_dot_product_attention"
        )
