"""Time attention called eagerly, from CUDA graphs, and compiled, with rows in results.csv.

    python kernels/benchmarks/bench_calls.py
    python kernels/benchmarks/bench_calls.py --case D128_N4096_full --no-save

All providers, each called in all ways, take turns, and a ratio is to cuDNN called in the same way. Also measured: the
time until a call returns, and the number of launches in a graph of one call. Compiled calls with 8-bit P use a running
max here, since compiled code can't look up the row maxima that the same inputs left. In a compiled model they keep row
maxima (`bench_end_to_end.py --called compiled`).
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from functools import partial

import torch
from bench import (
    FP8_RECIPE,
    RESULTS,
    Entrant,
    gate,
    make_sets,
    options_of,
    planned_attention,
    quintiles,
    report,
    take_turns,
    torch_sdpa,
)
from cases import MODELS, short, square
from cuda_graphs import Replayed, captured
from torch.nn.attention import SDPBackend

from sage_kernels import DEFAULT_RECIPE
from sage_kernels.results import append_row
from sage_kernels.testing import graph_nodes


CUDNN = "torch_sdpa_cudnn"
CASES = [
    short(128, 1024, 16), square(128, 1024), square(128, 4096), square(128, 16384), square(64, 16384),
    *(case for case in MODELS if case.name in ("flux_1024", "llama3_8b_prefill")),
]  # fmt: skip


def makers(case, inputs) -> list[tuple[str, str, Callable, Callable]]:
    """Return (provider, recipe, maker of a function, maker of a function that can be compiled)."""
    options = options_of(case)
    fp8 = options | {"recipe": FP8_RECIPE}
    stock = partial(torch_sdpa, case, SDPBackend.CUDNN_ATTENTION, **options)
    ours = partial(planned_attention, case, *inputs, **options)
    return [
        (CUDNN, "", stock, stock),
        ("sage_kernels", DEFAULT_RECIPE, ours, ours),
        (
            "sage_kernels", FP8_RECIPE, partial(planned_attention, case, *inputs, lagged=True, **fp8),
            partial(planned_attention, case, *inputs, **fp8),
        ),
    ]  # fmt: skip


def offered(case, sets):
    """Yield (provider, suffix of the case's name, recipe, function) for every provider and way of calling."""
    for provider, recipe, make, make_compilable in makers(case, sets[0]):
        yield provider, "/eager", recipe, make()
        yield provider, "/cuda_graph", recipe, Replayed(make(), sets)
        yield provider, "/compiled", recipe, torch.compile(make_compilable(), fullgraph=True, dynamic=False)


def launched(entrant: Entrant, inputs) -> dict[str, int]:
    """Return {kind of node: count} of a CUDA graph of one call."""
    if isinstance(entrant.function, Replayed):
        return entrant.function.launched
    return graph_nodes(captured(entrant.function, *inputs)[0])


def run_case(case, save: bool) -> list[str]:
    torch.compiler.reset()
    sets = make_sets(case)
    entrants, failures = gate(case, sets[0], offered(case, sets))
    take_turns(case, entrants, lambda _: sets)
    cudnn = {e.suffix: quintiles(e.times)[1] for e in entrants if e.provider == CUDNN}
    for entrant in entrants:
        reference = cudnn.get(entrant.suffix)
        report(case._replace(host_time=True), entrant, reference, reference or torch.nan, sets[0], save)
        nodes = launched(entrant, sets[0])
        print(f"{'':42} a call launches {dict(nodes)}", flush=True)
        if save:
            append_row(
                RESULTS, suite="attention_fwd", case=case.name + entrant.suffix, provider=entrant.provider,
                recipe=entrant.recipe, metric="launches", unit="1", median=sum(nodes.values()),
            )  # fmt: skip
    return failures


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    known = {case.name: case for case in CASES}
    parser.add_argument("--case", action="append", choices=sorted(known), metavar="NAME", help="all by default")
    parser.add_argument("--no-save", action="store_true", help="print only, append nothing to results.csv")
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        print("bench_calls.py times GPU kernels: no CUDA GPU was found here.", file=sys.stderr)
        return 2
    torch.manual_seed(0)
    cases = [known[name] for name in arguments.case or known]
    failures = [failure for case in cases for failure in run_case(case, not arguments.no_save)]
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
