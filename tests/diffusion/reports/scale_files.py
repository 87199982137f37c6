"""Scale files for tests: a pipeline that learnt something, its file, and files made from it that are wrong."""

from __future__ import annotations

import copy
import json

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from tests.diffusion.test_apply_pipelines import EVERYTHING
from tests.support.tiny_pipelines import PIPES


def learnt(name="flux", runs=2):
    """A pipeline that ran, its handle and how to run it again."""
    pipe, run = PIPES[name]()
    handle = pipe.set_attn_processor(EVERYTHING)
    for seed in range(runs):
        run(seed=seed)
    return pipe, handle, run


def values_of(handle):
    return [
        {
            name: tensor.clone()
            for name, tensor in (denoiser.state.snapshot() | {"t": denoiser._reader.snapshot()}).items()
        }
        for denoiser in handle._denoisers
    ]


def same(a, b):
    return all(torch.equal(x[name], y[name]) for x, y in zip(a, b, strict=True) for name in x)


def changed(saved, path, metadata=None, tensors=None):
    """The saved file with other metadata (a function of a copy, or the JSON text) and other tensors."""
    _, own, old = saved
    if callable(metadata):
        own = copy.deepcopy(own)
        metadata(own)
    text = metadata if isinstance(metadata, str) else json.dumps(own)
    save_file(old | (tensors or {}), path, metadata={"sage_processors": text})
    return path


def read(path):
    """(path, its metadata, its tensors)."""
    with safe_open(path, "pt") as file:
        return path, json.loads(file.metadata()["sage_processors"]), load_file(path)


def flux_file(folder):
    """`read` of the file of a Flux pipeline that ran twice."""
    learnt()[1].save_scales(folder / "flux.safetensors")
    return read(folder / "flux.safetensors")


class Refusal:
    """Call it with a file: the message of the error that a fresh Flux pipeline raises. It has not changed by then."""

    def __init__(self):
        self.pipe, _ = PIPES["flux"]()
        self.handle = self.pipe.set_attn_processor(EVERYTHING)

    def __call__(self, path, error=ValueError):
        before = values_of(self.handle)
        with pytest.raises(error) as caught:
            self.handle.load_scales(path)
        assert type(caught.value) is error
        assert same(before, values_of(self.handle))
        return str(caught.value)
