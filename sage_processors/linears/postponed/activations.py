"""8-bit inputs of linear layers, each quantised once in a block for all layers that read it."""

from __future__ import annotations

import functools
import weakref
from typing import Any

import torch

from sage_kernels import QuantizedRows, quantize_activation

from ...postponed.region import Region


# The rows of one activation: {`key_of`: (balance, rows)}. Holding the balance keeps its id its own.
Rows = dict[tuple[Any, ...], tuple[Any, Any]]


def key_of(format: str, balance: torch.Tensor | None) -> tuple[Any, ...]:
    """Return the key of an activation's rows. format: "int8" and "fp8": codes and scales; "16bit"."""
    return (format,) if balance is None else (format, id(balance), balance._version)


class Activations:
    """Codes and scales of the ordinary tensors that linear layers read in one call of a block.

    They are not kept for longer: the same tensor may hold other numbers by then, although PyTorch counted no write. A
    replayed CUDA graph, for one, writes its results into the tensors that it returned before.
    """

    def __init__(self):
        # id of a tensor → (weak reference to it, version, stream, Rows); an entry goes when its tensor is freed
        self._known: dict[int, tuple] = {}

    def forget(self) -> None:
        """Drop all entries. The callbacks of their weak references would keep the dictionary alive."""
        self._known.clear()

    def quantized(self, x: torch.Tensor, format: str, balance: torch.Tensor | None) -> QuantizedRows:
        """Return codes and scales of a tensor. The first layer that asks has them computed."""
        stream = torch.cuda.current_stream(x.device).cuda_stream if x.is_cuda else 0
        key, version, form = id(x), x._version, key_of(format, balance)
        known = self._known.get(key)
        if known is not None and known[0]() is x and known[1] == version and known[2] == stream:
            found: Rows = known[3]
            if form in found:
                return found[form][1]
        else:
            found = {}
            self._known[key] = (weakref.ref(x, functools.partial(_forget, self._known, key)), version, stream, found)
        rows = quantize_activation(x, format=format, balance=balance)
        found[form] = balance, rows
        return rows


def quantized(x: torch.Tensor, format: str, balance: torch.Tensor | None, region: Region | None) -> QuantizedRows:
    """Quantise an ordinary tensor [..., K] times balance [K]: codes [..., K], scale [...].

    In a region the same tensor is quantised once, unless it was written to in between. An inference tensor does not
    count writes, so it is quantised at every call.
    """
    if region is None or x.is_inference():
        return quantize_activation(x, format=format, balance=balance)
    if region.quantized is None:
        region.quantized = Activations()
    rows: QuantizedRows = region.quantized.quantized(x, format, balance)
    return rows


def _forget(known: dict, key: int, reference) -> None:
    entry = known.get(key)
    if entry is not None and entry[0] is reference:
        del known[key]
