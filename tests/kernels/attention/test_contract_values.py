"""Values at the edge: NaN, infinities, zeros, extremes and outliers (cases V of the contract)."""

from __future__ import annotations

import pytest
import torch

from sage_kernels import SCALINGS, new_head_state
from sage_kernels.testing import exact_attention, relative_l1, relative_l2, sqnr_db
from tests.kernels.attention.attention_cases import normal, without_interpreter


# the interpreter is numpy: it warns where a GPU returns inf
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")

NAN, INF = float("nan"), float("inf")


def poison(which, value):
    """N(0, 1) inputs [1, 70, 2, 64] / [1, 140, 2, 64] with one bad element: token 33, head 1, channel 7."""
    inputs = dict(zip("qkv", normal(1, 70, 140, 2, 2, 64), strict=True))
    inputs[which][0, 33, 1, 7] = value
    return tuple(inputs.values())


def runs(attend):
    """Every way to scale, and the state with and without a plan."""
    yield from ({"scaling": scaling} for scaling in SCALINGS)
    yield {"state": new_head_state(2, 64, attend.device)}
    yield {"state": attend.planned(*normal(1, 70, 140, 2, 2, 64, seed=1))}


def not_finite(x):
    return ~torch.isfinite(x)


def sdpa(q, k, v):
    """PyTorch's MATH attention in fp64, which hides no NaN (its CPU flash attention turns a NaN row into zeros)."""
    q, k, v = (x.double().transpose(1, 2) for x in (q, k, v))
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        return torch.nn.functional.scaled_dot_product_attention(q, k, v).transpose(1, 2)


def test_V01_nan_in_q_poisons_its_row_only(attend):
    inputs = poison("q", NAN)
    expected = torch.zeros(1, 70, 2, 64, dtype=torch.bool)
    expected[0, 33, 1] = True
    assert torch.equal(sdpa(*inputs).isnan(), expected)
    for options in runs(attend):
        if options.get("scaling") in (None, "per_token"):
            assert torch.equal(attend(*inputs, **options)[0].isnan(), expected), options
        else:  # a scale shared by several rows may carry the NaN to them: more than MATH poisons, never less
            out = attend(*inputs, **options)[0]
            assert out.isnan()[expected].all() and not out.isnan()[:, :, 0].any(), options


@pytest.mark.parametrize(("which", "head", "channel"), [("k", 1, slice(None)), ("v", 1, 7)])
def test_V02_V03_nan_in_k_poisons_its_head_and_in_v_its_channel(which, head, channel, attend):
    inputs = poison(which, NAN)
    expected = torch.zeros(1, 70, 2, 64, dtype=torch.bool)
    expected[:, :, head, channel] = True
    assert torch.equal(sdpa(*inputs).isnan(), expected)
    for options in runs(attend):
        assert torch.equal(attend(*inputs, **options)[0].isnan(), expected), options


def test_V02_nan_in_a_grouped_key_head_poisons_all_its_query_heads(attend):
    q, k, v = normal(1, 33, 40, 6, 2, 16)
    k[0, 5, 1, 3] = NAN
    assert torch.equal(attend(q, k, v)[0].isnan().any(-1).any(1)[0], torch.arange(6) >= 3)


@pytest.mark.parametrize("causal", ["top_left", "bottom_right"])
def test_V02_nan_in_a_key_that_some_rows_see_poisons_at_least_those(causal, attend):
    """We poison all rows of the head, as SDPA does too: the key's scale is part of every row's tile."""
    q, k, v = normal(1, 70, 90, 1, 1, 32)
    k[0, 40, 0, 3] = NAN
    first = 40 - (20 if causal == "bottom_right" else 0)
    assert attend(q, k, v, causal=causal)[0][:, first:].isnan().all()


@pytest.mark.parametrize("value", [INF, -INF])
@pytest.mark.parametrize("which", ["q", "v"])
def test_V04_inf_in_q_and_v_spreads_as_in_sdpa(which, value, attend):
    inputs = poison(which, value)
    expected = not_finite(sdpa(*inputs))
    assert 0 < expected.sum() < expected.numel()
    for options in runs(attend):
        wrong = not_finite(attend(*inputs, **options)[0])
        if which == "v" or options.get("scaling") in (None, "per_token"):
            assert torch.equal(wrong, expected), options
        else:
            assert wrong[expected].all() and not wrong[:, :, 0].any(), options


@pytest.mark.parametrize("value", [INF, -INF])
def test_V04_inf_in_k_is_never_finite_garbage(value, attend):
    """MATH poisons the rows whose query is positive there; INT8 has no infinity, so we poison all rows of the head."""
    inputs = poison("k", value)
    expected = not_finite(sdpa(*inputs))
    assert 0 < expected[0, :, 1, 0].sum() < 70
    for options in runs(attend):
        wrong = not_finite(attend(*inputs, **options)[0])
        assert wrong[expected].all() and wrong[:, :, 1].all() and not wrong[:, :, 0].any(), options


