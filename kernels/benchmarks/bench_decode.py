"""Time attention of one query over an INT8 KV cache against 16-bit caches, with rows in results.csv.

    python kernels/benchmarks/bench_decode.py
    python kernels/benchmarks/bench_decode.py --set short --no-save
    python kernels/benchmarks/bench_decode.py --dry-run          # checks without timing, on a small case and the CPU

Only attention is timed, as in a decode step: the new token is in the cache already. Providers of a case run one after
the other in one process, in turns on several caches, together larger than the L2 cache. Bandwidth counts the bytes of
keys, values and scales once each. Each provider is timed as called, where short calls wait for Python, and from a CUDA
graph (`/cuda_graph`), as compiled models decode.
"""

from __future__ import annotations

import argparse
import math
import sys
import time
from pathlib import Path
from typing import NamedTuple

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from sage_kernels import append_kv, sage_decode_attention
from sage_kernels.results import append_row
from sage_kernels.testing import relative_l2


RESULTS = Path(__file__).resolve().parent / "results.csv"
MAX_ERROR = 0.03  # relative L2 on N(0, 1): far above INT8's error, far below that of any bug
L2_BYTES = 200e6  # all caches of a case together are larger than this
CHUNK = 8192  # tokens that are quantised at a time
RECIPE = "kv_int8"
GRAPH_CALLS = 20  # least number of calls in one CUDA graph


