"""Forwards of several threads on one model with 8-bit linear layers, whose weights are laid out anew meanwhile."""

from __future__ import annotations

import copy
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import sage_processors as sp
from sage_processors.linears.weights.storage import CODES, SCALE, Storage


class OneMatrix(nn.Module):
    """GEGLU as diffusers has it: one layer, whose two halves are value and gate."""

    def __init__(self):
        super().__init__()
        self.proj, self.out = nn.Linear(64, 256), nn.Linear(128, 64)

    def forward(self, x):
        value, gate = self.proj(x).chunk(2, dim=-1)
        return self.out(value * F.gelu(gate))


class TwoMatrices(nn.Module):
    """SwiGLU as language models have it."""

    def __init__(self):
        super().__init__()
        self.gate, self.up, self.down = nn.Linear(64, 128), nn.Linear(64, 128), nn.Linear(128, 64)

    def forward(self, x):
        return self.down(F.silu(self.gate(x)) * self.up(x))


@pytest.fixture
def slow_layout(monkeypatch):
    """Between the old order of a weight and the new one there is time for other threads."""
    clear = Storage.clear

    def slowly(storage):
        clear(storage)
        time.sleep(0.05)

    monkeypatch.setattr(Storage, "clear", slowly)


def together(function, arguments):
    """[function(argument)], each in a thread of its own, which begin at once."""
    start = threading.Barrier(len(arguments))

    def run(argument):
        start.wait()
        return function(argument)

    with ThreadPoolExecutor(len(arguments)) as pool:
        return list(pool.map(run, arguments))


@pytest.mark.parametrize("kind", [OneMatrix, TwoMatrices])
def test_a_weight_is_laid_out_anew_once_and_nobody_reads_it_meanwhile(kind, slow_layout):
    torch.manual_seed(0)
    model = kind().eval().requires_grad_(False)
    inputs = [torch.randn(2, rows, 64) for rows in (3, 5, 8)]
    single = copy.deepcopy(model)
    with sp.quantize_linears(single, "int8", min_features=16):
        wanted = [single(x) + 0.0 for x in inputs]
    assert not torch.equal(wanted[0], model(inputs[0]))
    with sp.quantize_linears(model, "int8", min_features=16):
        for _ in range(2):  # the weight of the first forwards is that of later ones
            assert all(map(torch.equal, together(lambda x: model(x) + 0.0, inputs), wanted))


def test_a_copy_of_a_swapped_model_has_a_lock_of_its_own(slow_layout):
    torch.manual_seed(0)
    model = OneMatrix().eval().requires_grad_(False)
    x = torch.randn(2, 3, 64)
    with sp.quantize_linears(model, "int8", min_features=16):
        with model.proj._sage.shared.lock:  # held here
            other = copy.deepcopy(model)
            assert torch.equal(together(other, [x])[0], other(x))
        assert torch.equal(model(x), other(x))


@pytest.fixture
def fast_switches():
    """Threads take turns after a few instructions."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    yield
    sys.setswitchinterval(before)


@pytest.mark.parametrize("kind", [OneMatrix, TwoMatrices])
def test_casting_by_layer_takes_no_weight_away_from_another_threads_call(kind, fast_switches):
    """diffusers' hooks cast a layer's weight for each call and back, whoever else is in one. In stock that fails."""
    hooks = pytest.importorskip("diffusers.hooks", reason="diffusers is not installed")
    torch.manual_seed(0)
    model = kind().eval().requires_grad_(False)
    hooks.apply_layerwise_casting(model, storage_dtype=torch.float8_e4m3fn, compute_dtype=torch.float32)
    inputs = [torch.randn(6, 64) for _ in range(3)]
    with sp.quantize_linears(model, min_features=0) as swap:
        expected = [model(x) + 0 for x in inputs]
        found = together(lambda place: [model(inputs[place]) + 0 for _ in range(60)], range(3))
        for results, one in zip(found, expected, strict=True):
            for result in results:
                torch.testing.assert_close(result, one)
        assert not swap.report().fallbacks


def test_a_weight_that_another_thread_has_put_to_rest_is_not_asked_for():
    model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64)).eval().requires_grad_(False)
    x = torch.randn(3, 64)
    with sp.quantize_linears(model, min_features=0) as swap:
        before = model(x) + 0
        model.to(torch.float8_e4m3fn)
        assert torch.equal(model(x) + 0, before)
        assert not swap.report().fallbacks


def test_what_is_in_8_bit_is_there_while_a_layer_is_converted():
    model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64)).eval().requires_grad_(False)
    seen = []

    def converted(x):
        seen.append({name in model[0]._buffers for name in (CODES, SCALE)} | {"weight" in model[0]._parameters})
        return x.to(torch.bfloat16) if x.is_floating_point() else x

    for drop in (False, True):
        swap = sp.quantize_linears(model, min_features=0, drop_weights=drop)
        x = torch.randn(3, 64)
        before = model(x) + 0
        model._apply(converted)
        assert seen and all(there == {True} for there in seen)
        assert {p.dtype for p in model.parameters()} == {torch.bfloat16}
        assert all(layer._buffers[SCALE].dtype == torch.float32 for layer in model)
        model.float()
        torch.testing.assert_close(model(x) + 0, before, rtol=0.05, atol=0.05)
        assert drop or swap.remove() is None
