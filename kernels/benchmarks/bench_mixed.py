"""Measure the error of mixed precision, or with --time its speed, with rows in results.csv.

    python kernels/benchmarks/bench_mixed.py
    python kernels/benchmarks/bench_mixed.py --seq 16384 --family clustered --base nvfp4
    python kernels/benchmarks/bench_mixed.py --family clustered --base int8 --rows 192
    python kernels/benchmarks/bench_mixed.py --time --seq 8192

Errors are relative L1 and L2 of the reference, which rounds where the kernels do, against fp64 attention, on a CPU.
Inputs are one head with head_dim 128 in fp16, of each family in sage_kernels.testing. Case:
mixed/{family}/{base}/{selector}/{budget}. Budget 0 is the base format alone. Selector "thrift" is block_mean with P·V
of ordinary blocks in FP4 and K not centred, as in ThriftAttention. "/{rows}_rows" is added for blocks of other than 64
query rows.

--time: on a GPU, the INT8 base at 0 and 5 %, beside the plain recipe with a scale per token and PyTorch's 16-bit
attention, by bench.py's gate and clock, with 16 heads in bf16. Quantisation and selection are included.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import torch

from sage_kernels import DEFAULT_RECIPE, Mixed, mixed_attention, sage_attention
from sage_kernels.facts.recipe import BASES, BLOCK, FP4_GROUPS, MIXED_RECIPE, SELECTORS
from sage_kernels.reference import ref_mixed_attention
from sage_kernels.results import append_row
from sage_kernels.testing import BLOCK_FAMILIES, exact_attention, make_blocks, relative_l1, relative_l2


RESULTS = Path(__file__).with_name("results.csv")
HEAD_DIM = 128
BUDGETS = (0.0, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5)
THRIFT = "thrift"


def variants(bases: tuple[str, ...] = BASES) -> Iterator[tuple[str, str, float]]:
    """Yield (base, selector, budget) for every base at 0 and 5 %, and more of them for NVFP4."""
    for base in bases:
        for budget in BUDGETS if base == "nvfp4" else (0.0, 0.05):
            yield base, "block_mean", budget
    if "nvfp4" not in bases:
        return
    for selector in SELECTORS[1:]:
        yield "nvfp4", selector, 0.05
    for budget in (0.0, 0.05):
        yield "nvfp4", THRIFT, budget


def measure(family: str, seq: int, save: bool, bases: tuple[str, ...] = BASES, rows: int = BLOCK) -> None:
    q, k, v = make_blocks(family, 1, seq, 1, 1, HEAD_DIM, dtype=torch.float16)
    exact = torch.cat([exact_attention(rows, k, v)[0] for rows in q.split(1024, 1)], 1)
    for base, selector, budget in variants(bases):
        thrift = selector == THRIFT
        options = Mixed(base, "block_mean" if thrift else selector, budget)
        study = {"pv": "fp4", "smooth_k": False} if thrift and base in FP4_GROUPS else {}
        out, _, _ = ref_mixed_attention(q, k, v, options=options, block_q=rows, **study)
        l1, l2 = float(relative_l1(out, exact)), float(relative_l2(out, exact))
        case = f"mixed/{family}/{base}/{selector}/{budget:g}" + (f"/{rows}_rows" if rows != BLOCK else "")
        print(f"{case:50} relative L1 {l1:.5f}  L2 {l2:.5f}", flush=True)
        if save:
            append_row(
                RESULTS, suite="attention_error", case=case, provider="sage_kernels", recipe=MIXED_RECIPE, batch=1,
                heads=1, kv_heads=1, seq_q=seq, seq_k=seq, head_dim=HEAD_DIM, causal=False, metric="rel_l1", unit="1",
                median=f"{l1:.5f}", rel_l2_error=f"{l2:.5f}",
            )  # fmt: skip


def time_calls(seq: int, save: bool) -> int:
    """Time mixed precision for suite attention_fwd. Returns the number of providers that failed the gate."""
    from bench import SDPBackend, gate, make_sets, race, torch_sdpa
    from cases import Case

    case = Case(f"D{HEAD_DIM}_N{seq}_full_BH16", 1, seq, seq, 16, 16, HEAD_DIM)
    offered = [
        ("torch_sdpa_cudnn", "", "", torch_sdpa(case, SDPBackend.CUDNN_ATTENTION)),
        ("sage_kernels", "/per_token", DEFAULT_RECIPE, sage_attention),
    ]
    for budget in (0.0, 0.05):
        call = partial(mixed_attention, options=Mixed("int8", budget=budget))
        offered.append(("sage_kernels", f"/int8/{budget:g}", MIXED_RECIPE, call))
    sets = make_sets(case)
    entrants, failures = gate(case, sets[0], offered)
    race(case, entrants, sets, save)
    return len(failures)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seq", type=int, default=4096)
    parser.add_argument("--family", choices=BLOCK_FAMILIES, action="append", help="may be repeated; all by default")
    parser.add_argument("--base", choices=BASES, action="append", help="may be repeated; all by default")
    parser.add_argument("--rows", type=int, default=BLOCK, help="query rows of a block")
    parser.add_argument("--no-save", action="store_true", help="print only, append nothing to results.csv")
    parser.add_argument("--time", action="store_true", help="time calls on a GPU in place of all else")
    arguments = parser.parse_args()
    if arguments.time:
        return min(1, time_calls(arguments.seq, not arguments.no_save))
    for family in arguments.family or BLOCK_FAMILIES:
        measure(family, arguments.seq, not arguments.no_save, tuple(arguments.base or BASES), arguments.rows)
    return 0


if __name__ == "__main__":
    sys.exit(main())