def test_V05_zero_q_and_k_give_the_mean_of_v(attend):
    zero, v = torch.zeros(1, 70, 2, 64).half(), normal(1, 70, 70, 2, 2, 64)[2]
    mean = v.float().mean(1, keepdim=True).expand_as(v)
    for options in runs(attend):
        out, lse = attend(zero, zero, v, **options)
        assert relative_l2(out, mean) < 2.0**-10  # the output's fp16, and nothing else: P is 1
        assert torch.allclose(lse, torch.full_like(lse, 70.0).log(), atol=1e-5)


def test_V06_zero_v_gives_zero(attend):
    q, k, v = normal(1, 65, 90, 2, 2, 40)
    assert torch.equal(attend(q, k, torch.zeros_like(v))[0], torch.zeros_like(q))


def test_V06_one_hot_v_reveals_p(attend):
    q, k, _ = normal(1, 70, 64, 1, 1, 64)
    v = torch.eye(64).half()[None, :, None]
    for options in runs(attend) if attend.tier == "reference" else ({}, {"causal": "bottom_right"}):
        out, lse = attend(q, k, v, **options)
        if not options or "causal" in options:
            attend.check(q, k, v, **options)
        # each P is rounded to fp16 (2^-11 of it), then each output (2^-11, or 2^-25 where it is denormal)
        rows = lse[0, :, 0] > -torch.inf
        assert (out.double().sum(-1)[0, rows, 0] - 1).abs().max() < 2.0**-10 + 64 * 2.0**-25, options
        # log P = score - LSE, up to the INT8 of both scores and P's own rounding
        scores = (q[0, :, 0].double() @ k[0, :, 0].double().T / 8)[rows]
        log_p = out[0, rows, 0].double().log()
        near = (log_p > -6) & torch.isfinite(log_p)
        assert ((scores - lse[0, rows].double()) - log_p)[near].abs().max() < 0.1, options


def test_V07_v_at_the_limit_of_fp16(attend):
    seq = 300 if attend.tier == "interpreter" else 4096  # enough to overflow an fp16 sum many times over
    q, k, v = normal(1, 64, seq, 1, 1, 64)
    v = v.sign() * 6e4
    v[..., 0] = 6e4
    for options in ({}, {"causal": "bottom_right"}):
        out, _ = attend.check(q, k, v, **options)
        assert torch.isfinite(out).all()
        assert ((out[..., 0].double() - 6e4).abs() <= 6e4 * 2.0**-10).all()


@without_interpreter
@pytest.mark.parametrize("smooth_k", [True, False])
@pytest.mark.parametrize("seq", [1, 70])
def test_V08_large_bf16_stays_finite(seq, smooth_k, attend):
    """PyTorch's own test_flash_attention_large_bf16_nan_values, whose scores are 1.4e11."""
    x = torch.full((1, seq, 1, 64), 133120.0, dtype=torch.bfloat16)
    for options in ({}, {"causal": True}, {"state": new_head_state(1, 64, attend.device)}):
        out, lse = attend(x, x, x, smooth_k=smooth_k, **options)
        assert torch.isfinite(lse).all() and torch.equal(out, x), options


def test_V09_scores_beyond_fp16(attend):
    """Rows of ±40 have products of 102 400; each query has one key of its own, and its codes are exact."""
    signs = torch.randn(1, 100, 1, 64, generator=torch.Generator().manual_seed(0)).sign()
    k = (40 * signs).half()
    q = k[:, :70].clone()
    assert (q[0, :, 0].float() @ k[0, :, 0].float().T).max() > 65504
    v = normal(1, 1, 100, 1, 1, 64)[2]
    for scaling in SCALINGS:
        assert torch.equal(attend(q, k, v, scaling=scaling, smooth_k=False)[0], v[:, :70]), scaling
    assert relative_l2(attend(q, k, v)[0], v[:, :70]) < 0.01


def test_V10_tiny_inputs_give_the_mean_of_v(attend):
    v = normal(1, 1, 70, 1, 1, 32)[2]
    mean = v.float().mean(1, keepdim=True).expand(-1, 70, -1, -1)
    tiny = {torch.float16: (6e-8, 3e-5), torch.bfloat16: (1e-30, 1e-38), torch.float32: (1e-30, 1e-38, 1e-45)}
    for dtype in attend.dtypes:
        for size in tiny[dtype]:
            x = torch.full((1, 70, 1, 32), size, dtype=dtype)
            x[:, ::2] *= -1
            assert x.abs().max() > 0
            for scaling in SCALINGS:
                out, _ = attend(x, x, v.to(dtype), scaling=scaling)
                # V in the type of P·V, the result in the output's: at most 8 bits each
                assert relative_l2(out, mean) < (2.0**-10 if dtype == torch.float16 else 2.0**-7), (dtype, size)


