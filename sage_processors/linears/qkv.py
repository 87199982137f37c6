"""One matmul for projections of the same input, such as to_q, to_k and to_v of an attention module."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import nn

from sage_kernels import QuantizedRows

from ..postponed.region import Region
from .weights.few_rows import multiplied
from .weights.storage import Storage


# Names of an attention module's children that are mostly called with the same tensor, in the order of the calls.
TOGETHER = (
    ("to_q", "to_k", "to_v"),
    ("add_q_proj", "add_k_proj", "add_v_proj"),
    ("q_proj", "k_proj", "v_proj"),
    ("query", "key", "value"),
    ("q", "k", "v"),
    ("to_query", "to_key", "to_value"),
    ("wq", "wk", "wv"),
)
_OTHERS = ("add_q_proj", "to_q_t")  # in joint attention: queries of the second stream, mostly text


def last_joined(owner, modules) -> int:
    """Return the index of the last projection that is computed together with the first one.

    In joint attention the values are not: it concatenates the values of two streams, and PyTorch copies a slice of
    columns of a joined result at a fraction of the memory's speed. Queries and keys are read in place by their norms.
    """
    apart = any(owner._modules.get(name) is not None for name in _OTHERS)
    return len(modules) - 1 - apart


def base_of(module: Any) -> Any:
    """Return the layer that an adapter wraps, or the module itself if it is no adapter."""
    return getattr(module, "base_layer", module)


class Run:
    """Adjacent layers of one matrix that are all computed when the first one is called.

    The region of the block keeps the results of the others until they are called. If a layer turns out to have another
    input, the run is split there, so that no result is computed in vain a second time.
    """

    def __init__(self, storage, first: int, last: int):
        self.storage, self.first, self.last = storage, first, last

    def output(
        self, index: int, x: torch.Tensor, version: int, rows: QuantizedRows | torch.Tensor, dtype, region: Region
    ):
        """Return the result [..., N] of the module at `index`, or None if it has to be computed alone.

        x: the layer's input, ordinary or postponed. version: its count of writes. rows: its codes and scales, or the
        input in 16 bit.
        """
        waiting = region.joined.get(id(self))
        if index == self.first:
            if waiting is None:
                return self._all(x, version, rows, dtype, region)
            if waiting.results:
                self._break_up(min(waiting.results))  # these were not called with the last input
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
        state = self.storage.modules[index]._sage
        return result if weight_version == state.version and bias is state.bias else None

    def _all(self, x, version, rows, dtype, region: Region):
        storage, first, last = self.storage, self.first, self.last
        modules = storage.modules[first : last + 1]
        states = [module._sage for module in modules]
        for place, state in enumerate(states):
            if state.balance is not states[0].balance:  # it reads another activation
                self._break_up(first + place)
                return None
        # a weight that is offloaded at the moment counts as unchanged; else the layer's own call notices it
        if not all([state.prepare(module) for state, module in zip(states[1:], modules[1:], strict=True)]):
            return None
        together = multiplied(rows, storage.rows_of(first, last), storage.bias(first, last), dtype=dtype)
        parts = together.split_with_sizes([module.out_features for module in modules], -1)
        results = {i: (s.version, s.bias, y) for i, s, y in zip(range(first, last + 1), states, parts, strict=True)}
        own = results.pop(first)[2]
        region.joined[id(self)] = _Waiting(self, x, version, dtype, results)
        return own

    def _break_up(self, at: int) -> None:
        """Split the run in two in front of `at`, as the layers there have different inputs."""
        for first, last in ((self.first, at - 1), (at, self.last)):
            run = Run(self.storage, first, last) if last > first else None
            for module in self.storage.modules[first : last + 1]:
                module._sage.run = run


class _Waiting(NamedTuple):
    """Results of a run for modules that were not called yet.

    results: {index of the module: (version of its weight, bias, result)}.
    """

    run: Run  # held, so that its id stays its own
    x: torch.Tensor  # likewise
    version: int
    dtype: torch.dtype
    results: dict[int, tuple[int, torch.Tensor | None, torch.Tensor]]


def join_neighbours(model: nn.Module, states: dict[int, Any]) -> None:
    """Store the weights of projections with the same input as one matrix, as found by their names.

    states: {id of a swapped layer: (the layer, its LinearState)}.
    """
    known = {key: pair for key, pair in states.items() if not pair[1].is_weight_only}
    for owner in model.modules():
        for names in TOGETHER:
            modules = [base_of(owner._modules.get(name)) for name in names]
            own: list[Any] = [known.get(id(module)) for module in modules]
            if None in own:
                modules, own = modules[1:], own[1:]  # keys and values, if the queries are not swapped
            if None in own or any(len(state.storage.modules) > 1 for _, state in own):
                continue
            if len({(m.in_features, state.format) for m, state in own}) > 1:
                modules, own = modules[1:], own[1:]
            if len({(m.in_features, state.format) for m, state in own}) == 1 and len(set(map(id, modules))) > 1:
                _stack(modules, last_joined(owner, modules))


def _stack(modules: Any, last: int) -> None:
    states = [module._sage for module in modules]
    if any(state.is_filled or state.storage.in_turns for state in states):
        return
    storage = Storage(modules)
    run = Run(storage, 0, last) if last > 0 else None
    for index, state in enumerate(states):
        state.storage, state.index, state.run = storage, index, run if index <= last else None
