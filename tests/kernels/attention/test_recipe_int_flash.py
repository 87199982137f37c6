"""INT-FlashAttention as printed: Q and K as they are with a scale a token, P·V in 16 bit (half) or INT8 (full)."""

from __future__ import annotations

import pytest
import torch

import sage_kernels
from sage_kernels import new_head_state, sage_attention, sage_attention_varlen
from sage_kernels.facts.numerics import quantize_tensor_values
from sage_kernels.reference import ref_attention
from sage_kernels.testing import exact_attention, relative_l1, relative_l2
from tests.kernels.attention.attention_cases import DTYPES, MASKS, SHAPES, exact_under, normal
from tests.kernels.attention.test_softmax_reference import LOGITS, climbing


# the interpreter is numpy: it warns where a GPU returns inf
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")

NAN, INF = float("nan"), float("inf")
HALF, FULL, FULL_FP32_SUM = "int_flash_half", "int_flash_full", "int_flash_full_fp32_sum"
FULLS = (FULL, FULL_FP32_SUM)
PLAIN = (HALF, *FULLS)
HALF_BAR, FULL_BAR = 0.01, 0.06  # relative L1 on N(0, 1); that of the full one grows with the number of keys


def printed(q, k, v, block_k: int, sums_codes: bool) -> torch.Tensor:
    """Algorithm 1 of the paper, with its inputs' quantisation, in fp64: one head, q, k, v [S, D]."""
    q_scale, k_scale = (x.abs().amax(1) / 127 for x in (q, k))
    v_scale = v.abs().amax() / 127
    q_8, k_8, v_8 = torch.round(q / q_scale[:, None]), torch.round(k / k_scale[:, None]), torch.round(v / v_scale)
    top = torch.full((len(q),), -INF, dtype=q.dtype)
    total, out = torch.zeros_like(top), torch.zeros_like(q)
    for first in range(0, len(k), block_k):
        part = slice(first, first + block_k)
        scores = q_scale[:, None] * (q_8 @ k_8[part].T) * k_scale[part] * q.shape[1] ** -0.5
        new = torch.maximum(top, scores.amax(1))
        p = 127 * torch.exp(scores - new[:, None])
        codes = torch.round(p)
        rescale = torch.exp(top - new)
        total = total * rescale + (codes if sums_codes else p).sum(1)
        out = out * rescale[:, None] + codes @ v_8[part]
        top = new
    return out / total[:, None] * v_scale


@pytest.fixture
def flash(attend):
    """`attend`; P·V in INT8 of fp32 inputs is right in the interpreter too, for no bf16 is involved."""
    attend.dtypes = (*DTYPES[attend.tier], *([torch.float32] if attend.tier == "interpreter" else []))
    return attend


@pytest.mark.parametrize("recipe", FULLS)
def test_it_is_the_algorithm_as_printed(recipe, flash):
    q, k, v = normal(1, 70, 300, 1, 1, 64)
    out, _ = flash(q, k, v, recipe=recipe)
    block_k = flash.blocks.get("block_k", 128)
    wanted = printed(*(x[0, :, 0].double() for x in (q, k, v)), block_k, recipe == FULL)
    # a code that falls to the other side of a tie is all that fp32 changes
    assert relative_l2(out[0, :, 0], wanted) < 2e-3
    assert relative_l2(out, exact_attention(q, k, v)[0]) > 1e-2  # far from it: what is compared is the rounding


