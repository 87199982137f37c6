"""Time attention's loop with each way from INT32 scores to the softmax's exponent (kernels/NOTES.md), in turns.

    python kernels/benchmarks/bench_conversions.py
    python kernels/benchmarks/bench_conversions.py --no-save

16,384 keys of 64 channels, which all programs share: codes, scales and V stay in the cache, so the loop is timed.
FLOPs are those of both products.
"""

from __future__ import annotations

import sys

import torch
import triton
from bench import RESULTS, ROUNDS, quintiles, run_cases
from cases import Case
from conversion_ways import WAYS, conversion_kernel

from sage_kernels.results import append_row


TILE, CHANNELS, KEYS, PROGRAMS = 64, 64, 16384, 132 * 32
CASES = [Case("D64_N16384_full/conversions", 1, PROGRAMS * TILE, KEYS, 1, 1, CHANNELS)]
Q_SCALE = 1.4427 / CHANNELS**0.5 / 32**2  # scores of N(0, 1) in base 2, of codes that are 32 times as large
MAX_ERROR = 0.004  # relative L2 of P and of the output in bf16
EXACT_ROWS = 512


def make_inputs(case: Case) -> dict[str, torch.Tensor]:
    """Codes of Q and K, a scale for each tile of keys, V, and room for the output, which is poisoned."""

    def codes(tokens):
        return (torch.randn(tokens, case.head_dim, device="cuda") * 32).round().clamp(-127, 127).to(torch.int8)

    return {
        "q": codes(case.seq_q),
        "k": codes(case.seq_kv),
        "v": torch.randn(case.seq_kv, case.head_dim, device="cuda", dtype=torch.bfloat16),
        "k_scale": torch.rand(case.seq_kv // TILE, device="cuda") + 0.5,
        "out": torch.full((case.seq_q, case.head_dim), torch.nan, device="cuda"),
    }


def attend(inputs: dict[str, torch.Tensor], way: str) -> None:
    q, k = inputs["q"], inputs["k"]
    conversion_kernel[(q.shape[0] // TILE,)](
        q, k, inputs["v"], inputs["k_scale"], inputs["out"], Q_SCALE, k.shape[0] // TILE, WAY=way, D=q.shape[1],
        M=TILE, N=TILE, num_warps=4, enable_fp_fusion=False,
    )  # fmt: skip


def error_of(inputs: dict[str, torch.Tensor], way: str) -> float:
    """Relative L2 of the last rows against attention of the same codes in fp64."""
    inputs["out"].fill_(torch.nan)
    attend(inputs, way)
    scales = inputs["k_scale"].double().repeat_interleave(TILE) * Q_SCALE
    scores = inputs["q"][-EXACT_ROWS:].double() @ inputs["k"].double().T * scales
    weights = torch.exp2(scores - scores.amax(-1, keepdim=True))
    exact = weights @ inputs["v"].double() / weights.sum(-1, keepdim=True)
    assert not inputs["out"].isnan().any(), f"{way}: left rows of the output unwritten, or they are NaN"
    return float((inputs["out"][-EXACT_ROWS:].double() - exact).norm() / exact.norm())


def run_case(case: Case, save: bool) -> list[str]:
    """Gate and time every way on `case`. Returns the failures."""
    inputs = make_inputs(case)
    errors = {way: error_of(inputs, way) for way in WAYS}
    passed = [way for way in WAYS if errors[way] <= MAX_ERROR]
    times: dict[str, list[float]] = {way: [] for way in passed}
    for _ in range(ROUNDS):
        for way in passed:
            times[way] += triton.testing.do_bench(
                lambda way=way: attend(inputs, way), warmup=25, rep=case.rep // ROUNDS, return_mode="all"
            )
    flops = 4 * case.seq_q * case.seq_kv * case.head_dim
    for way in passed:
        p20, median, p80 = quintiles(times[way])
        tflops = [f"{flops / ms / 1e9:.1f}" for ms in (median, p80, p20)]
        print(f"{case.name}/{way:20} {tflops[0]:>7} TFLOPS  {errors[way]:.5f}", flush=True)
        if save:
            append_row(
                RESULTS, suite="attention_fwd", case=f"{case.name}/{way}", provider="conversion_study", batch=1,
                heads=1, kv_heads=1, seq_q=case.seq_q, seq_k=case.seq_kv, head_dim=case.head_dim, causal=False,
                includes_quantization=False, metric="throughput", unit="TFLOPS", median=tflops[0], p20=tflops[1],
                p80=tflops[2], rel_l2_error=f"{errors[way]:.5f}",
            )  # fmt: skip
    return [f"{case.name}/{way}: relative L2 {errors[way]:.5f} above {MAX_ERROR}" for way in WAYS if way not in passed]


if __name__ == "__main__":
    sys.exit(run_cases(__doc__, CASES, run_case))
