"""Time forwards of fourteen denoisers with preset "fast" against eager stock, with rows of suite models.

    python kernels/benchmarks/bench_models.py                      # all of published_models.py, minutes on an H200
    python kernels/benchmarks/bench_models.py --case mochi --no-save
    python kernels/benchmarks/bench_models.py --tiny --device cpu --no-save

Models have random weights and published shapes, some with fewer blocks. Forwards are called as a pipeline calls them:
one after another, and the host waits after the last. Stock is eager, with cuDNN (PyTorch's own choice where
cuDNN has no kernel for the mask). A model that fails is told and left out.
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
from bench_end_to_end import RESULTS, WARM_UP, check_output, held_to
from model_cases import make_inputs, make_model
from published_models import SUITE

import sage_processors as sp
from sage_kernels.results import append_row, check_appendable


GRAPHS_AFTER = 4  # forwards after WARM_UP until every block has a graph, and each was compared once
TOGETHER = 4  # forwards before a wait
ROUNDS = 3


def parse(arguments=None) -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--case", action="append", choices=sorted(SUITE), help="may be repeated; all by default")
    parser.add_argument("--preset", default="fast")
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


def stock_of(model, case, device) -> str:
    """Return torch_sdpa_cudnn, or torch_sdpa (its own choice) where cuDNN has no kernel for the model's mask."""
    try:
        with held_to("torch_sdpa_cudnn", device):
            warmed(model, case, device, 1)
    except RuntimeError as error:
        if "No available kernel" not in str(error):
            raise
        return "torch_sdpa"
    return "torch_sdpa_cudnn"


def measure(case, preset: str, device, csv: Path | None) -> str:
    """Time one case, append its rows, and return what to print. Raises: whatever the model raises."""
    model, first = make_model(case, device, torch.bfloat16), WARM_UP + GRAPHS_AFTER
    stock_provider = stock_of(model, case, device)
    _peak(device)  # making the model took more than a forward does
    with held_to(stock_provider, device) if stock_provider != "torch_sdpa" else nullcontext():
        warmed(model, case, device, 2)
        stock, wanted = timed(model, case, device, first)
        peaks = [_peak(device)]
        with sp.apply(model, sp.SageAttnProcessor(preset)) as handle:
            handle.new_run()
            warmed(model, case, device, first)
            ours, found = timed(model, case, device, first)
            report, graphs = handle.report(), handle._denoisers[0].graphs
        peaks.append(_peak(device))
    l1, l2 = check_output(found, wanted)
    sizes = case.attention()
    shared = {
        "suite": "models", "case": case.name, "batch": sizes["batch"], "heads": sizes["heads"],
        "kv_heads": sizes["kv_heads"], "seq_q": sizes["seq_q"], "seq_k": sizes["seq_kv"],
        "head_dim": sizes["head_dim"], "causal": sizes["causal"],
    }  # fmt: skip
    ratio = statistics.median(stock) / statistics.median(ours)
    for provider, recipe, times, peak, times_ratio in (
        (stock_provider, "", stock, peaks[0], 1.0),
        ("sage_kernels", f"preset_{preset}", ours, peaks[1], ratio),
    ):
        is_ours = bool(recipe)
        own = {"provider": provider, "recipe": recipe, "includes_quantization": is_ours}
        error = {"rel_l2_error": f"{l2:.5f}" if is_ours else ""}
        if csv is not None:
            p20, median, p80 = (f"{x:.3f}" for x in torch.tensor(times).quantile(torch.tensor([0.2, 0.5, 0.8])))
            append_row(
                csv, **shared, **own, **error, metric="time", unit="ms", median=median, p20=p20, p80=p80,
                ratio_vs_cudnn=f"{times_ratio:.3f}",
            )  # fmt: skip
            append_row(csv, **shared, **own, **error, metric="peak_memory", unit="GiB", median=f"{peak:.3f}")
            if is_ours:
                append_row(csv, **shared, **own, **error, metric="rel_l1", unit="1", median=f"{l1:.5f}")
    from_graphs = "no graphs" if graphs is None else f"{graphs.replays} whole, {graphs.partly} in blocks"
    return (
        f"{case.name:24} stock {statistics.median(stock):8.2f} ms  ours {statistics.median(ours):8.2f} ms  "
        f"{1 / ratio:.3f} of stock's time  L1 {l1:.4f}  {peaks[0]:.1f} -> {peaks[1]:.1f} GiB  {from_graphs}  "
        f"16 bit {dict(report.fallbacks)}"
    )


def _peak(device) -> float:
    """Return the peak of the memory in GiB since the last call; 0 on a CPU."""
    if device.type != "cuda":
        return 0.0
    found = torch.cuda.max_memory_allocated(device) / 2**30
    torch.cuda.reset_peak_memory_stats(device)
    return found


@torch.no_grad()
def main(arguments=None) -> int:
    """Run the command. Returns 1 if a model failed."""
    options = parse(arguments)
    device, failures = torch.device(options.device), []
    csv = None if options.no_save else options.csv or (None if options.tiny else RESULTS)
    if csv is not None:
        check_appendable(csv)
    for name in options.case or SUITE:
        case = SUITE[name].tiny() if options.tiny else SUITE[name]
        try:
            print(measure(case, options.preset, device, csv), flush=True)
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
