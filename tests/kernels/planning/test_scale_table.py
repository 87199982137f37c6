"""What of a step enters the table of scales: one odd token, step or prompt decides nothing."""

from __future__ import annotations

import pytest
import torch

import sage_kernels
from sage_kernels.facts.recipe import V_CODE
from sage_kernels.facts.state import (
    PLAN_K_WEIGHT,
    PLAN_Q_WEIGHT,
    PLAN_V_SCALE,
    STAT_K_MAX,
    STAT_K_MIN,
    STAT_Q_AMAX,
    STAT_V_AMAX,
)
from sage_kernels.planning.rules import Timestep, TimestepAdaptive
from sage_kernels.planning.state import ScaleState, Site
from sage_kernels.planning.table import GROWTH_LIMIT, MOVE_LIMIT, agreeing, full_reach, moved, record, widest
from sage_kernels.testing import make_qkv
from sage_processors.evaluation.metrics import sqnr_db


LEVELS = [1.0, 0.9, 0.75, 0.6, 0.4, 0.2]
SHAPE = (1, 61, 97, 2, 2, 24)
FAMILIES = ("normal", "biased_keys")


def new_state(rule=None):
    return ScaleState([Site("a", 2, 24)], device="cpu", rule=rule)


def inputs(step, family="normal", outlier=None, whom="k"):
    """One step: of one draw, a little larger from step to step; outlier: factor on one token of Q, K or V."""
    q, k, v = (x * (1 + 0.05 * step) for x in make_qkv(family, *SHAPE))
    if outlier is not None:
        {"q": q, "k": k, "v": v}[whom][:, 7] *= outlier
    return q, k, v


def run(state, family="normal", odd=None, *, outlier=1000.0, whom="k", recipe="qk_int8_pv_bf16"):
    """A run in which the step of index `odd` has the outlier -> the error of every step, dB."""
    state.begin_run(LEVELS[0])
    found = []
    for step, u in enumerate(LEVELS):
        q, k, v = inputs(step, family, outlier if step == odd else None, whom)
        out = sage_kernels.sage_attention(q, k, v, state=state.head_state(0), recipe=recipe)
        exact = torch.nn.functional.scaled_dot_product_attention(*(x.double().transpose(1, 2) for x in (q, k, v)))
        if torch.isfinite(out).all():
            found.append(sqnr_db(out.double(), exact.transpose(1, 2)).item())
        state.advance(u, LEVELS[min(step + 1, len(LEVELS) - 1)])
    return found


def half_and_center(stats):
    high, low = stats[..., STAT_K_MAX, :24], stats[..., STAT_K_MIN, :24]
    return (high - low) / 2, (high + low) / 2


def entries(state):
    """{noise bin: statistics} of what the table has."""
    table = state.snapshot()
    return {int(b): table["table"][b] for b in torch.nonzero(table["table_run"].any(1)).flatten()}


def is_within(entry, clean):
    """Whether the ranges are those of a run without the outlier, within MOVE_LIMIT, around nearly the same middle."""
    (half, center), (clean_half, clean_center) = half_and_center(entry), half_and_center(clean)
    near = (half <= clean_half * MOVE_LIMIT * 1.1) & (half >= clean_half / MOVE_LIMIT / 1.1)
    for field in (STAT_Q_AMAX, STAT_V_AMAX):
        got, wanted = entry[:, field, :24], clean[:, field, :24]
        near &= (got <= wanted * MOVE_LIMIT * 1.1) & (got >= wanted / MOVE_LIMIT / 1.1)
    return bool((near & ((center - clean_center).abs() <= clean_half * 1.1)).all())


@pytest.mark.parametrize("whom", ["k", "q", "v"])
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("odd", range(len(LEVELS)))
@pytest.mark.parametrize("runs", [0, 1])
def test_Q20_one_token_of_one_step_does_not_enter_the_table(family, odd, runs, whom):
    """Not in a first run, whose table is empty, and not where a run before left one."""
    recipe = "qk_int8_pv_fp8" if whom == "v" else "qk_int8_pv_bf16"
    spoiled, clean = new_state(), new_state()
    for _ in range(runs):
        run(spoiled, family, recipe=recipe)
    run(spoiled, family, odd, whom=whom, recipe=recipe)
    run(clean, family, recipe=recipe)
    wanted, got = entries(clean), entries(spoiled)
    assert len(wanted) == len(LEVELS)
    # where nothing was known, the steps beside it may be missing: their plans were made from it, or its from theirs
    assert set(got) <= set(wanted) and len(got) >= len(LEVELS) - (0 if runs else 3)
    assert all(is_within(got[b], wanted[b]) for b in got)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("odd", [0, 2, 5])
