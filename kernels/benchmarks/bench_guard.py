"""Time the guard of a fixed softmax reference in the Hopper kernel, with rows in results.csv.

    python kernels/benchmarks/bench_guard.py
    python kernels/benchmarks/bench_guard.py --case flux_2048 --no-save

The Hopper kernel runs with a plan, from CUDA graphs, in turns with cuDNN:
* guarded: as shipped. After its last key, each warpgroup checks whether its rows' reference fitted. With 16-bit P it
  checks whether a sum overflowed, with 8-bit P whether the row's largest P, kept by the loop, is in e4m3's range.
* unguarded: a copy of the kernel without these checks, for inputs that are known to fit.
* never_fixed: a running max, which needs no guard.
* all_redone: no row's reference fits, so all rows are computed again with a running max. For this, scores are 900
  times as large with 16-bit P, and kept maxima are moved before every call with 8-bit P.
Printed beside each speed: the share of the query tiles that were computed again.
"""

from __future__ import annotations

import argparse
import importlib.util
import sys
from collections.abc import Callable

import torch
from bench import (
    MAX_ERROR,
    RESULTS,
    Entrant,
    exact_rows,
    gate,
    make_sets,
    quintiles,
    report,
    take_turns,
    torch_sdpa,
)
from cases import MODELS, square
from cuda_graphs import Replayed
from torch.nn.attention import SDPBackend
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from sage_kernels import DEFAULT_RECIPE, RECIPES
from sage_kernels._triton.attention.hopper import consumer, epilogue, main_loop, softmax
from sage_kernels._triton.attention.hopper import kernel as attention_fwd_hopper
from sage_kernels._triton.attention.hopper.epilogue import bits_of
from sage_kernels._triton.attention.hopper.softmax import max_in_lanes
from sage_kernels._triton.attention.launch import device_tile, launch_attention_fwd
from sage_kernels.facts import recipe as constants
from sage_kernels.facts.recipe import FP8_RECIPE
from sage_kernels.planning.state import ScaleState, Site
from sage_kernels.results import append_row
from sage_kernels.testing import relative_l2


CASES = [square(128, 16384), square(64, 16384), *(case for case in MODELS if case.name in ("flux_1024", "flux_2048"))]
ITS_RECIPES = sorted(name for name, recipe in RECIPES.items() if recipe.hopper and not recipe.plain)
LARGE = 30.0  # factor of q and k: a row's largest P is then some 2^2000 relative to its first tile's
MOVED = 20.0  # added to kept maxima, base 2: P is then below e4m3's range
_EXPECTED = gl.constexpr(bits_of(2.0**constants.LAGGED_EXPONENT))  # largest P of a row whose maximum has not moved


@gluon.jit
def _as_expected(p, BLOCK_N: gl.constexpr):
    """Replace max_in_lanes by a constant, the largest P of a row whose maximum has not moved."""
    return gl.full_like(max_in_lanes(p, BLOCK_N), _EXPECTED)


@gluon.jit
def _never(acc, running_sum, OUT: gl.constexpr):
    """Replace outgrown by a condition that is never true."""
    return gl.program_id(0) < 0


def _copy_of(module):
    """Load a module's source again as another module, with kernels of its own."""
    spec = importlib.util.spec_from_file_location(f"{module.__name__}_unguarded", module.__file__)
    copied = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(copied)
    return copied


def unguarded_kernel():
    """Return the Hopper kernel without the checks of a row's reference."""
    # copies of the files with one of the two functions, and of all files which use these
    unguarded, loop, end, group, kernel = map(_copy_of, (softmax, main_loop, epilogue, consumer, attention_fwd_hopper))
    unguarded.max_in_lanes = _as_expected
    loop.fixed_softmax_tile, loop.masked_softmax_tile = unguarded.fixed_softmax_tile, unguarded.masked_softmax_tile
    end.outgrown = _never
    group.sum_up, group.finish = loop.sum_up, end.finish
    kernel.consume = group.consume
    return kernel.attention_fwd_hopper_kernel


class Planned:
    """Calls of the kernels with a plan made from `inputs`. Each set of inputs has its own row maxima.

    Args:
        kernel: replaces the Hopper kernel.
        fixed: True for a softmax with a fixed reference.
        moved: added to kept maxima before every call, base 2.
    """

    def __init__(self, case, recipe: str, inputs, *, kernel=None, fixed: bool = True, moved: float = 0.0):
        self.case, self.recipe, self.fixed, self.moved = case, recipe, fixed, moved
        self.kernel = kernel or attention_fwd_hopper.attention_fwd_hopper_kernel
        self.has_rows = fixed and RECIPES[recipe].keeps_rows
        self.scales = ScaleState([Site("bench", case.kv_heads, case.head_dim)], device="cuda")
        self.state, self.rows = self.scales.head_state(0), {}
        self(*inputs)
        self.scales.advance(1.0, 0.9)

    def __call__(self, q, k, v):
        state, place = self.state, q.data_ptr()
        if self.has_rows:
            known = place in self.rows
            if not known:
                self.rows[place] = q.new_empty(self.case.batch, self.case.heads, self.case.seq_q, dtype=torch.float32)
            elif self.moved:
                self.rows[place] += self.moved
            state = state.keeping(self.rows[place], known)
        width, tile = self.case.head_dim, None
        if not self.fixed and RECIPES[self.recipe].pv == "16bit":
            tile = device_tile(q.device, width, "planned")._replace(keep_first_max=False)
        shipped = attention_fwd_hopper.attention_fwd_hopper_kernel
        attention_fwd_hopper.attention_fwd_hopper_kernel = self.kernel
        try:
            return launch_attention_fwd(
                q, k, v, scale=width**-0.5, scaling="planned", smooth_k=True, state=state, return_lse=False,
                recipe=self.recipe, tile=tile,
            )[0]  # fmt: skip
        finally:
            attention_fwd_hopper.attention_fwd_hopper_kernel = shipped


