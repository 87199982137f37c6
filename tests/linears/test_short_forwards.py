"""Forwards that are known to have no work for 8 bit: nobody is asked again, and everything else is as before."""

from __future__ import annotations

import copy
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import nn

from sage_processors.linears import modules, swap
from sage_processors.linears.quantize import quantize_linears
from sage_processors.linears.short_forwards import shapes_of
from sage_processors.linears.weights import linear_state as weights


LEAST = 2**16  # multiply-adds: 8 rows of 64 x 64 are short, 64 rows are not
SHORT, LONG = 8, 64


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(64)
        self.up, self.down = nn.Linear(64, 64), nn.Linear(64, 64)

    def forward(self, x, options=None):
        return x + self.down(nn.functional.gelu(self.up(self.norm(x))))


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(2))

    def forward(self, x, options=None):
        for block in self.blocks:
            x = block(x)
        return x


@pytest.fixture
def timed(monkeypatch):
    """As on a GPU, where a short call is not worth 8 bit. Returns the calls of layers that were looked at."""
    looked_at = []
    in_8_bit = modules._in_8_bit

    def watched(module, base, x):
        looked_at.append(module)
        return in_8_bit(module, base, x)

    monkeypatch.setattr(modules, "_in_8_bit", watched)
    for home in (modules, swap):
        monkeypatch.setattr(home, "is_timed", lambda device: True)
    return looked_at


def made(timed):
    torch.manual_seed(0)
    model = Model().eval().requires_grad_(False)
    stock = copy.deepcopy(model)
    handle = quantize_linears(model, min_features=64)
    for state in handle.states():
        state.shared.least_work = LEAST
        state.find_short()
    return model, stock, handle


def counts(handle) -> tuple[int, int]:
    rows = [row for row in handle.report().rows if row["format"]]
    return sum(row["calls"] for row in rows), sum(row["fallbacks"].get("short", 0) for row in rows)


def test_from_the_third_forward_alike_on_no_layer_is_looked_at_and_all_are_counted(timed):
    model, stock, handle = made(timed)
    for i in range(6):
        x = torch.randn(SHORT, 64)
        timed.clear()
        assert torch.equal(model(x), stock(x))
        assert len(timed) == (4 if i < 2 else 0), i
        assert counts(handle) == (0, 4 * (i + 1))
    assert handle.forwards_without_eager_calls() == 0


def test_a_forward_of_other_shapes_is_looked_at_and_runs_in_8_bit(timed):
    model, stock, handle = made(timed)
    short, long = torch.randn(SHORT, 64), torch.randn(LONG, 64)
    first = model(long)
    assert not torch.equal(first, stock(long)) and counts(handle) == (4, 0)
    for _ in range(4):
        model(short)
    for i in range(3):
        timed.clear()
        assert torch.equal(model(long), first) and len(timed) == 4
        timed.clear()
        assert torch.equal(model(short), stock(short)) and not timed
        assert counts(handle) == (4 * (i + 2), 4 * (i + 5))
    # one of which only the depth of a dict tells
    nested = {"a": [torch.zeros(1)]}
    assert shapes_of((short,), nested) != shapes_of((short,), {"a": [torch.zeros(2)]})
    assert shapes_of((short,), {"a": 1}) == shapes_of((short,), {"a": 2}) != shapes_of((short,), {"a": None})


def test_a_long_call_inside_of_a_known_forward_runs_in_8_bit(timed):
    model, stock, handle = made(timed)
    short, long = torch.randn(SHORT, 64), torch.randn(LONG, 64)
    for _ in range(3):
        model(short)
    timed.clear()
    assert not torch.equal(model.blocks[0](long), stock.blocks[0](long)) and len(timed) == 2
    assert counts(handle) == (2, 12)


def test_weights_that_were_written_to_meanwhile_are_those_of_the_next_long_forward(timed):
    model, stock, _ = made(timed)
    short, long = torch.randn(SHORT, 64), torch.randn(LONG, 64)
    model(long)
    for _ in range(4):
        model(short)
    for m in (model, stock):
        m.blocks[0].up.weight.mul_(-2.0)
    assert torch.equal(model(short), stock(short))
    error = (model(long) - stock(long)).norm() / stock(long).norm()
    assert error < 0.02
    model.blocks[1].down.weight.copy_(stock.blocks[1].up.weight)
    fresh = copy.deepcopy(stock)
    fresh.blocks[1].down.weight.copy_(stock.blocks[1].up.weight)
    with quantize_linears(fresh, min_features=64):
        assert torch.equal(model(long), fresh(long))


@pytest.mark.parametrize("what", ["captured", "resting", "subclass", "compiled part"])
def test_a_forward_of_which_something_else_is_to_be_said_stays_unknown(what, timed, monkeypatch):
    model, _, handle = made(timed)
    x = torch.randn(SHORT, 64)
    if what == "captured":
        monkeypatch.setattr(swap, "is_captured", lambda device: True)
    elif what == "resting":
        handle.states()[0].is_resting = True
    elif what == "subclass":
        x = x.as_subclass(type("Own", (torch.Tensor,), {}))
    else:
        monkeypatch.setattr(weights, "has_compiled_parts", lambda model: True)
    for _ in range(5):
        timed.clear()
        model(x)
        assert len(timed) == 4


def test_what_was_known_is_forgotten_by_a_refresh_and_not_known_to_a_copy(timed):
    model, stock, handle = made(timed)
    short, long = torch.randn(SHORT, 64), torch.randn(LONG, 64)
    for _ in range(4):
        model(short)
    other = copy.deepcopy(model)
    timed.clear()
    assert torch.equal(other(short), stock(short)) and len(timed) == 4
    assert not torch.equal(other(long), stock(long))
    handle.refresh()
    timed.clear()
    model(short)
    assert len(timed) == 4 and counts(handle) == (0, 20)
    for _ in range(3):
        model(short)
    handle.remove()
    assert torch.equal(model(long), stock(long)) and not modules.is_swapped(model.blocks[0].up)


def test_threads_with_forwards_of_both_kinds_do_not_disturb_each_other(timed):
    model, stock, _ = made(timed)
    inputs = [torch.randn(SHORT, 64), torch.randn(LONG, 64)]
    wanted = [stock(inputs[0]), model(inputs[1])]

    def run(which: int) -> bool:
        return torch.equal(model(inputs[which]), wanted[which])

    with ThreadPoolExecutor(4) as pool:
        assert all(pool.map(run, [i // 3 % 2 for i in range(240)]))


def test_dropped_weights_have_no_16_bit_forward(timed):
    model, stock, handle = made(timed)
    short = torch.randn(SHORT, 64)
    for _ in range(4):
        model(short)
    handle.drop()
    timed.clear()
    out = model(short)
    assert len(timed) == 4 and not torch.equal(out, stock(short)) and torch.isfinite(out).all()
