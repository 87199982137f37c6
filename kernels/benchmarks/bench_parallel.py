"""Time forwards under diffusers' context parallelism, with rows of suite parallel.

    python kernels/benchmarks/bench_parallel.py --layers 12        # two GPUs of one host; starts its processes itself
    python kernels/benchmarks/bench_parallel.py --gpus 4 --case wan21_1_3b_480p81 --no-save
    python kernels/benchmarks/bench_parallel.py --tiny --device cpu --no-save

One GPU, then Ulysses and a ring on all of them: stock cuDNN, INT8 attention, and preset "fast". Random weights of the
published shapes, equal on each GPU. Of the processes the slowest counts, from one wait of all to the next. A result
that is not near stock's of one GPU makes no row, and ends the run.
"""

from __future__ import annotations

import argparse
import dataclasses
import gc
import os
import socket
import statistics
import subprocess
import sys
import time
from pathlib import Path
from unittest.mock import patch

import torch
import torch.distributed as dist
from bench_end_to_end import RESULTS, WARM_UP, check_output
from bench_models import GRAPHS_AFTER, wait
from diffusers import ContextParallelConfig
from model_cases import CASES, make_inputs, make_model

import sage_processors as sp
from sage_kernels.results import append_row, check_appendable


NAMES = ("wan21_1_3b_480p81", "flux_2048")
KINDS = ("ulysses", "ring")
OURS = {"qk_int8_pv_bf16": {}, "preset_fast": {"preset": "fast"}}  # {recipe of the rows: options}
TOGETHER, ROUNDS = 3, 3  # forwards before a wait, and waits


def parse(arguments=None) -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--case", action="append", choices=NAMES, help="may be repeated; both by default")
    parser.add_argument("--gpus", type=int, default=2)
    parser.add_argument("--layers", type=int, help="at most so many blocks of each kind in FLUX; its name says so")
    parser.add_argument("--tiny", action="store_true", help="tiny models of the same classes")
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--csv", type=Path, help="where rows go; results.csv by default")
    parser.add_argument("--no-save", action="store_true", help="print only")
    return parser.parse_args(arguments)


def chosen_cases(options: argparse.Namespace) -> list:
    """Return the chosen cases. Names tell of fewer blocks."""
    cases = [CASES[name] for name in options.case or NAMES]
    if options.layers is not None:
        cases = [case.thinned(options.layers) if case.name == "flux_2048" else case for case in cases]
    # four tokens of video more for two processes, whose parts have to be equal
    return [
        dataclasses.replace(case.tiny(), sizes=case.tiny().sizes | {"frames": 4}) if options.tiny else case
        for case in cases
    ]


def timed(model, case, device, first: int) -> tuple[list[float], torch.Tensor]:
    """Return ms a forward of each round on the slowest of the processes, and the output of the last forward."""
    times = []
    for i in range(ROUNDS):
        inputs = [make_inputs(case, first + i * TOGETHER + j, device, torch.bfloat16) for j in range(TOGETHER)]
        wait(device)
        if is_spread(model):
            dist.barrier()
            wait(device)
        began = time.perf_counter()
        for x in inputs:
            out = model(**x, return_dict=False)[0]
        wait(device)
        times.append((time.perf_counter() - began) * 1000 / TOGETHER)
    found = torch.tensor(times, device=device)
    if is_spread(model):
        dist.all_reduce(found, dist.ReduceOp.MAX)
    return found.tolist(), out.clone()


def is_spread(model) -> bool:
    """True for a model under context parallelism."""
    return model._parallel_config is not None


def measure(case, kind: str, device, wanted) -> tuple[dict, torch.Tensor]:
    """Time all providers of a case on this process, or on all with a kind.

    Returns: {(provider, recipe): (ms of each round, output, what ran)}, and stock's output.
    """
    model, first = make_model(case, device, torch.bfloat16), WARM_UP + GRAPHS_AFTER
    if device.type == "cuda":
        model.set_attention_backend("_native_cudnn")  # the fastest of diffusers' own that rings can merge
    if kind:
        config = ContextParallelConfig(**{f"{kind}_degree": dist.get_world_size()})
        with patch("torch.accelerator.device_count", lambda: max(1, torch.cuda.device_count())):  # a divisor
            model.enable_parallelism(config=config)
    found = {}
    if device.type == "cuda" or kind != "ring":  # on a CPU diffusers has no attention for rings
        for step in range(2):
            model(**make_inputs(case, step, device, torch.bfloat16), return_dict=False)
        times, out = timed(model, case, device, first)
        found["torch_sdpa_cudnn", ""] = times, out, ""
        wanted = out if wanted is None else wanted
    for recipe, options in OURS.items():
        with sp.apply(model, sp.SageAttnProcessor(**options)) as handle:
            handle.new_run()
            for step in range(first):
                model(**make_inputs(case, step, device, torch.bfloat16), return_dict=False)
            times, out = timed(model, case, device, first)
            report, graphs = handle.report(), handle._denoisers[0].graphs
            told = f"{report.calls} calls in INT8, 16 bit {dict(report.fallbacks)}"
            if graphs is not None:
                told += f", {graphs.replays} forwards from graphs, {graphs.partly} in blocks, {dict(graphs.eager)}"
            found["sage_kernels", recipe] = times, out, told
    return found, wanted