def test_V11_an_offset_shared_by_all_keys_costs_nothing(attend):
    """Smoothing is exact: 1 000 added to every key leaves the noise of the keys without it."""
    q, k, v = normal(1, 64, 256, 2, 2, 64)
    biased = k + 1000
    clean = (biased.float() - 1000).half()  # what fp16 kept of the keys beside the offset
    q -= q.mean(-1, keepdim=True)  # else q·offset rounds fp64's own scores apart from those that smoothing saw
    exact, _ = exact_attention(q, clean, v)
    plain = relative_l2(attend(q, clean, v)[0], exact)
    assert relative_l2(attend(q, biased, v)[0], exact) < 1.5 * plain
    assert relative_l2(attend(q, biased, v, smooth_k=False)[0], exact) > 5 * plain  # else the test could not fail
    attend.check(q, biased, v)


@pytest.mark.parametrize("factor", [20, 50, 100])
def test_V12_an_outlier_channel_is_balanced_away(factor, attend):
    """A channel of K that is large where Q is small, so that the scores are ordinary ones: 36 dB in every head, which
    is what planned scales give on inputs without outliers."""
    q, k, v = normal(1, 128, 256, 2, 2, 64)
    q[..., 3] /= factor
    k[..., 3] *= factor
    exact, _ = exact_attention(q, k, v)
    planned, _ = attend(q, k, v, state=attend.planned(q, k, v))
    dynamic, _ = attend(q, k, v)
    for head in range(2):
        assert sqnr_db(planned[:, :, head], exact[:, :, head]) >= 36
        assert sqnr_db(dynamic[:, :, head], exact[:, :, head]) >= 36


def test_V12_an_outlier_channel_that_rules_the_scores(attend):
    """×20 in K alone: the outlier is in the scores, so its own rounding is. Per head at least 27 dB with a state."""
    q, k, v = normal(1, 128, 256, 2, 2, 64)
    k[..., 3] *= 20
    exact, _ = exact_attention(q, k, v)
    for state in (new_head_state(2, 64, attend.device), attend.planned(q, k, v)):
        out, _ = attend(q, k, v, state=state)
        assert min(sqnr_db(out[:, :, h], exact[:, :, h]) for h in range(2)) >= 27


def test_V13_a_loud_query_row_leaves_its_neighbours_alone(attend):
    q, k, v = normal(1, 70, 140, 2, 2, 64)
    loud = q.clone()
    loud[:, 33] *= 50
    others = torch.arange(70) != 33
    for options in ({"scaling": "per_token"}, {"scaling": "per_token", "causal": "bottom_right"}):
        assert torch.equal(attend(q, k, v, **options)[0][:, others], attend(loud, k, v, **options)[0][:, others])
    plan = [attend.planned(q, k, v) for _ in range(2)]
    quiet, shout = attend(q, k, v, state=plan[0])[0], attend(loud, k, v, state=plan[1])[0]
    assert torch.equal(quiet[:, others], shout[:, others])
    assert not torch.equal(quiet, shout)


def test_V14_one_visible_key_returns_its_value_however_low_its_score(attend):
    """Scores below -1e6, where a finite mask sentinel would win; also those that no fp16 can hold."""
    q, k, v = normal(1, 70, 70, 1, 1, 64)
    q, k = q.abs() * 300 + 500, -(k.abs() * 300 + 500)
    assert exact_attention(q, k, v)[1].max() < -1e6
    only = torch.randperm(70, generator=torch.Generator().manual_seed(0))
    bool_mask = torch.nn.functional.one_hot(only, 70).bool()
    bias = torch.zeros(70, 70).masked_fill(~bool_mask, -torch.inf)
    for mask in (bool_mask, bias):
        for smooth_k in (True, False):
            out, lse = attend(q, k, v, attn_mask=mask, smooth_k=smooth_k)
            assert torch.equal(out, v[:, only])
            assert (lse < -1e6).all()
    assert torch.equal(attend(q, k, v, causal=True, window=1)[0], v)
    assert torch.equal(attend(q, k[:, :1], v[:, :1])[0], v[:, :1].expand_as(q))


@pytest.mark.parametrize("scaling", SCALINGS)
def test_numeric_bar_on_normal_inputs_holds_in_every_head_with_any_mask(scaling, attend):
    """Relative L1 at most 1.5 %, per head: full, causal, padded, biased."""
    q, k, v = normal(2, 128, 256, 2, 2, 64)
    padding = (torch.arange(256) < torch.tensor([[200], [256]]))[:, None, None]
    bias = torch.randn(1, 2, 128, 256, generator=torch.Generator().manual_seed(0))
    seen = torch.ones(128, 256, dtype=torch.bool).tril(128)
    for options, mask in (
        ({}, None),
        ({"causal": "bottom_right"}, seen),
        ({"attn_mask": padding}, padding),
        ({"attn_mask": bias}, bias),
    ):
        exact, _ = exact_attention(q, k, v, mask=mask)
        out, _ = attend(q, k, v, scaling=scaling, **options)
        assert relative_l1(out, exact, (1, 3)).max() <= 0.015, options
