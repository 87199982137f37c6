"""The embedded pipelines with 8-bit linear layers, through the handle: pictures, reports, removal."""

from __future__ import annotations

import copy
import functools

import pytest
import torch
from torch import nn

import sage_processors as sp
from sage_processors.evaluation import quality
from tests.linears.counting import relative_error
from tests.support.tiny_models import MODELS


ALL = {"linears": {"format": "int8", "min_features": 0}}


@functools.cache
def pipeline(name):
    diffusers = pytest.importorskip("diffusers")
    pipe = diffusers.DiffusionPipeline.from_pretrained(sp.pipelines.path(name))
    pipe.set_progress_bar_config(disable=True)
    return pipe


def draw(pipe):
    options = quality.picture_arguments(pipe) | {"generator": torch.Generator().manual_seed(0), "output_type": "pt"}
    return pipe("a red circle on a blue background", num_inference_steps=4, **options).images


def psnr(a, b):
    return (-10 * (a.float() - b.float()).square().mean().log10()).item()


# INT8 has an SQNR of 40 dB a layer, FP8 one of 29: the bar of a picture is 36 dB for the first, 10 less for the second
@pytest.mark.parametrize(
    ("format", "bar"), [("int8", 36.0), pytest.param("fp8", 30.0, marks=pytest.mark.slow("as int8"))]
)
@pytest.mark.parametrize(
    "name",
    [
        "tiny_sd",
        pytest.param("tiny_flux", marks=pytest.mark.slow("attention's reference; its blocks are tried alone")),
    ],
)
def test_pictures_of_the_embedded_pipelines(name, format, bar):
    pipe = pipeline(name)
    stock = draw(pipe)
    handle = pipe.set_attn_processor(sp.SageAttnProcessor(linears=sp.Linears(format, min_features=0)))
    assert psnr(draw(pipe), stock) > bar
    report = handle.report()
    active = [row for row in report.linears.rows if row["format"]]
    assert {row["format"] for row in active} == {format} and {row["calls"] for row in active} == {4}
    assert report.linears.fallbacks == {} and all(row["bytes_saved"] > 0 for row in active)
    text = str(report)
    assert "8-bit linear layers" in text and "INT8 attention" in text and "outside of the blocks" in text
    handle.remove()
    assert torch.equal(draw(pipe), stock)
    model = pipe.unet if name == "tiny_sd" else pipe.transformer
    assert all(type(module) is nn.Linear for module in model.modules() if isinstance(module, nn.Linear))


@pytest.mark.parametrize("name", ["tiny_sd", pytest.param("tiny_flux", marks=pytest.mark.slow("as tiny_sd"))])
def test_batch_and_resolution_change(name):
    pipe = pipeline(name)
    size = pipe.vae_scale_factor * 8
    calls = [{"height": 2 * size, "width": size}, {"height": size, "width": 2 * size, "num_images_per_prompt": 2}]

    def run(**options):
        generator = torch.Generator().manual_seed(1)
        return pipe(
            "a green square", num_inference_steps=2, generator=generator, output_type="latent", **options
        ).images

    stock = [run(**options) for options in calls]
    with sp.apply(pipe, sp.SageAttnProcessor(**ALL)):
        for options, expected in zip(calls, stock, strict=True):
            assert relative_error(run(**options), expected) < 0.1


def test_defaults_protect_modulation_embeddings_and_small_layers():
    model, _ = MODELS["flux"]()
    with sp.apply(model, sp.SageAttnProcessor(scaling="dynamic", **ALL)) as handle:
        status = {row["layer"]: row["status"] for row in handle.report().linears.rows}
        assert status["transformer_blocks.0.norm1.linear"] == "protected"
        assert status["x_embedder"] == status["proj_out"] == "outside of the blocks"
        assert status["single_transformer_blocks.0.proj_out"] == "active"
    with sp.apply(model, sp.SageAttnProcessor(scaling="dynamic", linears="int8")) as handle:
        assert {row["status"] for row in handle.report().linears.rows if "attn" in row["layer"]} == {"small"}
    options = {"linears": "none", "layers": {"*.attn.to_?": {"linears": "fp8"}, "*norm1.linear": {"linears": "int8"}}}
    with sp.apply(model, sp.SageAttnProcessor(scaling="dynamic", **options)) as handle:
        formats = {row["layer"]: row["format"] for row in handle.report().linears.rows}
        assert formats["transformer_blocks.0.attn.to_q"] == "fp8"
        assert formats["transformer_blocks.0.norm1.linear"] == "int8"
        assert formats["transformer_blocks.0.ff.net.2"] is None
    with sp.apply(model, sp.SageAttnProcessor(**ALL, scaling="dynamic", layers={"*.net.2": {"linears": "none"}})) as h:
        status = {row["layer"]: row["status"] for row in h.report().linears.rows}
        assert status["transformer_blocks.0.ff.net.2"] == "kept"


def run(model, inputs):
    torch.manual_seed(0)
    with torch.no_grad():
        result = model(**copy.deepcopy(inputs))
    result = result[0] if isinstance(result, (tuple, dict)) or hasattr(result, "to_tuple") else result
    return torch.cat([x.flatten() for x in result]) if isinstance(result, list) else result


@pytest.mark.parametrize("name", sorted(MODELS))
def test_every_family_within_quantisation(name):
    """At the end with nothing in 8 bit but the weights of modulation and time embeddings."""
    model, inputs = MODELS[name]()
    expected = run(model, inputs)
    with sp.quantize_linears(model, min_features=0) as swap:
        for _ in range(2):
            assert relative_error(run(model, inputs), expected) < 0.06
        assert swap.report().calls > 0
        assert set(swap.report().fallbacks) <= {"rank", "empty"}
        others = [row["layer"] for row in swap.report().rows if row["format"]]
    assert torch.equal(run(model, inputs), expected)
    swap = sp.quantize_linears(model, min_features=0, drop_weights=True, layers=dict.fromkeys(others, "none"))
    formats = {row["format"] for row in swap.report().rows}
    assert formats <= {None, "int8_weights"} and (name != "flux" or "int8_weights" in formats)
    assert relative_error(run(model, inputs), expected) < 0.03
    assert set(swap.report().fallbacks) <= {"rank", "empty"}


def test_weights_that_an_average_was_copied_to_are_noticed_by_the_next_run():
    """EMAModel writes through `.data`, which PyTorch does not count."""
    from diffusers.training_utils import EMAModel

    pipe = pipeline("tiny_sd")
    unet = pipe.unet
    own = [parameter.detach().clone() for parameter in unet.parameters()]
    other = EMAModel(unet.parameters())
    for parameter in other.shadow_params:
        parameter.mul_(1.02)
    try:
        before = draw(pipe)
        with pipe.set_attn_processor(sp.SageAttnProcessor(scaling="per_block", **ALL)):
            draw(pipe)
            other.copy_to(unet.parameters())
            got = draw(pipe)
        expected = draw(pipe)
    finally:
        for parameter, numbers in zip(unet.parameters(), own, strict=True):
            parameter.data.copy_(numbers)
    assert psnr(got, expected) > 36 > psnr(before, expected)
