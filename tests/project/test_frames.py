"""Paths of data are short: frames of our code between a user's or a library's call and the launch or swap it makes.

The launches are those of a Hopper GPU that is not there. ARCHITECTURE.md walks the same paths.
"""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch
from diffusers.models.attention_processor import Attention

import sage_processors as sp
from sage_kernels.ops import replay
from sage_processors.diffusion import denoiser
from tests.diffusion.test_apply_pipelines import flux_pipe
from tests.support.repository import ROOT


pytest.importorskip("triton", reason="triton is not installed")
pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="tensors of a CPU are taken for those of a GPU")
OURS = (str(ROOT / "sage_processors"), str(ROOT / "kernels"))
WALKS = (ROOT / "ARCHITECTURE.md").read_text(encoding="utf-8")


def frames() -> list[str]:
    """Functions of ours that are running, outermost first. A processor's rebound code counts as diffusers'."""
    frame, found = sys._getframe(1), []
    while frame is not None:
        code = frame.f_code
        if code.co_filename.startswith(OURS):
            found.append(f"{Path(code.co_filename).name}: {code.co_name}")
        frame = frame.f_back
    return found[::-1]


@pytest.fixture
def launches(monkeypatch):
    """Lists of the frames at each launch of a kernel, by Triton ("first") and by a replay ("repeated")."""
    from triton.runtime import interpreter, jit

    from sage_kernels._triton import compat
    from sage_kernels._triton.attention import launch as attention
    from sage_kernels._triton.attention.tiles import choose_tile
    from sage_kernels._triton.launch import launcher
    from sage_kernels._triton.prologue import prologue

    found = {"first": [], "repeated": []}

    def launched(*_):
        return lambda *_, **__: found["first"].append(frames())

    def hopper_tile(_, width, scaling, masking, pv="16bit", lagged=False, **others):
        return choose_tile(90, width, scaling, masking.by_row, pv, not lagged)

    monkeypatch.setattr(torch.Tensor, "is_cuda", property(lambda x: True))
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(attention, "device_tile", hopper_tile)
    for module in (attention, prologue):
        monkeypatch.setattr(module, "processors_of", lambda device: 132)
    for name in ("before_compile", "offer"):
        monkeypatch.setattr(launcher, name, lambda _: None)
    for kind in (jit.KernelInterface, interpreter.InterpretedFunction):
        monkeypatch.setattr(kind, "__getitem__", launched, raising=False)
    monkeypatch.setattr(compat, "parameters", lambda kernel: [(name, False, True) for name in kernel.arg_names])
    monkeypatch.setattr(compat, "current_device", lambda: None)
    monkeypatch.setattr(compat, "current_stream", lambda device: 0)
    monkeypatch.setattr(compat, "starter", lambda _: lambda *_: found["repeated"].append(frames()))
    replay.forget()
    yield found
    replay.forget()


def check(found: list[list[str]], at_most: int) -> None:
    longest = max(found, key=len)
    assert 1 < len(longest) <= at_most, " → ".join(longest)
    files = {name.partition(":")[0] for names in found for name in names}
    assert not {file for file in files if f"{file}`" not in WALKS}


def test_attention_is_launched_within_10_frames_and_replayed_within_7(launches):
    model = torch.nn.Sequential(Attention(64, heads=2, dim_head=32)).bfloat16().eval()
    sp.apply(model, sp.SageAttnProcessor(min_tokens=0))
    with torch.no_grad():
        for _ in range(2):
            model(torch.randn(1, 70, 64, dtype=torch.bfloat16))
    assert len(launches["first"]) == len(launches["repeated"]) == 2  # the prologue and attention
    check(launches["first"], 10)
    check(launches["repeated"], 7)


@pytest.mark.parametrize("room", [None, 200])
def test_a_token_is_appended_within_8_frames(room, launches):
    config = pytest.importorskip("transformers").LlamaConfig(
        hidden_size=64, num_attention_heads=2, num_key_value_heads=2, num_hidden_layers=1
    )
    cache = sp.Int8KVCache(config, room)
    for number in (70, 1, 1):
        key, value = torch.randn(2, 1, 2, number, 32, dtype=torch.bfloat16)
        cache.update(key, value, 0)
    assert (len(launches["first"]), len(launches["repeated"])) == (2, 1)
    check(launches["first"] + launches["repeated"], 8)


def test_the_walks_are_short():
    assert len(WALKS.split()) <= 900


def test_a_processor_is_swapped_within_6_frames(monkeypatch):
    found, put = [], denoiser.put_processor

    def putting(*arguments):
        found.append([*frames(), "discovery.py: put_processor"])
        put(*arguments)

    monkeypatch.setattr(denoiser, "put_processor", putting)
    pipe, _ = flux_pipe()
    for target in (pipe, pipe.transformer):
        target.set_attn_processor(sp.SageAttnProcessor())
    assert found[0][0].startswith("pipeline_method") and found[-1][0].startswith("model_methods")
    check(found, 6)
