"""The recipe qk_int8_pv_fp8: V in e4m3 per channel, P in e4m3, and its softmax reference of the step before."""

from __future__ import annotations

import pytest
import torch

from sage_kernels import new_head_state, sage_attention
from sage_kernels.facts.numerics import quantize_values, round_to_e4m3
from sage_kernels.facts.recipe import LAGGED_EXPONENT, LAGGED_LOWEST
from sage_kernels.facts.state import COUNT_CLIPPED, COUNT_REDONE, COUNT_TRIED, STAT_V_AMAX, HeadState
from sage_kernels.planning.state import ScaleState, Site
from sage_kernels.testing import exact_attention, relative_l2
from tests.kernels.attention.attention_cases import FP8, key_padding, normal, running, runs_fp8, stored_values
from tests.kernels.attention.test_softmax_reference import LOGITS, RAMP, climbing


# the interpreter is numpy: it warns where a GPU returns inf
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")

NAN, INF = float("nan"), float("inf")
BAR = 0.042  # relative L2 of the recipe on N(0, 1)


@pytest.fixture
def fp8(attend):
    """`attend`, running this recipe."""
    return running(attend, FP8)


def call(attend, q, k, v, **options):
    return attend(q, k, v, recipe=FP8, **options)


def lagging(attend, q, k, v) -> tuple[ScaleState, HeadState, HeadState]:
    """A planned state whose calls keep their rows' maxima: of all steps, of the first one, and of all others."""
    scales = ScaleState([Site("a", k.shape[2], q.shape[3])], device=attend.device)
    rows = torch.full((q.shape[0], q.shape[2], q.shape[1]), -INF, device=attend.device)
    state = scales.head_state(0)
    return scales, state.keeping(rows, known=False), state.keeping(rows, known=True)


def rates(state):
    counts = state.counts.sum(0)
    return int(counts[COUNT_TRIED]), int(counts[COUNT_REDONE])


# --- V ---


@pytest.mark.parametrize("stateful", [False, True])
@pytest.mark.parametrize("hidden", [False, True])
@pytest.mark.parametrize("shape", [(1, 330, 2, 64), (2, 17, 1, 40), (1, 129, 1, 160)])
def test_v_is_stored_transposed_and_permuted_with_the_codes_of_the_reference(shape, hidden, stateful, kernel_device):
    """stateful: with a state that has no plan yet, so that each program looks for the largest values itself."""
    if not runs_fp8(kernel_device.type):
        pytest.skip("needs a GPU of compute capability 8.9 or newer")
    heads, head_dim = shape[2:]
    state = new_head_state(heads, head_dim, kernel_device) if stateful else None
    scaling = "planned" if stateful else "per_block"
    options = {"scaling": scaling, "smooth_k": True, "state": state}
    v, seen, codes, scale = stored_values(kernel_device, shape, hidden, "fp8_e4m3", 0.0, **options)
    wanted, wanted_scale, _ = quantize_values(v.transpose(1, 2).float(), seen, seen)
    assert torch.equal(scale[..., :head_dim], wanted_scale[:, :, 0])
    stored = codes.float()
    torch.testing.assert_close(stored[:, :, :head_dim, : shape[1]], wanted.mT, rtol=0, atol=0, equal_nan=True)
    assert (stored[:, :, head_dim:] == 0).all() and (stored[..., shape[1] :] == 0).all()
    assert stored.isnan().sum() == (v if not hidden else v[:, :-9]).isfinite().logical_not().sum()


# --- the whole recipe ---


@pytest.mark.parametrize("seq", [640, 4096])
def test_error_on_normal_inputs_stays_below_the_bar(seq):
    device = "cuda" if torch.cuda.is_available() and runs_fp8("cuda") else "cpu"
    q, k, v = normal(1, 256, seq, 2, 2, 128, dtype=torch.float16)
    q, k, v = (x.to(device) for x in (q, k, v))
    state = new_head_state(2, 128, device)
    rows = torch.full((1, 2, 256), -INF, device=device)
    steps = [state.keeping(rows, known) for known in (False, True)]
    exact, _ = exact_attention(q, k, v)
    for options in ({}, {"scaling": "per_block"}, *({"state": step} for step in steps)):
        out = sage_attention(q, k, v, recipe=FP8, **options)
        assert relative_l2(out, exact) <= BAR and relative_l2(out, exact, (1, 3)).max() <= BAR, options


