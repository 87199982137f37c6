"""One matmul for linear layers of the same input: to_q, to_k and to_v of an attention module."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import nn

from sage_kernels import QuantizedRows, quantized_linear

from ..postponed.region import Region
from .weights.storage import Storage


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
    """Index of the last projection that is computed together with the first one.

    Joint attention puts values of two origins side by side. Columns of a joined result are rows that lie apart, which
    PyTorch copies at a fraction of the memory's speed; queries and keys are read in place by what norms them.
    """
    apart = any(owner._modules.get(name) is not None for name in _OTHERS)
    return len(modules) - 1 - apart


def base_of(module: Any) -> Any:
    """The layer that an adapter wraps."""
    return getattr(module, "base_layer", module)


class Run:
    """Neighbouring layers of one matrix, all computed when the first one is called.

    The others' results wait for their calls in the region of the block that runs, and no longer. Where the neighbours
    turn out to have other inputs, the run is broken up: nothing is computed for nothing twice.
    """

    def __init__(self, storage, first: int, last: int):
        self.storage, self.first, self.last = storage, first, last

    def output(self, index: int, x: torch.Tensor, version: int, rows: QuantizedRows, dtype, region: Region):
        """[..., N] of the module at `index`; None: it is to be computed alone.

        x: the input as the model has it, ordinary or postponed, whose codes and scales are `rows`.
        """
        waiting = region.joined.get(id(self))
        if index == self.first:
            if waiting is None:
                return self._all(x, version, rows, dtype, region)
            if waiting.results:
                self._break_up(min(waiting.results))  # nobody asked for them
                return None
            return self._all(x, version, rows, dtype, region)
        if waiting is None or waiting.run is not self:
            return None
        if waiting.x is not x or waiting.version != version or waiting.dtype != dtype:
            self._break_up(index)
            return None
        weight_version, bias, result = waiting.results.pop(index, (None, None, None))
        if not waiting.results:
            del region.joined[id(self)]
        state = self.storage.modules[index]._sage_linear
        return result if weight_version == state.version and bias is state.bias else None

    def _all(self, x, version, rows, dtype, region: Region):
        storage, first, last = self.storage, self.first, self.last
        modules = storage.modules[first : last + 1]
        states = [module._sage_linear for module in modules]
        for place, state in enumerate(states):
            if state.balance is not states[0].balance:  # they read other activations
                self._break_up(first + place)
                return None
        # those that are offloaded now are as they were, or their own call notices
        if not all([state.prepare(module) for state, module in zip(states[1:], modules[1:], strict=True)]):
            return None
        together = quantized_linear(rows, storage.rows_of(first, last), storage.bias(first, last), dtype=dtype)
        parts = together.split([module.out_features for module in modules], -1)
        results = {i: (s.version, s.bias, y) for i, s, y in zip(range(first, last + 1), states, parts, strict=True)}
        own = results.pop(first)[2]
        region.joined[id(self)] = _Waiting(self, x, version, dtype, results)
        return own

    def _break_up(self, at: int) -> None:
        """The modules before `at` and those from there on have different inputs."""
        for first, last in ((self.first, at - 1), (at, self.last)):
            run = Run(self.storage, first, last) if last > first else None
            for module in self.storage.modules[first : last + 1]:
                module._sage_linear.run = run


class _Waiting(NamedTuple):
    """Results of a run whose modules were not called yet: {index: (version of the weight, bias, result)}."""

    run: Run  # held: its id is nobody else's
    x: torch.Tensor  # likewise
    version: int
    dtype: torch.dtype
    results: dict[int, tuple[int, torch.Tensor | None, torch.Tensor]]


def join_neighbours(model: nn.Module, states: dict[int, Any]) -> None:
    """Lay the weights of layers of the same input out as one matrix, where their module names them as attention does.

    states: {id of a swapped layer: (the layer, its LinearState)}.
    """
    known = {key: pair for key, pair in states.items() if not pair[1].is_weight_only}
    for owner in model.modules():
        for names in TOGETHER:
            modules = [base_of(owner._modules.get(name)) for name in names]
            own: list[Any] = [known.get(id(module)) for module in modules]
            if None in own:
                modules, own = modules[1:], own[1:]  # keys and values of a layer whose queries are not swapped
            if None in own or any(len(state.storage.modules) > 1 for _, state in own):
                continue
            if len({(m.in_features, state.format) for m, state in own}) > 1:
                modules, own = modules[1:], own[1:]
            if len({(m.in_features, state.format) for m, state in own}) == 1 and len(set(map(id, modules))) > 1:
                _stack(modules, last_joined(owner, modules))


def _stack(modules: Any, last: int) -> None:
    states = [module._sage_linear for module in modules]
    if any(state.is_filled or state.storage.in_turns for state in states):
        return
    storage = Storage(modules)
    run = Run(storage, 0, last) if last > 0 else None
    for index, state in enumerate(states):
        state.storage, state.index, state.run = storage, index, run if index <= last else None
