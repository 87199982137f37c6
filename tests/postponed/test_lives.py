"""Random lives of models in 8 bit: after whatever users do, the numbers of a model in which nothing ever waits."""

from __future__ import annotations

import copy

import pytest
import torch

import sage_processors as sp
from sage_processors.postponed import enclosure
from tests.postponed.lives import ACTIONS, Life, random_life
from tests.support.tiny_language_models import MODELS as LANGUAGE
from tests.support.tiny_models import MODELS


# Codes that round the other way here and there; what is stale or leaks makes 0.03 to 8
CLOSE = 0.012


def output(model, inputs):
    found = model(**copy.deepcopy(inputs))  # hooks write to them
    return found[0] if isinstance(found, tuple) else found.to_tuple()[0]


def distance(a, b):
    return ((a.double() - b.double()).abs().sum() / b.double().abs().sum()).item()


def swapped(model):
    return sp.quantize_linears(model, min_features=0)


def live(name, seed, monkeypatch):
    """Largest distance over a life between a swapped model and one whose results never wait."""
    model, inputs = MODELS[name]() if name in MODELS else LANGUAGE[name]()
    model.eval().requires_grad_(False)
    names = [n for n, _ in model.named_modules() if n.count(".") >= 2]
    stock, plain, fast = (Life(copy.deepcopy(model)) for _ in range(3))
    largest, kept = 0.0, []
    closed = enclosure.Enclosure.is_closed
    with torch.no_grad(), swapped(plain.model) as of_plain, swapped(fast.model) as of_fast:
        for action, at in random_life(seed, names):
            try:
                for life in (stock, plain, fast):
                    ACTIONS[action](life, at)
            except (AttributeError, RuntimeError, TypeError):
                return largest  # a module that is gone, or one that is no module of this kind: no user does so
            if action in ("wrap", "unwrap"):
                of_plain.refresh(), of_fast.refresh()
            output(stock.model, inputs)  # where this raises, so may the others
            with monkeypatch.context() as patch:
                patch.setattr(enclosure.Enclosure, "is_closed", lambda *_, **__: False)
                expected = output(plain.model, inputs)
            assert enclosure.Enclosure.is_closed is closed
            got = output(fast.model, inputs)
            assert type(got) is torch.Tensor and all(type(x) is torch.Tensor for x in fast.kept)
            largest = max(largest, distance(got, expected))
            for mine, before in kept:
                assert torch.equal(mine, before), "what a hook kept has changed"
            kept += [(x, x.clone()) for x in fast.kept[len(kept) :]]
    return largest


def failures(seeds, monkeypatch, name):
    found = {seed: live(name, seed, monkeypatch) for seed in seeds}
    return {seed: error for seed, error in found.items() if error > CLOSE}


@pytest.mark.parametrize("name", ["flux", "llama"])
def test_lives(name, monkeypatch):
    assert not failures(range(12), monkeypatch, name)
