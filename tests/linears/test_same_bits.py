"""The first forward of a swapped model gives the bits of all later ones, whatever it learns of the model."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

import sage_processors as sp
from sage_processors.linears import modules
from tests.linears.counting import set_least_work
from tests.support.tiny_language_models import MODELS as LANGUAGE
from tests.support.tiny_models import MODELS


# Cross-attention, whose queries turn out to have another input than keys and values; a norm in front of layers of
# unlike widths; GEGLU; layers of one token.
NAMES = ("unet_sdxl", "wan_t2v", "flux", "ltx")
REPEATS = 3


def cast(x, dtype=torch.bfloat16):
    if isinstance(x, torch.Tensor):
        return x.to(dtype, copy=True) if x.is_floating_point() else x.clone()
    return {key: cast(value, dtype) for key, value in x.items()} if isinstance(x, dict) else x


def forwards(model, inputs, least_work=0):
    """(outputs of a model that was swapped just now, called again and again with the same inputs; how many calls of
    its linear layers ran in 8 bit)."""
    options = sp.SageAttnProcessor(min_tokens=0, scaling="per_block", linears=sp.Linears("int8", min_features=0))
    is_text = "input_ids" in inputs
    swapped = sp.quantize_linears(model, min_features=0) if is_text else sp.apply(model, options)
    with swapped, torch.no_grad():
        set_least_work(model, least_work)
        outputs = [model(**cast(inputs), return_dict=False)[0] for _ in range(REPEATS)]
        report = swapped.report()
        return outputs, (report if is_text else report.linears).calls


def work_of_calls(model, inputs) -> list[int]:
    """Multiply-adds of the linear layers' calls, each number once."""
    found = set()
    layers = [module for module in model.modules() if type(module) is nn.Linear]
    hooks = [
        x.register_forward_pre_hook(lambda m, given: found.add(given[0].numel() * m.out_features)) for x in layers
    ]
    with torch.no_grad():
        model(**cast(inputs))
    for hook in hooks:
        hook.remove()
    return sorted(found)


def all_same(outputs) -> bool:
    return all(torch.equal(outputs[0], other) for other in outputs[1:])


@pytest.mark.parametrize("name", (*NAMES, "hidream"))
def test_a_copy_gives_the_bits_of_its_original(name):
    """Of two layers with one input, too, that wait for each other (SwiGLU)."""
    model, inputs = MODELS[name]()
    with sp.quantize_linears(model.to(torch.bfloat16), min_features=0), torch.no_grad():
        outputs = [each(**cast(inputs), return_dict=False)[0] for each in (model, copy.deepcopy(model))]
    assert all_same(outputs)


@pytest.mark.parametrize("name", (*NAMES, "llama", "gemma2"))
def test_whatever_calls_are_short(name, monkeypatch):
    """As on a GPU: the CPU is taken for one. The border lies between each two kinds of calls once. Keys and values of
    language models have fewer heads than queries; gate and value of their feed-forward are one multiplication."""
    monkeypatch.setattr(modules, "is_timed", lambda device: True)
    model, inputs = (MODELS[name] if name in NAMES else LANGUAGE[name])()
    model.to(torch.bfloat16)
    work = work_of_calls(model, inputs)
    found = set()
    for least_work in (*(number + 1 for number in work[:-1]), *(3 * number for number in work[:-1])):
        outputs, calls = forwards(model, inputs, least_work)
        assert all_same(outputs), least_work
        found.add(calls)
    assert len(found) > (2 if name in NAMES else 1)


@pytest.mark.parametrize("target", ["to_q", "to_k", "to_v"])
@pytest.mark.parametrize("name", NAMES)
def test_what_follows_a_projection_is_rounded_as_it_was_at_first(name, target):
    """A LoRA adds to the projection's result."""
    peft = pytest.importorskip("peft")
    model, inputs = MODELS[name]()
    torch.manual_seed(0)
    model.add_adapter(peft.LoraConfig(r=4, lora_alpha=8, target_modules=[target]))
    for key, parameter in model.named_parameters():
        if "lora_B" in key:
            nn.init.normal_(parameter, std=0.2)
    model.eval().requires_grad_(False).to(torch.bfloat16)
    outputs, calls = forwards(model, inputs)
    assert all_same(outputs) and calls > 0
