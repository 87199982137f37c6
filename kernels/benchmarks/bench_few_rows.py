"""Time products of few rows with an 8-bit weight on this GPU, with rows of suite linear_few_rows.

    python kernels/benchmarks/bench_few_rows.py
    python kernels/benchmarks/bench_few_rows.py --case llama3_8b_qkv --no-save

Each time is of a CUDA graph of products whose weights together exceed the L2 cache several times. Bandwidth counts the
bytes of the weight alone. `linears_int8_weights` and `linears_fp8_weights` are `weight_only_linear`, `linears_int8` is
quantising the rows and the 8-bit matmul, `torch_bf16` is cuBLAS. A ratio is bf16's time over theirs. `device_copy`
counts the bytes read and written by a large copy.
"""

from __future__ import annotations

import argparse
import contextlib
import sys

import torch
import triton
from bench import RESULTS, quintiles
from bench_linear import WEIGHT_ONLY_ERROR, Shape
from cuda_graphs import captured
from feed_forward import MAX_ERROR

from sage_kernels import QuantizedRows, quantize_activation, quantize_weight, quantized_linear, weight_only_linear
from sage_kernels.results import append_row
from sage_kernels.testing import relative_l2


ROWS = (1, 2, 4, 8, 16, 32, 64)
SHAPES = tuple(
    Shape(name, 0, depth, columns)
    for name, columns, depth in (
        ("llama3_8b_qkv", 6144, 4096),
        ("llama3_8b_out", 4096, 4096),
        ("llama3_8b_up", 28672, 4096),
        ("llama3_8b_down", 4096, 14336),
        ("llama3_8b_head", 128256, 4096),
        ("llama3_1b_qkv", 3072, 2048),
        ("llama3_1b_out", 2048, 2048),
        ("llama3_1b_up", 16384, 2048),
        ("llama3_1b_down", 2048, 8192),
        ("llama3_70b_qkv", 10240, 8192),
        ("llama3_70b_out", 8192, 8192),
        ("llama3_70b_up", 57344, 8192),
        ("llama3_70b_down", 8192, 28672),
    )
)
WEIGHTS = 10**9  # elements of all weights of a graph, about
LARGEST = {"": 0.01, "linears_int8_weights": WEIGHT_ONLY_ERROR, "linears_fp8_weights": MAX_ERROR["fp8"]}


def torchao(weights):
    """Return a function (number of the weight, x) of torchao's weight-only INT8 layer. Raises: ImportError."""
    import torchao.quantization as ao

    layers = []
    for weight in weights:
        layer = torch.nn.Linear(*weight.shape[::-1], bias=False, dtype=weight.dtype, device=weight.device)
        layer.weight = torch.nn.Parameter(weight, False)
        holder = torch.nn.Sequential(layer)
        ao.quantize_(holder, ao.Int8WeightOnlyConfig())
        layers.append(torch.compile(holder, dynamic=False))
    return lambda i, x: layers[i](x)


def providers(weights):
    """Yield (provider, recipe, bytes of a weight's element, function of the number of the weight and x)."""
    yield "torch_bf16", "", 2, lambda i, x: torch.nn.functional.linear(x, weights[i])
    for format in ("int8", "fp8"):
        rows = [quantize_weight(weights[0], format=format)]  # copies: quantising many takes long
        rows += [QuantizedRows(rows[0].codes.clone(), rows[0].scale) for _ in weights[1:]]
        yield "sage_kernels", f"linears_{format}_weights", 1, lambda i, x, rows=rows: weight_only_linear(x, rows[i])
        if format == "int8":
            yield (
                "sage_kernels",
                "linears_int8",
                1,
                lambda i, x, rows=rows: quantized_linear(quantize_activation(x), rows[i]),
            )
    with contextlib.suppress(ImportError):
        yield "torchao_int8_weights", "", 1, torchao(weights)


def time_graph(function, x, number: int) -> list[float]:
    """Return times in µs of one product, from replays of a graph with one product for each weight."""
    for i in range(number):
        function(i, x)
    graph, _ = captured(lambda x: [function(i, x) for i in range(number)][-1], x)
    times = triton.testing.do_bench(graph.replay, warmup=5, rep=15, return_mode="all")
    return [1e3 * ms / number for ms in times]


