"""Inputs of linear layers in 8 bit, each quantised once in a block although several layers read it."""

from __future__ import annotations

import functools
import weakref

import torch

from sage_kernels import QuantizedRows, quantize_activation

from ...postponed.region import Region


class RowsOf:
    """Codes of one activation, by number format and channel balance."""

    __slots__ = ("_found",)

    def __init__(self):
        self._found: dict[tuple, tuple] = {}  # (format, id of the balance, its version) → (the balance, rows)

    def __bool__(self):
        return bool(self._found)

    def get(self, format: str, balance: torch.Tensor | None) -> QuantizedRows | None:
        return self._found.get(_key_of(format, balance), (None, None))[1]

    def put(self, format: str, balance: torch.Tensor | None, rows: QuantizedRows) -> QuantizedRows:
        self._found[_key_of(format, balance)] = (balance, rows)  # held: its id is nobody else's
        return rows


def _key_of(format, balance):
    return (format,) if balance is None else (format, id(balance), balance._version)


class Activations:
    """Ordinary tensors that layers of one block were given in one call of it, and their codes.

    Not kept for longer: the same object, whose writes are counted, may have other numbers by then. Not every write is
    counted: a CUDA graph that is replayed leaves its results in the tensors that it gave out before.
    """

    def __init__(self):
        # id of a tensor → (weak reference to it, version, stream, RowsOf); entries leave with their tensors
        self._known: dict[int, tuple] = {}

    def forget(self) -> None:
        """Let go of all of them: what watches an entry's tensor holds the dictionary."""
        self._known.clear()

    def quantized(self, x: torch.Tensor, format: str, balance: torch.Tensor | None) -> QuantizedRows:
        """Codes and scales of a tensor, from the first layer that asked for them."""
        stream = torch.cuda.current_stream(x.device).cuda_stream if x.is_cuda else 0
        key, version = id(x), x._version
        known = self._known.get(key)
        if known is not None and known[0]() is x and known[1] == version and known[2] == stream:
            found = known[3]
            rows = found.get(format, balance)
            if rows is not None:
                return rows
        else:
            found = RowsOf()
            self._known[key] = (weakref.ref(x, functools.partial(_forget, self._known, key)), version, stream, found)
        return found.put(format, balance, quantize_activation(x, format=format, balance=balance))


def quantized(x: torch.Tensor, format: str, balance: torch.Tensor | None, region: Region | None) -> QuantizedRows:
    """Codes [..., K] and scale [...] of an ordinary tensor [..., K], multiplied by balance [K].

    In a region the same object, not written to in between, is quantised once. An inference tensor does not count
    writes: it is quantised at every call.
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
