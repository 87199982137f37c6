"""Noise levels from the `timestep` that a model is called with, and where a run begins."""

from __future__ import annotations

import inspect

import pytest
import torch

import sage_processors as sp
from sage_processors.diffusion.steps.noise_level import TimestepReader
from tests.diffusion.steps.test_timestep import NoHostRead
from tests.support.tiny_models import MODELS


@pytest.mark.parametrize(
    "values, expected",
    [
        ([999.0, 500.0, 1.0], [0.999, 0.5, 0.001]), ([1.0, 0.5, 0.0], [1.0, 0.5, 0.0]),
        ([1000.0, 1500.0, -20.0, 1e30], [1.0, 1.0, 0.02, 1.0]),
    ],
)  # fmt: skip
def test_Q04_timestep_reader_tells_thousandths_from_fractions(values, expected):
    model, _ = MODELS["flux"]()
    reader = TimestepReader(type(model).forward, "cpu")
    read = []
    with NoHostRead():
        for value in values:
            previous, level = reader.read(torch.tensor([value]))
            read.append((previous.clone(), level.clone()))
    assert [float(level) for _, level in read] == pytest.approx(expected)
    assert [float(previous) for previous, _ in read] == pytest.approx([1.0, *expected[:-1]])


@pytest.mark.parametrize("down", [True, False])
def test_timestep_reader_tells_where_runs_begin(down):
    """Where the timesteps turn back, or are those of the first step again; whichever way they go."""
    model, _ = MODELS["flux"]()
    reader = TimestepReader(type(model).forward, "cpu")

    def begins(*values):
        found = []
        for value in values:
            reader.read(torch.tensor([value if down else 1.0 - value]))
            found.append(int(reader.begins))
        return found

    assert begins(1.0, 0.75, 0.75, 0.5, 0.25) == [1, 0, 0, 0, 0]
    assert begins(1.0, 0.5) == [1, 0]
    assert begins(1.0, 1.0, 0.5, 0.75, 0.875, 0.5) == [1, 1, 0, 1, 0, 1]
    reader.begin_run()
    assert begins(0.25, 0.125) == [1, 0]


def test_a_reader_that_is_held_numbers_timesteps_as_before():
    model, _ = MODELS["flux"]()
    reader = TimestepReader(type(model).forward, "cpu")
    given = [(0.5, 0), (1000.0, 1), (500.0, 0)]
    read = [float(reader.read(torch.tensor([t]), held=torch.tensor(held))[1]) for t, held in given]
    assert read == [0.5, 1.0, 0.5]


def test_a_reader_keeps_no_graph():
    model, _ = MODELS["flux"]()
    reader = TimestepReader(type(model).forward, "cpu")
    with torch.enable_grad():
        levels = reader.read(torch.tensor([0.5], requires_grad=True))
    assert not any(x.requires_grad for x in (*levels, reader.begins, reader.snapshot()))


def test_a_model_without_a_timestep_has_none():
    reader = TimestepReader(lambda self, hidden_states, mask=None: hidden_states, "cpu")
    assert reader.timestep_of((1.0, 2.0), {}) is None and reader.timestep_of((), {"timestep": 1.0}) is None


@pytest.mark.parametrize("name", ["flux", "unet_sd15", "z_image", "hidream", "prior"])
def test_timestep_reader_finds_the_argument(name):
    model, inputs = MODELS[name]()
    reader = TimestepReader(type(model).forward, "cpu")
    wanted = next(inputs[key] for key in ("timestep", "timesteps", "t") if key in inputs)
    assert reader.timestep_of((), inputs) is wanted
    order = list(inspect.signature(model.forward).parameters)
    assert reader.timestep_of([inputs.get(key) for key in order], {}) is wanted
    before = order.index(next(key for key in ("timestep", "timesteps", "t") if key in inputs))
    assert reader.timestep_of([inputs.get(key) for key in order[:before]], inputs) is wanted
    assert reader.timestep_of((), {}) is None
    reader.read(wanted)


def test_P32_a_reader_forgets_timesteps_that_are_no_numbers():
    model, inputs = MODELS["flux"]()
    reader = TimestepReader(type(model).forward, "cpu")
    read = [float(reader.read(torch.tensor([t]))[1]) for t in (1.0, 0.5, torch.nan, -torch.inf, 0.25)]
    assert read == [1.0, 0.5, 1.0, 1.0, 0.25]
    with torch.no_grad(), sp.apply(model, sp.SageAttnProcessor(min_tokens=1)) as handle:
        for t in (1.0, torch.nan, 0.5):
            assert model(**inputs | {"timestep": torch.tensor([t])}).sample.isnan().any() == (t != t)
        assert handle.report().calls == 3 * len(handle.report().rows)