class Counted(Replayed):
    """Calls of `planned` from CUDA graphs, with the share of query tiles that are computed again."""

    def __init__(self, planned: Planned, sets):
        for inputs in sets:
            planned(*inputs)  # makes the row maxima, so that the graph's calls use them
        super().__init__(planned, sets)
        self._planned, self._before = planned, torch.zeros(2)
        self.redone()

    def redone(self) -> float:
        """Return the share of query tiles computed again since the last call of this method."""
        site = self._planned.scales.summary()[0]
        now = torch.tensor([site["lagged"], site["lagged"] * site["redone"]])
        (tried, redone), self._before = now - self._before, now
        return float(redone / tried) if tried else 0.0


def variants(case, recipe: str, sets, without: Callable):
    """Yield (suffix, function, its sets of inputs)."""
    large = sets
    if RECIPES[recipe].pv == "16bit":
        large = [(LARGE * q, LARGE * k, v) for q, k, v in sets]
    moved = 0.0 if RECIPES[recipe].pv == "16bit" else MOVED
    yield "/guarded", Counted(Planned(case, recipe, sets[0]), sets), sets
    yield "/unguarded", Counted(Planned(case, recipe, sets[0], kernel=without), sets), sets
    yield "/never_fixed", Counted(Planned(case, recipe, sets[0], fixed=False), sets), sets
    yield "/all_redone", Counted(Planned(case, recipe, large[0], moved=moved), large), large


def check_redone(case, recipe: str, function, sets) -> str | None:
    """Compare rows computed again with a running max on the same codes. Returns the failure, or None."""
    running = Planned(case, recipe, sets[0], fixed=False)
    error = float(relative_l2(function(*sets[0]), running(*sets[0])))
    share, bar = function.redone(), MAX_ERROR[RECIPES[recipe].pv]
    if error <= bar and share == 1.0:
        return None
    return f"{case.name} {recipe} all_redone: {share:.1%} done again, relative L2 {error:.3g}, expected 100 %, {bar}"


def run_case(case, recipe: str, save: bool) -> list[str]:
    sets = make_sets(case)
    cudnn = torch_sdpa(case, SDPBackend.CUDNN_ATTENTION)
    [stock], failures = gate(case, sets[0], [("torch_sdpa_cudnn", "", "", cudnn)])
    entrants, inputs_of, exact = [], {}, exact_rows(case, *sets[0])
    for suffix, function, its_sets in variants(case, recipe, sets, unguarded_kernel()):
        error, wrong = None, None  # no error for scores 900 times as large, which INT8 can't represent
        if its_sets is sets:
            error = float(relative_l2(function(*sets[0])[:, -exact.shape[1] :], exact))
            wrong = None if error <= MAX_ERROR[RECIPES[recipe].pv] else f"{case.name}{suffix} {recipe}: {error:.3g}"
        if suffix == "/all_redone":
            wrong = wrong or check_redone(case, recipe, function, its_sets)
        if wrong:
            failures.append(wrong)
            print(f"FAILED {wrong}", flush=True)
            continue
        entrants.append(Entrant("sage_kernels", suffix, recipe, function, error))
        inputs_of[suffix] = its_sets
    take_turns(case, [stock, *entrants], lambda entrant: inputs_of.get(entrant.suffix, sets))
    reference = quintiles(stock.times)[1]
    for entrant in entrants:
        report(case, entrant, reference, reference, sets[0], save)
        share = entrant.function.redone()
        print(f"{'':42} {share:.2%} of the tiles of query rows were done again", flush=True)
        if save:
            append_row(
                RESULTS, suite="attention_fwd", case=case.name + entrant.suffix, provider="sage_kernels",
                recipe=recipe, metric="redone_share", unit="1", median=f"{share:.5f}",
            )  # fmt: skip
    return failures


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    known = {case.name: case for case in CASES}
    parser.add_argument("--case", action="append", choices=sorted(known), metavar="NAME", help="all by default")
    parser.add_argument("--recipe", choices=ITS_RECIPES, action="append", help="both by default")
    parser.add_argument("--no-save", action="store_true", help="print only, append nothing to results.csv")
    arguments = parser.parse_args()
    if not torch.cuda.is_available() or torch.cuda.get_device_capability()[0] != 9:
        print("bench_guard.py times the Hopper kernel: no such GPU was found here.", file=sys.stderr)
        return 2
    torch.manual_seed(0)
    failures = []
    for name in arguments.case or known:
        for recipe in arguments.recipe or (DEFAULT_RECIPE, FP8_RECIPE):
            failures += run_case(known[name], recipe, not arguments.no_save)
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
