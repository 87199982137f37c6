"""The recipes to compare with in a pipeline: what runs, and what is refused before anything does."""

from __future__ import annotations

import pytest

import sage_processors as sp
from sage_kernels import RECIPES
from sage_processors.calibration.layer_choices import milder_recipe
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


@pytest.mark.parametrize("recipe", PLAIN)
def test_a_plain_recipe_has_no_plans_and_is_refused_with_them(recipe):
    for scaling in ("timestep", "static", "per_block", "per_head"):
        with pytest.raises(ValueError, match=f"scaling: got '{scaling}' with recipe '{recipe}', expected 'per_token'"):
            sp.SageAttnProcessor(recipe=recipe, scaling=scaling)
    assert sp.SageAttnProcessor(recipe=recipe, scaling="dynamic").scaling.of_call == "per_token"
    pipe, run = ddpm_pipe()
    with pytest.raises(ValueError, match="scaling: got 'timestep'.*set recipe and scaling together"):
        sp.apply(pipe, sp.SageAttnProcessor(min_tokens=1, layers={"*mid_block*": {"recipe": recipe}}))
    own = {"recipe": recipe, "scaling": "per_token"}
    config = sp.SageAttnProcessor(layers={"*mid_block*": own}, min_tokens=1)
    with sp.apply(pipe, config) as handle:
        run()
        rows = [row for row in handle.report().rows if row["status"] == "active"]
    recipes = {(row["recipe"], row["scaling"]) for row in rows}
    assert recipes == {(recipe, "per_token"), ("qk_int8_pv_bf16", "timestep")}


def test_calibration_knows_a_milder_recipe_of_each():
    milder = {name: milder_recipe(name) for name in RECIPES}
    assert {milder[name] for name in PLAIN} == {"int_flash_half"}
    assert milder["qk_fp8_pv_fp8"] == milder["qk_int8_pv_fp8"] == milder["qk_int8_pv_bf16"] == "qk_int8_pv_bf16"
