"""Time attention with random key tiles skipped, and the measuring that skipping needs.

    python kernels/benchmarks/bench_skip.py
    python kernels/benchmarks/bench_skip.py --no-save

"/skip0", "/skip50" and "/skip75" have lists that leave out this percentage of the key tiles at random, for every query
tile, and measure nothing. "/skip50_compensated" has these tiles in the softmax as mean keys. "/measuring" visits all
tiles and measures one query tile of 8 in each call, as in most steps of a run; "/measuring_all" measures all of them,
as in the first step. Beside them run the same recipe without lists, and PyTorch's attention in 16 bit. FP8 takes the
row maxima of the call before, as in later steps of a run. FLOPs are those of all tiles, skipped ones included.

Rows of 50 % and 0 % of both recipes, beside cuDNN and the recipe without lists, are written first, the others later.
Kernels of all of them compile in parallel meanwhile.
"""

from __future__ import annotations

import dataclasses
import sys

import torch
from bench import (
    FP8_RECIPE,
    GATE_ROWS,
    Entrant,
    exact_rows,
    gate,
    make_sets,
    planned_attention,
    race,
    run_cases,
    torch_sdpa,
)
from cases import Case
from random_lists import EVERY, Shape, attend_listed, random_lists
from torch.nn.attention import SDPBackend

from sage_kernels import DEFAULT_RECIPE, sage_attention
from sage_kernels.facts.skipping import SkipState
from sage_kernels.ops.warm_up import LONG, CallKind, compile_ahead
from sage_kernels.planning.state import ScaleState, Site


CASES = [Case("wan21_1_3b_480p81_self", 1, 32760, 32760, 12, 12, 128)]
# suffix of the case's name: share of the key tiles that are left out, steps that the clock advances in a call
FIRST = {"/skip50": (0.5, 0), "/skip50_compensated": (0.5, 0), "/skip0": (0.0, 0)}
LATER = {"/skip75": (0.75, 0), "/measuring": (0.0, 1), "/measuring_all": (0.0, EVERY)}


def calling(case: Case, lists: SkipState, recipe: str, q, k, v, steps: int = 0):
    """Return attention with a plan and these lists. steps: the lists' clock advance per call."""
    scales = ScaleState([Site("bench", case.kv_heads, case.head_dim)], device=q.device)
    maxima: dict[int, torch.Tensor] = {}  # for each set of inputs: a step sees nearly the rows of the step before

    def run(q, k, v):
        state, known = scales.head_state(0), q.data_ptr() in maxima
        if recipe == FP8_RECIPE:
            if not known:
                maxima[q.data_ptr()] = q.new_empty(case.batch, case.heads, case.seq_q, dtype=torch.float32)
            state = state.keeping(maxima[q.data_ptr()], known)
        out = sage_attention(q, k, v, state=state, recipe=recipe, skip=lists)
        if steps:
            lists.now.add_(steps)
        return out

    run(q, k, v)
    scales.advance(1.0, 0.9)
    run.scales = scales
    return run


def listed(case: Case, suffix: str, recipe: str, inputs) -> tuple[list[Entrant], list[str]]:
    """Return the entrant for a suffix in FIRST or LATER, if it passed the gate, and the failures."""
    share, steps = (FIRST | LATER)[suffix]
    shape = Shape(case.batch, case.heads, case.seq_q, case.seq_kv, case.head_dim)
    lists = random_lists(shape, share, recipe, inputs[0].device, suffix.endswith("compensated"))
    first = max(0, case.seq_q - GATE_ROWS)
    exact = attend_listed(*inputs, lists, first) if share else exact_rows(case, *inputs)
    if steps:
        lists.limit.fill_(1e-30)  # tiles are measured, but none has so little probability
    return gate(case, inputs, [("sage_kernels", suffix, recipe, calling(case, lists, recipe, *inputs, steps))], exact)


def run_case(case: Case, save: bool) -> list[str]:
    recipes = [DEFAULT_RECIPE]
    if torch.version.hip is None and torch.cuda.get_device_capability() >= (8, 9):
        recipes.append(FP8_RECIPE)
    for recipe in recipes:  # recipe by recipe, so that the first row waits for few kernels
        kind = CallKind(torch.bfloat16, case.head_dim, recipe, keeps_rows=True, skips=True, tokens=(LONG,))
        compile_ahead([kind, kind._replace(compensates=True)], torch.device("cuda", torch.cuda.current_device()))
    sets = make_sets(case)
    cudnn, failures = gate(case, sets[0], [("torch_sdpa_cudnn", "", "", torch_sdpa(case, SDPBackend.CUDNN_ATTENTION))])
    rest: list[Entrant] = []
    for turn, recipe in enumerate(recipes):
        function = planned_attention(case, *sets[0], lagged=recipe == FP8_RECIPE, recipe=recipe)
        entrants, failed = gate(case, sets[0], [("sage_kernels", "", recipe, function)])
        entrants, failures = [*again(cudnn), *entrants], failures + failed
        for suffix in FIRST:
            passed, failed = listed(case, suffix, recipe, sets[0])
            entrants, failures = entrants + passed, failures + failed
        race(case, entrants, sets, save, pacers=len(cudnn) if turn else 0)
    for recipe in recipes:
        for suffix in LATER:
            passed, failed = listed(case, suffix, recipe, sets[0])
            rest, failures = rest + passed, failures + failed
    race(case, [*again(cudnn), *rest], sets, save, pacers=len(cudnn))
    return failures


def again(entrants: list[Entrant]) -> list[Entrant]:
    """Return the entrants without their times, taken in another group and state of the GPU."""
    return [dataclasses.replace(entrant, times=[]) for entrant in entrants]


if __name__ == "__main__":
    sys.exit(run_cases(__doc__, CASES, run_case))
