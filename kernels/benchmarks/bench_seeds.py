"""Measure the errors of INT-FlashAttention and our recipes on the inputs of its Tables 1 and 2.

    python kernels/benchmarks/bench_seeds.py
    python kernels/benchmarks/bench_seeds.py --seq 1024 --no-save

The reference, which rounds where the kernels do, runs on a CPU; no time is measured. Inputs are two heads in fp16 with
512 query rows (256 of "biased"), compared with fp64 attention. Rows of suite attention_error.

Case: int_flash/{inputs}/{scale}. Inputs: "normal" N(0, 1) and "uniform" U(-0.5, 0.5) as in the paper, "positive" U(0,
1) as in its code, "biased" `sage_kernels.testing.make_biased`, "biased_fp32" the same in fp32. Scale: "sqrt" is 1/√D,
"one" is 1, as in its code. "/per_tensor" is the paper's FP8, with a scale per head and K not centred.

Provider "emulated": the released code of the paper where no recipe does the same, namely P truncated instead of
rounded, and Q, K, V and P cast to e5m2 without a scale.

Metrics: "rel_l1" (with relative L2), "cosine_distance" (1 - cosine), "mre" (mean |error| / (|exact| + 1e-5) over four
neighbouring elements; the paper's benchmark takes this of an output's last four, here median, p20 and p80 are over
all) and, of biased inputs, "centred_l1" (relative to the output minus V's mean, which would hide errors).
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from sage_kernels import sage_attention
from sage_kernels.results import append_row
from sage_kernels.testing import exact_attention, make_biased, relative_l1, relative_l2


RESULTS = Path(__file__).with_name("results.csv")
LENGTHS = (1024, 2048, 4096, 8192, 16384)
ROWS, HEADS = 512, 2
RECIPES = ("int_flash_half", "int_flash_full", "int_flash_full_fp32_sum", "qk_int8_pv_bf16", "qk_int8_pv_int8",
           "qk_int8_pv_fp8", "qk_fp8_pv_fp8")  # fmt: skip
TRUNCATED, E5M2 = "int_flash_full_truncated", "fp8_e5m2_cast"
EMULATED = (TRUNCATED, E5M2)
KEYS = 64  # keys of a tile


def cases(lengths: tuple[int, ...]) -> Iterator[tuple[str, str, int, int]]:
    """Yield (inputs, scale, head_dim, keys)."""
    for seq in lengths:
        for inputs in ("normal", "uniform"):
            yield inputs, "sqrt", 64, seq
            yield inputs, "one", 64, seq
        if seq in (1024, 16384):
            yield "normal", "sqrt", 128, seq
            yield "positive", "one", 128, seq
            yield "biased_fp32", "sqrt", 128, seq
        if seq == 1024:  # with more keys, the error is mostly fp16 rounding of the output, which has V's mean
            yield "biased", "sqrt", 128, seq


def make_inputs(inputs: str, seq: int, head_dim: int) -> tuple[torch.Tensor, ...]:
    """Return q [1, ROWS, HEADS, D] and k, v [1, S_kv, HEADS, D] in fp16, or in fp32 for "biased_fp32"."""
    if inputs.startswith("biased"):
        return tuple(x.to(torch.float32 if inputs == "biased_fp32" else torch.float16) for x in make_biased(seq))
    generator = torch.Generator().manual_seed(0)
    draw = torch.randn if inputs == "normal" else torch.rand
    shift = 0.5 if inputs == "uniform" else 0.0
    rows = min(ROWS, seq)
    q, k, v = (draw(1, tokens, HEADS, head_dim, generator=generator) - shift for tokens in (rows, seq, seq))
    return q.half(), k.half(), v.half()


def emulated(name: str, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float) -> torch.Tensor:
    """Return attention, fp32 [1, R, H, D], as in INT-FlashAttention's released code or its FP8 baseline."""
    q, k, v = (x.float().transpose(1, 2) for x in (q, k, v))
    v_scale = torch.ones(())
    if name == TRUNCATED:
        q_scale, k_scale = (x.abs().amax(3, keepdim=True) / 127 for x in (q, k))
        v_scale = v.abs().amax((2, 3), keepdim=True) / 127
        scores = torch.round(q / q_scale) @ torch.round(k / k_scale).mT * (q_scale * k_scale.mT * scale)
        v = torch.round(v / v_scale)
    else:
        q, k, v = (x.to(torch.float8_e5m2).float() for x in (q, k, v))
        scores = q @ k.mT * scale
    top = torch.full((*scores.shape[:3], 1), -torch.inf)
    total, out = torch.zeros_like(top), torch.zeros_like(q)
    for first in range(0, k.shape[2], KEYS):
        part = scores[..., first : first + KEYS]
        new = torch.maximum(top, part.amax(-1, keepdim=True))
        p = torch.exp(part - new)
        codes = torch.floor(127 * p) / 127 if name == TRUNCATED else p.to(torch.float8_e5m2).float()
        rescale = torch.exp(top - new)
        total = total * rescale + p.sum(-1, keepdim=True)
        out = out * rescale + codes @ v[:, :, first : first + KEYS]
        top = new
    return (out / total * v_scale).transpose(1, 2)


