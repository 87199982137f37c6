"""Balances of a loaded model by a run of it, as `sage_processors.apply` balances a model in 16 bit."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch

from sage_kernels import quantize_weight

from ..linears.balance import Balance
from ..linears.measured_balance import measured_balances
from ..linears.random_run import random_run, unmeasured
from ..linears.swap import LinearSwap
from ..linears.weights.linear_state import LinearState, in_16_bit
from .files import Renaming, as_named


logger = logging.getLogger("sage_processors")


def balance_by_run(swap: LinearSwap, files: Iterable[Any], renaming: Renaming = as_named) -> None:
    """Balance what norms and attention of a loaded model hand on, by a run of it on random tokens.

    A model that can't be run so stays as it is, and the log says it.

    Args: files: that the model was read from, to read 16-bit weights once more. A weight that is not found there with
        its own numbers (joined or split while it was read) is rounded twice. renaming: of names in the files.
    """
    states = {state.label: state for state in swap.states() if state.dropped and not state.is_weight_only}
    run = random_run(swap.model)
    # one after the other: what attention returns is measured with layers that the first run has balanced
    for source in ("norms", "attention"):
        try:
            vectors = {} if isinstance(run, str) else _measured(swap, list(states.values()), run, source)
        except Exception as error:  # RunFailed, or too little memory for the weights' sizes behind the run
            run, vectors = str(error), {}
        _balance(states, vectors, files, renaming)
    if isinstance(run, str):
        logger.warning("linears: %s", unmeasured(swap.model, run))


def _balance(
    states: dict[str, LinearState], vectors: dict[str, torch.Tensor], files: Iterable[Any], renaming: Renaming
) -> None:
    """Quantise the layers of these balances {label: [K]} again, from their 16-bit weights."""
    made: dict[int, Balance] = {}
    with torch.no_grad():
        for label, weight in _weights({x: states[x] for x in vectors if x in states}, files, renaming):
            state, vector = states[label], vectors[label]
            rows = quantize_weight(in_16_bit(weight), format=state.format, balance=vector)
            state.storage.write(state.index, rows)
            state.balance = made.setdefault(id(vector), Balance(vector))


def _measured(swap: LinearSwap, states: list[LinearState], run: Any, source: Any) -> dict[str, torch.Tensor]:
    """Return {label: balance [K]}, of a run with 16-bit activations, which is counted nowhere."""
    for state in states:
        state.is_resting = True
    try:
        return measured_balances(swap.model, run, (source,))
    finally:
        for state in states:
            state.is_resting = False


def _weights(
    states: dict[str, LinearState], files: Iterable[Any], renaming: Renaming
) -> Iterable[tuple[str, torch.Tensor]]:
    """Yield (label, weight [N, K]), from the files where they have it, else from the 8-bit weight."""
    from safetensors import safe_open

    left = dict(states)
    for path in (Path(file) for file in files if Path(file).suffix == ".safetensors"):
        with safe_open(path, "pt") as opened:
            raw_names = opened.keys()
            names = {name.removesuffix(".weight"): raw for raw in raw_names for name in renaming(raw)[0]}
            for label in [label for label in left if label in names]:
                weight = opened.get_tensor(names[label]).to(states[label].storage.device)
                if _is_weight_of(states[label], weight):
                    del left[label]
                    yield label, weight
    for label, state in left.items():
        balance = None if state.balance is None else state.balance.vector
        yield label, state.storage.dequantized(state.index, torch.float32, balance)


def _is_weight_of(state: LinearState, weight: torch.Tensor) -> bool:
    """Return True if a weight gives the 8-bit weight that the layer has."""
    codes, scale = state.storage.plain_rows(state.index)
    if weight.shape != codes.shape or not weight.is_floating_point():
        return False
    balance = None if state.balance is None else state.balance.vector
    rows = quantize_weight(in_16_bit(weight), format=state.format, balance=balance)
    return torch.equal(rows.codes.view(torch.uint8), codes.view(torch.uint8)) and torch.equal(rows.scale, scale)
