"""The Hopper kernel itself, whatever the tile table chooses: every recipe, scaling and softmax reference it knows."""

from __future__ import annotations

import os
import subprocess
import sys
import time

import pytest
import torch

from sage_kernels import RECIPES, sage_attention
from sage_kernels.facts.recipe import INT8_RECIPE
from sage_kernels.facts.state import COUNT_REDONE, COUNT_TRIED
from sage_kernels.planning.state import ScaleState, Site
from sage_kernels.testing import FP32_ROUNDING
from tests.kernels.attention.attention_cases import FP8, key_padding, normal
from tests.kernels.hopper.conftest import TILES


pytestmark = pytest.mark.gpu

BF16 = "qk_int8_pv_bf16"
ITS_RECIPES = [name for name, recipe in RECIPES.items() if recipe.hopper and not recipe.plain]
# Of a score, by the format of Q and K: INT8 is summed exactly and rounded to fp32; Hopper's FP8 matrix unit cuts off
# what is 13 bits below the largest product. In units of fp32's rounding
SUM_ROUNDING = {"int8": 1.0, "fp8_e4m3": 2.0**-13 / FP32_ROUNDING}
# (queries, keys): within one tile, ragged ones, more tiles than the ring has buffers and than are summed in FP8
LENGTHS = [(1, 1), (64, 128), (113, 203), (300, 1025), (129, 2049)]
MASKS = {
    "full": {},
    "top_left": {"causal": "top_left"},
    "bottom_right": {"causal": "bottom_right"},
    "window": {"causal": "bottom_right", "window": 100},
}


def rounded_like(exponent: float, recipe: str) -> float:
    """The size of fp32 scores that are off by as much as scores of size `exponent` are with this recipe."""
    return exponent * SUM_ROUNDING[RECIPES[recipe].qk]


def skip_what_is_the_same(hopper, recipe):
    """FP8 P knows no reference of the first tile, INT8 P no other: both tiles of two consumers run the same."""
    if recipe == FP8 and hopper.tile == TILES["two_first"][1]:
        pytest.skip("as two_running")
    if recipe == INT8_RECIPE and hopper.tile == TILES["two_running"][1]:
        pytest.skip("as two_first")


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("lengths", LENGTHS)
@pytest.mark.parametrize("scaling", ["per_token", "per_block", "per_head"])
@pytest.mark.parametrize("recipe", ITS_RECIPES)
def test_matches_the_reference(recipe, scaling, lengths, mask, hopper):
    skip_what_is_the_same(hopper, recipe)
    q, k, v = normal(2, *lengths, 4, 2, hopper.head_dim, dtype=torch.bfloat16)
    hopper.check(q, k, v, recipe=recipe, scaling=scaling, **MASKS[mask])


@pytest.mark.parametrize("recipe", ITS_RECIPES)
def test_hidden_keys_are_hidden_and_may_be_nan(recipe, hopper):
    skip_what_is_the_same(hopper, recipe)
    q, k, v = normal(3, 200, 700, 2, 2, hopper.head_dim, dtype=torch.float16)
    seen = key_padding([700, 300, 129], 700)
    k[1, 300:], v[1, 300:] = torch.nan, torch.nan
    for scaling in ("per_token", "per_block"):
        hopper.check(q, k, v, recipe=recipe, scaling=scaling, attn_mask=seen)


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("recipe", ITS_RECIPES)
def test_planned_steps_match_the_reference(recipe, mask, hopper, monkeypatch):
    from sage_kernels._triton.attention import launch as launch_attention

    skip_what_is_the_same(hopper, recipe)
    monkeypatch.setattr(launch_attention, "choose_tail", lambda *_: None)  # cut ones: test_split_tails.py
    q, k, v = normal(1, 300, 1025, 4, 2, hopper.head_dim, dtype=torch.bfloat16)
    scales = ScaleState([Site("a", 2, hopper.head_dim)], device="cuda")
    state = scales.head_state(0)
    rows = torch.full((1, 4, 300), -torch.inf, device="cuda")
    for step in range(4):
        if step == 2:  # nothing like the step before: the kept maxima do not fit
            q = 30 * q
        if recipe == FP8:
            state = state.keeping(rows, known=step > 0)
        hopper.check(q, k, v, recipe=recipe, state=state, exponent=rounded_like(2000.0, recipe), **MASKS[mask])
        counts = state.counts.sum(0)
        tried, redone = int(counts[COUNT_TRIED]), int(counts[COUNT_REDONE])
        # the 64 rows of each of 5 warpgroups once (a sixth has none) but for unknown ones (the first step); those that
        # outgrew their maxima again
        assert tried in (0, 4 * 5), step
        # sums of codes of P and V end 2^22 sooner than those of P and V themselves: from step 2 on some may
        assert (redone > 0) == (recipe == FP8 and step == 2) or (recipe == INT8_RECIPE and step >= 2), step
        assert recipe != FP8 or (tried == 0) == (step == 0)
        scales.advance(1.0 - step / 4, 0.9 - step / 4)


