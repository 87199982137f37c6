"""Time forwards of fourteen denoisers, eager stock and preset "fast" or other ways, with rows of suite models.

    python kernels/benchmarks/bench_models.py                      # all of published_models.py, minutes on an H200
    python kernels/benchmarks/bench_models.py --case mochi --no-save
    python kernels/benchmarks/bench_models.py --case flux_1024 --ways cudnn compiled fast sageattention_2
    python kernels/benchmarks/bench_models.py --ways cudnn removed int8 linears fast  # what took time away: plots.py
    python kernels/benchmarks/bench_models.py --tiny --device cpu --no-save

Models have random weights and published shapes, some with fewer blocks. Forwards are called as a pipeline calls them:
one after another, and the host waits after the last. Every way but "default" prefers cuDNN for attention that it
leaves to PyTorch. A way that fails is told and left out.
"""

from __future__ import annotations

import argparse
import gc
import statistics
import sys
import time
from contextlib import nullcontext
from pathlib import Path

import torch
from bench_end_to_end import OURS, REMOVED, RESULTS, WARM_UP, check_output
from model_cases import make_inputs, make_model
from published_models import SUITE
from ways import CUDNN, DEFAULT, NAMES, Way, chosen, cudnn_first, is_8_bit

from sage_kernels.results import append_row, check_appendable


GRAPHS_AFTER = 4  # forwards after WARM_UP until every block has a graph, and each was compared once
TOGETHER = 4  # forwards before a wait
ROUNDS = 3


def parse(arguments=None) -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--case", action="append", choices=sorted(SUITE), help="may be repeated; all by default")
    parser.add_argument("--ways", nargs="+", choices=NAMES, default=("cudnn", "fast"), help="ways to run")
    parser.add_argument("--tiny", action="store_true", help="tiny models of the same classes")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--csv", type=Path, help="where rows go; results.csv by default")
    parser.add_argument("--no-save", action="store_true", help="print only")
    return parser.parse_args(arguments)


def timed(model, case, device, first: int) -> tuple[list[float], torch.Tensor]:
    """Return ms a forward of each round, and the output of the last forward."""
    times = []
    for i in range(ROUNDS):
        inputs = [make_inputs(case, first + i * TOGETHER + j, device, torch.bfloat16) for j in range(TOGETHER)]
        wait(device)
        began = time.perf_counter()
        outs = [model(**x, return_dict=False)[0] for x in inputs]
        wait(device)
        times.append((time.perf_counter() - began) * 1000 / TOGETHER)
    last = outs[-1]
    return times, (last[0] if isinstance(last, list) else last).clone()


def wait(device) -> None:
    """Wait for the device."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def warmed(model, case, device, forwards: int) -> None:
    """Run forwards at the steps before those that are timed."""
    for step in range(forwards):
        model(**make_inputs(case, step, device, torch.bfloat16), return_dict=False)


def measure(case, options, device, csv: Path | None) -> list[str]:
    """Time one case in every way and append its rows. Returns the failures."""
    model, first = make_model(case, device, torch.bfloat16), WARM_UP + GRAPHS_AFTER
    failures, wanted, cudnn = [], None, None
    for way in chosen(options.ways, 0 if options.tiny else None):
        label = f"{case.name:24} {way.provider:22} {way.recipe:16}"
        gc.collect()
        _peak(device)  # making the model took more than a forward does
        try:
            with nullcontext() if way.provider == DEFAULT else cudnn_first(), way.inside(model, model) as handle:
                if way.provider == OURS:
                    handle.new_run()
                warmed(model, case, device, first if way.provider == OURS else 2)
                times, output = timed(model, case, device, first)
                said = _said(handle) if way.provider == OURS else ""
            peak = _peak(device)
            wanted = output if wanted is None else wanted
            l1, l2 = (1.0, 1.0) if way.provider == REMOVED else check_output(output, wanted)
        except Exception as error:  # the other ways are measured all the same
            failures.append(f"{label}: {type(error).__name__}: {str(error).strip().partition(chr(10))[0]}")
            print(f"FAILED {failures[-1]}", flush=True)
            continue
        median = statistics.median(times)
        cudnn = median if way.provider == CUDNN else cudnn
        ratio = f"{cudnn / median:.3f}" if cudnn else ""
        print(f"{label} {median:8.2f} ms  {ratio or '-'}x  L1 {l1:.4f}  {peak:.1f} GiB  {said}", flush=True)
        if csv is not None:
            save(csv, case, way, times, peak, ratio, l1, l2)
    return failures


def _said(handle) -> str:
    """Return what ran from graphs, and attention calls in 16 bit."""
    report, graphs = handle.report(), handle._denoisers[0].graphs
    from_graphs = "no graphs" if graphs is None else f"{graphs.replays} whole, {graphs.partly} in blocks"
    return f"{from_graphs}  16 bit {dict(report.fallbacks)}"


def save(csv: Path, case, way: Way, times: list[float], peak: float, ratio: str, l1: float, l2: float) -> None:
    """Append the rows of one way."""
    sizes, quantizes = case.attention(), is_8_bit(way.provider)
    shared = {
        "suite": "models", "case": case.name, "provider": way.provider, "recipe": way.recipe, "batch": sizes["batch"],
        "heads": sizes["heads"], "kv_heads": sizes["kv_heads"], "seq_q": sizes["seq_q"], "seq_k": sizes["seq_kv"],
        "head_dim": sizes["head_dim"], "causal": sizes["causal"], "includes_quantization": quantizes,
        "rel_l2_error": f"{l2:.5f}" if quantizes else "",
    }  # fmt: skip
    p20, median, p80 = (f"{x:.3f}" for x in torch.tensor(times).quantile(torch.tensor([0.2, 0.5, 0.8])))
    append_row(csv, **shared, metric="time", unit="ms", median=median, p20=p20, p80=p80, ratio_vs_cudnn=ratio)
    append_row(csv, **shared, metric="peak_memory", unit="GiB", median=f"{peak:.3f}")
    if quantizes:
        append_row(csv, **shared, metric="rel_l1", unit="1", median=f"{l1:.5f}")


def _peak(device) -> float:
    """Return the peak of the memory in GiB since the last call; 0 on a CPU."""
    if device.type != "cuda":
        return 0.0
    found = torch.cuda.max_memory_allocated(device) / 2**30
    torch.cuda.reset_peak_memory_stats(device)
    return found


@torch.no_grad()
def main(arguments=None) -> int:
    """Run the command. Returns 1 if anything failed."""
    options = parse(arguments)
    device, failures = torch.device(options.device), []
    csv = None if options.no_save else options.csv or (None if options.tiny else RESULTS)
    if csv is not None:
        check_appendable(csv)
    for name in options.case or SUITE:
        case = SUITE[name].tiny() if options.tiny else SUITE[name]
        try:
            failures += measure(case, options, device, csv)
        except Exception as error:  # the other models are measured all the same
            failures.append(name)
            print(
                f"FAILED {case.name}: {type(error).__name__}: {str(error).strip().partition(chr(10))[0]}", flush=True
            )
        gc.collect()
        if device.type == "cuda":
            torch.cuda.empty_cache()
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