class Case(NamedTuple):
    """Shapes of one decode step: `batch` sequences of seq_kv tokens each, with grouped query heads."""

    name: str
    batch: int
    seq_kv: int
    heads: int = 32
    kv_heads: int = 8
    head_dim: int = 128

    def nbytes(self, bits: int) -> int:
        """Return the bytes of keys and values in the cache, with a 2-byte scale per token and head if 8 bits."""
        return 2 * self.batch * self.kv_heads * self.seq_kv * (self.head_dim * bits // 8 + 2 * (bits == 8))


def llama8b(seq_kv: int, batch: int) -> Case:
    return Case(f"llama8b_decode_{seq_kv}_b{batch}", batch, seq_kv)


SETS = {
    "llama8b": [llama8b(n, b) for n in (32_768, 131_072) for b in (1, 8, 32)],
    "short": [llama8b(n, b) for n in (1024, 4096) for b in (1, 8, 32)],
    "dry": [Case("dry", 2, 200, 8, 2, 64)],
}
SETS["all"] = SETS["short"] + SETS["llama8b"]


class Caches:
    """The same tokens as a 16-bit cache [B, H_kv, S, D] and as an INT8 one, and queries [B, 1, H, D]."""

    def __init__(self, case: Case, device, dtype):
        shape = (case.batch, case.kv_heads, case.seq_kv, case.head_dim)
        self.q = torch.randn(case.batch, 1, case.heads, case.head_dim, device=device, dtype=dtype)
        self.k, self.v = (torch.randn(shape, device=device, dtype=dtype) for _ in range(2))
        self.v /= 8  # so that a mix-up of K's and V's scales would show
        codes = [torch.empty(shape, dtype=torch.int8, device=device) for _ in range(2)]
        scales = [torch.empty(shape[:3], dtype=torch.bfloat16, device=device) for _ in range(2)]
        self.mean = self.k.mean(2, dtype=torch.float32)
        self.int8 = (codes[0], scales[0], codes[1], scales[1])
        for start in range(0, case.seq_kv, CHUNK):
            part = slice(start, start + CHUNK)
            append_kv(self.k[:, :, part], self.v[:, :, part], self.mean, *self.int8, position=start)

    def drop_16_bit(self):
        """Free the 16-bit keys and values, which only the correctness gate needs."""
        self.k = self.v = None


def exact(case: Case, caches: Caches) -> torch.Tensor:
    """Return attention in fp64, [B, 1, H, D], one key/value head at a time to save memory."""
    out = torch.empty(case.batch, 1, case.heads, case.head_dim, dtype=torch.float64, device=caches.q.device)
    group = case.heads // case.kv_heads
    for b in range(case.batch):
        for h in range(case.kv_heads):
            own = slice(h * group, (h + 1) * group)
            scores = caches.q[b, 0, own].double() @ caches.k[b, h].double().T * case.head_dim**-0.5
            out[b, 0, own] = scores.softmax(-1) @ caches.v[b, h].double()
    return out


def ours(case: Case):
    return lambda c: sage_decode_attention(c.q, *c.int8, c.mean)


def torch_sdpa(case: Case, backend, *, pack: bool):
    """Return torch's attention. pack: the query heads of a group become rows of one matrix.

    This is faster for one query.
    """

    def run(c):
        q = c.q.transpose(1, 2)
        if pack:
            q = c.q.view(case.batch, case.kv_heads, case.heads // case.kv_heads, case.head_dim)
        with sdpa_kernel(backend):
            out = scaled_dot_product_attention(q, c.k, c.v, enable_gqa=not pack and case.heads != case.kv_heads)
        return out.reshape(case.batch, case.heads, 1, case.head_dim).transpose(1, 2)

    return run


def flex_decoding(case: Case):
    """Return torch's FlexAttention, compiled. For few queries it has a kernel that splits the keys."""
    from torch.nn.attention.flex_attention import flex_attention

    compiled = torch.compile(flex_attention)
    return lambda c: compiled(c.q.transpose(1, 2), c.k, c.v, enable_gqa=True).transpose(1, 2)


def flash_attn_4(case: Case):
    from flash_attn.cute import flash_attn_func

    def run(c):
        out = flash_attn_func(c.q, c.k.transpose(1, 2), c.v.transpose(1, 2))
        return out[0] if isinstance(out, tuple) else out

    return run


def providers(on_gpu: bool):
    """Yield (provider, suffix of the case's name, bits of the cache, maker of its function)."""
    backends = {"math": SDPBackend.MATH}
    if on_gpu:
        backends = {
            "cudnn": SDPBackend.CUDNN_ATTENTION,
            "flash": SDPBackend.FLASH_ATTENTION,
            "efficient": SDPBackend.EFFICIENT_ATTENTION,
        }
    for name, backend in backends.items():
        for suffix, pack in (("", False), ("/packed", True)):
            yield (
                f"torch_sdpa_{name}",
                suffix,
                16,
                lambda case, backend=backend, pack=pack: torch_sdpa(case, backend, pack=pack),
            )
    if on_gpu:
        yield "flex_attention", "", 16, flex_decoding
        yield "flash_attn_4", "", 16, flash_attn_4
    yield "sage_kernels", "", 8, ours


def milliseconds(function, sets, graph: bool) -> tuple[float, float, float]:
    """Return p20, median, p80 of one call in ms, each call on the next cache.

    graph: from a CUDA graph of many calls.
    """
    turn = iter(range(1 << 60))

    def call():
        return function(sets[next(turn) % len(sets)])

    if graph:
        calls = math.ceil(GRAPH_CALLS / len(sets)) * len(sets)
        recorded = torch.cuda.CUDAGraph()
        call()
        with torch.cuda.graph(recorded):
            for _ in range(calls):
                call()
        times = triton_testing().do_bench(recorded.replay, warmup=50, rep=300, quantiles=[0.2, 0.5, 0.8])
        return tuple(ms / calls for ms in times)
    if sets[0].q.is_cuda:
        return tuple(triton_testing().do_bench(call, warmup=50, rep=300, quantiles=[0.2, 0.5, 0.8]))
    start = time.perf_counter()
    call()
    return ((time.perf_counter() - start) * 1e3,) * 3


def triton_testing():
    import triton

    return triton.testing


def copy_bandwidth(device) -> float:
    """Return the bandwidth of a device copy in TB/s, read and written bytes counted: the memory's best."""
    source = torch.empty(2**30, dtype=torch.int8, device=device)
    target = torch.empty_like(source)
    ms = triton_testing().do_bench(lambda: target.copy_(source), warmup=50, rep=300, quantiles=[0.5])
    return 2 * source.numel() / (ms if isinstance(ms, float) else ms[0]) / 1e9


def save_rows(case, provider, suffix, bits, error, times, rates, ratio) -> None:
    shared = {
        "suite": "decode", "case": case.name + suffix, "provider": provider, "recipe": RECIPE if bits == 8 else "",
        "batch": case.batch, "heads": case.heads, "kv_heads": case.kv_heads, "seq_q": 1, "seq_k": case.seq_kv,
        "head_dim": case.head_dim, "causal": True, "includes_quantization": False,
        "rel_l2_error": f"{error:.5f}",
    }  # fmt: skip
    p20, median, p80 = (f"{x:.5f}" for x in times)
    ratio = {} if ratio is None else {"ratio_vs_cudnn": f"{ratio:.3f}"}
    append_row(RESULTS, **shared, **ratio, metric="time", unit="ms", median=median, p20=p20, p80=p80)
    p80, median, p20 = (f"{x:.4f}" for x in rates)
    append_row(RESULTS, **shared, metric="bandwidth", unit="TB_s", median=median, p20=p20, p80=p80)
    per_token = case.nbytes(bits) / case.batch / case.seq_kv
    append_row(RESULTS, **shared, metric="kv_bytes_per_token", unit="B", median=f"{per_token:.0f}")


def run_case(case: Case, device, dtype, save: bool) -> list[str]:
    """Gate and time every provider on `case`. Returns the failures; a provider that can't run is not one."""
    on_gpu = device.type == "cuda"
    failures, best, cudnn_ms, ours_ms = [], {}, {}, {}
    for provider, suffix, bits, make in providers(on_gpu):
        name = f"{case.name + suffix:32} {provider:22}"
        number = max(2, math.ceil(L2_BYTES / case.nbytes(bits))) if on_gpu else 2
        sets = [Caches(case, device, dtype) for _ in range(number)]
        wanted = exact(case, sets[0])
        try:
            function = make(case)
            error = float(relative_l2(function(sets[0]), wanted))
        except (RuntimeError, ImportError, NotImplementedError, ValueError) as failure:
            if provider == "sage_kernels":
                raise
            print(f"{name} not here: {str(failure).splitlines()[0][:90]}", flush=True)
            continue
        if not error <= MAX_ERROR:
            failures.append(f"{name}: relative L2 {error:.3g} > {MAX_ERROR}")
            print(f"FAILED {failures[-1]}", flush=True)
            continue
        if bits == 8:
            for caches in sets:
                caches.drop_16_bit()
        for graph, how in ((False, ""), (True, "/cuda_graph"))[: 1 + on_gpu]:
            try:
                times = milliseconds(function, sets, graph)
            except RuntimeError as failure:
                if provider == "sage_kernels":
                    raise
                print(f"{name} not in a graph: {str(failure).splitlines()[0][:90]}", flush=True)
                continue
            rates = [case.nbytes(bits) / ms / 1e9 for ms in times]
            if provider == "sage_kernels":
                ours_ms[how] = times[1]
            elif how not in best or times[1] < best[how][0]:
                best[how] = (times[1], provider + suffix)
            if provider == "torch_sdpa_cudnn":
                cudnn_ms[how] = min(times[1], cudnn_ms.get(how, math.inf))
            label = f"{case.name + suffix + how:44} {provider:22}"
            print(f"{label} {times[1]:9.4f} ms  {rates[1]:6.3f} TB/s  {error:.4f}", flush=True)
            if save:
                ratio = cudnn_ms[how] / times[1] if how in cudnn_ms else None
                save_rows(case, provider, suffix + how, bits, error, times, rates, ratio)
        del sets
        if on_gpu:
            torch.cuda.empty_cache()
    for how, (ms, provider) in best.items():
        print(f"{case.name + how:44} ours is {ms / ours_ms[how]:.2f} times as fast as {provider}", flush=True)
    return failures


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--set", choices=sorted(SETS), default="llama8b")
    parser.add_argument("--no-save", action="store_true", help="print only, append nothing to results.csv")
    parser.add_argument("--dry-run", action="store_true", help="a small case on the CPU; saves nothing")
    arguments = parser.parse_args()
    torch.manual_seed(0)
    if arguments.dry_run:
        failures = [f for case in SETS["dry"] for f in run_case(case, torch.device("cpu"), torch.float32, False)]
        return 1 if failures else 0
    if not torch.cuda.is_available():
        print("bench_decode.py times GPU kernels: no CUDA GPU was found here.", file=sys.stderr)
        return 2
    device = torch.device("cuda")
    copy = copy_bandwidth(device)
    print(f"device copy: {copy:.2f} TB/s", flush=True)
    if not arguments.no_save:
        shared = {"suite": "decode", "case": "device_copy", "provider": "device_copy"}
        append_row(RESULTS, **shared, metric="bandwidth", unit="TB_s", median=f"{copy:.4f}")
    failures = []
    for case in SETS[arguments.set]:
        failures += run_case(case, device, torch.bfloat16, not arguments.no_save)
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