def test_rows_that_see_nothing_or_a_nan_do_not_cost_a_second_try(hopper):
    """The largest P of a row tells whether the reference of the step before fits: 0 where nothing was seen, or NaN."""
    skip_what_is_the_same(hopper, FP8)
    q, k, v = (x.cuda() for x in normal(3, 200, 700, 2, 2, hopper.head_dim, dtype=torch.bfloat16))
    q[0, 70, 1] = torch.nan
    seen = key_padding([700, 0, 129], 700).cuda()
    scales = ScaleState([Site("a", 2, hopper.head_dim)], device="cuda")
    state, rows = scales.head_state(0), torch.full((3, 2, 200), -torch.inf, device="cuda")
    for step in range(3):
        state = state.keeping(rows, known=step > 0)
        out = sage_attention(q, k, v, recipe=FP8, state=state, attn_mask=seen)
        counts = state.counts.sum(0)
        # 4 warpgroups for each of 6 heads; of the first step nothing is known
        assert int(counts[COUNT_TRIED]) == (4 * 6 if step else 0) and int(counts[COUNT_REDONE]) == 0, step
        assert bool(out[0, 70, 1].isnan().all()) and int(out.isnan().sum()) == hopper.head_dim
        assert bool((out[1] == 0).all())
        exact = torch.nn.functional.scaled_dot_product_attention(
            *(x.transpose(1, 2).double() for x in (q, k, v)), attn_mask=seen
        ).transpose(1, 2)
        error = (out[2] - exact[2]).norm() / exact[2].norm()
        assert float(error) < 0.05, step
        scales.advance(1.0 - step / 4, 0.9 - step / 4)


@pytest.mark.parametrize("keys", [40, 130, 1025])
@pytest.mark.parametrize("left", [(0,), (1,), (0, 1), (-1,), (-1, 0), "all"])
def test_only_warpgroups_whose_rows_left_the_range_do_theirs_again(left, keys, hopper, monkeypatch):
    """Whichever of a program's they are, with fewer key tiles than warpgroups too; other rows keep their bits.
    (Those done again may keep theirs, too: their number is counted.)"""
    from sage_kernels._triton.attention import launch as launch_attention

    monkeypatch.setattr(launch_attention, "choose_tail", lambda *_: None)  # cut ones: test_split_tails.py
    skip_what_is_the_same(hopper, FP8)
    groups, seq = hopper.tile.block_m // 64, 2 * hopper.tile.block_m
    left = range(groups) if left == "all" else sorted({i % groups for i in left})
    q, k, v = normal(2, seq, keys, 4, 2, hopper.head_dim, dtype=torch.bfloat16)
    scales = ScaleState([Site("a", 2, hopper.head_dim)], device="cuda")
    state, rows = scales.head_state(0), torch.empty((2, 4, seq), device="cuda")
    hopper.check(q, k, v, recipe=FP8, state=state.keeping(rows, known=False))
    scales.advance(1.0, 0.9)
    state = scales.head_state(0)
    hopper.check(q, k, v, recipe=FP8, state=state.keeping(rows, known=True))
    right = rows.clone()
    expected, expected_lse = hopper(q, k, v, recipe=FP8, state=state.keeping(rows, known=True))
    for moved in (20.0, -20.0):
        rows.copy_(right)
        state.counts[:, [COUNT_TRIED, COUNT_REDONE]] = 0
        again = torch.zeros_like(rows, dtype=torch.bool)
        for i in left:  # one row of each of these warpgroups, in the second program of a head only
            again[:, :, hopper.tile.block_m + 64 * i : hopper.tile.block_m + 64 * (i + 1)] = True
            rows[:, :, hopper.tile.block_m + 64 * i + 17] += moved
        out, lse = hopper.check(q, k, v, recipe=FP8, state=state.keeping(rows, known=True))
        tried, redone = state.counts[:, [COUNT_TRIED, COUNT_REDONE]].sum(0).tolist()
        assert (tried, redone) == (2 * 4 * 2 * groups, 2 * 4 * len(left)), moved
        again = again.transpose(1, 2).cpu()
        assert torch.equal(out[~again], expected[~again]) and torch.equal(lse[~again], expected_lse[~again])
        torch.testing.assert_close(lse, expected_lse, rtol=0, atol=1e-4)
        torch.testing.assert_close(rows, right, rtol=0, atol=1e-4)


@pytest.mark.parametrize("value", [1.0, -3.0])
@pytest.mark.parametrize("lagged", [False, True])
def test_long_sums_in_fp8_do_not_shrink(lagged, value, hopper):
    """All values alike: the mean is known exactly, and sums that were cut off at every step would fall short of it.

    In fp16: the steps of bf16 outputs near the value are as large as what is looked for.
    """
    skip_what_is_the_same(hopper, FP8)
    q, k, _ = normal(1, 200, 32768, 1, 1, hopper.head_dim, dtype=torch.float16)
    v = torch.full_like(k, value)
    scales = ScaleState([Site("a", 1, hopper.head_dim)], device="cuda")
    state = scales.head_state(0)
    rows = torch.full((1, 1, 200), -torch.inf, device="cuda")
    for step in range(2):
        if lagged:
            state = state.keeping(rows, known=step > 0)
        out = sage_attention(*(x.cuda() for x in (q, k, v)), recipe=FP8, state=state).float()
        scales.advance(1.0, 0.9)
    # P is rounded to 4 bits on both sides of the fraction's line but not in its sum: errors of many keys average out
    assert float((out / value - 1).abs().max()) < 0.01
    assert abs(float((out / value).mean()) - 1) < 0.003