LONG_SUMS = {
    "full": {},
    "causal": {"causal": "bottom_right"},
    "rows": {"attn_mask": (128, 32768)},
    "softcap": {"softcap": 30.0},
}


@pytest.mark.gpu
@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize("name", LONG_SUMS)
def test_sums_of_many_keys_are_not_cut_off(name, head_dim):
    """All values alike: the mean is known exactly. FP8 matrix units keep some 14 bits of a sum: with all keys in one,
    it came out 39 % short."""
    if not torch.cuda.is_available() or not runs_fp8("cuda"):
        pytest.skip("needs a GPU of compute capability 8.9 or newer")
    generator = torch.Generator("cuda").manual_seed(0)

    def make(tokens):
        return torch.randn(1, tokens, 2, head_dim, device="cuda", dtype=torch.float16, generator=generator)

    q, k = make(128), make(32768)
    options = dict(LONG_SUMS[name])
    if "attn_mask" in options:
        options["attn_mask"] = torch.rand(options["attn_mask"], device="cuda", generator=generator) > 0.2
    for value in (1.0, -3.0):
        error = sage_attention(q, k, torch.full_like(k, value), recipe=FP8, **options).float() / value - 1
        assert float(error.abs().max()) < 0.01 and abs(float(error.mean())) < 0.003, value


# --- planned scales of V ---


def test_planned_values_record_and_clip_as_the_reference(kernel_device):
    if not runs_fp8(kernel_device.type):
        pytest.skip("needs a GPU of compute capability 8.9 or newer")
    from sage_kernels._triton.attention.launch import launch_attention_fwd
    from sage_kernels.reference import ref_attention

    state = ScaleState([Site("a", 2, 40)], device=kernel_device)
    for step, factor in enumerate((1.0, 3.0, 50.0)):
        q, k, v = normal(1, 70, 200, 2, 2, 40, seed=step)
        v *= factor
        v[..., 9] *= (0.0, 0.02, 1.0)[step]  # a channel that wakes up
        before = type(state.head_state(0))(*(x.cpu().clone() for x in state.head_state(0)))
        options = {"scale": 0.1, "scaling": "per_token", "smooth_k": True, "recipe": FP8}
        inputs = [x.to(kernel_device) for x in (q, k, v)]
        launch_attention_fwd(*inputs, state=state.head_state(0), return_lse=False, **options)
        ref_attention(q, k, v, state=before, block_q=64, block_k=64, **options)
        after = state.head_state(0)
        assert torch.equal(after.counts.cpu(), before.counts)
        assert torch.equal(after.stats[:, STAT_V_AMAX, :40].cpu(), before.stats[:, STAT_V_AMAX, :40])
        clipped = int(after.counts[:, COUNT_CLIPPED].sum())
        assert (clipped > 0) == (step == 2)  # 3 times larger fits, 17 times does not, and shows
        state.advance(1 - step / 3, 1 - (step + 1) / 3)
    assert 0 < state.summary()[0]["clipped"] < 1


def test_a_state_that_saw_no_values_runs_dynamic_ones(fp8):
    q, k, v = normal(1, 64, 128, 2, 2, 64)
    state = ScaleState([Site("a", 2, 64)], device=fp8.device)
    fp8(q, k, v, state=state.head_state(0))  # the 16-bit recipe: no statistics of V
    state.advance(1.0, 0.9)
    assert state.summary()[0]["known"]
    out, _ = fp8.check(q, k, 1000 * v, state=state.head_state(0))
    assert relative_l2(out, exact_attention(q, k, 1000 * v)[0]) <= BAR


# --- the softmax reference of the step before ---


def test_the_second_step_takes_the_first_ones_row_maxima(fp8):
    q, k, v = normal(1, 70, 200, 2, 1, 64)
    scales, first, state = lagging(fp8, q, k, v)
    call(fp8, q, k, v, state=first)
    assert rates(state) == (0, 0)  # nothing known: all of it with a running max
    scores = (
        torch.einsum("bqhd,bkhd->bhqk", q.double(), k.double().repeat_interleave(2, 2)) * 64**-0.5 / 0.6931471805599453
    )
    middle = (k.double().amax(1) + k.double().amin(1)) / 2
    kept = torch.einsum("bqhd,bhd->bhq", q.double(), middle.repeat_interleave(2, 1)) * 64**-0.5 / 0.6931471805599453
    torch.testing.assert_close(state.row_max.cpu().double(), scores.amax(-1) - kept, rtol=0, atol=0.2)
    scales.advance(1.0, 0.9)
    for step in range(2):
        near = q + 0.05 * torch.randn(q.shape, generator=torch.Generator().manual_seed(step)).half()
        fp8.check(near, k, v, state=state)
        tried, redone = rates(state)
        assert tried > 0 and redone == 0
        scales.advance(0.9 - step / 10, 0.8 - step / 10)
    assert scales.summary()[0]["redone"] == 0


