"""8-bit weights beside 16-bit ones take no memory that the model needs; those without room are counted."""

from __future__ import annotations

import pytest
import torch

import sage_processors as sp
from sage_processors.linears.weights import room
from tests.diffusion.calls.test_processors import forward
from tests.support.tiny_models import MODELS


class Gpu:
    """A GPU with so many free bytes, of which every stored 8-bit weight of a model takes its part."""

    def __init__(self, model, free, needed=0):
        self.model, self.free, self.needed = model, free, needed

    def taken(self) -> int:
        return sum(b.numel() for name, b in self.model.named_buffers() if name.endswith("_sage_codes"))

    def __call__(self, device):
        return self.free - self.taken(), self.needed


def quantized(model, **options):
    return sp.apply(model, sp.SageAttnProcessor(scaling="dynamic", linears=sp.Linears(min_features=1, **options)))


@pytest.mark.parametrize(("share", "needed"), [(0.0, 0.0), (0.4, 0.0), (0.4, 1.6), (2.0, 0.0)])
def test_copies_leave_what_is_needed_and_the_rest_runs_in_16_bit(share, needed, monkeypatch):
    model, inputs = MODELS["flux"]()
    stock = forward(model, inputs)
    with quantized(model):
        forward(model, inputs)
        size = Gpu(model, 0).taken()
    gpu = Gpu(model, int(2 * share * size), int(needed * share * size))
    monkeypatch.setattr(room, "free_bytes", gpu)
    with quantized(model) as handle:
        for _ in range(2):
            out = forward(model, inputs)
        assert gpu.taken() <= gpu.free - max(gpu.free // 2, gpu.needed)
        assert (gpu.taken() == size) == (share > 1) and (gpu.taken() > 0) == (share > 0)
    report = handle.report().linears
    without = [row for row in report.rows if row["fallbacks"]]
    assert bool(without) == (share < 1) and all(row["fallbacks"] == {"memory": 2} for row in without)
    assert all(not row["calls"] and "no room" in row["note"] for row in without)
    assert (f"{len(without)} linear layers run in 16 bit (memory)" in str(report)) == bool(without)
    assert torch.equal(forward(model, inputs), stock) and not torch.equal(out, stock)


def test_weights_that_take_the_place_of_others_need_no_room(monkeypatch):
    model, inputs = MODELS["flux"]()
    monkeypatch.setattr(room, "free_bytes", Gpu(model, 0))
    handle = quantized(model, drop_weights=True)
    forward(model, inputs)
    assert handle.report().linears.fallbacks == {} and handle.report().linears.calls


def test_a_layer_without_room_is_an_error_where_the_options_say_so(monkeypatch):
    model, inputs = MODELS["flux"]()
    monkeypatch.setattr(room, "free_bytes", Gpu(model, 0))
    config = sp.SageAttnProcessor("fast", linears={"min_features": 1}, min_tokens=1, on_unsupported="raise")
    with sp.apply(model, config), pytest.raises(sp.UnsupportedLinearError, match='reason .memory.*preset "small"'):
        forward(model, inputs)
