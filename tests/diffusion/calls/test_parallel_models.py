"""Swapped models under diffusers' context parallelism: two processes, each with half of the tokens."""

from __future__ import annotations

import pytest

from tests.diffusion.calls.parallel_models import CASES, STEPS
from tests.support.tiny_models import OLDEST
from tests.support.two_processes import two_processes


if OLDEST:
    pytest.skip("0.36 has no hooks for it on models like these", allow_module_level=True)

pytestmark = pytest.mark.slow("two processes draw all of them")

# Two runs in INT8 differ as each does from exact attention: linear layers of half of the tokens round in another
# order, and codes follow. Two errors of that size, which may add up.
AS_ALONE_DB = 6.0


@pytest.fixture(scope="module")
def rows(tmp_path_factory):
    """{(kind, case): one row of each process}."""
    found: dict = {}
    for row in two_processes("diffusion/calls/parallel_models", tmp_path_factory):
        found.setdefault((row["kind"], row["case"]), []).append(row)
    return found


EVERY = [(kind, name) for kind in ("ulysses", "ring") for name in CASES]


@pytest.mark.parametrize(("kind", "name"), EVERY)
def test_P60_two_processes_draw_what_one_draws(rows, kind, name):
    pair = rows[kind, name]
    assert len(pair) == 2 and pair[0]["sum"] == pair[1]["sum"]
    for row in pair:
        assert row["to_alone"] > row["alone_to_exact"] - AS_ALONE_DB and row["repeats"]
        assert row["to_exact"] > row["alone_to_exact"] - AS_ALONE_DB
        assert row["reported_bytes"] == row["sent_bytes"] > 0
        assert "apart" not in row or row["apart"] < row["to_alone"] - 20


@pytest.mark.parametrize("kind", ["ulysses", "ring"])
def test_P60_each_device_plans_the_heads_that_it_computes(rows, kind):
    for row in rows[kind, "planned"]:
        assert "apart" in row and row["planned"] == ([row["rank"]] if kind == "ulysses" else [0, 1])
        parts = 1 if kind == "ulysses" else 2  # a ring's keys come in two parts
        # two runs, whose first steps have no plan
        assert row["calls"] == 2 * STEPS * parts and row["dynamic"] == 2 * parts and row["fallbacks"] == {}
    for row in rows[kind, "per_token"]:
        assert row["dynamic"] == row["calls"] and row["planned"] == []


@pytest.mark.parametrize("kind", ["ulysses", "ring"])
def test_P61_calls_that_stay_exact_are_counted_and_exact_in_parallel_too(rows, kind):
    parts = 1 if kind == "ulysses" else 2
    for row in rows[kind, "windows"]:
        assert row["calls"] == 2 * (STEPS - 1) * parts and set(row["fallbacks"]) == {"window"}
    for row in rows[kind, "kept"]:
        assert row["calls"] == 2 * STEPS * parts and set(row["fallbacks"]) == {"kept"}


def test_P61_training_across_devices_is_exact_and_its_gradients_are_those_of_one_process(rows):
    for row in rows["ulysses", "training"]:
        assert row["error"] < 1e-5 and set(row["fallbacks"]) == {"context_parallel"}


@pytest.mark.parametrize("kind", ["ulysses", "ring"])
def test_P60_compiled_calls_are_the_same(rows, kind):
    for row in rows[kind, "compiled"]:
        assert row["db"] > 100 and row["calls"] == (2 if kind == "ulysses" else 4) and row["fallbacks"] == {}
