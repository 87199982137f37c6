"""Eager 8-bit layers round compiled blocks read what these wrote, also where nobody counts their writes."""

from __future__ import annotations

import copy

import pytest
import torch

import sage_processors as sp
from tests.support.replaying import Replaying
from tests.support.tiny_models import MODELS


STEPS = 4
CHANGING = ("hidden_states", "sample", "encoder_hidden_states")


@torch.no_grad()
def walk(model, inputs) -> list[torch.Tensor]:
    """Outputs of a run's steps, each of other inputs."""
    outputs = []
    for step in range(STEPS):
        generator, given = torch.Generator().manual_seed(step), dict(inputs)
        for name in CHANGING:
            if isinstance(given.get(name), torch.Tensor):
                given[name] = given[name] + 0.3 * torch.randn(given[name].shape, generator=generator)
        outputs.append(model(**given, return_dict=False)[0].clone())
    return outputs


@pytest.mark.parametrize("is_copy", [False, True])
@pytest.mark.parametrize("name, has_eager_layers", [("unet_sdxl", True), ("krea2", True), ("flux", False)])
def test_E25_replayed_blocks_leave_nothing_stale(name, has_eager_layers, is_copy):
    model, inputs = MODELS[name]()
    options = sp.SageAttnProcessor(min_tokens=1, linears=sp.Linears("int8", min_features=0))
    replaying, results = Replaying(), []
    for backend in ("eager", replaying):
        torch._dynamo.reset()
        with sp.apply(model, options) as handle:
            handle.new_run()
            called = model
            if is_copy:  # its original's forwards are other ones
                model(**inputs)
                called = copy.deepcopy(model)
                called(**inputs)
            called.compile_repeated_blocks(fullgraph=True, backend=backend)
            results.append(walk(called, inputs))
            rows = [row for row in handle.report().linears.rows if row["format"]]
        for module in model.modules():
            module._compiled_call_impl = None
    assert all(map(torch.equal, *results)) and not torch.equal(results[0][0], results[0][-1])
    assert replaying.replays >= STEPS - 1
    if not is_copy:
        assert {row["calls"] + row["compiled_calls"] for row in rows} == {STEPS}
        assert any(row["calls"] for row in rows) == has_eager_layers
    torch._dynamo.reset()
