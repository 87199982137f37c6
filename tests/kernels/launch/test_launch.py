"""launch() hands the driver what Triton itself would, and leaves to Triton what is not like an earlier launch."""

from __future__ import annotations

import pytest


pytest.importorskip("triton", reason="triton is not installed")
from tests.support.recording_driver import run  # noqa: E402


# in a process of its own, with a driver that records what it is handed
SCRIPT = """
import torch
import triton.language as tl
import triton
from triton.tools.tensor_descriptor import TensorDescriptor
from tests.support.recording_driver import install

handed = install()
from sage_kernels._triton.launch import launch

@triton.jit(do_not_specialize=["length"], do_not_specialize_on_alignment=["scale_ptr"])
def kernel(x_ptr, scale_ptr, described, stride, length, factor, BLOCK: tl.constexpr, NAME: tl.constexpr):
    at = tl.arange(0, BLOCK)
    x = tl.load(x_ptr + at * stride, mask=at < length) * factor + tl.load(scale_ptr) + described.load([0, 0])
    tl.store(x_ptr + at * stride, tl.sum(x, 0).to(x_ptr.dtype.element_ty))

runs = []
run = kernel.run
kernel.run = lambda *a, **k: runs.append(1) or run(*a, **k)

def values(dtype=torch.float32, first=0, first_scale=0, stride=16, length=5, factor=2.0, width=16, **constants):
    x, scale, plane = (torch.zeros(256, dtype=dtype) for _ in range(3))
    kept.append((x, scale, plane))
    described = TensorDescriptor(plane.view(16, 16), [16, 16], [16, 1], [1, width])
    return (x[first:], scale[first_scale:], described, stride, length, factor), {"BLOCK": 16, "NAME": "a", **constants}

kept = []
arguments, constants = values()
launch(kernel, 3, *arguments, **constants)
assert len(runs) == 1
# like the first: other memory, lengths and factors, an address that need not be aligned
for other in ({}, {"length": 1000}, {"factor": 3.5}, {"first_scale": 1}, {"length": 1}, {"length": -(2**31)}):
    arguments, constants = values(**other)
    runs.clear(), handed.clear()
    launch(kernel, 7, *arguments, **constants)
    assert not runs, other
    kernel[(7,)](*arguments, **constants)
    assert handed[0] == handed[1] and handed[0][1] == (7, 1, 1), (other, handed)
# not like it: Triton compiles anew, or may; the second time some of these are
for other in (
    {"dtype": torch.float16}, {"first": 1}, {"stride": 1}, {"stride": 3}, {"stride": 2**33}, {"length": 2**31},
    {"BLOCK": 32, "width": 32}, {"NAME": "b"}, {"width": 8, "BLOCK": 8}, {"num_warps": 8}, {"factor": 2},
):
    for turn in range(2):
        arguments, constants = values(**other)
        runs.clear(), handed.clear()
        launch(kernel, 2, *arguments, **constants)
        assert turn or runs, other
        kernel[(2,)](*arguments, **constants)
        assert handed[0] == handed[1], (other, handed)
print("all like Triton")
"""


def test_what_is_launched_is_what_triton_would_launch(tmp_path):
    done = run(SCRIPT, tmp_path)
    assert done.stdout == "all like Triton\n", done.stderr[-3000:]