def run_shape(shape: Shape, copy: float, save: bool) -> bool:
    """Gate and time every provider at all numbers of rows. Returns True if all passed the gate."""
    torch.compiler.reset()
    number = max(2, min(40, WEIGHTS // (shape.columns * shape.depth)))
    first = torch.randn(shape.columns, shape.depth, device="cuda", dtype=torch.bfloat16) * shape.depth**-0.5
    weights = [first, *(first.clone() for _ in range(number - 1))]
    passed, base = True, {}
    for provider, recipe, size, function in providers(weights):
        for rows in ROWS:
            x = torch.randn(rows, shape.depth, device="cuda", dtype=torch.bfloat16)
            try:
                error = float(relative_l2(function(number - 1, x), x.double() @ first.double().T))
                times = time_graph(function, x, number)
            except Exception as failure:
                if provider != "torchao_int8_weights":
                    raise
                print(f"{shape.name:16} {provider} not here: {str(failure).splitlines()[0][:80]}", flush=True)
                break
            if not error <= LARGEST.get(recipe, MAX_ERROR["int8"]):
                print(f"FAILED {shape.name} {rows} rows {provider} {recipe}: relative L2 {error:.3g}", flush=True)
                passed = False
                continue
            p20, median, p80 = quintiles(times)
            base.setdefault(rows, median)
            rates = [size * shape.columns * shape.depth / us / 1e6 for us in (median, p80, p20)]
            print(
                f"{shape.name:16} {rows:3} rows {provider:12} {recipe:20} {median:7.2f} us {rates[0]:.2f} TB/s, "
                f"{rates[0] / copy:.2f} of a copy, {base[rows] / median:.2f}x {error:.5f}",
                flush=True,
            )
            if save:
                append_row(
                    RESULTS, suite="linear_few_rows", case=f"{shape.name}/rows_{rows}", provider=provider,
                    recipe=recipe, batch=rows, seq_q=shape.columns, seq_k=shape.depth,
                    includes_quantization=recipe == "linears_int8", metric="bandwidth", unit="TB_s",
                    median=f"{rates[0]:.3f}", p20=f"{rates[1]:.3f}", p80=f"{rates[2]:.3f}",
                    ratio_vs_cudnn=f"{base[rows] / median:.3f}", rel_l2_error=f"{error:.5f}",
                )  # fmt: skip
    return passed


def copy_rate(save: bool) -> float:
    """Measure the rate of a large copy in TB/s, bytes read and written."""
    source = torch.empty(2**30, dtype=torch.uint8, device="cuda").random_()
    target = torch.empty_like(source)
    times = triton.testing.do_bench(lambda: target.copy_(source), warmup=20, rep=60, return_mode="all")
    rates = [2 * 2**30 / ms / 1e9 for ms in quintiles(times)]
    if save:
        append_row(
            RESULTS, suite="linear_few_rows", case="copy", provider="device_copy", metric="bandwidth", unit="TB_s",
            median=f"{rates[1]:.3f}", p20=f"{rates[2]:.3f}", p80=f"{rates[0]:.3f}",
        )  # fmt: skip
    return rates[1]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    known = {shape.name: shape for shape in SHAPES}
    parser.add_argument("--case", action="append", choices=sorted(known), metavar="NAME", help="all by default")
    parser.add_argument("--no-save", action="store_true", help="print only, append nothing to results.csv")
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        print("bench_few_rows.py times GPU kernels: no CUDA GPU was found here.", file=sys.stderr)
        return 2
    torch.manual_seed(0)
    with torch.no_grad():
        copy = copy_rate(not arguments.no_save)
        print(f"device copy {copy:.2f} TB/s", flush=True)
        names = arguments.case or known
        passed = [run_shape(known[name], copy, not arguments.no_save) for name in names]
    return 0 if all(passed) else 1


if __name__ == "__main__":
    sys.exit(main())
