"""What every recipe but the default one owes: shapes, masks, values at the edge, and what it refuses.

What is one recipe's own is in test_recipe_*.py; the default one has the contract tests to itself.
"""

from __future__ import annotations

import pytest
import torch

import sage_kernels
from sage_kernels import RECIPES, new_head_state, sage_attention_varlen
from sage_kernels.testing import exact_attention, relative_l2
from tests.kernels.attention.attention_cases import FP8, MASKS, SHAPES, exact_under, normal, running
from tests.kernels.attention.test_softmax_reference import LOGITS, climbing


# the interpreter is numpy: it warns where a GPU returns inf
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")

NAN, INF = float("nan"), float("inf")
INT8, FP8_SCORES = "qk_int8_pv_int8", "qk_fp8_pv_fp8"
HALF, FULLS = "int_flash_half", ("int_flash_full", "int_flash_full_fp32_sum")
# Relative L2 on N(0, 1) under any mask
BARS = {FP8: 0.06, INT8: 0.03, FP8_SCORES: 0.07, HALF: 0.015} | dict.fromkeys(FULLS, 0.06)
# Masks that are as slow as others are quick; test_contract_random has bands and windows of the studied recipes
SLOW = {FP8: ("top_left", "window"), FP8_SCORES: ("top_left", "window", "rows"), INT8: ("top_left",)}


@pytest.fixture
def own(recipe, attend, request):
    """`attend`, running the recipe."""
    if recipe == FP8_SCORES:
        request.getfixturevalue("true_fp8")
    return running(attend, recipe)


def of_recipes(*recipes):
    return pytest.mark.parametrize("recipe", recipes)


def ways(own, recipe, q, k, v, **masking):
    """Options of each way to scale that a recipe has."""
    if RECIPES[recipe].plain:
        return [{"smooth_k": False}]
    return [{}, {"scaling": "per_block"}, {"state": own.planned(q, k, v, **masking)}]


@of_recipes(*BARS)
@pytest.mark.parametrize("shape", SHAPES)
def test_every_shape_matches_the_reference(shape, recipe, own):
    q, k, v = normal(*shape)
    for options in ways(own, recipe, q, k, v):
        own.check(q, k, v, **options)
    if recipe == FP8_SCORES:
        own.check(q, k, v, scaling="per_head", smooth_k=False)


@pytest.mark.parametrize(
    ("recipe", "name"),
    [
        pytest.param(recipe, name, marks=[pytest.mark.slow("as causal")] * (name in SLOW.get(recipe, ())))
        for recipe in BARS
        for name in MASKS
    ],
)
def test_every_mask_matches_the_reference(name, recipe, own):
    q, k, v = normal(2, 70, 150, 2, 1, 64)
    v = v + 2 * (recipe == INT8)  # a sink has no value: the centre is not added for its weight
    options = ways(own, recipe, q, k, v, **MASKS[name])
    first, last = options[0], options[-1]
    out, _ = own.check(q, k, v, **first, **MASKS[name])
    if "padding" in name:
        hidden = [x.clone() for x in (k, v)]
        for x in hidden:
            x[1, 97:] = NAN
        assert torch.equal(own(q, *hidden, recipe=recipe, **first, **MASKS[name])[0], out)
    if last is not first:
        out, _ = own.check(q, k, v, **last, **MASKS[name])
    assert relative_l2(out, exact_under(MASKS[name], q, k, v)) <= BARS[recipe]


@of_recipes(FP8, INT8, *FULLS)
@pytest.mark.parametrize("value", [NAN, -INF])
def test_a_bad_element_of_v_poisons_its_channel_and_nothing_else(value, recipe, own):
    q, k, v = normal(1, 70, 140, 2, 2, 64)
    clean, _ = own(q, k, v, recipe=recipe)
    bad = torch.zeros(1, 70, 2, 64, dtype=torch.bool)
    bad[:, :, 1, 7] = True
    planned = [] if RECIPES[recipe].plain else [new_head_state(2, 64, own.device), own.planned(q, k, v)]
    v[0, 33, 1, 7] = value
    for options in ({}, *({"state": state} for state in planned)):
        out, _ = own(q, k, v, recipe=recipe, **options)
        assert torch.equal(~torch.isfinite(out), bad), options
        assert options or torch.equal(out[~bad], clean[~bad])