@pytest.mark.parametrize("head_dim", [40, 64])
def test_a_move_that_all_keys_share_costs_nothing(head_dim, fp8):
    """The plan's center follows a step behind, so all scores of a row move with the keys; what is kept does not."""
    q, k, v = normal(2, 70, 200, 4, 2, head_dim)
    scales, first, state = lagging(fp8, q, k, v)
    move = 4 * torch.randn(2, head_dim, generator=torch.Generator().manual_seed(1)).half()
    moved_scores = torch.einsum("bqhd,hd->bhq", q.float(), move.float().repeat_interleave(2, 0)) * head_dim**-0.5
    assert moved_scores.abs().amax() / 0.6931471805599453 > 12  # far outside of e4m3
    for step, (keys, call_state) in enumerate([(k, first), (k + move, state), (k + move, state), (k, state)]):
        fp8.check(q, keys, v, state=call_state)
        tried, redone = rates(state)
        assert (tried > 0) == (step > 0) and redone == 0, step
        scales.advance(1 - step / 4, 1 - (step + 1) / 4)


def test_kept_maxima_do_not_hang_on_what_is_returned(fp8):
    q, k, v = normal(1, 70, 200, 2, 1, 64)
    kept = []
    for return_lse in (True, False):
        scales, first, state = lagging(fp8, q, k, v)
        for call_state in (first, state):
            fp8(q, k + 1, v, state=call_state, recipe=FP8, return_lse=return_lse)
            kept.append(state.row_max.clone())
            scales.advance(0.5, 0.5)
    torch.testing.assert_close(kept[:2], kept[2:], rtol=0, atol=1e-4)


@pytest.mark.parametrize("name", LOGITS)
def test_scores_of_any_course_match_the_reference_from_step_to_step(name, fp8):
    q, k, v = climbing(LOGITS[name])
    scales, first, state = lagging(fp8, q, k, v)
    exponent = max(64.0, 4 * float(LOGITS[name].abs().max()))
    for step in (first, state):
        fp8.check(q, k, v, state=step, exponent=exponent)
        scales.advance(0.5, 0.5)
    fp8.check(q, k, v, state=state, exponent=exponent)
    assert rates(state)[1] == 0  # same rows, same maxima: nothing to do again


