"""Time 8-bit linear layers against bf16 ones on this GPU, with rows of suite linear.

    python kernels/benchmarks/bench_linear.py
    python kernels/benchmarks/bench_linear.py --case flux_qkv --no-save

A call of ours quantises its activation and multiplies, bias included. With one row per sample, as in modulation, it
multiplies the 16-bit activation by an 8-bit weight. torch_bf16 is torch.nn.functional.linear. All providers of a shape
run in turns in one process. Each is warmed up before its turn: a GPU at its power limit would otherwise run at the
clock of the provider before. A ratio is bf16's time over theirs. torchao and comfy_kitchen run if they can be
imported. `flux_feed_forward` is a whole feed-forward, with all fusions of each package (feed_forward.py). `torch_fp8`
is PyTorch's FP8 matmul after our quantisation of rows, `torch_fp8_fast` the same with fast accumulation, which loses
part of long sums (kernels/NOTES.md).
"""

from __future__ import annotations

import argparse
import contextlib
import math
import sys
from collections.abc import Callable, Iterable
from typing import NamedTuple

import feed_forward
import torch
import triton
from bench import RESULTS, ROUNDS, quintiles
from feed_forward import MAX_ERROR
from rival_linears import COMPILED, PEER_ERROR, RIVALS, quantize_in_place

from sage_kernels import quantize_activation, quantize_weight, quantized_linear, weight_only_linear
from sage_kernels.results import append_row
from sage_kernels.testing import relative_l2


WEIGHT_ONLY_ERROR = 0.0096  # MAX_ERROR's INT8 / √2, since only the weight is rounded
GATE_ROWS = 256
WARM_UP_MS, MEASURED_MS = 100, 40  # of a turn; the warm-up is long, so that the GPU's clock settles


class Shape(NamedTuple):
    """Shape of a linear layer: x [rows, depth] to y [rows, columns]."""

    name: str
    rows: int
    depth: int
    columns: int


SHAPES = (
    Shape("flux_qkv", 4608, 3072, 9216),
    Shape("flux_out", 4608, 3072, 3072),
    Shape("flux_mlp_up", 4608, 3072, 12288),
    Shape("flux_mlp_down", 4608, 12288, 3072),
    Shape("flux_single_in", 4608, 3072, 21504),
    Shape("flux_single_out", 4608, 15360, 3072),
    Shape("wan_qkv", 32760, 1536, 4608),
    Shape("wan_ffn_up", 32760, 1536, 8960),
    Shape("wan_ffn_down", 32760, 8960, 1536),
    Shape("llama_up", 32768, 4096, 28672),
    Shape("llama_down", 32768, 14336, 4096),
)
TEXT = (Shape("flux_text_qkv", 512, 3072, 9216), Shape("flux_text_up", 512, 3072, 12288))  # not in the mean
MODULATION = (
    Shape("flux_modulation", 1, 3072, 18432),
    Shape("flux_single_modulation", 1, 3072, 9216),
    Shape("flux_modulation_8_samples", 8, 3072, 18432),
)  # not in the mean: the activation stays in 16 bit
FEED_FORWARD = Shape("flux_feed_forward", 4608, 3072, 12288)  # not in the mean: two layers, up to `columns` and back


class Problem(NamedTuple):
    """One computation: input, last rows of the fp64 result, operations, and the providers."""

    x: torch.Tensor
    exact: torch.Tensor
    flops: int
    entrants: Iterable[tuple[str, str, float, Callable]]  # provider, recipe, largest relative L2 allowed, function


def ours(format: str, weight, bias):
    rows = quantize_weight(weight, format=format)
    return lambda x: quantized_linear(quantize_activation(x, format=format), rows, bias)


SCALED_MATMUL = getattr(torch, "_scaled_mm", None)


def torch_fp8(weight, bias, fast: bool):
    codes, scale = quantize_weight(weight, format="fp8")
    codes, scale = codes.t(), scale.view(1, -1)

    def run(x):
        q = quantize_activation(x, format="fp8")
        return SCALED_MATMUL(
            q.codes, codes, q.scale.view(-1, 1), scale, bias=bias, out_dtype=x.dtype, use_fast_accum=fast
        )

    return run


def peers(shape: Shape, weight, bias):
    """Yield (provider, function) of other packages that are installed."""
    for name in RIVALS:
        layer = torch.nn.Linear(shape.depth, shape.columns, dtype=weight.dtype, device=weight.device)
        layer.weight, layer.bias = torch.nn.Parameter(weight, False), torch.nn.Parameter(bias, False)
        with contextlib.suppress(ImportError):
            quantize_in_place(name, layer)
            yield name, torch.compile(layer, dynamic=False) if name in COMPILED else layer


