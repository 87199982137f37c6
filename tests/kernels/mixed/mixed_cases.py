"""The kernels of mixed attention called by themselves, and what they must agree with."""

from __future__ import annotations

import torch

from sage_kernels.facts.numerics import pv_dtype
from sage_kernels.facts.recipe import BLOCK
from sage_kernels.reference import ref_mixed_attention
from sage_kernels.testing import FP32_ROUNDING, relative_l2


def launch(q, k, v, device, *, options, causal=False, offset=0, **extra):
    """The kernels: out, lse and blocks on the CPU. FP4 is emulated on all GPUs unless `extra` says otherwise."""
    from sage_kernels._triton.mixed.launch import launch_mixed_attention

    given = {"scale": q.shape[3] ** -0.5, "return_lse": True, "return_blocks": True}
    given |= {"packed_fp4": False, "block_q": BLOCK} | extra
    results = launch_mixed_attention(
        *(x.to(device) for x in (q, k, v)), options=options, causal=causal, offset=offset, **given
    )
    return [None if x is None else x.cpu() for x in results]


def assert_as_reference(out, lse, chosen, q, k, v, **options):
    """As `testing.assert_matches_reference`: from the reference without rounding of P and of the output, a kernel may
    be twice as far off as the reference with both. Both take the blocks that the kernel chose."""
    half = pv_dtype(q.dtype)
    exact = (q.float(), k.float(), v.to(half).float())
    options |= {"chosen": chosen.bool(), "half": half}
    unrounded, ref_lse, _ = ref_mixed_attention(*exact, round_p=False, **options)
    rounded, _, _ = ref_mixed_attention(q, k, v, **options)
    for dim in ((1, 3), 3):
        floor, error = (relative_l2(x, unrounded, dim).max() for x in (rounded, out))
        assert error <= 2 * floor + 64 * FP32_ROUNDING, (dim, float(error), float(floor))
    assert torch.where(lse == ref_lse, 0.0, (lse - ref_lse).abs()).max() <= 128 * FP32_ROUNDING * 8
