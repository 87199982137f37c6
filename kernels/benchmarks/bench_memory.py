"""Measure peak memory of whole models, stock and ours with dropped 16-bit weights.

    python kernels/benchmarks/bench_memory.py --linears int8
    python kernels/benchmarks/bench_memory.py --tiny --device cpu --no-save

Rows of suite end_to_end, cases as in bench_end_to_end.py with `/dropped` appended. Peaks are those of forwards;
"weights" is the memory of parameters and buffers. The output is checked against stock's.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import torch
from bench import RESULTS
from bench_end_to_end import WARM_UP, check_output, held_to
from model_cases import CASES, make_inputs, make_model

import sage_processors as sp
from sage_kernels.results import append_row, check_appendable


FORWARDS = 3
CUDNN = "torch_sdpa_cudnn"


def weights_gib(model) -> float:
    """Return the memory of parameters and buffers in GiB."""
    tensors = {x.data_ptr(): x.untyped_storage().nbytes() for x in (*model.parameters(), *model.buffers())}
    return sum(tensors.values()) / 2**30


def forwards(case, model, device) -> tuple[torch.Tensor, float | None]:
    """Run forwards. Returns the last output, and the peak memory in GiB or, on a CPU, None."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    for step in range(WARM_UP, WARM_UP + FORWARDS):
        output = model(**make_inputs(case, step, device, torch.bfloat16), return_dict=True)[0]
    peak = torch.cuda.max_memory_allocated(device) / 2**30 if device.type == "cuda" else None
    return output.clone(), peak


def measure(case, linears: str, device, min_features: int | None) -> list[dict]:
    """Return rows of one model, whose weights are dropped at the end. min_features: of our options."""
    model, rows = make_model(case, device, torch.bfloat16), []
    with held_to(CUDNN, device):
        stock, peak = forwards(case, model, device)
        rows += measurements(CUDNN, "", weights_gib(model), peak)
        print(rows, flush=True)
        options = sp.SageAttnProcessor(linears=sp.Linears(linears, drop_weights=True, min_features=min_features))
        sp.apply(model, options)
        forwards(case, model, device)  # compiles kernels and allocates lasting buffers
        output, peak = forwards(case, model, device)
    error = check_output(output, stock)[1]
    found = measurements("sage_kernels", f"{options.recipe}+linears_{linears}", weights_gib(model), peak)
    print(found, f"relative L2 {error:.4f}", flush=True)
    return rows + [row | {"rel_l2_error": f"{error:.5f}"} for row in found]


def measurements(provider: str, recipe: str, weights: float, peak: float | None) -> list[dict]:
    """Return rows of one provider, without the fields common to all rows. weights, peak: GiB."""
    sizes = {"weights_memory": weights, "peak_memory": peak}
    shared = {"provider": provider, "recipe": recipe, "unit": "GiB"}
    return [shared | {"metric": name, "median": f"{size:.3f}"} for name, size in sizes.items() if size is not None]


@torch.no_grad()
def main(arguments=None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    names = sorted(name for name, case in CASES.items() if case.is_denoiser)
    parser.add_argument("--case", action="append", choices=names, help="may be repeated; flux_1024 by default")
    parser.add_argument("--linears", choices=("int8", "fp8"), default="int8")
    parser.add_argument("--tiny", action="store_true", help="tiny models of the same classes")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--csv", type=Path, default=RESULTS, help="where rows go")
    parser.add_argument("--no-save", action="store_true", help="print only")
    options = parser.parse_args(arguments)
    device = torch.device(options.device)
    if device.type == "cuda" and not torch.cuda.is_available():
        print("bench_memory.py measures a GPU's memory: no CUDA GPU was found here.", file=sys.stderr)
        return 2
    if not options.no_save:
        check_appendable(options.csv)
    for name in options.case or ["flux_1024"]:
        case = CASES[name].tiny() if options.tiny else CASES[name]
        for row in measure(case, options.linears, device, 0 if options.tiny else None):
            if not options.no_save:
                append_row(options.csv, suite="end_to_end", case=f"{case.name}/dropped", **row)
    return 0


if __name__ == "__main__":
    sys.exit(main())
