"""Time every recipe on the same inputs, beside PyTorch's attention in 16 bit.

    python kernels/benchmarks/bench_recipes.py
    python kernels/benchmarks/bench_recipes.py --recipe qk_int8_pv_int8 --recipe qk_int8_pv_bf16 --no-save

Gate, clock and rows are those of bench.py. Times include the computation of scales and centres, and quantisation.
Recipes that can be planned run with a plan, and without one as "/per_token" or "/per_block". qk_int8_pv_fp8 takes its
row maxima from the call before.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from functools import partial

from bench import gate, make_sets, planned_attention, race, run_cases, torch_sdpa
from cases import Case, square
from torch.nn.attention import SDPBackend

from sage_kernels import RECIPES, sage_attention


CASES = [
    *(square(128, seq) for seq in (4096, 8192, 16384)),
    *(square(64, seq) for seq in (4096, 16384)),
    *(square(128, seq, causal=True) for seq in (8192, 16384)),
]


def offered(case: Case, inputs, recipes):
    """Yield cuDNN, flash, and each recipe with and without a plan, in the form of `bench.providers`."""
    causal = {"causal": "bottom_right"} if case.causal else {}
    yield "torch_sdpa_cudnn", "", "", torch_sdpa(case, SDPBackend.CUDNN_ATTENTION, **causal)
    yield "torch_sdpa_flash", "", "", torch_sdpa(case, SDPBackend.FLASH_ATTENTION, **causal)
    for name in recipes:
        recipe = RECIPES[name]
        if not recipe.plain:
            yield (
                "sage_kernels", "", name,
                planned_attention(case, *inputs, lagged=recipe.keeps_rows, recipe=name, **causal),
            )  # fmt: skip
        scaling = recipe.scalings[-1] if recipe.plain else "per_block"
        yield "sage_kernels", f"/{scaling}", name, partial(sage_attention, recipe=name, scaling=scaling, **causal)


def run_case(case: Case, save: bool, recipes: Sequence[str]) -> list[str]:
    sets = make_sets(case)
    entrants, failures = gate(case, sets[0], offered(case, sets[0], recipes))
    race(case, entrants, sets, save)
    return failures


if __name__ == "__main__":
    sys.exit(run_cases(__doc__, CASES, run_case, list(RECIPES)))