def rows_of(case, name: str, found: dict, wanted, csv: Path | None) -> None:
    """Check and print what was measured, and append its rows. Raises: Gated."""
    stock = found.get(("torch_sdpa_cudnn", ""))
    sizes = case.attention()
    for (provider, recipe), (times, out, told) in found.items():
        l1, l2 = check_output(out, wanted)
        ratio = statistics.median(stock[0]) / statistics.median(times) if stock else float("nan")
        print(
            f"{case.name}/{name:10} {recipe or provider:16} {statistics.median(times):8.2f} ms  "
            f"{1 / ratio:.3f} of stock's  L1 {l1:.4f}  {told}", flush=True,
        )  # fmt: skip
        if csv is None:
            continue
        shared = {
            "suite": "parallel", "case": f"{case.name}/{name}", "provider": provider, "recipe": recipe,
            "batch": sizes["batch"], "heads": sizes["heads"], "kv_heads": sizes["kv_heads"], "seq_q": sizes["seq_q"],
            "seq_k": sizes["seq_kv"], "head_dim": sizes["head_dim"], "causal": sizes["causal"],
            "includes_quantization": bool(recipe), "rel_l2_error": f"{l2:.5f}",
        }  # fmt: skip
        p20, median, p80 = (f"{x:.3f}" for x in torch.tensor(times).quantile(torch.tensor([0.2, 0.5, 0.8])))
        append_row(
            csv, **shared, metric="time", unit="ms", median=median, p20=p20, p80=p80,
            ratio_vs_cudnn=f"{ratio:.3f}" if stock else "",
        )  # fmt: skip
        append_row(csv, **shared, metric="rel_l1", unit="1", median=f"{l1:.5f}")


@torch.no_grad()
def work(options: argparse.Namespace, csv: Path | None) -> None:
    """Measure as one of the processes. The first one does it alone before, checks, and writes rows."""
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    device = torch.device("cpu") if options.device == "cpu" else torch.device("cuda", rank)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    dist.init_process_group("gloo" if device.type == "cpu" else "nccl")
    for case in chosen_cases(options):
        wanted = None
        for name in ("x1", *(f"x{world}_{kind}" for kind in KINDS)):
            kind = name.partition("_")[2]
            if kind or rank == 0:
                found, alone = measure(case, kind, device, wanted)
                wanted = wanted if kind else alone
                if rank == 0:
                    rows_of(case, name, found, wanted, csv)
                del found
            gc.collect()
            if device.type == "cuda":
                torch.cuda.empty_cache()
            dist.barrier()
    dist.destroy_process_group()


def main(arguments=None) -> int:
    """Run the command: start a process for each GPU, unless torchrun did. Returns 1 if one of them failed."""
    options = parse(arguments)
    csv = None if options.no_save else options.csv or (None if options.tiny else RESULTS)
    if csv is not None:
        check_appendable(csv)
    if "RANK" in os.environ:
        work(options, csv)
        return 0
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    command = [sys.executable, str(Path(__file__).resolve()), *(sys.argv[1:] if arguments is None else arguments)]
    shared = os.environ | {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "WORLD_SIZE": str(options.gpus)}
    started = [subprocess.Popen(command, env=shared | {"RANK": str(rank)}) for rank in range(options.gpus)]
    try:
        while any(process.poll() is None for process in started):
            if any(process.poll() for process in started):  # the others would wait for it
                break
            time.sleep(0.2)
    finally:
        for process in started:
            process.kill()
    return int(any(process.wait() for process in started))


if __name__ == "__main__":
    sys.exit(main())