@of_recipes(INT8, FP8_SCORES, HALF, *FULLS)
@pytest.mark.parametrize("value", [NAN, INF])
def test_a_bad_element_of_k_or_q_poisons_what_it_does_by_default(value, recipe, own):
    """Codes hold no NaN: it must not become a plausible number on its way."""
    smooth_k = {"smooth_k": False} if RECIPES[recipe].plain else {}
    for which in (0, 1):
        inputs = list(normal(1, 70, 140, 2, 2, 64))
        inputs[which][0, 33, 1, 7] = value
        out, _ = own(*inputs, recipe=recipe)
        expected, _ = own(*inputs, **smooth_k)
        assert torch.equal(out.isnan(), expected.isnan()) and out.isnan().any(), which


@of_recipes(FP8, INT8, *FULLS)
def test_values_of_every_size_are_right(recipe, own):
    """fp16's limit, one value for all keys (a mean that rounding must not push to inf), fp32's limits, zeros."""
    q, k, v = normal(1, 64, 300, 1, 1, 64)
    smooth_k = {"smooth_k": False} if RECIPES[recipe].plain else {}
    out, _ = own.check(q, k, v.sign() * 6e4, **smooth_k)
    assert torch.isfinite(out).all()
    out, _ = own(q, k, torch.full_like(v, 65504.0), recipe=recipe)
    rounding = {FP8: 2.0**-4, INT8: 0.0}.get(recipe, 0.02)  # nothing is left of it but INT8's centre
    assert torch.isfinite(out).all() and ((out.double() / 65504 - 1).abs() <= rounding).all()
    assert (own(q, k, torch.zeros_like(v), recipe=recipe)[0] == 0).all()
    if torch.float32 in own.dtypes:
        for size in (1e5, 1e38, 1e-30):
            big = [q.float(), k.float(), v.float().clamp(-1, 1) * size]
            out, _ = own(*big, recipe=recipe)
            assert relative_l2(out, exact_attention(*big)[0]) <= BARS[recipe], size


@of_recipes(FP8_SCORES, *FULLS)
@pytest.mark.parametrize("name", ["late_sink", "falls", "grows_beyond_every_format", "large_and_mixed"])
def test_scores_far_from_the_first_ones_stay_finite_and_right(name, recipe, own):
    q, k, v = climbing(LOGITS[name])
    if recipe == FP8_SCORES:
        out, _ = own(q, k, v, recipe=recipe)
        again, _ = sage_kernels.sage_attention(q, k, v, recipe=recipe, return_lse=True)
        assert torch.isfinite(out).all() and relative_l2(out, again) <= BARS[recipe]
        return
    out, _ = own.check(q, k, v, exponent=2.0**13, smooth_k=False)
    exact, _ = exact_attention(q, k, v)
    scores_alone = relative_l2(own(q, k, v, recipe=HALF)[0], exact)
    assert torch.isfinite(out).all() and relative_l2(out, exact) <= 1.2 * scores_alone + BARS[recipe]


@of_recipes(INT8, FP8_SCORES, HALF, *FULLS)
def test_packed_sequences_are_refused_with_what_to_do_instead(recipe):
    q, k, v = (x[0] for x in normal(1, 64, 64, 1, 1, 64))
    ends = torch.tensor([0, 30, 64], dtype=torch.int32)
    with pytest.raises(NotImplementedError, match=f"recipe: got '{recipe}' with packed sequences.*each sequence"):
        sage_attention_varlen(q, k, v, ends, ends, recipe=recipe)
