"""The folder of the benchmarks on the path, as when one of them is run."""

from __future__ import annotations

import importlib
import importlib.metadata
import sys
import types

import pytest
from torch.nn.functional import scaled_dot_product_attention

from tests.support.repository import ROOT


@pytest.fixture(scope="module")
def on_the_path():
    folder = str(ROOT / "kernels" / "benchmarks")
    sys.path.insert(0, folder)
    yield
    sys.path.remove(folder)


@pytest.fixture(scope="module")
def bench(request, on_the_path):
    """The module that the test file is named after: bench_skip for test_bench_skip.py."""
    return importlib.import_module(request.module.__name__.rpartition(".")[2].removeprefix("test_"))


@pytest.fixture
def sageattention(monkeypatch):
    """A package of SageAttention 2's name and signature, with a rounding of its own."""
    package, calls = types.ModuleType("sageattention"), []

    def attend(q, k, v, tensor_layout="HND", is_causal=False, sm_scale=None):
        assert tensor_layout == "HND"
        calls.append(q.shape)
        return scaled_dot_product_attention(q, k, v, is_causal=is_causal, scale=sm_scale) * 1.02

    package.sageattn_qk_int8_pv_fp8_cuda_sm90 = attend
    version = importlib.metadata.version
    monkeypatch.setitem(sys.modules, "sageattention", package)
    monkeypatch.setattr(importlib.metadata, "version", lambda x: "2.2.0" if x == "sageattention" else version(x))
    return calls
