"""Linear layers of the same input as one matrix multiplication: to_q, to_k and to_v of an attention module."""

from __future__ import annotations

import weakref
from typing import Any

import torch

from sage_kernels import QuantizedRows, quantized_linear

from .captured import is_captured


# Children of an attention module that are mostly called with the same tensor, in the order of the calls.
TOGETHER = (
    ("to_q", "to_k", "to_v"),
    ("add_q_proj", "add_k_proj", "add_v_proj"),
    ("q_proj", "k_proj", "v_proj"),
    ("query", "key", "value"),
    ("q", "k", "v"),
    ("to_query", "to_key", "to_value"),
    ("wq", "wk", "wv"),
)
_OTHERS = ("add_q_proj", "to_q_t")  # of joint attention: the queries of its other origin, mostly text


def last_joined(owner, modules) -> int:
    """The index of the last of an attention module's projections that is computed together with the first one.

    Joint attention puts values of two origins side by side. Columns of a joined result are rows that lie apart, which
    PyTorch copies at a fraction of the memory's speed; queries and keys are read in place by what norms them.
    """
    apart = any(owner._modules.get(name) is not None for name in _OTHERS)
    return len(modules) - 1 - apart


def base_of(module: Any) -> Any:
    """The layer that an adapter wraps."""
    return getattr(module, "base_layer", module)


class Run:
    """Neighbours in a Storage, computed when the first one is called; the others' results wait for their calls.

    Where they turn out to have other inputs, the run is broken up: nothing is computed for nothing twice.
    """

    def __init__(self, storage, first: int, last: int):
        self.storage, self.first, self.last = storage, first, last
        # (weak reference to the input, its version, dtype, whether it is captured, the forward's Activations, {index:
        # (version of the weight, result)})
        self._waiting: tuple | None = None

    def __getstate__(self):
        return self.__dict__ | {"_waiting": None}

    @property
    def _forward(self):
        """Whose results may wait: what comes in the next forward may be the same object with other numbers."""
        return self.storage.modules[self.first]._sage_linear.shared.activations

    def output(self, index: int, x: torch.Tensor, version: int, rows: QuantizedRows, dtype) -> torch.Tensor | None:
        """[..., N] of the module at `index`; None: it is to be computed alone.

        x: the input as the model has it, ordinary or lazy, whose codes and scales are `rows`.
        """
        waiting = self._waiting
        if index != self.first:
            if waiting is None:
                return None
            reference, known_version, known_dtype, was_captured, forward, results = waiting
            if forward is not self._forward or was_captured != is_captured(x.device):
                return None  # a replay gives it other numbers
            if reference() is x and known_version == version and known_dtype == dtype:
                weight_version, result = results.pop(index, (None, None))
                if not results:
                    self._waiting = None
                is_current = weight_version == self.storage.modules[index]._sage_linear.version
                return result if is_current else None
            self._break_up(index)
            return None
        if waiting is not None and waiting[0]() is not None and waiting[-1]:
            self._break_up(min(waiting[-1]))  # nobody asked for them
            return None
        return self._all(x, version, rows, dtype)

    def _all(self, x, version, rows, dtype):
        storage, first, last = self.storage, self.first, self.last
        modules = storage.modules[first : last + 1]
        states = [module._sage_linear for module in modules]
        for place, state in enumerate(states):
            if state.balance is not states[0].balance:  # they read other activations
                self._break_up(first + place)
                return None
        # those that are offloaded now are as they were, or their own call notices
        if not all([state.prepare(module) for state, module in zip(states, modules, strict=True)]):
            return None
        together = quantized_linear(rows, storage.rows_of(first, last), storage.bias(first, last), dtype=dtype)
        parts = together.split([module.out_features for module in modules], -1)
        results = {i: (s.version, y) for i, s, y in zip(range(first, last + 1), states, parts, strict=True)}
        own = results.pop(first)[1]
        captured = is_captured(x.device)
        self._waiting = (weakref.ref(x, self._forget), version, dtype, captured, self._forward, results)
        return own

    def _forget(self, reference) -> None:
        waiting = self._waiting
        if waiting is not None and waiting[0] is reference:
            self._waiting = None

    def _break_up(self, at: int) -> None:
        """The modules before `at` and those from there on have different inputs."""
        self._waiting = None
        for first, last in ((self.first, at - 1), (at, self.last)):
            run = Run(self.storage, first, last) if last > first else None
            for module in self.storage.modules[first : last + 1]:
                module._sage_linear.run = run
