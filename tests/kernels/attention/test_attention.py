"""sage_attention against exact attention (what INT8 costs), and the kernels against the reference."""

from __future__ import annotations

import pytest
import torch

import sage_kernels
from sage_kernels.facts.state import COUNT_REDONE, COUNT_TRIED, HeadState
from sage_kernels.planning.state import ScaleState, Site
from sage_kernels.reference import ref_attention
from sage_kernels.testing import (
    FAMILIES,
    assert_matches_reference,
    exact_attention,
    make_qkv,
    relative_l1,
    sqnr_db,
)


SHAPES = {  # B, S_q, S_kv, H, H_kv, D
    "one_tile": (1, 64, 64, 1, 1, 64),
    "ragged": (2, 100, 300, 2, 2, 64),
    "gqa": (1, 65, 129, 4, 2, 32),
    "mqa_wide": (1, 70, 200, 3, 1, 128),
    "padded_head": (1, 63, 97, 2, 2, 40),
    "odd_head": (1, 33, 66, 2, 2, 59),
    "tiny_head": (1, 33, 40, 2, 2, 5),
    "one_token": (2, 1, 1, 2, 2, 64),
    "cross": (1, 257, 77, 2, 2, 64),
}
DTYPES = {"interpreter": (torch.float16,), "cuda": (torch.float16, torch.bfloat16, torch.float32)}


def run_kernel(q, k, v, device, *, scaling="per_token", state=None, smooth_k=True, return_lse=True):
    """The kernels (not the reference) on `device`, and the block sizes of the scales that they used."""
    from sage_kernels._triton.attention.launch import device_tile, launch_attention_fwd
    from sage_kernels._triton.primitives import head_width

    q, k, v = (x.to(device) for x in (q, k, v))
    mode = "planned" if state is not None else scaling
    tile = device_tile(q.device, head_width(q.shape[3]), mode)
    out, lse = launch_attention_fwd(
        q, k, v, scale=q.shape[3] ** -0.5, scaling=scaling, smooth_k=smooth_k, state=state, return_lse=return_lse
    )
    return out, lse, {"block_q": tile.scale_rows, "block_k": tile.block_n}


@pytest.mark.parametrize("shape", SHAPES)
def test_planned_kernel_matches_reference_and_records_the_same(shape, kernel_device):
    batch, seq_q, seq_kv, heads, kv_heads, head_dim = SHAPES[shape]
    for dtype in DTYPES["cuda" if kernel_device.type == "cuda" else "interpreter"]:
        # two sites, so that the rows do not start at 0; the state is wider than the head
        state = ScaleState([Site("other", 3, 128), Site("this", kv_heads, head_dim)], device=kernel_device)
        for step in range(3):
            q, k, v = make_qkv("outlier_channels", *SHAPES[shape], dtype=dtype, seed=step)
            before = HeadState(*(x.cpu().clone() for x in state.head_state(1)))
            out, lse, blocks = run_kernel(q, k, v, kernel_device, state=state.head_state(1))
            assert_matches_reference(out, lse, q, k, v, state=before, **blocks)
            ref_attention(q, k, v, state=before, **blocks)
            after = state.head_state(1)
            counts = after.counts.cpu()
            counts[:, [COUNT_TRIED, COUNT_REDONE]] = 0  # tiles of queries are the kernels' own affair
            assert torch.equal(counts, before.counts)
            assert torch.equal(after.stats[..., :head_dim].cpu(), before.stats[..., :head_dim])
            state.advance(1 - step / 3, 1 - (step + 1) / 3)
        assert state.summary()[1]["known"]


