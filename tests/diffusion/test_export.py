"""torch.export of a swapped model: the program runs INT8 attention, in both of its ways."""

from __future__ import annotations

import diffusers
import pytest
import torch

import sage_processors as sp
from sage_kernels.testing import sqnr_db
from tests.diffusion.test_compile import Pipe
from tests.support.tiny_models import MODELS


def targets(program):
    return {str(node.target) for node in program.graph.nodes if node.op == "call_function"}


@pytest.mark.parametrize("strict", [False, True])
@pytest.mark.parametrize("scaling", ["dynamic", "timestep"])
@pytest.mark.slow("exports whole models")
@pytest.mark.parametrize("name", ["unet_sd15", "flux"])
def test_P36_an_exported_program_runs_int8_attention(name, scaling, strict):
    model, inputs = MODELS[name]()
    config = sp.SageAttnProcessor(min_tokens=1, scaling=scaling)
    pipe = Pipe(model, diffusers.DDIMScheduler())
    with torch.no_grad(), sp.apply(pipe, config) as handle:
        ours = model(**inputs).sample
        program = torch.export.export(model, (), inputs, strict=strict)
        found = {name for name in targets(program) if "attention" in name}
        assert found == {f"sage_kernels.attention{'' if scaling == 'dynamic' else '_planned'}.default"}
        out = program.module()(**inputs).sample
        # on a GPU norms and rotary embeddings of eager code are fused: their sums round elsewhere
        assert torch.equal(out, ours) if out.device.type == "cpu" else sqnr_db(out, ours) > 40
        assert handle.report().fallbacks == {}