@pytest.mark.parametrize("recipe", ITS_RECIPES)
def test_results_are_bitwise_repeatable(recipe, hopper):
    skip_what_is_the_same(hopper, recipe)
    q, k, v = (x.cuda() for x in normal(4, 500, 3000, 8, 4, hopper.head_dim, dtype=torch.bfloat16))
    for scaling in ("per_token", "per_block"):
        first = sage_attention(q, k, v, recipe=recipe, scaling=scaling)
        assert all(torch.equal(first, sage_attention(q, k, v, recipe=recipe, scaling=scaling)) for _ in range(50))


@pytest.mark.parametrize("recipe", ITS_RECIPES)
def test_calls_behind_each_other_read_their_own_keys(recipe, hopper):
    """The kernel's programs may begin while those of the prologue run: few queries leave room for them, and there are
    many keys. Calls share memory, so one that reads too early finds the keys of the call before."""
    skip_what_is_the_same(hopper, recipe)
    generator = torch.Generator("cuda").manual_seed(0)
    given = [
        [
            torch.randn(1, tokens, 4, hopper.head_dim, device="cuda", dtype=torch.bfloat16, generator=generator)
            for tokens in (192, 50000, 50000)
        ]
        for _ in range(4)
    ]

    def run(x):
        return sage_attention(*x, recipe=recipe, scaling="per_block")

    alone = []
    for x in given:
        alone.append(run(x))
        torch.cuda.synchronize()
    behind = [run(x) for x in given * 5]
    for i, out in enumerate(behind):
        assert torch.equal(out, alone[i % len(given)]), i


MASKED_LAUNCHES = """
import torch
from sage_kernels import sage_attention
torch.manual_seed(0)
for head_dim in (64, 128):
    q, k, v = (torch.randn(2, 8192, 8, head_dim, device="cuda", dtype=torch.bfloat16) for _ in range(3))
    seen = torch.ones(2, 1, 1, 8192, dtype=torch.bool, device="cuda")
    seen[0, ..., -100:] = False
    seen[1, ..., 10::64] = False  # no tile is wholly visible
    exact = torch.nn.functional.scaled_dot_product_attention(
        *(x.transpose(1, 2) for x in (q, k, v)), attn_mask=seen
    ).transpose(1, 2).float()
    for scaling in ("per_token", "per_block"):
        first = sage_attention(q, k, v, attn_mask=seen, scaling=scaling)
        assert float((first - exact).norm() / exact.norm()) < 0.02, (head_dim, scaling)
        outs = [sage_attention(q, k, v, attn_mask=seen, scaling=scaling) for _ in range(50)]
        assert all(torch.equal(out, first) for out in outs), (head_dim, scaling)
"""


def test_warpgroups_that_silence_hidden_keys_together_do_not_wait_for_ever(hopper_gpu):
    """With three consumers two used to get two turns ahead of the third, which then waited for a phase long over."""
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    # in a process of its own, which can be ended
    subprocess.run([sys.executable, "-c", MASKED_LAUNCHES], check=True, timeout=90, env=environment)


NEIGHBOUR = """
import time, torch
x = torch.randn(4096, 4096, device="cuda", dtype=torch.bfloat16)
end = time.monotonic() + 30
while time.monotonic() < end:
    for _ in range(20):
        y = x @ x
    torch.cuda.synchronize()
"""


def test_other_processes_on_the_gpu_change_nothing(hopper):
    """The GPU takes turns with other processes in the middle of a launch: what a kernel left to chance shows then.

    Some of thousands of launches differed while the state of a barrier could come back over what was stored there.
    """
    q, k, v = (x.cuda() for x in normal(8, 1100, 1100, 4, 4, hopper.head_dim, dtype=torch.bfloat16))
    scales = ScaleState([Site("a", 4, hopper.head_dim)], device="cuda")
    state = scales.head_state(0)
    sage_attention(q, k, v, state=state)
    scales.advance(1.0, 0.9)
    first = sage_attention(q, k, v, state=state)
    neighbours = [subprocess.Popen([sys.executable, "-c", NEIGHBOUR]) for _ in range(2)]
    try:
        end = time.monotonic() + 12  # some of it goes by before the neighbours are there
        launches = different = 0
        while time.monotonic() < end:
            outs = [sage_attention(q, k, v, state=state) for _ in range(50)]  # back to back
            launches += len(outs)
            different += sum(not torch.equal(out, first) for out in outs)
    finally:
        for neighbour in neighbours:
            neighbour.kill()
            neighbour.wait()
    assert launches > 500 and different == 0, (different, launches)
