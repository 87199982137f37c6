"""FlashAttention's own grid: head dims, lengths, causality, masks, head groups and dtypes, kernel against reference.

The bar is FlashAttention's rule (testing.assert_matches_reference) with the same-quantisation reference in the place
of its fp32 one. One test runs the 27 cases that share compiled kernels; `pytest -n 8` spreads the tests. On a GPU the
reference runs there too (its codes are the same, see there), or 4096 tokens would take minutes.
"""

from __future__ import annotations

import pytest
import torch

from tests.kernels.attention.attention_cases import FP8, Attend, key_padding, normal, runs_fp8


HEAD_DIMS = (40, 64, 72, 96, 128, 160, 256)
LENGTHS = ((1, 1), (63, 63), (64, 64), (65, 65), (113, 203), (128, 217), (640, 640), (1025, 1025), (4096, 4096))
MODES = ("full", "top_left", "bottom_right", "key padding", "bias")
HEADS = {"MHA": (2, 2), "GQA": (4, 2), "MQA": (3, 1)}


def options_of(mode, batch, seq_q, seq_kv, heads, dtype):
    if mode == "full":
        return {}
    if mode == "key padding":  # each sample has its own length
        return {"attn_mask": key_padding([seq_kv - b * (seq_kv // 4) for b in range(batch)], seq_kv)}
    if mode == "bias":
        generator = torch.Generator().manual_seed(0)
        return {"attn_mask": torch.randn(1, heads, seq_q, seq_kv, generator=generator).to(dtype)}
    return {"causal": mode}


def run_grid(attend: Attend, head_dim, mode, dtype, lengths, groups):
    """Every case of one head dim, mode and dtype; the failures together. Planned scales as well where heads share."""
    failures, cases = [], 0
    for seq_q, seq_kv in lengths:
        for name in groups:
            heads, kv_heads = HEADS[name]
            batch = 2 if seq_kv < 1025 else 1
            q, k, v = normal(batch, seq_q, seq_kv, heads, kv_heads, head_dim, dtype=dtype, seed=seq_q)
            options = options_of(mode, batch, seq_q, seq_kv, heads, dtype)
            runs = [{"scaling": "per_token"}]
            if name == "GQA" and dtype == torch.bfloat16:
                runs.append({"state": attend.planned(q, k, v, **options)})
            if name == "GQA" and dtype == torch.float16 and runs_fp8(attend.tier):
                runs.append({"recipe": FP8, "scaling": "per_block"})
            for run in runs:
                cases += 1
                try:
                    attend.check(q, k, v, **options, **run)
                except AssertionError as error:
                    failures.append(f"S=({seq_q}, {seq_kv}) {name} {next(iter(run))}: {error}")
    assert not failures, f"{len(failures)} of {cases}:\n" + "\n".join(failures)


@pytest.mark.gpu
@pytest.mark.parametrize("tier", ["cuda"], indirect=True)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=["fp16", "bf16"])
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("head_dim", HEAD_DIMS[::-1])  # the slowest first, so that no worker ends with them
def test_grid_kernel_is_within_flash_attentions_rule(head_dim, mode, dtype, attend):
    attend.reference_device = attend.device
    run_grid(attend, head_dim, mode, dtype, LENGTHS[::-1], HEADS)
