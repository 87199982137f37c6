"""Calls whose attention is all short run as in stock from the second of a kind on, counted as before."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

import sage_processors as sp
from sage_processors.diffusion.calls.short_calls import MOST_KINDS, ShortCalls
from tests.diffusion.calls.test_processors import forward
from tests.diffusion.test_apply import processors_of
from tests.support.tiny_models import MODELS


ALL_SHORT = sp.SageAttnProcessor(min_tokens=10**6)


@pytest.mark.parametrize("name", ["unet_sd15", "flux", "lumina2", "wan_t2v", "sd3"])
def test_the_second_forward_runs_the_original_code_and_counts_the_same(name, monkeypatch):
    model, inputs = MODELS[name]()
    stock = forward(model, inputs)
    with sp.apply(model, ALL_SHORT) as handle:
        assert torch.equal(forward(model, inputs), stock)
        first = handle.report()
        for processor in processors_of(model).values():
            monkeypatch.setattr(type(processor)._sage_binding, "inner", None)  # not called any more
        for _ in range(2):
            assert torch.equal(forward(model, inputs), stock)
    for before, after in zip(first.rows, handle.report().rows, strict=True):
        assert after["calls"] == 0 and after["fallbacks"] == {"short": 3 * before["fallbacks"]["short"]}


def test_each_length_is_a_kind_of_its_own():
    model, inputs = MODELS["unet_sd15"]()
    larger = inputs | {"sample": torch.cat([inputs["sample"]] * 2, -1)}
    with sp.apply(model, sp.SageAttnProcessor(min_tokens=100, scaling="dynamic")) as handle:
        for _ in range(2):
            forward(model, inputs)
        assert handle.report().calls == 0
        forward(model, larger)
        calls = handle.report().calls
        assert calls > 0
        for _ in range(2):
            forward(model, larger)
        assert handle.report().calls == 3 * calls


def test_a_back_end_that_is_set_later_counts_as_before():
    model, inputs = MODELS["flux"]()
    with sp.apply(model, ALL_SHORT) as handle:
        for _ in range(2):
            forward(model, inputs)
        for processor in processors_of(model).values():
            processor._attention_backend = "_native_math"
        for _ in range(2):
            forward(model, inputs)
        assert handle.report().fallbacks == {"short": 4, "backend": 4}


def test_kinds_are_bounded_and_calls_with_other_attention_are_none():
    short = ShortCalls()
    for i in range(2 * MOST_KINDS):
        short.note((i,), 1, 1)
    assert [short.known((i,)) for i in (0, MOST_KINDS - 1, MOST_KINDS)] == [1, 1, 0]
    short = ShortCalls()
    for calls, found in ((2, 1), (0, 0)):
        short.note("a", calls, found)
        assert not short.known("a") and not short.known(None)
    tensor = torch.zeros(2)
    assert short.kind(object(), (None, tensor), {}) is not None
    assert short.kind(object(), (None, object()), {}) is short.kind(object(), (), {"attn": None}) is None
    assert short.kind(SimpleNamespace(_attention_backend="sage_int8"), (None, tensor), {}) is None
    assert short.kind(SimpleNamespace(_parallel_config=1), (None, tensor), {}) is None