@pytest.mark.parametrize("hidden", [False, True])
@pytest.mark.parametrize("shape", [(1, 330, 2, 64), (1, 129, 1, 160)])
def test_v_has_one_scale_a_head_and_no_center(shape, hidden, kernel_device):
    from sage_kernels._triton.primitives import head_width
    from sage_kernels._triton.prologue.mask_tiles import launch_mask_tiles
    from sage_kernels._triton.prologue.prologue import launch_prologue
    from sage_kernels.facts.masking import make_masking

    batch, seq, heads, head_dim = shape
    v = torch.randn(shape, generator=torch.Generator().manual_seed(0)).half() + 5
    v[..., 3] *= 1000
    v[0, 5, 0, 1], v[0, 6, 0, 2] = NAN, INF
    shown = torch.ones(batch, 1, 1, seq, dtype=torch.bool)
    if hidden:
        shown[..., -9:] = False
        v[:, -9:] = 6e4
        v[:, -4] = NAN
    masking, _ = make_masking(shown.to(kernel_device), False, None, 0.0, None, 70, seq)
    width = head_width(head_dim)
    mask = launch_mask_tiles(masking, heads, heads, 70, seq, 64, 64)
    q = torch.zeros(batch, 70, heads, head_dim, dtype=v.dtype, device=kernel_device)
    v = v.to(kernel_device)
    prepared = launch_prologue(
        q, torch.zeros_like(v), v, scaling="per_token", smooth_k=False, state=None, mask=mask, return_center=False,
        block_n=64, width=width, rotation="none", pv="int8_tensor",
    )  # fmt: skip
    codes, numbers, v = prepared.values.cpu(), prepared.value_scale.cpu(), v.cpu()
    wanted, scale, center = quantize_tensor_values(v.transpose(1, 2).float(), shown[:, :, 0], shown[:, :, 0])
    assert torch.equal(numbers[:, :, 0, :head_dim], scale[:, :, 0])
    assert (scale == scale[..., :1]).all() and scale.unique().numel() == heads
    steps = -(-seq // codes.shape[1])
    first_sum = 2 + -(-steps // 4)
    found = numbers[:, :, 1:first_sum, :head_dim].sum(2)
    torch.testing.assert_close(found, center[:, :, 0], rtol=0, atol=0, equal_nan=True)
    assert center.isnan().sum() == 2 and (center.nan_to_num() == 0).all()
    stored = codes.view(batch, heads, steps, width, 8, 4, 2, 2).transpose(-2, -3)  # back in order
    stored = stored.reshape(batch, heads, steps, width, 128).transpose(2, 3).flatten(3)
    assert torch.equal(stored[:, :, :head_dim, :seq], wanted.mT.to(torch.int8))
    # P's codes are P: nothing is taken off but the number that makes bits of sums
    assert (numbers[:, :, first_sum:] == -1.5 * 2**23).all()


@pytest.mark.parametrize("recipe", PLAIN)
@pytest.mark.parametrize("shape", SHAPES)
def test_every_shape_matches_the_reference(shape, recipe, flash):
    flash.check(*normal(*shape), recipe=recipe, smooth_k=False)


@pytest.mark.parametrize("recipe", PLAIN)
@pytest.mark.parametrize("name", MASKS)
def test_every_mask_matches_the_reference(name, recipe, flash):
    q, k, v = normal(2, 70, 150, 2, 1, 64)
    out, _ = flash.check(q, k, v, recipe=recipe, smooth_k=False, **MASKS[name])
    if "padding" in name:
        bad = [x.clone() for x in (k, v)]
        for x in bad:
            x[1, 97:] = NAN
        assert torch.equal(flash(q, *bad, recipe=recipe, **MASKS[name])[0], out)
    exact = exact_under(MASKS[name], q, k, v)
    assert relative_l2(out, exact) <= (1.5 * HALF_BAR if recipe == HALF else FULL_BAR)


@pytest.mark.parametrize("recipe", FULLS)
@pytest.mark.parametrize("name", ["late_sink", "falls", "grows_beyond_every_format", "large_and_mixed"])
def test_scores_far_from_the_first_ones_stay_finite_and_right(name, recipe, flash):
    q, k, v = climbing(LOGITS[name])
    out, _ = flash.check(q, k, v, exponent=2.0**13, recipe=recipe, smooth_k=False)
    exact, _ = exact_attention(q, k, v)
    scores_alone = relative_l2(flash(q, k, v, recipe=HALF)[0], exact)
    assert torch.isfinite(out).all() and relative_l2(out, exact) <= 1.2 * scores_alone + FULL_BAR


@pytest.mark.parametrize("recipe", FULLS)
@pytest.mark.parametrize("value", [NAN, -INF])
def test_a_bad_element_of_v_poisons_its_channel_and_nothing_else(value, recipe, flash):
    q, k, v = normal(1, 70, 140, 2, 2, 64)
    clean, _ = flash(q, k, v, recipe=recipe)
    v[0, 33, 1, 7] = value
    bad = torch.zeros(1, 70, 2, 64, dtype=torch.bool)
    bad[:, :, 1, 7] = True
    out, _ = flash(q, k, v, recipe=recipe)
    assert torch.equal(~torch.isfinite(out), bad) and torch.equal(out[~bad], clean[~bad])


@pytest.mark.parametrize("recipe", PLAIN)
def test_a_bad_element_of_k_or_q_poisons_what_it_does_by_default(recipe, flash):
    for which in (0, 1):
        inputs = list(normal(1, 70, 140, 2, 2, 64))
        inputs[which][0, 33, 1, 7] = NAN
        out, _ = flash(*inputs, recipe=recipe)
        expected, _ = flash(*inputs, smooth_k=False)
        assert torch.equal(out.isnan(), expected.isnan()) and out.isnan().any()


@pytest.mark.parametrize("recipe", FULLS)
def test_values_of_every_size_are_right(recipe, flash):
    q, k, v = normal(1, 64, 300, 1, 1, 64)
    out, _ = flash.check(q, k, v.sign() * 6e4, recipe=recipe, smooth_k=False)
    assert torch.isfinite(out).all()
    assert (flash(q, k, torch.zeros_like(v), recipe=recipe)[0] == 0).all()
    if torch.float32 in flash.dtypes:
        for size in (1e5, 1e38, 1e-30):
            big = [q.float(), k.float(), v.float().clamp(-1, 1) * size]
            out, _ = flash(*big, recipe=recipe)
            assert relative_l2(out, exact_attention(*big)[0]) <= FULL_BAR, size


def test_the_sum_of_rounded_p_is_a_choice_of_its_own(flash):
    """With all values alike, weights summed as they were rounded give just them; summed in fp32, not."""
    q, k, v = normal(1, 64, 256, 1, 1, 64)
    q, v = 3 * q, torch.ones_like(v)
    (printed_out, printed_lse), (out, lse) = (flash(q, k, v, recipe=recipe) for recipe in FULLS)
    exact = exact_attention(q, k, v)[1]
    assert (printed_out - 1).abs().max() <= 1e-3 and (out - 1).abs().max() > 5e-3
    assert (printed_lse - exact).abs().max() > 2 * (lse - exact).abs().max()


@pytest.mark.parametrize("seq", [1024, pytest.param(16384, marks=pytest.mark.slow("16,384 keys on a CPU"))])
def test_error_is_what_it_is_said_to_be_at_any_length(seq):
    """Half: 1 % at any length. Full: twice our own recipe's, and growing, since 127 levels are the row's largest's."""
    q, k, v = normal(1, 256, seq, 2, 2, 128, dtype=torch.float32)
    exact, _ = exact_attention(q, k, v)
    error = {recipe: float(relative_l1(sage_attention(q, k, v, recipe=recipe), exact)) for recipe in PLAIN}
    assert error[HALF] <= HALF_BAR
    assert all(0.02 <= error[recipe] <= 0.05 for recipe in FULLS)
    assert error[FULL] > 1.3 * relative_l1(sage_attention(q, k, v, recipe="qk_int8_pv_int8"), exact)


@pytest.mark.parametrize("recipe", PLAIN)
def test_what_it_has_not_is_refused_with_what_has_it(recipe):
    q, k, v = normal(1, 64, 64, 1, 1, 64)
    for call in (sage_attention, sage_kernels.differentiable_attention):
        for scaling in ("per_block", "per_head"):
            with pytest.raises(
                ValueError, match=f"scaling: got '{scaling}' with recipe '{recipe}', expected 'per_tok"
            ):
                call(q, k, v, recipe=recipe, scaling=scaling)
        with pytest.raises(ValueError, match=f"smooth_k: got True with recipe '{recipe}', expected None or False"):
            call(q, k, v, recipe=recipe, smooth_k=True)
    with pytest.raises(NotImplementedError, match=f"state: got one with recipe '{recipe}', expected None.*qk_int8_pv"):
        sage_attention(q, k, v, recipe=recipe, state=new_head_state(1, 64, "cpu"))
    ends = torch.tensor([0, 30, 64], dtype=torch.int32)
    with pytest.raises(NotImplementedError, match=f"recipe: got '{recipe}' with packed sequences"):
        sage_attention_varlen(q[0], k[0], v[0], ends, ends, recipe=recipe)


def test_by_default_k_is_taken_as_it_is():
    q, k, v = normal(1, 64, 200, 1, 1, 64)
    k = k + 5
    for recipe in PLAIN:
        out = sage_attention(q, k, v, recipe=recipe)
        assert torch.equal(out, ref_attention(q, k, v, recipe=recipe, smooth_k=False)[0])
        assert not torch.equal(out, ref_attention(q, k, v, recipe=recipe, smooth_k=True)[0])
