"""Graphs together with other features: from graphs comes what the table of docs/guide.md says, with eager bits."""

from __future__ import annotations

import contextlib
import re

import pytest
import torch

import sage_processors as sp
from sage_processors.diffusion.graphs.model_graphs import WARM_UP
from tests.diffusion.graphs.test_block_graphs import CACHES, moved, outside, same
from tests.diffusion.graphs.test_model_graphs import Looking, add_lora
from tests.diffusion.test_apply_pipelines import flux_pipe
from tests.diffusion.test_lifecycle import accelerate_offload, group_offload
from tests.diffusion.test_lifecycle_adapters import flux_ip_adapter
from tests.support.cpu_graphs import captures, options
from tests.support.repository import ROOT
from tests.support.tiny_models import MODELS


STEPS = 14


class Case:
    """A model with a feature. waits_in: a function that finds a module whose forward waits for the GPU."""

    name, options, waits_in = "flux", {}, None

    def __init__(self):
        self.model, self.inputs = MODELS[self.name]()
        self.put()

    def put(self):
        """Before the swap."""

    def swapped(self, handle):
        """After the swap."""

    def around(self):
        """The context of all forwards."""
        return torch.no_grad()

    def calls(self):
        """The inputs of the calls of one step."""
        return [self.inputs]


def case(put=lambda case: None, around=torch.no_grad, calls=lambda case: [case.inputs], **others):
    members = {"put": put, "around": lambda case: around(), "calls": calls}
    return type("Made", (Case,), members | others)


def scale_lora(case):
    add_lora(case.model)
    [x.set_scale("default", 0.7) for x in case.model.modules() if hasattr(x, "set_scale")]


def load_ip_adapter(case):
    pipe, _ = flux_pipe()
    adapter = flux_ip_adapter(pipe.transformer)
    pipe.load_ip_adapter(adapter, "", image_encoder_pretrained_model_name_or_path=None)
    case.model, case.image = pipe.transformer, torch.randn(1, 1, 24)
    case.inputs["hidden_states"] = case.inputs["hidden_states"].repeat(1, 1, 4)


def with_image(case):  # the model takes the image out of the dict
    return [case.inputs | {"joint_attention_kwargs": {"ip_adapter_image_embeds": [case.image]}}]


def with_residuals(case):
    torch.manual_seed(2)
    rows = case.inputs["hidden_states"].shape[1]
    return [case.inputs | {"controlnet_block_samples": [torch.randn(1, rows, 32)]}]


def batch_of_two(case):
    one = {k: x for k, x in case.inputs.items() if k.endswith("ids")}
    return [{k: torch.cat([x, x]) if isinstance(x, torch.Tensor) else x for k, x in case.inputs.items()} | one]


def two_calls(case):
    return [case.inputs, case.inputs | {"encoder_hidden_states": -case.inputs["encoder_hidden_states"]}]


def two_resolutions(case):
    rows = case.inputs["hidden_states"].shape[1] // 2
    return [
        case.inputs,
        case.inputs | {name: case.inputs[name][..., :rows, :] for name in ("hidden_states", "img_ids")},
    ]


def cached(name):
    return case(
        lambda case: case.model.enable_cache(CACHES[name][0]()), around=torch.no_grad,
        swapped=lambda case, handle: case.opened.enter_context(case.model.cache_context("cond")),
    )  # fmt: skip


def hooked(case):
    case.model.proj_out.register_forward_hook(lambda module, args, out: out * 1.5)


def offload_whole(case):
    accelerate = pytest.importorskip("accelerate")
    case.model, _ = accelerate.cpu_offload_with_hook(case.model, execution_device="cpu")


def free_unet(case):
    case.model.enable_freeu(s1=0.9, s2=0.2, b1=1.2, b2=1.4)


def compile_block(case):  # as nn.Module.compile does
    block = case.model.transformer_blocks[0]
    block._compiled_call_impl = block._call_impl


def autocast():
    stack = contextlib.ExitStack()
    stack.enter_context(torch.no_grad())
    stack.enter_context(torch.autocast("cpu", dtype=torch.bfloat16))
    return stack


