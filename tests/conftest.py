"""Fixtures for every test: a device, and memory that is never conveniently zero."""

from __future__ import annotations

import os

import pytest
import torch


# Without a GPU the kernels run in Triton's interpreter, which is chosen when a kernel is defined: before any import
# of ours.
if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")


@pytest.fixture(autouse=True)
def _poisoned_memory(monkeypatch):
    """torch.empty returns NaN (codes: 77), so that a result that was never written can't pass for a right one."""
    empty = torch.empty

    def poisoned(*args, **kwargs):
        tensor = empty(*args, **kwargs)
        if (
            torch.compiler.is_compiling()
            or tensor.device.type == "meta"
            or isinstance(tensor, torch._subclasses.FakeTensor)
        ):
            return tensor
        if tensor.is_floating_point():
            tensor.fill_(float("nan"))
        elif tensor.dtype == torch.int8:
            tensor.fill_(77)
        return tensor

    monkeypatch.setattr(torch, "empty", poisoned)


@pytest.fixture(params=["interpreter", pytest.param("cuda", marks=pytest.mark.gpu)])
def kernel_device(request):
    """Where the Triton kernels run: in the interpreter on the CPU, or on a GPU."""
    on_gpu = torch.cuda.is_available()
    if (request.param == "cuda") != on_gpu:
        pytest.skip(
            "needs a CUDA GPU" if request.param == "cuda" else "the interpreter was not chosen: there is a GPU"
        )
    if request.param == "interpreter":
        pytest.importorskip("triton", reason="triton is not installed")
    return torch.device("cuda" if on_gpu else "cpu")
