"""Mixed attention: its kernels against the same-quantisation reference, and the reference against exact attention."""

from __future__ import annotations

import itertools

import pytest
import torch

from sage_kernels import Mixed, mixed_attention
from sage_kernels.facts.base_formats import base_codes, round_to_e2m1
from sage_kernels.facts.block_budget import (
    chosen_a_row,
    chosen_share,
    has_fp4,
    promoted_a_row,
    rows_of_block,
    visible_blocks,
)
from sage_kernels.facts.recipe import BASES, BLOCK, FP4_GROUPS, SELECTORS
from sage_kernels.reference import ref_mixed_attention
from sage_kernels.reference.mixed import ref_block_scores
from sage_kernels.testing import exact_attention, make_blocks, make_qkv, relative_l2
from tests.kernels.mixed.mixed_cases import assert_as_reference, launch


E2M1 = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])


# --- the budget ---


def test_budget_is_that_of_thriftattention():
    """Its k of 2,048 blocks at 5, 10 and 25 % in a causal square, and at 5 % without causality."""
    length = 2048 * BLOCK
    assert [promoted_a_row(length, length, True, 0, share) for share in (0.05, 0.1, 0.25)] == [52, 105, 274]
    assert promoted_a_row(length, length, False, 0, 0.05) == 102


