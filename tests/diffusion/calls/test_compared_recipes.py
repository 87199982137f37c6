"""The recipes to compare with in a pipeline: what runs, and what is refused before anything does."""

from __future__ import annotations

import pytest

import sage_processors as sp
from sage_kernels import RECIPES
from tests.diffusion.calls.test_processors import sqnr_db
from tests.support.tiny_pipelines import ddpm_pipe


PLAIN = [recipe.name for recipe in RECIPES.values() if recipe.plain]
COMPARED = [recipe.name for recipe in RECIPES.values() if recipe.study]


@pytest.mark.parametrize("recipe", COMPARED)
def test_a_pipeline_runs_it_and_says_so(recipe):
    pipe, run = ddpm_pipe()
    stock = run()
    scaling = "per_token" if recipe in PLAIN else "timestep"
    with pipe.set_attn_processor(sp.SageAttnProcessor(recipe=recipe, scaling=scaling, min_tokens=1)) as handle:
        ours = run()
        rows = [row for row in handle.report().rows if row["status"] == "active"]
    assert rows and 10 < sqnr_db(ours, stock) < 70
    for row in rows:
        assert row["calls"] == 4 and not row["fallbacks"], row
        assert (row["recipe"], row["scaling"]) == (recipe, scaling)
