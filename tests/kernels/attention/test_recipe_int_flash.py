"""INT-FlashAttention as printed: Q and K as they are with a scale a token, P·V in 16 bit (half) or INT8 (full)."""

from __future__ import annotations

import pytest
import torch

import sage_kernels
from sage_kernels import new_head_state, sage_attention
from sage_kernels.testing import exact_attention, relative_l1, relative_l2
from tests.kernels.attention.attention_cases import DTYPES, normal


# the interpreter is numpy: it warns where a GPU returns inf
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")

HALF, FULL, FULL_FP32_SUM = "int_flash_half", "int_flash_full", "int_flash_full_fp32_sum"
FULLS = (FULL, FULL_FP32_SUM)
PLAIN = (HALF, *FULLS)
HALF_BAR = 0.01  # relative L1 on N(0, 1)


def printed(q, k, v, block_k: int, sums_codes: bool) -> torch.Tensor:
    """Algorithm 1 of the paper, with its inputs' quantisation, in fp64: one head, q, k, v [S, D]."""
    q_scale, k_scale = (x.abs().amax(1) / 127 for x in (q, k))
    v_scale = v.abs().amax() / 127
    q_8, k_8, v_8 = torch.round(q / q_scale[:, None]), torch.round(k / k_scale[:, None]), torch.round(v / v_scale)
    top = torch.full((len(q),), -torch.inf, dtype=q.dtype)
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