@pytest.mark.parametrize("causal", [False, True])
def test_budget_comes_as_near_as_whole_blocks_can(causal):
    for seq_q, seq_kv, share in itertools.product((64, 500, 3000), (100, 1000, 3000), (0.0, 0.03, 0.3, 1.0)):
        rows = range(-(-seq_q // BLOCK))
        visible = [visible_blocks(i, seq_q, seq_kv, causal, seq_kv - seq_q) for i in rows]
        sums = [sum(min(seen, k) for seen in visible) for k in range(max(visible) + 1)]
        got = promoted_a_row(seq_q, seq_kv, causal, seq_kv - seq_q, share)
        wanted = share * sum(visible)
        assert abs(sums[got] - wanted) == min(abs(x - wanted) for x in sums[1 if wanted else 0 :])


# --- formats ---


def test_e2m1_is_the_nearest_number_with_ties_to_even():
    x = torch.linspace(-7, 7, 14 * 64 + 1)  # all ties are among them
    got = round_to_e2m1(x)
    distance = (x.abs()[:, None] - E2M1).abs()
    nearest = distance == distance.amin(1, keepdim=True)
    even = torch.arange(8) % 2 == 0
    wanted = torch.where(nearest.sum(1) > 1, (nearest & even).float() @ E2M1, E2M1[distance.argmin(1)])
    assert torch.equal(got, wanted.copysign(x) * (x != 0))


@pytest.mark.parametrize("base", ["mxfp4", "nvfp4"])
def test_fp4_codes_fit_fp16_and_scales_keep_any_size(base):
    """What an FP4 matrix unit multiplies is the same number in fp16, also where groups and tokens differ much."""
    x = make_qkv("normal", 1, 64, 1, 1, 1, 128)[0][0, :, 0]
    x = x * torch.logspace(-20, 20, 64)[:, None] * torch.logspace(0, -9, 8).repeat_interleave(16)
    codes, scale = base_codes(x, base)
    assert torch.equal(codes, codes.half().float())
    largest = x.unflatten(1, (-1, 16 if base == "nvfp4" else 32))[:, 0]
    error = (codes * scale).unflatten(1, (-1, largest.shape[1]))[:, 0] - largest
    # half a step of 2 below 6, in units of a scale that is at most 2 (MXFP4) or 2^-4 (NVFP4) larger than it need be
    step = largest.abs().amax(1) / 6 * (2 if base == "mxfp4" else 1 + 2.0**-4)
    assert (error.abs().amax(1) <= step).all()


def test_packed_fp4_is_what_the_emulated_codes_are(kernel_device):
    """No GPU here multiplies FP4: the bytes that one would are decoded, as `dot_scaled` has it."""
    if kernel_device.type != "cpu":
        pytest.skip("FP8 scales of any GPU are decoded in the interpreter alone")
    from tests.kernels.mixed.fp4_kernel import fp4_codes_kernel

    x = make_qkv("normal", 1, 16, 1, 1, 1, 64)[0][0, :, 0] * torch.logspace(-3, 3, 16)[:, None]
    for base, groups, kind in (("mxfp4", 2, torch.uint8), ("nvfp4", 4, torch.float8_e4m3fn)):
        emulated, packed = torch.empty(16, 64, dtype=torch.float16), torch.empty(16, 32, dtype=torch.uint8)
        group_scales, scale = torch.empty(16, groups).to(kind), torch.empty(16)
        fp4_codes_kernel[(1,)](x, emulated, packed, group_scales, scale, base, groups)
        codes, ref_scale = base_codes(x, base)
        assert torch.equal(emulated.float(), codes) and torch.equal(scale, ref_scale[:, 0])
        nibbles = torch.stack([packed & 15, packed >> 4], -1).flatten(1).long()
        values = E2M1[nibbles & 7] * torch.where(nibbles >= 8, -1.0, 1.0)
        factors = group_scales.float() if base == "nvfp4" else torch.exp2(group_scales.float() - 127)
        assert torch.equal(values * factors.repeat_interleave(64 // groups, 1), codes)


# --- kernels ---

CASES = [
    # base, selector, action, causal, offset, S_q, S_kv, heads, kv_heads, D
    ("int8", "block_mean", "promote", False, 0, 200, 333, 2, 1, 64),
    ("int8", "quest", "skip", True, 0, 260, 260, 1, 1, 80),
    ("int4", "local", "promote", True, 70, 130, 200, 4, 2, 64),
    ("int4", "block_mean", "skip", False, 0, 64, 257, 1, 1, 40),
    ("mxfp4", "quest", "promote", False, 0, 100, 257, 2, 1, 128),
    ("nvfp4", "block_mean", "promote", True, -40, 200, 190, 2, 1, 64),
    ("nvfp4", "local", "skip", True, 0, 200, 200, 1, 1, 72),
    pytest.param(
        ("int8", "block_mean", "promote", True, 0, 200, 200, 2, 1, 256), marks=pytest.mark.slow("a wide head")
    ),
    pytest.param(("nvfp4", "quest", "promote", False, 0, 300, 500, 2, 2, 256), marks=pytest.mark.slow("a wide head")),
]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_kernels_are_the_reference(kernel_device, case):
    base, selector, action, causal, offset, seq_q, seq_kv, heads, kv_heads, head_dim = case
    q, k, v = make_qkv("biased_keys", 1, seq_q, seq_kv, heads, kv_heads, head_dim, dtype=torch.float16)
    options = Mixed(base, selector, 0.3, action)
    out, lse, chosen = launch(q, k, v, kernel_device, options=options, causal=causal, offset=offset)
    assert_as_reference(out, lse, chosen, q, k, v, options=options, causal=causal, offset=offset)
    # as many as the budget says, of blocks that are seen; and none that is clearly less important than one left out
    scores = ref_block_scores(*(x.transpose(1, 2).float() for x in (q, k)), selector, causal, offset) * (
        1 if action == "promote" else -1
    )
    for row in range(chosen.shape[2]):
        assert (chosen[:, :, row].sum(-1) == chosen_a_row(row, seq_q, seq_kv, causal, offset, options)).all()
        seen = visible_blocks(row, seq_q, seq_kv, causal, offset)
        assert not chosen[:, :, row, seen:].any()
    least = torch.where(chosen.bool(), scores, torch.inf).amin(-1)
    if action == "promote":
        seen = torch.stack([torch.arange(chosen.shape[3]) < visible_blocks(i, seq_q, seq_kv, causal, offset)
                            for i in range(chosen.shape[2])])  # fmt: skip
        best = torch.where(seen & ~chosen.bool(), scores, -torch.inf).amax(-1)
        assert (least >= best - 1e-4 * scores.abs().amax()).all()


def test_rows_of_two_blocks_are_chosen_for_together(kernel_device):
    """As data centre Blackwell has it with FP4."""
    q, k, v = make_blocks("clustered", 1, 300, 2, 1, 64, dtype=torch.float16)
    options = Mixed("nvfp4", budget=0.3)
    out, lse, chosen = launch(q, k, v, kernel_device, options=options, causal=True, block_q=128)
    assert chosen.shape == (1, 2, 3, 5)
    assert_as_reference(out, lse, chosen, q, k, v, options=options, causal=True, block_q=128)


def test_of_equal_blocks_the_first_are_chosen(kernel_device):
    q, k, v = make_qkv("normal", 1, 64, 2 * 256 * BLOCK // 8, 1, 1, 64, dtype=torch.float16)  # 64 blocks of keys
    k[:] = k[:, :1]
    for action in ("promote", "skip"):
        options = Mixed("int8", "block_mean", 0.25, action)
        _, _, chosen = launch(q, k, v, kernel_device, options=options)
        assert chosen[0, 0, 0].nonzero()[:, 0].tolist() == list(range(chosen.shape[3] // 4))


def test_skipped_blocks_are_not_read(kernel_device):
    """NaN in their values does not show, and it does once they are kept."""
    q, k, v = make_blocks("clustered", 1, 512, 1, 1, 64, dtype=torch.float16)
    options = Mixed("int8", "block_mean", 0.5, "skip")
    _, _, chosen = launch(q, k, v, kernel_device, options=options)
    row = chosen[0, 0, 0].bool()
    v[:, row.repeat_interleave(BLOCK)] = torch.nan
    out, _, _ = launch(q, k, v, kernel_device, options=options)
    assert out[:, :BLOCK].isfinite().all() and out[:, BLOCK:].isnan().any()


def test_nan_stays_in_its_head(kernel_device):
    for base in ("int8", "nvfp4"):
        q, k, v = make_blocks("clustered", 1, 130, 2, 2, 64, dtype=torch.float16)
        k[0, 100, 1, 3] = torch.nan
        out, lse, _ = launch(q, k, v, kernel_device, options=Mixed(base, budget=0.3))
        assert out[:, :, 0].isfinite().all() and lse[..., 0].isfinite().all()
        assert out[:, :, 1].isnan().all() and lse[..., 1].isnan().all()


def test_nan_in_a_query_stays_in_its_row(kernel_device):
    q, k, v = make_blocks("clustered", 1, 130, 2, 2, 64, dtype=torch.float16)
    q[0, 70, 0, 5] = torch.nan
    out, lse, _ = launch(q, k, v, kernel_device, options=Mixed("int8", "local", 0.3))
    rest = torch.arange(130) != 70
    assert out[:, rest, 0].isfinite().all() and lse[:, rest, 0].isfinite().all() and out[:, :, 1].isfinite().all()
    assert out[:, 70, 0].isnan().all()


def test_strided_inputs_of_any_offset_are_read_where_they_lie(kernel_device):
    fused = torch.randn(1, 130, 3, 4, 64, generator=torch.Generator().manual_seed(0)).half()
    q, k, v = (x[:, :, ::3] for x in fused.unbind(2))
    options = Mixed("int8", budget=0.4)
    strided = launch(q, k, v, kernel_device, options=options)
    dense = launch(*(x.contiguous() for x in (q, k, v)), kernel_device, options=options)
    assert all(torch.equal(a, b) for a, b in zip(strided, dense, strict=True))


@pytest.mark.gpu
@pytest.mark.parametrize("base", BASES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_kernels_are_the_reference_in_other_types(kernel_device, base, dtype):
    q, k, v = make_blocks("clustered", 1, 1000, 4, 2, 128, dtype=dtype)
    for action, causal in (("promote", False), ("skip", True)):
        options = Mixed(base, "block_mean", 0.1, action)
        out, lse, chosen = launch(q, k, v, kernel_device, options=options, causal=causal)
        assert_as_reference(out, lse, chosen, q, k, v, options=options, causal=causal)


@pytest.mark.gpu
def test_the_op_in_poisoned_memory_gives_the_same_bits_again(kernel_device):
    fused = torch.randn(1, 3000, 3, 4, 128, generator=torch.Generator().manual_seed(0)).to(kernel_device).bfloat16()
    q, k, v = fused.unbind(2)
    options = Mixed("int8", budget=0.05)
    first = mixed_attention(q, k, v, options=options, return_lse=True, return_blocks=True)
    assert first[2].shape == (1, 4, -(-3000 // rows_of_block(kernel_device, "int8")), -(-3000 // BLOCK))
    for _ in range(3):
        poison = [torch.full((2**22,), torch.nan, device=kernel_device) for _ in range(8)]
        del poison
        again = mixed_attention(q, k, v, options=options, return_lse=True, return_blocks=True)
        assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))
    assert_as_reference(*(x.cpu() for x in first), *(x.cpu() for x in (q, k, v)), options=options)


@pytest.mark.gpu
def test_a_graph_of_the_op_repeats_its_bits(kernel_device):
    q, k, v = (x.to(kernel_device) for x in make_blocks("clustered", 1, 4000, 2, 1, 128, dtype=torch.bfloat16))
    options = Mixed("int8", budget=0.1)
    expected = mixed_attention(q, k, v, options=options)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = mixed_attention(q, k, v, options=options)
    for _ in range(3):
        out.fill_(torch.nan)
        graph.replay()
        assert torch.equal(out, expected)


@pytest.mark.gpu
@pytest.mark.parametrize("base", list(FP4_GROUPS))
@pytest.mark.parametrize("head_dim", [64, 128])
def test_native_fp4_is_the_reference(kernel_device, base, head_dim):
    if not has_fp4(kernel_device):
        pytest.skip("FP4 matrix units are those of NVIDIA Blackwell")
    q, k, v = make_blocks("clustered", 1, 1000, 4, 2, head_dim, dtype=torch.bfloat16)
    options, rows = Mixed(base, budget=0.1), rows_of_block(kernel_device, base)
    given = {"options": options, "causal": True, "block_q": rows}
    out, lse, chosen = launch(q, k, v, kernel_device, packed_fp4=True, **given)
    assert_as_reference(out, lse, chosen, q, k, v, **given)


# --- the op ---


def test_all_blocks_in_16_bit_are_16_bit_attention():
    q, k, v = make_qkv("biased_keys", 1, 150, 200, 2, 1, 64, dtype=torch.float16)
    out, lse, blocks = mixed_attention(q, k, v, options=Mixed("int4", budget=1.0), return_lse=True, return_blocks=True)
    exact, exact_lse = exact_attention(q, k, v)
    assert blocks.all()
    assert relative_l2(out, exact) <= 2 * torch.finfo(torch.float16).eps and (lse - exact_lse).abs().max() <= 1e-4


def test_int8_without_a_budget_is_the_plain_recipe():
    from sage_kernels import sage_attention

    q, k, v = make_qkv("outlier_channels", 1, 150, 200, 2, 1, 64)
    plain = sage_attention(q, k, v, scaling="per_token")
    assert torch.equal(mixed_attention(q, k, v, options=Mixed("int8", budget=0.0)), plain)


def test_long_calls_are_made_in_pieces_of_whole_blocks(monkeypatch):
    q, k, v = make_blocks("clustered", 1, 300, 2, 1, 64)
    given = {"options": Mixed("int8", budget=0.3), "causal": True, "block_q": 128}
    out, lse, chosen = ref_mixed_attention(q, k, v, **given)
    monkeypatch.setattr("sage_kernels.reference.mixed.rows_at_a_time", lambda *_: 150)
    pieces = ref_mixed_attention(q, k, v, **given)
    assert torch.equal(pieces[2], chosen)
    assert relative_l2(pieces[0], out) <= 1e-6 and (pieces[1] - lse).abs().max() <= 1e-5


def test_rows_without_keys_give_zero():
    q, k, v = make_qkv("normal", 1, 150, 80, 1, 1, 64)
    out, lse = mixed_attention(q, k, v, causal="bottom_right", return_lse=True)
    assert (out[:, :70] == 0).all() and (lse[:, :70] == -torch.inf).all() and lse[:, 70:].isfinite().all()
    out, lse, blocks = mixed_attention(q, k[:, :0], v[:, :0], return_lse=True, return_blocks=True)
    assert (out == 0).all() and (lse == -torch.inf).all() and blocks.shape == (1, 1, 3, 0)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("action", ["promote", "skip"])
def test_share_of_the_blocks_is_known_before(action, causal):
    q, k, v = make_qkv("normal", 1, 700, 700, 1, 1, 32)
    options = Mixed("int8", "local", 0.2, action)
    _, blocks = mixed_attention(q, k, v, options=options, causal=causal, return_blocks=True)
    visible = sum(visible_blocks(i, 700, 700, causal, 0) for i in range(11))
    assert float(blocks.sum()) / visible == pytest.approx(chosen_share(700, 700, causal, 0, options))
    assert abs(float(blocks.sum()) / visible - 0.2) <= 0.1


def test_causal_rows_keep_their_own_key_when_blocks_are_skipped():
    q, k, v = make_qkv("normal", 1, 300, 300, 1, 1, 32)
    for selector in SELECTORS:
        _, lse = mixed_attention(q, k, v, options=Mixed("int8", selector, 1.0, "skip"), causal=True, return_lse=True)
        assert lse.isfinite().all()


@pytest.mark.slow("torch.compile")
def test_compiled_calls_see_one_op():
    q, k, v = make_blocks("clustered", 1, 100, 2, 1, 64)
    options = Mixed("nvfp4", budget=0.2)
    compiled = torch.compile(
        lambda q, k, v: mixed_attention(q, k, v, options=options), backend="eager", fullgraph=True
    )
    assert torch.equal(compiled(q, k, v), mixed_attention(q, k, v, options=options))


def test_what_it_can_not_do_is_said_before_anything_runs():
    q, k, v = make_qkv("normal", 1, 64, 64, 2, 1, 64)
    wide = (x.repeat(1, 1, 1, 5)[..., :300] for x in (q, k, v))
    for error, match, call in (
        (TypeError, "options: got dict", lambda: mixed_attention(q, k, v, options={})),
        (NotImplementedError, "head_dim: got 300", lambda: mixed_attention(*wide)),
        (NotImplementedError, "requires_grad", lambda: mixed_attention(q.clone().requires_grad_(), k, v)),
        (ValueError, "causal: got True with", lambda: mixed_attention(q, k[:, :32], v[:, :32], causal=True)),
        (TypeError, "scale: got Tensor", lambda: mixed_attention(q, k, v, scale=torch.ones(()))),
        (ValueError, "base: got 'fp4'", lambda: Mixed("fp4")),
        (TypeError, "selector: got None", lambda: Mixed(selector=None)),
        (ValueError, "budget: got 1.5", lambda: Mixed(budget=1.5)),
        (ValueError, "budget: got nan", lambda: Mixed(budget=float("nan"))),
        (TypeError, "budget: got bool", lambda: Mixed(budget=True)),
        (ValueError, "action: got 'demote'", lambda: Mixed(action="demote")),
    ):  # fmt: skip
        with pytest.raises(error, match=match):
            call()
    from sage_kernels import sage_attention

    with pytest.raises(ValueError, match="mixed_attention"):
        sage_attention(q, k, v, recipe="mixed")
