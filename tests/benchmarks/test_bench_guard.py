"""bench_guard.py times another kernel without the guard, and the shipped one with it, whatever ran before."""

from __future__ import annotations

import pytest


pytest.importorskip("triton", reason="triton is not installed")
from tests.support.recording_driver import run  # noqa: E402
from tests.support.repository import ROOT  # noqa: E402


SCRIPT = f"""
import contextlib, functools, sys
sys.path[:0] = [{str(ROOT)!r}, {str(ROOT / "kernels" / "benchmarks")!r}]
import torch
from tests.support.recording_driver import install

handed = install()
import bench_guard
from cases import square
from sage_kernels._triton.attention import launch as launch_attention
from sage_kernels._triton.attention.hopper import kernel as attention_fwd_hopper
from sage_kernels._triton.attention.tiles import choose_tile

# a Hopper GPU, for tensors on the CPU
torch.cuda.device_of = lambda x: contextlib.nullcontext()
launch_attention.processors_of = lambda device: 132
def tile_on_hopper(device, width, scaling, *_):
    return choose_tile(90, width, scaling)

def on_cpu(state, sites, device):
    return state(sites, device="cpu")

bench_guard.device_tile = launch_attention.device_tile = tile_on_hopper
bench_guard.ScaleState = functools.partial(on_cpu, bench_guard.ScaleState)
inputs = [torch.randn(1, 512, 2, 64).bfloat16() for _ in range(3)]
shipped = attention_fwd_hopper.attention_fwd_hopper_kernel
without = bench_guard.unguarded_kernel()
variants = {{"guarded": {{}}, "unguarded": {{"kernel": without}}, "never_fixed": {{"fixed": False}}}}
kernels = {{}}
for turn in range(2):
    for name, options in variants.items():
        planned = bench_guard.Planned(square(64, 512, batch=1, heads=2), "qk_int8_pv_bf16", inputs, **options)
        handed.clear()
        planned(*inputs)
        (prologue, *_), (attention, *_) = handed
        assert kernels.setdefault(name, attention) == attention and prologue != attention
        assert attention_fwd_hopper.attention_fwd_hopper_kernel is shipped
assert len(set(kernels.values())) == 3, kernels
print("three kernels")
"""


@pytest.mark.slow("compiles three kernels")
def test_without_the_guard_it_is_another_kernel(tmp_path):
    done = run(SCRIPT, tmp_path)
    assert done.stdout == "three kernels\n", done.stderr[-3000:]
