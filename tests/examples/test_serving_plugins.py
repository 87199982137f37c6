"""Plug-ins for servers, on stand-ins of the published interfaces that they were written from."""

from __future__ import annotations

import importlib
import importlib.metadata
import sys
import types
from importlib.metadata import EntryPoint

import pytest
import torch

import sage_processors as sp
from sage_kernels.ops import skip_state
from sage_kernels.testing import exact_attention, sqnr_db
from tests.support.repository import ROOT
from tests.support.tiny_pipelines import flux_pipe


FOLDER = ROOT / "examples" / "serving_plugins"
B, S, H, D, STEPS = 1, 96, 2, 32, 6
OPTIONS = {"limit": 0.9, "every": 3, "first_steps": 1, "last_steps": 1}


@pytest.fixture
def plugin(monkeypatch):
    monkeypatch.syspath_prepend(str(FOLDER))
    monkeypatch.setattr(skip_state, "REFERENCE_BLOCK", (4, 4))
    text = (FOLDER / "pyproject.toml").read_text()
    (line,) = (line for line in text.splitlines() if line.startswith("sage_int8 = "))
    entry = EntryPoint("sage_int8", line.partition(" = ")[2].strip('"'), "vllm_omni.sparse_attn")
    yield entry.load()  # as the dispatcher does
    del sys.modules["sage_vllm_omni"]


def heads(seed):
    """Q, K and V of a layer: seeds that are even attend to the first half of the keys, odd ones to the second."""
    generator = torch.Generator().manual_seed(seed)
    q, k, v = (torch.randn(B, S, H, D, generator=generator) for _ in range(3))
    q[..., 0] = 4.0
    k[:, : S // 2, :, 0], k[:, S // 2 :, :, 0] = (6.0, -6.0) if seed % 2 == 0 else (-6.0, 6.0)
    return q, k, v


def run(plugin, layers=2, first=0, given=OPTIONS):
    """One run of a model with some layers: what every call returns."""
    outs = []
    for step in range(STEPS):
        told = {"denoise_step_idx": torch.full((B,), step), "total_denoise_steps": torch.full((B,), STEPS)}
        for layer in range(layers):
            q, k, v = heads(100 * first + layer)
            # by keyword, as the dispatcher passes them
            outs.append(plugin(q, k, v, dict(given) | told, is_causal=False, softmax_scale=D**-0.5))
    return outs


def test_steps_between_the_ends_skip_tiles_and_runs_repeat(plugin):
    dense = run(plugin, given=OPTIONS | {"limit": 0.0})
    first, other, again = run(plugin), run(plugin, first=1), run(plugin)
    assert all(map(torch.equal, first, again)) and not torch.equal(first[4], other[4])
    assert all(map(torch.equal, first[:2], dense[:2])) and all(map(torch.equal, first[-2:], dense[-2:]))  # the ends
    assert not torch.equal(first[4], dense[4]) and sqnr_db(first[4], dense[4]) > 5
    for out, layer in zip(dense[:2], range(2), strict=True):
        assert sqnr_db(out, exact_attention(*heads(layer))[0]) > 30


def test_each_layer_has_its_own_lists(plugin):
    """The list of one would lose what the other attends to."""
    module, visited = sys.modules["sage_vllm_omni"], []
    for layers in (2, 1):
        module._of_thread.lists = module.Lists()
        outs = run(plugin, layers=layers)
        visited.append([lists.totals[:2].tolist() for lists in module._of_thread.lists._kept.values()])
    assert all(map(torch.equal, run(plugin)[::2], outs))
    (first, second), (alone,) = visited
    assert first == alone
    for tiles, seen in (first, second):
        assert seen < 0.5 * tiles  # half of the keys at the most, but for the steps at the ends


def test_calls_without_one_step_visit_everything(plugin):
    q, k, v = heads(0)
    mixed = {"denoise_step_idx": torch.tensor([2, 3]), "total_denoise_steps": torch.tensor([6, 6])}
    wanted = plugin(q, k, v, {"limit": 0.9}, is_causal=False, softmax_scale=D**-0.5)
    assert torch.equal(plugin(q, k, v, OPTIONS | mixed, is_causal=False, softmax_scale=D**-0.5), wanted)
    assert sqnr_db(wanted, exact_attention(q, k, v)[0]) > 30
    causal = plugin(q, k, v, {}, is_causal=True, softmax_scale=D**-0.5)
    assert sqnr_db(causal, exact_attention(q, k, v, mask=torch.ones(S, S, dtype=torch.bool).tril())[0]) > 30
    assert not getattr(plugin, "capabilities", {}).get("supports_attention_mask")  # so that the server refuses masks


def test_heads_that_int8_can_not_do_run_in_pytorch(plugin):
    q, k, v = (x.double() for x in heads(0))
    out = plugin(q, k, v, {}, is_causal=False, softmax_scale=D**-0.5)
    assert out.dtype == torch.float64 and sqnr_db(out, exact_attention(q, k, v)[0]) > 100


def test_sglang_pipelines_are_swapped_when_they_are_loaded(monkeypatch):
    pipe, draw = flux_pipe()

    class DiffusersPipeline:
        def __init__(self, model_path, server_args):
            self.diffusers_pipe = self._load_diffusers_pipeline(model_path, server_args)

        def _load_diffusers_pipeline(self, model_path, server_args):
            assert (model_path, server_args) == ("folder", "arguments")
            return pipe

    name = "sglang.multimodal_gen.runtime.pipelines.diffusers_pipeline"
    for i in range(len(name.split("."))):
        monkeypatch.setitem(sys.modules, ".".join(name.split(".")[: i + 1]), types.ModuleType("stand_in"))
    sys.modules[name].DiffusersPipeline = DiffusersPipeline
    monkeypatch.syspath_prepend(str(FOLDER))
    sage_sglang = importlib.import_module("sage_sglang")
    sage_sglang.install("fast")
    sage_sglang.install(min_tokens=0)  # the newest options, once
    with pytest.raises(ValueError, match="preset"):
        sage_sglang.install("fastest")
    loaded = DiffusersPipeline("folder", "arguments")
    assert loaded.diffusers_pipe is pipe and isinstance(loaded.sage_handle, sp.Handle)
    draw(steps=2)
    assert loaded.sage_handle.report().calls > 0
    loaded.sage_handle.remove()
