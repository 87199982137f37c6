"""Random programs: the same numbers whether results wait or not, and no error where the stock model has none."""

from __future__ import annotations

import copy

import torch

import sage_processors as sp
from sage_processors.linears import modules
from sage_processors.linears.postponed import norm_layers as norms
from tests.postponed.programs import LIBRARY, STEPS, Program, random_program


# Codes that round the other way, since a norm's or a product's last bits differ: of 1 in some hundred elements, by a
# step of 1/127. Any stale or leaking operand is a hundred times as much.
CLOSE = 2e-3
SHAPE = (2, 5, 32)


def runs(model, x):
    """All tensors that two runs of the model leave."""
    found = []
    for _ in range(2):
        held, kept = model(x.clone())
        found += [y.detach().clone() for y in (*held, *kept)]
    return found


def distance(a, b):
    a, b = a.double(), b.double()
    return ((a - b).abs().sum() / b.abs().sum().clamp_min(1e-30)).item()


def compare(seed, monkeypatch, names, length=9, may_refuse=False):
    """Run a program on a swapped model, and on one whose results never wait; returns the largest distance."""
    steps = random_program(seed, names, length)
    model, x = Program(steps), torch.randn(SHAPE, generator=torch.Generator().manual_seed(seed))
    with torch.no_grad():
        try:
            runs(copy.deepcopy(model), x)
        except RuntimeError:
            return 0.0  # no program that PyTorch runs, such as a view of what has no such strides
        at_once = copy.deepcopy(model)
        with sp.quantize_linears(at_once, min_features=0), monkeypatch.context() as patch:
            patch.setattr(modules, "is_caller_known", lambda depth: False)
            expected = runs(at_once, x)
        with sp.quantize_linears(model, min_features=0):
            try:
                got = runs(model, x)
            except sp.ChangedInputError:
                assert may_refuse, f"{seed}: refused"
                return 0.0
    assert all(type(y) is torch.Tensor for y in got)
    assert [y.shape for y in got] == [y.shape for y in expected]
    return max(map(distance, got, expected))


def failures(seeds, monkeypatch, names, **options):
    found = {seed: compare(seed, monkeypatch, names, **options) for seed in seeds}
    return {seed: (error, random_program(seed, names)) for seed, error in found.items() if error > CLOSE}


def test_programs_of_users(monkeypatch):
    assert not failures(range(120), monkeypatch, tuple(STEPS))


def test_programs_of_libraries(monkeypatch, library_tests):
    """What waits there, and writes in place between, which are noticed."""
    assert not failures(range(120), monkeypatch, LIBRARY, may_refuse=True)


def test_results_wait_in_programs_of_libraries(monkeypatch, library_tests):
    """Without this the tests above would compare nothing."""
    made = []
    own = norms.NormState.postpone
    monkeypatch.setattr(norms.NormState, "postpone", lambda *args: made.append(own(*args)) or made[-1])
    failures(range(40), monkeypatch, LIBRARY, may_refuse=True)
    assert sum(y is not None for y in made) > 20
