"""Time the prologue of attention as bandwidth, beside a device copy in the same run.

    python kernels/benchmarks/bench_prologue.py
    python kernels/benchmarks/bench_prologue.py --no-save

K is read in 16 bit and written in 8, three bytes per element; with FP8 P·V, so is V. The copy reads and writes 16 bit.
`timestep` is a call with a plan. Only bytes that must move are counted. Rows of suite prologue.
"""

from __future__ import annotations

import sys

import torch
import triton
from bench import FP8_RECIPE, GATE_ROWS, MAX_ERROR, RESULTS, exact_rows, make_inputs, run_cases
from cases import Case, square

from sage_kernels import DEFAULT_RECIPE, RECIPES, sage_attention
from sage_kernels._triton.attention.launch import device_tile
from sage_kernels._triton.prologue.mask_tiles import launch_mask_tiles
from sage_kernels._triton.prologue.prologue import launch_prologue
from sage_kernels.facts.masking import NO_MASKING
from sage_kernels.planning.state import ScaleState, Site
from sage_kernels.results import append_row
from sage_kernels.testing import relative_l2


CASES = [square(head_dim, seq) for head_dim in (128, 64) for seq in (4096, 16384, 32768)]


def prologues(case: Case, q, k, v):
    """Yield (recipe, scaling, state of the plan or None, function, bytes it must move per element of K)."""
    width = case.head_dim
    mask = launch_mask_tiles(NO_MASKING, case.heads, case.kv_heads, case.seq_q, case.seq_kv, 128, 128)
    for recipe in (DEFAULT_RECIPE, FP8_RECIPE):
        scales = ScaleState([Site("bench", case.kv_heads, case.head_dim)], device=q.device)
        state = scales.head_state(0)
        sage_attention(q, k, v, state=state, recipe=recipe)
        scales.advance(1.0, 0.9)
        for scaling in ("planned", "per_block", "per_token"):
            planned = state if scaling == "planned" else None
            block_n = device_tile(q.device, width, scaling, pv=RECIPES[recipe].pv, lagged=planned is not None).block_n

            values = v if RECIPES[recipe].pv != "16bit" else None

            def prepare(scaling=scaling, planned=planned, block_n=block_n, values=values):
                return launch_prologue(
                    q, k, values, scaling=scaling, smooth_k=True, state=planned, mask=mask, return_center=False,
                    block_n=block_n, width=width, rotation="none",
                )  # fmt: skip

            yield recipe, scaling, planned, prepare, 3 if values is None else 6


def run_case(case: Case, save: bool) -> list[str]:
    q, k, v = make_inputs(case, torch.bfloat16)
    exact = exact_rows(case, q, k, v)
    target = torch.empty_like(k)
    failures = []

    def row(provider, recipe, suffix, milliseconds, nbytes, error):
        p20, median, p80 = (nbytes / ms / 1e9 for ms in reversed(milliseconds))
        print(f"{case.name + suffix:34} {provider:14} {recipe:16} {median:6.2f} TB/s", flush=True)
        if save:
            append_row(
                RESULTS, suite="prologue", case=case.name + suffix, provider=provider, recipe=recipe,
                batch=case.batch, heads=case.heads, kv_heads=case.kv_heads, seq_q=case.seq_q, seq_k=case.seq_kv,
                head_dim=case.head_dim, causal=case.causal, includes_quantization=provider == "sage_kernels",
                metric="bandwidth", unit="TB_s", median=f"{median:.3f}", p20=f"{p20:.3f}", p80=f"{p80:.3f}",
                ratio_vs_cudnn="", rel_l2_error=error,
            )  # fmt: skip

    def clock(function):
        return triton.testing.do_bench(function, warmup=30, rep=150, quantiles=[0.2, 0.5, 0.8])

    row("device_copy", "", "", clock(lambda: target.copy_(k)), 4 * k.numel(), "")
    for recipe, scaling, state, function, bytes_an_element in prologues(case, q, k, v):
        how = {"state": state} if state is not None else {"scaling": scaling}
        error = float(relative_l2(sage_attention(q, k, v, recipe=recipe, **how)[:, -GATE_ROWS:], exact))
        if not error <= MAX_ERROR[RECIPES[recipe].pv]:
            failures.append(f"{case.name} {recipe} {scaling}: relative L2 {error:.3g}")
            print(f"FAILED {failures[-1]}", flush=True)
            continue
        suffix = "/timestep" if scaling == "planned" else f"/{scaling}"
        row("sage_kernels", recipe, suffix, clock(function), bytes_an_element * k.numel(), f"{error:.5f}")
    return failures


if __name__ == "__main__":
    sys.exit(run_cases(__doc__, CASES, run_case))
