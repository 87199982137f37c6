"""Pictures and whole models whose layers of one row a sample keep INT8 weights alone."""

from __future__ import annotations

import copy

import pytest
import torch

import sage_processors as sp
from tests.linears.counting import relative_error
from tests.linears.weights.test_weight_only import dropped, formats
from tests.support.tiny_models import MODELS


@pytest.mark.slow("draws two pictures of tiny_flux")
def test_pictures_are_as_near_as_with_modulation_in_16_bit():
    """The bar of pictures with INT8 layers, which keep modulation in 16 bit: 36 dB. Modulation alone: 10 dB more."""
    diffusers = pytest.importorskip("diffusers")

    def draw(**options):
        pipe = diffusers.DiffusionPipeline.from_pretrained(sp.pipelines.path("tiny_flux"))
        pipe.set_progress_bar_config(disable=True)
        if options:
            swap = dropped(pipe.transformer, **options)
            assert "int8_weights" in formats(swap).values()
        generator = torch.Generator().manual_seed(0)
        prompt = "a red circle on a blue background"
        return pipe(prompt, num_inference_steps=4, generator=generator, output_type="pt").images

    stock = draw()
    for kept, bar in (((), 36.0), (("*.attn.*", "*.ff*", "*.proj_*"), 46.0)):
        error = (draw(layers=dict.fromkeys(kept, "none"), linears="int8") - stock).square().mean()
        assert error > 0 and -10 * error.log10() > bar


@pytest.mark.slow("runs every family twice")
@pytest.mark.parametrize("name", sorted(MODELS))
def test_every_family_within_quantisation_of_its_weights(name):
    """Nothing but modulation and time embeddings in 8 bit: every other layer is kept."""
    model, inputs = MODELS[name]()

    def run():
        torch.manual_seed(0)
        with torch.no_grad():
            result = model(**copy.deepcopy(inputs))
        result = result[0] if isinstance(result, (tuple, dict)) or hasattr(result, "to_tuple") else result
        return torch.cat([x.flatten() for x in result]) if isinstance(result, list) else result

    expected = run()
    with sp.quantize_linears(copy.deepcopy(model), min_features=0) as swap:
        others = tuple(row["layer"] for row in swap.report().rows if row["format"])
    swap = dropped(model, layers={**dict.fromkeys(others, "none")})
    assert set(formats(swap).values()) <= {None, "int8_weights"}
    assert relative_error(run(), expected) < 0.03
    assert set(swap.report().fallbacks) <= {"rank", "empty"}
    if name == "flux":
        assert "int8_weights" in formats(swap).values()
