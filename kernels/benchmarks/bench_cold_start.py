"""Time a model's first forwards with an empty kernel cache, for suite cold_start.

    python kernels/benchmarks/bench_cold_start.py                          # both recipes, under 200 s on an H200
    python kernels/benchmarks/bench_cold_start.py --recipe qk_int8_pv_bf16 --linears int8
    python kernels/benchmarks/bench_cold_start.py --recipe qk_int8_pv_fp8 --layers 99 --no-save

Each measurement runs in a process of its own with a new TRITON_CACHE_DIR. The clock starts with the model on the GPU:
    first_forward        from `apply` (stock: from the forward) to the end of the first forward
    worst_later_forward  the longest of the next forwards, some of which need more kernels
    warm_up              from `apply` to the end of `handle.warm_up()`; later forwards are rows of {case}/warmed_up
Rows of {case}/compiled ran without prebuilt kernels, as on a GPU or with a version of Triton that has none.
The model has random weights, true widths and few blocks. So its steps are short, and a later forward waits longer for
its kernels than in the whole model. The GPU's context exists already, cuBLAS is not initialised.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch
from bench_end_to_end import held_to
from model_cases import CASES, ModelCase, make_inputs, make_model

import sage_processors as sp
from sage_kernels.facts.recipe import DEFAULT_RECIPE, FP8_RECIPE, RECIPES
from sage_kernels.results import append_row, check_appendable
from sage_processors.option_groups import LINEARS


RESULTS = Path(__file__).resolve().parent / "results.csv"
STEPS = 9  # row maxima are used from the fifth on; the later ones show the usual time
STOCK, OURS, WARMED, COMPILED = "stock", "ours", "warmed_up", "compiled"
PROVIDERS = {STOCK: "torch_sdpa_cudnn", OURS: "sage_kernels", WARMED: "sage_kernels", COMPILED: "sage_kernels"}


def chosen_case(name: str, layers: int, tiny: bool) -> ModelCase:
    """Return the case with at most `layers` blocks of each kind, named after their total number."""
    whole = CASES[name]
    case = whole.thinned(layers)
    blocks = sum(case.config[option] for option in case.layer_options)
    if case.config == whole.config:
        case = whole
    else:
        case = dataclasses.replace(case, name=f"{whole.name}/{blocks}_blocks")
    return case.tiny() if tiny else case


@torch.no_grad()
def measure(options) -> dict:
    """Measure in this process. Returns the seconds of the forwards and the warm-up, and counts of kernels."""
    device = torch.device(options.device)
    case = chosen_case(options.case, options.layers, options.tiny)
    model = make_model(case, device, torch.bfloat16)
    steps = [make_inputs(case, step, device, torch.bfloat16) for step in range(STEPS)]

    def wait():
        if device.type == "cuda":
            torch.cuda.synchronize(device)

    wait()
    found, times = {}, []
    start = time.perf_counter()
    if options.measure != STOCK:
        least = 0 if options.tiny else None
        config = sp.SageAttnProcessor(recipe=options.recipe, linears=options.linears, min_tokens=least)
        handle = sp.apply(model, config)
        handle.new_run()
    if options.measure == WARMED:
        done = handle.warm_up(progress=False)
        found |= {"kernels": done.kernels, "cached": done.cached, "warm_up": time.perf_counter() - start}
        start = time.perf_counter()
    with held_to("torch_sdpa_cudnn", device):
        for inputs in steps:
            output = model(**inputs, return_dict=True)[0]
            wait()
            times.append(time.perf_counter() - start)
            start = time.perf_counter()
    if not bool(torch.isfinite(output).all()):
        raise ArithmeticError(f"{case.name}: got an output that is not finite")
    if options.measure != STOCK:
        report = handle.report()
        found["int8_calls"], found["exact_calls"] = report.calls, sum(report.fallbacks.values())
        if not report.calls:
            raise RuntimeError(f"{case.name}: no call ran in INT8")
    return found | {"times": times}


def run_alone(options, what: str, recipe: str) -> dict:
    """Run `measure` in a process of its own, with an empty kernel cache."""
    command = [sys.executable, __file__, "--measure", what, "--recipe", recipe, "--case", options.case]
    command += ["--layers", str(options.layers), "--device", options.device, "--linears", options.linears]
    command += ["--tiny"] * options.tiny
    always = {"TRITON_ALWAYS_COMPILE": "1"} if what == COMPILED else {}
    with tempfile.TemporaryDirectory() as folder:
        environment = os.environ | {"TRITON_CACHE_DIR": folder} | always
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{what}, {recipe}: {done.stderr.strip()[-2000:]}")
    return json.loads(done.stdout.splitlines()[-1])


def save(csv: Path | None, case: ModelCase, what: str, recipe: str, found: dict) -> None:
    name = f"{case.name}/{what}" if what in (WARMED, COMPILED) else case.name
    first, *later = found["times"]
    metrics = {"first_forward": first, "worst_later_forward": max(later)}
    if what == WARMED:
        metrics["warm_up"] = found["warm_up"]
    said = ", ".join(f"{metric} {seconds:.2f} s" for metric, seconds in metrics.items())
    steps = " ".join(f"{seconds:.2f}" for seconds in found["times"])
    kernels = f"; {found['kernels']} kernels, {found['cached']} of them were there" if what == WARMED else ""
    print(f"{name:28} {PROVIDERS[what]:14} {recipe:18} {said}{kernels}; forwards {steps}", flush=True)
    if csv is None:
        return
    sizes = case.attention()
    for metric, seconds in metrics.items():
        append_row(
            csv, suite="cold_start", case=name, provider=PROVIDERS[what], recipe=recipe, batch=sizes["batch"],
            heads=sizes["heads"], kv_heads=sizes["kv_heads"], seq_q=sizes["seq_q"], seq_k=sizes["seq_kv"],
            head_dim=sizes["head_dim"], causal=sizes["causal"], metric=metric, unit="s", median=f"{seconds:.3f}",
        )  # fmt: skip


def parse(arguments=None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    denoisers = sorted(name for name, case in CASES.items() if case.is_denoiser)
    parser.add_argument("--case", choices=denoisers, default="flux_2048")
    parser.add_argument("--recipe", choices=sorted(RECIPES), action="append", help="may be repeated; two by default")
    parser.add_argument("--linears", choices=sorted(LINEARS), default="none", help="8-bit linear layers, too")
    parser.add_argument("--layers", type=int, default=1, help="at most so many blocks of each kind")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--tiny", action="store_true", help="a tiny model of the same class; needs --csv to save")
    parser.add_argument("--csv", type=Path, help="where rows go; results.csv by default")
    parser.add_argument("--no-save", action="store_true", help="print only")
    parser.add_argument("--measure", choices=sorted(PROVIDERS), help=argparse.SUPPRESS)  # one only, in this process
    return parser.parse_args(arguments)


def main(arguments=None) -> int:
    options = parse(arguments)
    if options.device.startswith("cuda") and not torch.cuda.is_available():
        print("bench_cold_start.py times a model on a GPU: no CUDA GPU was found here.", file=sys.stderr)
        return 2
    if options.measure is not None:
        options.recipe = (options.recipe or [DEFAULT_RECIPE])[0]
        print(json.dumps(measure(options)))
        return 0
    csv = None if options.no_save else options.csv or (None if options.tiny else RESULTS)
    if csv is not None:
        check_appendable(csv)
    case = chosen_case(options.case, options.layers, options.tiny)
    save(csv, case, STOCK, "", run_alone(options, STOCK, DEFAULT_RECIPE))
    for recipe in options.recipe or (DEFAULT_RECIPE, FP8_RECIPE):
        name = recipe if options.linears == "none" else f"{recipe}+linears_{options.linears}"
        for what in (OURS, WARMED, COMPILED):
            save(csv, case, what, name, run_alone(options, what, recipe))
    return 0


if __name__ == "__main__":
    sys.exit(main())