def providers(shape: Shape, weight, bias):
    """Yield (provider, recipe, largest relative L2 allowed, function)."""
    yield "torch_bf16", "", 0.01, lambda x: torch.nn.functional.linear(x, weight, bias)
    if shape in MODULATION:
        codes = quantize_weight(weight)
        yield "sage_kernels", "linears_int8_weights", WEIGHT_ONLY_ERROR, lambda x: weight_only_linear(x, codes, bias)
        return
    for format, error in MAX_ERROR.items():
        yield "sage_kernels", f"linears_{format}", error, ours(format, weight, bias)
    if SCALED_MATMUL is not None and torch.cuda.get_device_capability() >= (9, 0):
        yield "torch_fp8", "", MAX_ERROR["fp8"], torch_fp8(weight, bias, False)
        yield "torch_fp8_fast", "", MAX_ERROR["fp8"], torch_fp8(weight, bias, True)
    for provider, function in peers(shape, weight, bias):
        yield provider, "", PEER_ERROR, function


def one_layer(shape: Shape) -> Problem:
    x, weight = (torch.randn(n, shape.depth, device="cuda", dtype=torch.bfloat16) for n in (shape.rows, shape.columns))
    weight = weight * shape.depth**-0.5
    bias = torch.randn(shape.columns, device="cuda", dtype=torch.bfloat16)
    exact = x[-GATE_ROWS:].double() @ weight.double().T + bias.double()
    return Problem(x, exact, 2 * shape.rows * shape.columns * shape.depth, providers(shape, weight, bias))


def whole_feed_forward(shape: Shape) -> Problem:
    x, layers = feed_forward.make(shape.rows, shape.depth, shape.columns, "cuda")
    exact = feed_forward.exact(x, layers)[-GATE_ROWS:]
    return Problem(x, exact, 4 * shape.rows * shape.columns * shape.depth, feed_forward.providers(layers))


def run_shape(shape: Shape, save: bool) -> tuple[dict, list[str]]:
    """Gate and time every provider. Returns {(provider, recipe): ratio to bf16} and the failures."""
    torch.compiler.reset()  # Dynamo compiles a function for a limited number of shapes
    x, exact, flops, contenders = (whole_feed_forward if shape == FEED_FORWARD else one_layer)(shape)
    entrants, failures = [], []
    for provider, recipe, allowed, function in contenders:
        try:
            error = float(relative_l2(function(x)[-GATE_ROWS:], exact))
        except Exception as failure:
            if provider in ("sage_kernels", "torch_bf16"):
                raise
            print(f"{shape.name:18} {provider:16} not here: {str(failure).splitlines()[0][:80]}", flush=True)
            continue
        if not error <= allowed:
            failures.append(f"{shape.name} {provider} {recipe}: relative L2 {error:.3g} > {allowed}")
            print(f"FAILED {failures[-1]}", flush=True)
            continue
        entrants.append((provider, recipe, function, error, []))
    for _ in range(ROUNDS):
        for *_, function, _, times in entrants:
            times += triton.testing.do_bench(
                lambda f=function: f(x), warmup=WARM_UP_MS, rep=MEASURED_MS, return_mode="all"
            )
    base, ratios = quintiles(entrants[0][-1])[1], {}
    for provider, recipe, _, error, times in entrants:
        p20, median, p80 = quintiles(times)
        rates = [flops / ms / 1e9 for ms in (median, p80, p20)]
        ratios[provider, recipe] = base / median
        print(
            f"{shape.name:18} {provider:16} {recipe:14} {rates[0]:7.1f} TFLOPS {base / median:.3f}x {error:.5f}",
            flush=True,
        )
        if save:
            append_row(
                RESULTS, suite="linear", case=shape.name, provider=provider, recipe=recipe, batch=shape.rows,
                seq_q=shape.columns, seq_k=shape.depth, includes_quantization=provider != "torch_bf16",
                metric="throughput", unit="TFLOPS", median=f"{rates[0]:.1f}", p20=f"{rates[1]:.1f}",
                p80=f"{rates[2]:.1f}", ratio_vs_cudnn=f"{base / median:.3f}", rel_l2_error=f"{error:.5f}",
            )  # fmt: skip
    return ratios, failures


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    known = {shape.name: shape for shape in (*SHAPES, *TEXT, *MODULATION, FEED_FORWARD)}
    parser.add_argument("--case", action="append", choices=sorted(known), metavar="NAME", help="all by default")
    parser.add_argument("--no-save", action="store_true", help="print only, append nothing to results.csv")
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        print("bench_linear.py times GPU kernels: no CUDA GPU was found here.", file=sys.stderr)
        return 2
    torch.manual_seed(0)
    found, failures = [], []
    with torch.no_grad():
        for shape in [known[name] for name in arguments.case] if arguments.case else known.values():
            ratios, failed = run_shape(shape, not arguments.no_save)
            failures += failed
            found += [ratios] if shape in SHAPES else []
    for kind in sorted({kind for ratios in found for kind in ratios} - {("torch_bf16", "")}):
        mine = [ratios[kind] for ratios in found if kind in ratios]
        mean = math.exp(sum(map(math.log, mine)) / len(mine))
        print(
            f"{' '.join(kind):34} geometric mean {mean:.3f}x, least {min(mine):.3f}x of {len(mine)} shapes", flush=True
        )
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