def test_Q21_the_run_after_starts_as_well_from_the_frozen_table(family, odd):
    spoiled, clean = new_state(), new_state()
    run(spoiled, family, odd)
    run(clean, family)
    found = []
    for state in (spoiled, clean):
        state.freeze()
        found.append(run(state, family))
    assert all(a > b - 1.5 for a, b in zip(*found, strict=True)), found


def test_Q22_a_step_that_outgrows_its_plan_widens_the_entry_of_its_level_by_so_much_only():
    """Steps of one run and one noise level: the widest of them, but none makes it many times wider."""
    state = new_state()
    state.begin_run(1.0)
    for factor in (1.0, 1.0, 1.0, 3.5, 1.0):
        q, k, v = make_qkv("normal", *SHAPE)
        sage_kernels.sage_attention(q, k * factor, v, state=state.head_state(0))
        state.advance(1.0, 1.0)
    (entry,) = entries(state).values()
    wanted = half_and_center(torch.stack([q.abs().amax((0, 1)), k.amax((0, 1)), k.amin((0, 1)), v[0, 0] * 0], 1))[0]
    ratio = half_and_center(entry)[0] / wanted
    assert (ratio <= MOVE_LIMIT + 1e-4).all() and (ratio > 1.5).all()


def test_Q23_a_spoiled_entry_heals():
    """Adaptive runs plan from the entry, and contradict it: each may halve it."""
    state = new_state(TimestepAdaptive())
    run(state)
    clean = entries(state)
    spoiled = state.snapshot()
    spoiled["table"][..., STAT_K_MAX, :24] *= 60.0
    spoiled["table"][..., STAT_K_MIN, :24] *= 60.0
    state.restore(spoiled)
    for _ in range(8):
        run(state)
    assert all(is_within(entry, clean[b]) for b, entry in entries(state).items())


@pytest.mark.parametrize("rule", [Timestep, TimestepAdaptive])
def test_Q24_what_is_not_finite_is_not_kept(rule):
    state, clean = new_state(rule()), new_state(rule())
    run(clean)
    for odd in (0, 3):
        assert len(run(state, odd=odd, outlier=float("inf"))) == len(LEVELS) - 1
        table = state.snapshot()["table"]
        assert torch.isfinite(table).all()
    assert all(is_within(entry, entries(clean)[b]) for b, entry in entries(state).items())


def test_an_entry_moves_by_so_much_and_no_further():
    channels = torch.ones(1, 5, dtype=torch.bool)
    channels[0, 4] = False
    old = torch.tensor([[[2.0, 2, 2, 0, 0], [3, 3, 3, 0, 0], [1, 1, 1, 0, 0], [4, 4, 4, 0, 0]]])
    new = torch.tensor([[[3.0, 50, 0.1, 7, 9], [3.5, 90, 2.1, 5, 9], [1.5, 50, 2.0, -5, -9], [3, 90, 0.1, 6, 9]]])
    result = moved(old, new, channels)
    assert torch.equal(result[..., 0], new[..., 0]) and torch.equal(result[..., 4], new[..., 4])
    assert result[0, :, 1].tolist() == [4, 5, 1, 8]  # twice the range, its middle one range further
    assert result[0, :, 2].tolist() == pytest.approx([1, 2.55, 1.55, 2])  # half of it around the new middle
    assert (result[0, [0, 1, 3], 3] < 1e-5).all()  # a channel of zeros beside others grows from next to nothing


def test_a_first_step_is_noted_until_the_next_one_confirms_it():
    table, marks = torch.zeros(3, 1, 4, 8), torch.zeros(3, 1, dtype=torch.int32)
    stats, channels = torch.ones(1, 4, 8), torch.ones(1, 8, dtype=torch.bool)
    yes, no = torch.ones(1, dtype=torch.bool), torch.zeros(1, dtype=torch.bool)

    def step(bin_, run, **of):
        bins, run = torch.tensor([bin_]), torch.tensor(run, dtype=torch.int32)
        record(table, marks, run, bins, stats, channels, **{"seen": yes, "planned": yes, "agrees": yes} | of)
        return marks[:, 0].tolist()

    assert step(0, 1, planned=no, agrees=no) == [-1, 0, 0]
    assert step(1, 1) == [1, 1, 0]
    assert step(2, 2, planned=no, agrees=no) == [1, 1, -2]
    assert step(0, 2, agrees=no) == [2, 1, 0]  # one of the two was odd: what is known moves, what is not goes
    assert step(2, 3, agrees=no) == [2, 1, 0]
    assert step(1, 3, seen=no) == [2, 1, 0]