def looked_at():
    stack = contextlib.ExitStack()
    stack.enter_context(torch.no_grad())
    stack.enter_context(Looking())
    return stack


# words of a row of the table → the cases that show it
ROWS = {
    "LoRA and its scales, IP-Adapter, ControlNet residuals": {
        "lora": case(scale_lora),
        "ip adapter": case(load_ip_adapter, calls=with_image),
        "controlnet": case(calls=with_residuals),
    },
    "guidance in one batch or in two calls, several resolutions": {
        "batch": case(calls=batch_of_two), "two calls": case(calls=two_calls), "sizes": case(calls=two_resolutions),
    },
    "`inference_mode`, autocast, FreeU": {
        "inference mode": case(around=torch.inference_mode), "autocast": case(around=autocast),
        "8 bit under autocast": case(around=autocast, options={"linears": {"format": "int8", "min_features": 0}}),
        "freeu": case(free_unet, name="unet_sd15"),
    },
    "FirstBlockCache, MagCache": {"first block": cached("first block"), "magnitudes": cached("magnitudes")},
    "code that waits for the GPU, or hooks outside of the blocks": {
        "waits": case(waits_in=outside), "hook": case(hooked),
    },
    "offloading of whole models": {"whole model": case(offload_whole)},
    "TaylorSeerCache, PyramidAttentionBroadcast: hooks inside of blocks": {
        "taylor series": cached("taylor series"), "pyramid": cached("pyramid"),
    },
    "group offloading": {"groups": case(lambda case: group_offload("block_level")(case.model, "cpu"))},
    "sequential offloading": {"sequential": case(lambda case: accelerate_offload(case.model, "cpu"))},
    "compiled blocks": {"compiled": case(compile_block)},
    "skip lists": {},  # need a pipeline: test_lists_in_graphs.py
    "gradients": {"gradient": case(around=contextlib.nullcontext)},
    "a profiler or a mode of PyTorch": {"mode": case(around=looked_at)},
    "a running probe": {"probe": case(swapped=lambda case, handle: handle.probe(every=1))},
}  # fmt: skip
CASES = {name: (row, made) for row, cases in ROWS.items() for name, made in cases.items()}


def table() -> dict[str, str]:
    text = (ROOT / "docs" / "guide.md").read_text(encoding="utf-8").partition("| together with | from graphs |")[2]
    return dict(re.findall(r"^\| (.+) \| (.+) \|$", text.partition("\n\n")[0], re.M))


def test_each_row_of_the_table_is_shown():
    assert set(table()) - {"---"} == set(ROWS)


@pytest.mark.parametrize("name", CASES)
def test_what_comes_from_graphs(name):
    row, made = CASES[name]
    found = []
    for with_graphs in (False, True):
        torch.manual_seed(0)
        one = made()
        with (
            sp.apply(one.model, options(scaling="timestep", **one.options)) as handle,
            contextlib.ExitStack() as opened,
        ):
            graphs, recorder = captures(handle) if with_graphs else (None, None)
            if made.waits_in is not None and with_graphs:
                recorder.waits_in(made.waits_in(one.model))
            one.opened = opened
            one.swapped(handle)
            handle.new_run()
            with one.around():
                found.append(
                    [
                        one.model(**moved(given, step), return_dict=False)[0].detach().clone()
                        for step in range(STEPS)
                        for given in one.calls()
                    ]
                )
            report = str(handle.report())
    assert same(*found) and not graphs.differing
    states = {"whole": graphs.replays, "blocks": graphs.block_replays, **graphs.eager, **graphs.block_eager}
    said = table()[row]
    if said.startswith("whole"):
        assert graphs.replays >= len(one.calls()) * (STEPS - WARM_UP) and not graphs.partly, states
        assert set(graphs.eager) == {"warm_up"}, states
        return
    assert not graphs.replays, states
    assert bool(graphs.partly) == ("blocks" in said), states
    for reason in re.findall(r"`(\w+)`", said):
        assert states[reason] and reason in report, states
