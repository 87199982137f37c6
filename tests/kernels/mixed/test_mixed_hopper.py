"""Mixed attention in the Hopper kernel, whose blocks have 192 query rows: against the same-quantisation reference."""

from __future__ import annotations

import pytest
import torch

from sage_kernels import Mixed, mixed_attention
from sage_kernels.facts.block_budget import HOPPER_ROWS, chosen_a_row, rows_of_block
from sage_kernels.testing import make_blocks, make_qkv
from tests.kernels.mixed.mixed_cases import assert_as_reference, launch


pytestmark = pytest.mark.gpu
HALF, BF16, FLOAT = torch.float16, torch.bfloat16, torch.float32


@pytest.fixture
def hopper():
    if not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("needs a Hopper GPU")
    device = torch.device("cuda")
    if rows_of_block(device, "int8", 128) != HOPPER_ROWS:
        pytest.skip("needs a Triton that has Gluon")
    return device


CASES = [
    # selector, action, budget, causal, offset, S_q, S_kv, heads, kv_heads, D, dtype
    ("block_mean", "promote", 0.05, False, 0, 1000, 1000, 4, 2, 128, BF16),
    ("block_mean", "promote", 0.3, False, 0, 200, 333, 2, 1, 64, HALF),
    ("quest", "promote", 0.1, False, 0, 500, 4097, 2, 1, 128, HALF),  # cut along the keys
    ("block_mean", "promote", 0.1, False, 0, 193, 4500, 3, 3, 80, BF16),  # so, and a padded head
    ("local", "promote", 0.6, False, 0, 193, 4500, 1, 1, 128, BF16),  # so, and pieces that begin with promoted ones
    ("local", "promote", 0.3, True, 70, 130, 200, 4, 2, 64, HALF),
    ("block_mean", "promote", 0.2, True, 0, 777, 777, 2, 1, 128, BF16),
    ("quest", "skip", 0.3, True, 0, 660, 660, 1, 1, 80, HALF),
    ("block_mean", "skip", 0.5, False, 0, 64, 2571, 1, 1, 40, BF16),
    ("block_mean", "promote", 0.1, True, -40, 500, 190, 2, 1, 64, BF16),  # rows that see nothing
    ("block_mean", "promote", 0.1, True, -400, 800, 390, 1, 1, 128, HALF),  # tiles that see nothing
    ("block_mean", "promote", 0.0, False, 0, 300, 500, 2, 2, 128, BF16),
    ("block_mean", "promote", 1.0, False, 0, 300, 2500, 2, 2, 128, BF16),
    ("block_mean", "promote", 1.0, True, 0, 300, 300, 2, 2, 64, HALF),
    ("local", "promote", 0.5, False, 0, 300, 1, 1, 1, 128, BF16),
    ("block_mean", "promote", 0.1, False, 0, 1000, 1000, 2, 1, 128, FLOAT),
]


@pytest.mark.parametrize("case", CASES, ids=lambda case: "-".join(str(x).removeprefix("torch.") for x in case))
def test_it_is_the_reference(hopper, case):
    selector, action, budget, causal, offset, seq_q, seq_kv, heads, kv_heads, head_dim, dtype = case
    q, k, v = make_qkv("biased_keys", 2, seq_q, seq_kv, heads, kv_heads, head_dim, dtype=dtype)
    options = Mixed("int8", selector, budget, action)
    given = {"options": options, "causal": causal, "offset": offset, "block_q": HOPPER_ROWS}
    out, lse, chosen = launch(q, k, v, hopper, **given)
    for row in range(chosen.shape[2]):
        wanted = chosen_a_row(row, seq_q, seq_kv, causal, offset, options, HOPPER_ROWS)
        assert (chosen[:, :, row].sum(-1) == wanted).all()
    assert_as_reference(out, lse, chosen, q, k, v, **given)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("seq", [700, 4200])  # of the second, tiles are cut along the keys
def test_rows_whose_scores_outgrow_the_first_tiles_are_done_again(hopper, seq, causal):
    """P in fp16 has no room for probabilities 2^16 times those of the first tile."""
    q, k, v = make_qkv("normal", 1, seq, seq, 2, 1, 128, dtype=HALF)
    k[:, :64] *= 0.01
    q[:, 100:, :1] *= 8
    options = Mixed("int8", "local", 0.1)
    given = {"options": options, "causal": causal, "block_q": HOPPER_ROWS}
    out, lse, chosen = launch(q, k, v, hopper, **given)
    assert (lse[:, 200:, 0] > 30).any()
    assert_as_reference(out, lse, chosen, q, k, v, **given)


def test_nan_stays_in_its_head_and_in_its_row(hopper):
    q, k, v = make_blocks("clustered", 1, 1030, 2, 2, 64, dtype=HALF)
    k[0, 100, 1, 3] = torch.nan
    q[0, 300, 0, 5] = torch.nan
    out, lse, _ = launch(q, k, v, hopper, options=Mixed("int8", "local", 0.3), block_q=HOPPER_ROWS)
    rest = torch.arange(1030) != 300
    assert out[:, rest, 0].isfinite().all() and lse[:, rest, 0].isfinite().all()
    assert out[:, 300, 0].isnan().all() and out[:, :, 1].isnan().all() and lse[..., 1].isnan().all()


def test_skipped_blocks_are_not_read(hopper):
    q, k, v = make_blocks("clustered", 1, 768, 1, 1, 64, dtype=HALF)
    options = Mixed("int8", "block_mean", 0.5, "skip")
    _, _, chosen = launch(q, k, v, hopper, options=options, block_q=HOPPER_ROWS)
    v[:, chosen[0, 0, 0].bool().repeat_interleave(64)] = torch.nan
    out, _, _ = launch(q, k, v, hopper, options=options, block_q=HOPPER_ROWS)
    assert out[:, :HOPPER_ROWS].isfinite().all() and out[:, HOPPER_ROWS:].isnan().any()


def test_the_op_runs_it_in_poisoned_memory_and_again_gives_the_same_bits(hopper):
    fused = torch.randn(1, 3000, 3, 4, 128, generator=torch.Generator().manual_seed(0)).to(hopper, BF16)
    q, k, v = fused.unbind(2)
    options = Mixed("int8", budget=0.05)
    first = mixed_attention(q, k, v, options=options, return_lse=True, return_blocks=True)
    assert first[2].shape == (1, 4, -(-3000 // HOPPER_ROWS), -(-3000 // 64))
    for _ in range(3):
        poison = [torch.full((2**22,), torch.nan, device=hopper) for _ in range(8)]
        del poison
        again = mixed_attention(q, k, v, options=options, return_lse=True, return_blocks=True)
        assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))
    given = {"options": options, "block_q": HOPPER_ROWS}
    assert_as_reference(*(x.cpu() for x in first), *(x.cpu() for x in (q, k, v)), **given)


def test_a_graph_of_it_counts_arrivals_anew(hopper):
    """Programs that share a tile count in memory that the selection has zeroed, in each replay."""
    q, k, v = (x.to(hopper) for x in make_blocks("clustered", 1, 4000, 2, 1, 128, dtype=BF16))
    options = Mixed("int8", budget=0.1)
    expected = mixed_attention(q, k, v, options=options)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = mixed_attention(q, k, v, options=options)
    for _ in range(3):
        out.fill_(torch.nan)
        graph.replay()
        assert torch.equal(out, expected)