@pytest.mark.parametrize("factor, strayed", [(1.1, False), (1.6, True), (3.0, True), (0.5, False), (0.2, True)])
def test_a_head_that_left_its_plan_does_not_trust_the_table(factor, strayed):
    """Beyond GROWTH_LIMIT, and four times below."""
    assert 1.1 < GROWTH_LIMIT < 1.6
    state = new_state()
    run(state)
    state.freeze()
    state.begin_run(1.0)
    q, k, v = inputs(0)
    sage_kernels.sage_attention(q, k * factor, v, state=state.head_state(0))
    assert state.strayed().tolist() == [strayed] * 2
    own, table = state._shared.stats.clone(), entries(state)
    state.advance(1.0, LEVELS[1])
    from_own, from_table = new_state(), new_state()
    for other, stats in ((from_own, own), (from_table, table[int(state._noise_bins.of(LEVELS[1]))])):
        other._plan(other.rule.following(other, other._noise_bins.of(1.0), other._seen())._replace(
            stats=stats, known=torch.ones(2, dtype=torch.bool)
        ))  # fmt: skip
    expected = from_own if strayed else from_table
    assert torch.equal(state.head_state(0).plan_scale, expected.head_state(0).plan_scale)


def of_size(q=1.0, half=1.0, center=0.0, v=1.0):
    """Statistics [1, 4, 8] of keys from center - half to center + half; channel 7 is none."""
    stats = torch.tensor([q, center + half, center - half, v])[None, :, None].repeat(1, 1, 8)
    stats[..., 7] = torch.tensor([900.0, 900.0, -900.0, 900.0])
    return stats


CHANNELS = torch.arange(8)[None] < 7
FITS = {"half": (0.26, 3.9), "q": (0.26, 3.9), "v": (0.26, 3.9)}  # OUTLIER_LIMIT is 4


@pytest.mark.parametrize("factor", [0.1, 1.0, 1000.0])
@pytest.mark.parametrize("name", FITS)
def test_a_step_agrees_with_its_plan_within_the_limit(name, factor):
    """Of K the range, of Q and V the largest; V only where it was planned. The size of them all plays no part."""
    margin = 1.25
    full = full_reach(margin)
    plan = torch.zeros(1, 4, 8)
    plan[:, PLAN_K_WEIGHT], plan[:, PLAN_Q_WEIGHT] = full / factor, 1.0 / factor
    plan[:, PLAN_V_SCALE] = factor / V_CODE
    plan_scale = torch.tensor([1.0 / full])

    def agrees(plan=plan, plan_scale=plan_scale, **sizes):
        stats = of_size(**{n: sizes.get(n, 1.0) * factor for n in FITS}, center=50.0 * factor)
        return bool(agreeing(plan, plan_scale, stats, CHANNELS, margin))

    low, high = FITS[name]
    assert agrees() and agrees(**{name: low}) and agrees(**{name: high})
    assert not agrees(**{name: low - 0.02}) and not agrees(**{name: high + 0.2})
    assert not agrees(plan_scale=torch.zeros(1))
    plan = plan.clone()
    plan[:, PLAN_V_SCALE] = 0.0
    assert agrees(plan, v=1e-3) and agrees(plan, v=1e3)


def test_the_widest_of_two_ranges_covers_both():
    old, new = of_size(q=2, half=1, center=0, v=1), of_size(q=1, half=1, center=1.5, v=3)
    assert widest(old, new)[0, :, 0].tolist() == [2.0, 2.5, -1.0, 3.0]
    assert torch.equal(widest(old, new), widest(new, old))


def test_what_a_step_makes_of_an_entry():
    """Of an earlier run: a step that agrees replaces it, one that does not moves it. Of this run: they are joined."""
    yes, no = torch.ones(1, dtype=torch.bool), torch.zeros(1, dtype=torch.bool)

    def entry(mark, agrees):
        table, marks = of_size()[None].clone(), torch.tensor([[mark]], dtype=torch.int32)
        run = torch.tensor(5, dtype=torch.int32)
        stats = of_size(q=8.0, half=0.125, v=8.0)
        record(table, marks, run, torch.tensor([0]), stats, CHANNELS, seen=yes, planned=yes, agrees=agrees)
        return table[0, 0, :, 0].tolist(), int(marks)

    assert entry(3, yes) == ([8.0, 0.125, -0.125, 8.0], 5)
    assert entry(3, no) == ([2.0, 0.5, -0.5, 2.0], 5)
    assert entry(5, yes) == ([2.0, 1.0, -1.0, 2.0], 5)
    # contradicted by a step of the same run, it stays; what nothing had confirmed is forgotten
    assert entry(5, no) == ([1.0, 1.0, -1.0, 1.0], 5)
    assert entry(-5, no) == ([1.0, 1.0, -1.0, 1.0], 0)
    assert entry(-5, yes) == ([2.0, 1.0, -1.0, 2.0], 5)
