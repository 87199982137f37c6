"""Time whole forwards in 8 bit with all fusions of a block, and without each.

    python kernels/benchmarks/bench_fusions.py
    python kernels/benchmarks/bench_fusions.py --case flux_1024 --called compiled --variant all_fusions
    python kernels/benchmarks/bench_fusions.py --called cuda_graph
    python kernels/benchmarks/bench_fusions.py --tiny --device cpu --csv rows.csv

Fusions of eager code:
    norms    the quantisation kernel computes the norm and modulation in front of it
    results  the matmul computes activation, gate and residual
    heads    one pass computes the heads' norms and rotary embedding (in a language model, the latter alone)
    values   in joint attention, values have a matmul of their own, so that they are contiguous
In compiled code, `heads` is the same, and `graph` is all that is found in the compiler's graph. A CUDA graph replays
the launches of eager code without the host. Fusions are switched off in this process alone, by patches; PyTorch then
computes the same.

Models, gate and clock are those of bench_end_to_end.py, with INT8 linear layers. In every round, each variant is
applied, warmed up and timed. Suite end_to_end, cases {model}/{variant}.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from contextlib import ExitStack, contextmanager
from pathlib import Path
from unittest import mock

import torch
import torch._inductor.config  # eager code does not import it
from bench_end_to_end import OURS, RESULTS, Bench, Gated, check_output, save
from model_cases import CASES, make_model

from sage_kernels import DEFAULT_RECIPE
from sage_kernels.results import check_appendable
from sage_processors.diffusion.heads import head_norms, rotary
from sage_processors.linears import head_rotation, modules, qkv, swap
from sage_processors.linears.postponed import norm_layers as norms


EAGER = {
    "all_fusions": (),
    "no_norms": ("norms",),
    "no_results": ("results",),
    "no_heads": ("heads",),
    "joined_values": ("values",),
    "no_fusions": ("norms", "results", "heads"),
}
COMPILED = {"all_fusions": (), "no_heads": ("heads_in_graph",), "no_fusions": ("graph",)}
VARIANTS = {"eager": EAGER, "compiled": COMPILED, "cuda_graph": EAGER}


def _nothing(*_, **__) -> None:
    """Replace a function that returns a postponed result (by None) or installs a compiler pass."""


def _all_joined(owner, modules) -> int:
    """Replace last_joined, so that values share a matmul with queries and keys."""
    return len(modules) - 1


def _at_once(shape, dtype, device, module, rows) -> torch.Tensor:
    """Replace PostponedLinear by the product itself."""
    return modules.product(module, rows, module._sage_linear.bias, dtype=dtype)


@contextmanager
def without(*fusions: str):
    """Switch these fusions off inside of the with-statement."""
    change, config = mock.patch.object, torch._inductor.config
    with ExitStack() as stack:
        if "norms" in fusions:
            stack.enter_context(change(norms.NormState, "_waiting", _nothing))
        if "results" in fusions:
            stack.enter_context(change(modules, "PostponedLinear", _at_once))
        if "heads" in fusions:
            stack.enter_context(change(head_norms.HeadNormState, "_waiting", _nothing))
            stack.enter_context(change(rotary, "_postponed", _nothing))
            stack.enter_context(change(head_rotation.HeadRotations, "put", _nothing))
        if "values" in fusions:
            stack.enter_context(change(qkv, "last_joined", _all_joined))
        off = {"heads_in_graph": (head_norms,), "graph": (head_norms, swap)}
        for module in (module for name in fusions for module in off.get(name, ())):
            stack.enter_context(config.patch(pre_grad_custom_pass=None))
            stack.enter_context(change(module, "fuse_in_compiled_code", _nothing))
        yield


def run_case(case, model, options, device) -> list[str]:
    """Measure all variants in turns and append their rows. Returns the failures."""
    variants = {name: off for name, off in VARIANTS[options.called].items() if name in (options.variant or (name,))}
    bench = Bench(
        case, model, device, torch.bfloat16, recipe=DEFAULT_RECIPE, min_tokens=None, reps=options.reps or case.reps,
        called=options.called, linears="int8", min_features=0 if options.tiny else None,
    )  # fmt: skip
    stock = bench.stock("torch_sdpa_cudnn")
    results, failures = {}, []
    for _ in range(options.rounds):
        for name, fusions in variants.items():
            try:
                with without(*fusions):
                    result = bench.ours_denoiser() if case.is_denoiser else bench.ours_language()
                errors = check_output(result.output, stock.output)
            except Gated as error:
                failures.append(f"{case.name}/{name}: {error}")
                continue
            print(f"{case.name}/{name:20} {statistics.median(result.times):9.3f} ms in this turn", flush=True)
            if name in results:
                earlier = results[name][0]
                result = earlier._replace(times=earlier.times + result.times, slow=earlier.slow + result.slow)
            results[name] = result, errors
    for name, (result, errors) in results.items():
        median = statistics.median(result.times)
        print(f"{case.name}/{name:20} {median:9.3f} ms  relative L1 {errors[0]:.4f}", flush=True)
        if result.slow > len(result.times) // 2:
            print(f"{case.name}/{name:20} no rows: the host was slow in {result.slow} timings", flush=True)
        elif options.csv is not None:
            bench.case = case.renamed(name)
            save(options.csv, bench, OURS, result, None, errors)
    return failures


def parse(arguments=None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--case", action="append", choices=sorted(CASES), help="may be repeated; flux_1024 by default")
    parser.add_argument("--called", choices=sorted(VARIANTS), default="eager", help="denoisers only, but for eager")
    parser.add_argument("--variant", action="append", choices=list(EAGER), help="may be repeated; all by default")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--reps", type=int, help="timed forwards of each turn; the case's own number by default")
    parser.add_argument("--tiny", action="store_true", help="tiny models of the same classes; needs --csv to save")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--csv", type=Path, help="where rows go; results.csv by default")
    options = parser.parse_args(arguments)
    if options.called != "eager" and not all(CASES[name].is_denoiser for name in options.case or ()):
        parser.error(f"--called {options.called}: expected denoisers alone")
    unknown = set(options.variant or ()) - set(VARIANTS[options.called])
    if unknown:
        parser.error(f"--variant {min(unknown)}: expected one of {', '.join(VARIANTS[options.called])}")
    options.csv = options.csv or (None if options.tiny else RESULTS)
    return options


@torch.no_grad()
def main(arguments=None) -> int:
    options = parse(arguments)
    device = torch.device(options.device)
    if device.type == "cuda" and not torch.cuda.is_available():
        print("bench_fusions.py times models on a GPU: no CUDA GPU was found here.", file=sys.stderr)
        return 2
    if options.csv is not None:
        check_appendable(options.csv)
    failures = []
    for name in options.case or ["flux_1024"]:
        case = CASES[name] if options.called == "eager" else CASES[name].renamed(options.called)
        case = case.tiny() if options.tiny else case
        failures += run_case(case, make_model(case, device, torch.bfloat16), options, device)
    for failure in failures:
        print(f"FAILED {failure}", flush=True)
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
