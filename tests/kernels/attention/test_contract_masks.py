"""Masks, causality, windows, soft cap, sinks and the LSE (cases M and K of the contract)."""

from __future__ import annotations

import pytest
import torch

from sage_kernels import SCALINGS, new_head_state
from sage_kernels.testing import FP32_ROUNDING, assert_matches_reference, exact_attention, relative_l1, relative_l2
from tests.kernels.attention.attention_cases import band_mask, key_padding, normal


# the interpreter is numpy: it warns where a GPU returns inf
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")

NAN, INF = float("nan"), float("inf")
BAR = 0.015  # relative L1 of the recipe on N(0, 1), per head
each_scaling = pytest.mark.parametrize("scaling", [*SCALINGS, "planned"])


def seeded(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def check_both(attend, q, k, v, mask, *, scaling="per_token", **options):
    """Against the reference, and against exact attention under the mask that the options stand for."""
    masking = {n: options[n] for n in ("attn_mask", "causal", "window") if n in options}
    out, lse = attend.check(q, k, v, **attend.scaled(scaling, q, k, v, **masking), **options)
    extra = {n: options[n] for n in ("softcap", "sinks", "scale") if n in options}
    exact, exact_lse = exact_attention(q, k, v, mask=mask, **extra)
    assert relative_l1(out, exact, (1, 3)).max() <= BAR, options
    hidden = exact_lse == -INF
    assert torch.equal(lse == -INF, hidden) and (out[hidden] == 0).all()
    assert (lse - exact_lse)[~hidden].abs().max() < 0.1  # INT8 noise of the scores
    return out, lse


def test_exact_attention_is_sdpa():
    """The oracle of this file, against PyTorch's, where PyTorch can."""
    q, k, v = (x.double() for x in normal(2, 40, 50, 4, 2, 16))
    for mask in (None, seeded(40, 50) > 0, seeded(2, 4, 40, 50), key_padding([50, 0], 50)):
        with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
            sdpa = torch.nn.functional.scaled_dot_product_attention(
                *(x.transpose(1, 2) for x in (q, k, v)),
                attn_mask=mask if mask is None or mask.dtype == torch.bool else mask.double(),
                enable_gqa=True,
            )
        torch.testing.assert_close(exact_attention(q, k, v, mask=mask)[0], sdpa.transpose(1, 2))


@each_scaling
def test_M01_bool_mask_hides_half_the_keys(scaling, attend):
    q, k, v = normal(1, 40, 200, 2, 2, 64)
    mask = (seeded(1, 2, 40, 200) > 0).index_fill(3, torch.tensor([0]), True)
    out, _ = check_both(attend, q, k, v, mask, attn_mask=mask, scaling=scaling)
    assert relative_l2(attend(q, k, v)[0], out) > 0.3


@each_scaling
def test_M02_finite_float_bias_is_added_to_the_scores(scaling, attend):
    """A kernel that works in base 2 must scale the bias too; masks of 0 and -inf hide it when it forgets."""
    q, k, v = normal(1, 40, 200, 2, 1, 64)
    bias = 2 * seeded(1, 2, 40, 200)
    for dtype in (torch.float32, torch.float16, torch.bfloat16):
        mask = bias.to(dtype)
        check_both(attend, q, k, v, mask, attn_mask=mask, scaling=scaling)
    wrong, _ = exact_attention(q, k, v, mask=bias / 1.4426950408889634)
    assert relative_l1(wrong, exact_attention(q, k, v, mask=bias)[0]) > 5 * BAR  # else the test could not fail


@pytest.mark.parametrize("form", ["bool", "-inf"])
def test_M03_M04_a_row_that_sees_nothing_gives_zero(form, attend):
    q, k, v = normal(2, 40, 140, 1, 1, 64)
    visible = (seeded(2, 1, 40, 140) > 0).index_fill(2, torch.tensor([0, 3, 39]), False)
    visible[1] = False  # a whole sample of padding
    mask = visible if form == "bool" else torch.zeros(visible.shape).masked_fill(~visible, -INF)
    out, lse = check_both(attend, q, k, v, mask, attn_mask=mask)
    nothing = ~visible.any(-1)[:, 0]
    assert nothing.sum() == 43 and (out[nothing] == 0).all() and (lse[nothing] == -INF).all()
    assert torch.isfinite(out).all() and (lse[~nothing] > -INF).all()
    assert torch.equal(attend(q, k, v, attn_mask=torch.zeros(1, 1, 1, 140).bool())[0], torch.zeros_like(q))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("by_key", [False, True])
def test_M05_a_row_of_finfo_min_behaves_as_in_sdpa(by_key, dtype, attend):
    """-3.4e38 swallows the scores, so the row is the mean of V; fp16's -65504 shifts them all, so nothing changes."""
    q, k, v = normal(1, 40, 140, 1, 1, 64)
    lowest = torch.finfo(dtype).min
    mask = torch.zeros(1, 1, 1 if by_key else 40, 140, dtype=dtype)
    rows = slice(None) if by_key else slice(5, 9)
    mask[:, :, rows] = lowest
    out, lse = attend(q, k, v, attn_mask=mask)
    exact, exact_lse = exact_attention(q, k, v, mask=mask)
    assert torch.isfinite(lse).all()
    if dtype == torch.float16:  # scores beside 65504 · log2 e = 94 504 are rounded to 2^-8, so P to 2^-9 of it
        assert relative_l1(out, exact, (1, 3)).max() <= BAR + 2.0**-9
        assert (lse - exact_lse).abs().max() < 0.1
    else:
        mean = v.float().mean(1, keepdim=True).expand_as(q)[:, rows]
        assert relative_l2(out[:, rows], mean) < 2.0**-10
        assert relative_l1(out, exact, (1, 3)).max() <= BAR
        assert (lse[:, rows] < -1e38).all()  # weighs nothing beside any other part in a merge


def test_M05_finfo_min_where_other_keys_are_visible_hides_the_key(attend):
    q, k, v = normal(1, 40, 140, 1, 1, 64)
    hidden = seeded(1, 1, 1, 140) > 0.5
    lowest = torch.zeros(hidden.shape).masked_fill(hidden, torch.finfo(torch.float32).min)
    loud = torch.where(hidden[0, 0, 0, :, None, None], 300.0, k.float()).half()  # what no row reads sets no scale
    assert torch.equal(attend(q, loud, v, attn_mask=lowest)[0], attend(q, k, v, attn_mask=~hidden)[0])


MASK_SHAPES = {
    "[S_kv]": (100,),
    "[S_q, S_kv]": (40, 100),
    "[S_q, 1]": (40, 1),
    "[H, 1, S_kv]": (2, 1, 100),
    "[1, 1, 1, S_kv]": (1, 1, 1, 100),
    "[B, 1, 1, S_kv]": (2, 1, 1, 100),
    "[B, 1, S_q, S_kv]": (2, 1, 40, 100),
    "[1, H, S_q, S_kv]": (1, 2, 40, 100),
    "[B, H, 1, S_kv]": (2, 2, 1, 100),
    "[B, H, S_q, S_kv]": (2, 2, 40, 100),
}


@pytest.mark.parametrize("shape", MASK_SHAPES)
def test_M06_masks_broadcast_as_in_sdpa(shape, attend):
    q, k, v = normal(2, 40, 100, 2, 1, 32)
    for mask in (seeded(*MASK_SHAPES[shape]) > -0.5, seeded(*MASK_SHAPES[shape])):
        check_both(attend, q, k, v, mask, attn_mask=mask)


@pytest.mark.parametrize("layout", ["expanded", "transposed", "sliced", "last_stride"])
def test_M06_mask_strides_do_not_matter(layout, attend):
    q, k, v = normal(2, 40, 100, 1, 1, 32)
    if layout == "expanded":
        masks = [x.expand(2, 1, 40, 100) for x in (seeded(1, 1, 1, 100) > 0, seeded(40, 100))]
    elif layout == "transposed":
        masks = [seeded(100, 40).T > 0, seeded(2, 100, 1, 40).permute(0, 2, 3, 1)]
    elif layout == "sliced":
        masks = [(seeded(2, 1, 60, 161) > 0)[:, :, 7:47, 13:113], seeded(60, 161)[7:47, 13:113]]
    else:
        masks = [(seeded(40, 200) > 0)[:, ::2], seeded(2, 1, 40, 200)[..., ::2]]
    for mask in masks:
        out, _ = check_both(attend, q, k, v, mask, attn_mask=mask)
        if layout != "expanded":  # a mask folded to one vector of keys runs other code
            assert torch.equal(out, attend(q, k, v, attn_mask=mask.contiguous())[0])


HIDING = {  # how the keys from 70 on are hidden from every row
    "bool by key": {"attn_mask": key_padding([70, 70], 100)},
    "bool by row": {"attn_mask": key_padding([70, 70], 100).expand(2, 1, 40, 100).contiguous()},
    "-inf by key": {"attn_mask": torch.zeros(100).masked_fill(torch.arange(100) >= 70, -INF)},
    "-inf by row": {"attn_mask": torch.zeros(40, 100).masked_fill(torch.arange(100) >= 70, -INF)},
    "never reached": {"causal": "top_left"},  # 40 rows see 40 keys
}


@each_scaling
@pytest.mark.parametrize("how", HIDING)
def test_M09_M10_what_no_row_sees_may_hold_anything(how, scaling, attend):
    """Bitwise: hidden keys take no part in smoothing, scales, statistics or sums."""
    q, k, v = normal(2, 40, 100, 1, 1, 32)
    first = None
    for fill in (None, (2000.0, 2000.0), (NAN, NAN), (INF, -INF)):
        bad_k, bad_v = k.clone(), v.clone()
        if fill is not None:
            bad_k[:, 70:], bad_v[:, 70:] = fill
        options = attend.scaled(scaling, q, k, v, **HIDING[how])
        found = (*attend(q, bad_k, bad_v, **options, **HIDING[how]), *options.get("state", ()))
        first = first or found
        assert all(torch.equal(a, b) for a, b in zip(found, first, strict=True)), fill
    assert torch.isfinite(first[0]).all()


def test_M10_hidden_keys_in_the_middle_and_per_head(attend):
    """Each key/value head has its own hidden keys, shared by its query heads; the sampled ones among them."""
    q, k, v = normal(1, 40, 150, 4, 2, 32)
    hidden = seeded(2, 150) > 0.3
    mask = ~hidden.repeat_interleave(2, 0)[None, :, None]
    clean, _ = check_both(attend, q, k, v, mask, attn_mask=mask)
    where = hidden.T[None, :, :, None]
    for bad in (NAN, INF, 2000.0):
        out, _ = attend(q, k.masked_fill(where, bad), v.masked_fill(where, -bad), attn_mask=mask)
        assert torch.equal(out, clean), bad


@each_scaling
@pytest.mark.parametrize("rule", ["top_left", "bottom_right"])
@pytest.mark.parametrize("lengths", [(70, 150), (129, 129), (150, 70)])
def test_K01_K03_causal_rules(lengths, rule, scaling, attend):
    seq_q, seq_kv = lengths
    q, k, v = normal(1, seq_q, seq_kv, 2, 1, 32)
    out, lse = check_both(attend, q, k, v, band_mask(seq_q, seq_kv, rule), causal=rule, scaling=scaling)
    if rule == "bottom_right" and seq_q > seq_kv:
        assert (out[:, : seq_q - seq_kv] == 0).all() and (lse[:, : seq_q - seq_kv] == -INF).all()
        assert (lse[:, seq_q - seq_kv :] > -INF).all()
    elif scaling != "planned":
        first = 0 if rule == "top_left" else seq_kv - seq_q
        if first == 0:  # row 0 sees one key: exactly its value
            assert torch.equal(out[:, 0], v[:, 0].repeat_interleave(2, 1))


def test_K01_true_means_either_rule_where_lengths_are_equal(attend):
    q, k, v = normal(1, 70, 70, 1, 1, 32)
    outs = [attend(q, k, v, causal=causal)[0] for causal in (True, "top_left", "bottom_right")]
    assert torch.equal(outs[0], outs[1]) and torch.equal(outs[0], outs[2])


def test_K04_the_future_changes_no_bit_without_smoothing(attend):
    """Bitwise only where nothing is shared between tokens: a scale per token, and no smoothing vector."""
    q, k, v = normal(1, 150, 150, 2, 2, 32)
    before, _ = attend(q, k, v, causal=True, smooth_k=False)
    for position in (1, 64, 100, 149):
        other = [x.clone() for x in (q, k, v)]
        for x in other:
            x[:, position:] = 30 * seeded(*x[:, position:].shape, seed=position).half()
        after, _ = attend(*other, causal=True, smooth_k=False)
        assert torch.equal(after[:, :position], before[:, :position])
        assert not torch.equal(after[:, position:], before[:, position:])


@each_scaling
def test_K04_the_future_changes_no_more_than_rounding_otherwise(scaling, attend):
    """Smoothing and shared scales come from all keys: earlier rows keep their value, within the recipe's error."""
    q, k, v = normal(1, 150, 150, 2, 2, 32)
    changed = [x.clone() for x in (q, k, v)]
    for x in changed:
        x[:, 100:] = seeded(*x[:, 100:].shape, seed=1).half()
    outs = []
    for inputs in ((q, k, v), changed):
        options = attend.scaled(scaling, *inputs, causal=True)
        outs.append(attend(*inputs, causal=True, **options)[0][:, :100])
    exact, _ = exact_attention(q, k, v, mask=band_mask(150, 150, True))
    for out in outs:
        assert relative_l1(out, exact[:, :100], (1, 3)).max() <= BAR


@each_scaling
@pytest.mark.parametrize("masking", ["full", "causal", "bias"])
def test_softcap_is_that_of_the_true_scores(masking, scaling, attend):
    """tanh is not invariant to smoothing: what smoothing took from a score must be back before the cap."""
    q, k, v = normal(1, 40, 100, 2, 1, 64)
    k = k + 2 * seeded(1, 1, 1, 64, seed=1).half()
    bias = seeded(40, 100)
    mask = {"full": None, "causal": band_mask(40, 100, "bottom_right"), "bias": bias}[masking]
    options = {"full": {}, "causal": {"causal": "bottom_right"}, "bias": {"attn_mask": bias}}[masking]
    for softcap in (2.0, 50.0):
        check_both(attend, q, k, v, mask, softcap=softcap, scaling=scaling, **options)
    uncapped, _ = exact_attention(q, k, v, mask=mask)
    assert relative_l1(uncapped, exact_attention(q, k, v, mask=mask, softcap=2.0)[0]) > 5 * BAR


@each_scaling
@pytest.mark.parametrize("masking", ["full", "causal", "nothing visible", "softcap"])
def test_sinks_take_part_in_the_softmax_and_the_lse(masking, scaling, attend):
    q, k, v = normal(1, 40, 100, 4, 2, 32)
    k = k + 2 * seeded(1, 1, 1, 32, seed=1).half()  # smoothing has something to hide from the sink
    sinks = torch.tensor([-INF, -1.0, 3.0, 6.0])
    nothing = torch.zeros(40, 100, dtype=torch.bool)
    mask = {"causal": band_mask(40, 100, "bottom_right"), "nothing visible": nothing}.get(masking)
    options = {
        "full": {},
        "causal": {"causal": "bottom_right"},
        "nothing visible": {"attn_mask": nothing},
        "softcap": {"softcap": 3.0},
    }[masking]
    for dtype in (torch.float32, torch.bfloat16):
        check_both(attend, q, k, v, mask, sinks=sinks.to(dtype), scaling=scaling, **options)
    if masking == "full":
        out, lse = attend(q, k, v, sinks=sinks)
        plain, plain_lse = attend(q, k, v)
        torch.testing.assert_close(
            lse.double(), torch.logaddexp(plain_lse.double(), sinks.double()), atol=1e-5, rtol=0
        )
        share = torch.exp(plain_lse.double() - lse)[..., None]
        assert relative_l2(out, plain.double() * share) < 2.0**-9  # both were rounded to fp16


@pytest.mark.parametrize("masking", ["full", "causal", "bias", "softcap"])
def test_lse_merges_two_halves_of_the_keys(masking, attend):
    """Natural log, fp32: what ring attention and cascades rely on. Without smoothing and with a scale per token both
    halves have the codes of the whole, so only rounding is left."""
    q, k, v = normal(1, 90, 170, 2, 2, 64)
    whole = {"smooth_k": False}
    parts = [{}, {}]
    if masking == "causal":
        mask = band_mask(90, 170, "bottom_right")
        whole, parts = whole | {"causal": "bottom_right"}, [{"attn_mask": m} for m in (mask[:, :80], mask[:, 80:])]
    elif masking == "bias":
        mask = seeded(90, 170)
        whole, parts = whole | {"attn_mask": mask}, [{"attn_mask": m} for m in (mask[:, :80], mask[:, 80:])]
    elif masking == "softcap":
        whole, parts = whole | {"softcap": 5.0}, [{"softcap": 5.0}] * 2
    out, lse = attend.check(q, k, v, **whole)
    (out_a, lse_a), (out_b, lse_b) = (
        attend(q, k[:, part], v[:, part], smooth_k=False, **extra)
        for part, extra in zip((slice(0, 80), slice(80, None)), parts, strict=True)
    )
    assert lse.dtype == torch.float32
    merged_lse = torch.logaddexp(lse_a.double(), lse_b.double())
    # a sum of 170 terms, each of an exponent of up to 64 rounded in fp32
    assert (merged_lse - lse).abs().max() < (64 + 170) * FP32_ROUNDING
    weight = torch.exp(torch.stack([lse_a, lse_b]).double() - merged_lse)[..., None]
    merged = (weight * torch.stack([out_a, out_b]).double()).sum(0)
    if masking != "causal":
        options = {"smooth_k": False} | attend.blocks
        from sage_kernels.testing import masked_keys

        kept = {n: x for n, x in whole.items() if n != "smooth_k"}
        seen_k, seen_v, hidden = masked_keys(k, v, 90, **kept)
        assert_matches_reference(merged, merged_lse.float(), q, seen_k, seen_v, masking=hidden, **options)
    assert relative_l2(merged, out) < 2 * 2.0**-11 + 2.0**-11  # P and out of both, rounded at random


def test_lse_costs_no_bit_of_the_output(attend):
    q, k, v = normal(1, 70, 140, 2, 2, 64)
    for options in ({}, {"causal": "bottom_right"}, {"state": new_head_state(2, 64, attend.device)}):
        assert torch.equal(attend(q, k, v, **options)[0], attend(q, k, v, return_lse=False, **options)[0])


@pytest.mark.parametrize("length", [1, 100])
def test_E07_a_padded_sample_has_the_bits_of_the_sample_alone(length, attend):
    """Alone, among others, and padded to their length: the key mask leaves no trace, with a scale per token."""
    q, k, v = normal(3, 128, 128, 2, 2, 64)
    mask = key_padding([128, length, 77], 128)
    together, lse = attend(q, k, v, attn_mask=mask)
    alone, alone_lse = attend(q[1:2, :length], k[1:2, :length], v[1:2, :length])
    if attend.tier == "reference":  # torch sums 100 numbers in another order than 128: P and out rounded in fp16
        assert relative_l2(together[1:2, :length], alone) < 2.0**-10
    else:
        assert torch.equal(together[1:2, :length], alone)
    assert (lse[1:2, :length] - alone_lse).abs().max() < (64 + 128) * FP32_ROUNDING
    assert torch.equal(together[:1], attend(q[:1], k[:1], v[:1], attn_mask=mask[:1])[0])


def test_E07_planned_scales_are_shared_by_the_batch_and_promise_accuracy_only(attend):
    q, k, v = normal(4, 128, 128, 2, 2, 64)
    state = attend.planned(q, k, v)
    together, _ = attend(q, k, v, state=state)
    for sample in range(4):
        one = [x[sample : sample + 1] for x in (q, k, v)]
        alone, _ = attend(*one, state=attend.planned(*one))
        exact, _ = exact_attention(*one)
        for out in (alone, together[sample : sample + 1]):
            assert relative_l1(out, exact, (1, 3)).max() <= BAR