def outputs(q, k, v, scale: float) -> Iterator[tuple[str, str, str, torch.Tensor]]:
    """Yield (provider, recipe, suffix of the case, output)."""
    for recipe in RECIPES:
        yield "sage_kernels", recipe, "", sage_attention(q, k, v, recipe=recipe, scale=scale)
    baseline = sage_attention(q, k, v, recipe="qk_fp8_pv_fp8", scale=scale, scaling="per_head", smooth_k=False)
    yield "sage_kernels", "qk_fp8_pv_fp8", "/per_tensor", baseline
    for name in EMULATED:
        yield "emulated", name, "", emulated(name, q, k, v, scale)


def errors(out: torch.Tensor, exact: torch.Tensor, center: torch.Tensor | None = None) -> list[dict[str, Any]]:
    """Return metric, unit and values for the rows of one output. center: V's mean, for "centred_l1"."""
    out = out.double()
    cosine = torch.nn.functional.cosine_similarity(out.flatten(), exact.flatten(), 0)
    mre = ((out - exact).abs() / (exact.abs() + 1e-5)).flatten().unflatten(0, (-1, 4)).mean(1)
    low, middle, high = (f"{float(x):.5g}" for x in torch.quantile(mre, torch.tensor([0.2, 0.5, 0.8]).double()))
    l1, l2 = float(relative_l1(out, exact)), float(relative_l2(out, exact))
    centred = [] if center is None else [float((out - exact).abs().sum() / (exact - center).abs().sum())]
    return [
        *({"metric": "centred_l1", "unit": "1", "median": f"{error:.5f}"} for error in centred),
        {"metric": "rel_l1", "unit": "1", "median": f"{l1:.5f}", "rel_l2_error": f"{l2:.5f}"},
        {"metric": "cosine_distance", "unit": "1", "median": f"{float(1 - cosine):.3g}"},
        {"metric": "mre", "unit": "1", "median": middle, "p20": low, "p80": high},
    ]


def measure(inputs: str, scale: str, head_dim: int, seq: int, save: bool) -> None:
    q, k, v = make_inputs(inputs, seq, head_dim)
    factor = head_dim**-0.5 if scale == "sqrt" else 1.0
    exact, _ = exact_attention(q, k, v, scale=factor)
    for provider, recipe, behind, out in outputs(q, k, v, factor):
        case = f"int_flash/{inputs}/{scale}{behind}"
        found = errors(out, exact, v.double().mean(1, keepdim=True) if "biased" in inputs else None)
        print(f"{case:36} {seq:6} D{head_dim:<4} {recipe:26}", *(f"{x['metric']} {x['median']}" for x in found))
        for columns in found if save else ():
            append_row(
                RESULTS, suite="attention_error", case=case, provider=provider, recipe=recipe, batch=1,
                heads=HEADS, kv_heads=HEADS, seq_q=q.shape[1], seq_k=seq, head_dim=head_dim, causal=False, **columns,
            )  # fmt: skip


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seq", type=int, action="append", help="keys; may be repeated; 1024 to 16384 by default")
    parser.add_argument("--no-save", action="store_true", help="print only, append nothing to results.csv")
    arguments = parser.parse_args()
    for inputs, scale, head_dim, seq in cases(tuple(arguments.seq or LENGTHS)):
        measure(inputs, scale, head_dim, seq, not arguments.no_save)
    return 0


if __name__ == "__main__":
    sys.exit(main())