@pytest.mark.parametrize("seq", [128, 640, 1024, 4096, pytest.param(16384, marks=pytest.mark.gpu)])
@pytest.mark.parametrize("scaling", ["per_block", "per_token"])
def test_error_budget_against_exact_attention(scaling, seq):
    """The bar: relative L1 <= 1.5 % on N(0, 1), over everything and in the worst head; the worst row stays near."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    rows = min(seq, 256)  # rows are independent of each other: the last ones do for the long sequences
    q, k, v = make_qkv(
        "normal", 1, rows, seq, 2, 2, 128, dtype=torch.float16 if device == "cuda" else torch.float32, device=device
    )
    out = sage_kernels.sage_attention(q, k, v, scaling=scaling)
    exact, _ = exact_attention(q, k, v)
    assert relative_l1(out, exact) <= 0.015
    assert relative_l1(out, exact, (1, 3)).max() <= 0.015
    assert relative_l1(out, exact, 3).max() <= 0.03


@pytest.mark.parametrize("family", FAMILIES)
def test_planned_scales_keep_up_with_dynamic_ones_on_every_family(family):
    """Signal to noise of a planned step against per-token scales of the same inputs; the family's floor in dB."""
    floor = {"outlier_tokens": 20.0, "varying_outliers": 26.0, "biased_varying_outliers": 26.0}.get(family, 36.0)
    state = ScaleState([Site("a", 2, 64)], device="cpu")
    for step in range(2):
        q, k, v = make_qkv(family, 1, 256, 1024, 2, 2, 64, seed=step)
        planned = sage_kernels.sage_attention(q, k, v, state=state.head_state(0))
        state.advance(1.0 - step / 2, 0.5)
    exact, _ = exact_attention(q, k, v)
    dynamic = sage_kernels.sage_attention(q, k, v)
    assert sqnr_db(planned, exact) >= floor and sqnr_db(dynamic, exact) >= floor
    assert sqnr_db(planned, exact) > sqnr_db(dynamic, exact) - 8


def test_a_tile_that_outgrows_its_plan_is_never_clipped(kernel_device):
    """Keys 30 times larger than the step before, in a few tokens that no sample meets: it has a scale of its own."""
    state = ScaleState([Site("a", 1, 64)], device=kernel_device)
    q, k, v = make_qkv("normal", 1, 64, 256, 1, 1, 64, dtype=torch.float16)
    run_kernel(q, k, v, kernel_device, state=state.head_state(0))
    state.advance(1.0, 0.9)
    k[:, 73:76] *= 30
    before = HeadState(*(x.cpu().clone() for x in state.head_state(0)))
    out, lse, blocks = run_kernel(q, k, v, kernel_device, state=state.head_state(0))
    assert_matches_reference(out, lse, q, k, v, state=before, **blocks)
    outside = state.summary()[0]["outside"]
    assert 0 < outside < 3 / 256
    exact, _ = exact_attention(q, k, v)
    assert relative_l1(out, exact) < 0.1  # clipped at the old range it would be far off
    clipped = k.clone()
    clipped[:, 73:76] = k[:, 70:73].clamp(-4.5, 4.5)
    assert relative_l1(exact_attention(q, clipped, v)[0], exact) > 0.1


def test_a_new_shape_runs_dynamic_and_a_known_one_planned(kernel_device):
    state = ScaleState([Site("a", 1, 64)], device=kernel_device)
    for seq, expected in ((64, 1), (64, 0), (96, 1), (96, 0), (64, 1)):
        q, k, v = make_qkv("normal", 1, seq, seq, 1, 1, 64, dtype=torch.float16)
        before = state.summary()[0]["dynamic_calls"]
        run_kernel(q, k, v, kernel_device, state=state.head_state(0))
        assert state.summary()[0]["dynamic_calls"] - before == expected, seq
        state.advance(0.5, 0.5)


def test_two_shapes_in_one_step_are_both_known(kernel_device):
    """Guidance with two calls a step, whose prompts differ in length."""
    state = ScaleState([Site("a", 1, 64)], device=kernel_device)
    for _ in range(2):
        for seq in (77, 40):
            q, k, v = make_qkv("normal", 1, 64, seq, 1, 1, 64, dtype=torch.float16)
            run_kernel(q, k, v, kernel_device, state=state.head_state(0))
        state.advance(0.5, 0.5)
    assert state.summary()[0]["dynamic_calls"] == 2 and state.summary()[0]["calls"] == 4