@pytest.mark.parametrize("rise", [4.5, 5.5, -3.5, -5.0, 300.0, -300.0])
def test_rows_that_left_the_range_are_done_again_and_others_are_not(rise, fp8):
    """A key's logit moves the row maxima of head 0 by `rise`; head 1 keeps its own."""
    q, k, v = climbing(0 * RAMP)
    scales, first, state = lagging(fp8, q, k, v)
    for step in (first, state):
        call(fp8, q, k, v, state=step)
        scales.advance(0.5, 0.5)
    state.row_max[:, 0] -= rise
    fp8.check(q, k, v, state=state, exponent=1200.0)
    tried, redone = rates(state)
    assert redone == (0 if -4 <= rise <= 4.75 else tried // 2)


def test_changed_prompts_and_unknown_rows_are_right(fp8):
    def keys(seed):  # whose range has its middle at 0, as the plan's center then is: maxima are kept as they are
        half = normal(1, 70, 70, 2, 2, 64, seed=seed)[1]
        return torch.cat([half, -half], 1)

    q, _, v = normal(1, 70, 140, 2, 2, 64)
    k = keys(0)
    scales, _, state = lagging(fp8, q, k, v)
    for seed, factor in ((1, 1), (2, 40), (3, 0.01)):
        fp8.check(q * factor, keys(seed), v, state=state, exponent=500.0)
        scales.advance(0.5, 0.5)
    results, counts = [], []
    for known in (LAGGED_EXPONENT, NAN, INF, -INF, 1e30):  # the first gives a reference of 0, as the others do
        before = rates(state)
        state.row_max.fill_(known)
        results.append((*call(fp8, q, k, v, state=state), state.row_max.clone()))
        counts.append([now - then for now, then in zip(rates(state), before, strict=True)])
        assert all(torch.equal(x, y) for x, y in zip(results[-1], results[0], strict=True)), known
        assert counts[-1] == counts[0] and counts[0][0] > 0, known
        fp8.check(q, k, v, state=state)
        assert torch.isfinite(state.row_max).all()


@pytest.mark.parametrize("options", [{"causal": "bottom_right"}, {"causal": "bottom_right", "window": 90},
                                     {"attn_mask": key_padding([130], 140)}, {"causal": "top_left"}])  # fmt: skip
def test_bands_and_key_masks_lag_too(options, fp8):
    q, k, v = normal(1, 150, 140, 2, 2, 64)
    scales, first, state = lagging(fp8, q, k, v)
    for step in (first, state, state):
        out, _ = fp8.check(q, k, v, state=step, **options)
        scales.advance(0.5, 0.5)
    call(fp8, q, k, v, state=state, **options)
    assert rates(state)[0] > 0 and rates(state)[1] == 0
    if options == {"causal": "bottom_right"}:
        assert (out[:, :10] == 0).all()  # rows that see nothing


def test_nan_rows_stay_alone_and_are_forgotten(fp8):
    q, k, v = normal(1, 70, 140, 2, 2, 64)
    scales, first, state = lagging(fp8, q, k, v)
    call(fp8, q, k, v, state=first)
    bad = q.clone()
    bad[0, 33, 1] = NAN
    out, _ = call(fp8, bad, k, v, state=state)
    assert torch.equal(out.isnan().all(-1), torch.arange(70)[None, :, None].eq(33) & torch.tensor([False, True]))
    fp8.check(q, k, v, state=state)


def test_maxima_that_are_kept_first_change_nothing_and_lie_in_one_place(fp8):
    q, k, v = normal(1, 70, 140, 2, 2, 64)
    scales, first, state = lagging(fp8, q, k, v)
    plain, lse = call(fp8, q, k, v, state=scales.head_state(0))
    again, lse_again = call(fp8, q, k, v, state=first)
    assert torch.equal(plain, again) and torch.equal(lse, lse_again)
    assert torch.isfinite(state.row_max).all()
    # whatever the state keeps already
    assert [x.numel() for x in state.keeping(state.row_max, known=False)[-2:]] == [0, state.row_max.numel()]
    assert [x.numel() for x in first.keeping(state.row_max, known=True)[-2:]] == [state.row_max.numel(), 0]
    with pytest.raises(ValueError, match="state.row_max_next: got elements beside those of state.row_max"):
        call(fp8, q, k, v, state=state._replace(row_max_next=state.row_max.clone()))


@pytest.mark.parametrize("name", ["row_max", "row_max_next"])
def test_row_maxima_of_another_shape_are_an_error(name, fp8):
    q, k, v = normal(1, 40, 70, 2, 2, 64)
    state = new_head_state(2, 64, fp8.device)._replace(**{name: torch.zeros(1, 2, 41, device=fp8.device)})
    with pytest.raises(ValueError, match=rf"state.{name}: got .* expected contiguous torch.float32 \(1, 2, 40\)"):
        call(fp8, q, k, v, state=state)


@pytest.mark.slow("measures rounding")
def test_rounding_error_by_the_size_of_the_largest_p():
    """Why a lagged reference may lie so far above the row's largest score and no further: LAGGED_LOWEST."""
    generator = torch.Generator().manual_seed(0)
    scores = torch.randn(48, 131072, generator=generator) * 1.4427
    v = torch.randn(131072, 64, generator=generator)
    scale = v.abs().amax(0) / 64
    values = (round_to_e4m3(v / scale) * scale).double()

    def error(exponent):
        p = torch.exp2(scores - scores.amax(-1, keepdim=True) + exponent)
        exact, rounded = p.double() @ v.double(), round_to_e4m3(p).double() @ values
        return float(relative_l2(rounded, exact))

    running = error(8)  # the ratios depend on the draw in their third digit
    assert error(LAGGED_LOWEST + 1) == pytest.approx(1.01 * running, rel=0.01)
    assert error(LAGGED_LOWEST) == pytest.approx(1.065 * running, rel=0.02)
    assert error(LAGGED_LOWEST - 1) == pytest.approx(1.3 * running, rel=0.04)
