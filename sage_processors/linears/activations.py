"""Ordinary activations in 8 bit, each quantised once although several layers ask for it."""

from __future__ import annotations

import functools
import weakref

import torch

from sage_kernels import QuantizedRows, quantize_activation

from .captured import is_captured


# id of a tensor → (weak reference to it, version, stream, RowsOf); entries leave with their tensors
_known: dict[int, tuple] = {}


class RowsOf:
    """What one activation is in 8 bit: in a format, with a balance of its channels."""

    __slots__ = ("_found",)

    def __init__(self):
        self._found: dict[tuple, tuple] = {}  # (format, id of the balance, its version) → (the balance, rows)

    def get(self, format: str, balance: torch.Tensor | None) -> QuantizedRows | None:
        return self._found.get(_key_of(format, balance), (None, None))[1]

    def put(self, format: str, balance: torch.Tensor | None, rows: QuantizedRows) -> QuantizedRows:
        self._found[_key_of(format, balance)] = (balance, rows)  # held: its id is nobody else's
        return rows


def _key_of(format, balance):
    return (format,) if balance is None else (format, id(balance), balance._version)


def quantized(x: torch.Tensor, format: str, balance: torch.Tensor | None = None) -> QuantizedRows:
    """Codes [..., K] and scale [...] of an ordinary tensor [..., K], multiplied by balance [K].

    The same object, not written to in between, is quantised once. An inference tensor does not know whether it was
    written to: it is quantised at every call.
    """
    if x.is_inference():
        return quantize_activation(x, format=format, balance=balance)
    stream = 0
    if is_captured(x.device):
        return quantize_activation(x, format=format, balance=balance)
    if x.is_cuda:
        stream = torch.cuda.current_stream(x.device).cuda_stream
    key, version = id(x), x._version
    known = _known.get(key)
    if known is not None and known[0]() is x and known[1] == version and known[2] == stream:
        rows = known[3].get(format, balance)
        if rows is None:
            rows = known[3].put(format, balance, quantize_activation(x, format=format, balance=balance))
        return rows
    rows, found = quantize_activation(x, format=format, balance=balance), RowsOf()
    _known[key] = (weakref.ref(x, functools.partial(_forget, key)), version, stream, found)
    return found.put(format, balance, rows)


def _forget(key: int, reference) -> None:
    entry = _known.get(key)
    if entry is not None and entry[0] is reference:
        del _known[key]
