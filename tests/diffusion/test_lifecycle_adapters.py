"""Everything in diffusers that replaces attention processors or goes around them: reported, and healed by refresh().

The case IDs in the names are those of the project's list of failure cases.
"""

from __future__ import annotations

import copy

import diffusers
import pytest
import torch

import sage_processors as sp
from sage_processors.diffusion.calls import sage_class
from tests.diffusion.calls.test_processors import forward, sqnr_db
from tests.diffusion.test_apply import processors_of
from tests.diffusion.test_lifecycle import statuses
from tests.support.placing import placed
from tests.support.tiny_models import MODELS
from tests.support.tiny_pipelines import flux_pipe, sd_pipe


EVERYTHING = sp.SageAttnProcessor(min_tokens=1)
# What it has learnt shows in the runs after: that it was kept is seen there.
LEARNING = sp.SageAttnProcessor(min_tokens=1, scaling="timestep_adaptive")
STRICT = sp.SageAttnProcessor(min_tokens=1, on_unsupported="raise")


def calls_of(handle):
    """Calls of every layer, and those without a plan: 1, if its state was kept.

    A plan that does not fit a call of these random models is another matter: of two layers of eight, now and then, it
    leaves nothing to be told.
    """
    rows = handle.report().rows
    assert sum(row["misfit_fraction"] == 0 for row in rows) >= 0.75 * len(rows)
    assert all(row["misfit_fraction"] < 0.25 for row in rows)
    return {row["layer"]: (row["calls"], 1 if row["misfit_fraction"] else row["dynamic_calls"]) for row in rows}


# --- P03: IP-Adapters ---


def image_projection(width, image_width=24):
    shapes = {"proj.weight": (4 * width, image_width), "proj.bias": (4 * width,), "norm.weight": (width,)}
    return {name: torch.randn(shape) * 0.2 for name, shape in shapes.items()} | {"norm.bias": torch.zeros(width)}


def unet_ip_adapter(unet):
    torch.manual_seed(3)
    width, weights = unet.config.cross_attention_dim, {}
    cross = [name.removesuffix(".processor") for name in unet.attn_processors if name.endswith("attn2.processor")]
    for i, name in enumerate(cross):
        hidden = unet.get_submodule(name).to_q.out_features
        weights |= {f"{2 * i + 1}.to_{x}_ip.weight": torch.randn(hidden, width) * 0.2 for x in "kv"}
    return {"image_proj": image_projection(width), "ip_adapter": weights}


def flux_ip_adapter(transformer):
    torch.manual_seed(3)
    inner, width, weights = transformer.inner_dim, transformer.config.joint_attention_dim, {}
    for i in range(transformer.config.num_layers):
        weights |= {f"{i}.to_{x}_ip.weight": torch.randn(inner, width) * 0.2 for x in "kv"}
        weights |= {f"{i}.to_{x}_ip.bias": torch.zeros(inner) for x in "kv"}
    return {"image_proj": image_projection(width), "ip_adapter": weights}


def sd_with_adapter():
    pipe, run = sd_pipe()
    image = placed(torch.randn(2, 1, 24))
    adapter = unet_ip_adapter(pipe.unet)

    def load():
        pipe.load_ip_adapter(adapter, subfolder="", weight_name="", image_encoder_folder=None)

    return pipe, pipe.unet, run, lambda: run(ip_adapter_image_embeds=[image]), load


def flux_with_adapter():
    pipe, run = flux_pipe()
    image = placed(torch.randn(1, 1, 24))
    adapter = flux_ip_adapter(pipe.transformer)

    def load():
        pipe.load_ip_adapter(adapter, "", image_encoder_pretrained_model_name_or_path=None)

    def run_with_image():
        return run(steps=3, ip_adapter_image_embeds=[image], negative_ip_adapter_image_embeds=[image])

    return pipe, pipe.transformer, lambda: run(steps=3), run_with_image, load


@pytest.mark.parametrize("make", [sd_with_adapter, flux_with_adapter])
def test_P03_ip_adapter_load_and_unload(make):
    pipe, model, run, run_with_image, load = make()
    original, stock = processors_of(model), run()
    load()
    stock_with_image = run_with_image()
    pipe.unload_ip_adapter()
    assert sqnr_db(stock_with_image, stock) < 20
    model.set_attn_processor({f"{name}.processor": p for name, p in original.items()})

    handle = pipe.set_attn_processor(LEARNING)
    run()
    learnt = calls_of(handle)
    assert set(learnt.values()) == {(3, 1)}
    load()
    report = handle.report()
    assert statuses(handle) == {"replaced"} and all("the next forward swaps" in row["note"] for row in report.rows)
    with_image = {row["layer"] for row in report.rows if "IPAdapter" in row["processor"]}
    made_anew = {row["layer"] for row in report.rows if row["processor"].startswith("Sage")}
    assert with_image and made_anew and with_image | made_anew == set(learnt)

    assert sqnr_db(run_with_image(), stock_with_image) > 25
    report = handle.report()
    assert statuses(handle) == {"active"} and report.fallbacks == {}, str(report)
    for row in report.rows:
        # the first call of every layer goes on with its plans; the image's is new, and dynamic in its first step
        calls, dynamic = (9, 2) if row["layer"] in with_image else (6, 1)
        assert row["calls"] == calls, str(report)
        assert (
            row["dynamic_calls"] == dynamic
            or row["misfit_fraction"] > 0
            and dynamic <= row["dynamic_calls"] <= dynamic + 1
        )

    pipe.unload_ip_adapter()
    assert statuses(handle) == {"replaced"}
    assert sqnr_db(run(), stock) > 25 and statuses(handle) == {"active"}
    assert set(calls_of(handle).values()) == {(9, 1)}
    load()
    run_with_image()
    for row in handle.report().rows:  # the image's call had not been forgotten
        if row["layer"] in with_image:
            assert row["calls"] == 18 and (row["dynamic_calls"] == 2 or row["misfit_fraction"] > 0)
    pipe.unload_ip_adapter()  # with no forward in between: what is there is stock's, of which nothing tells
    handle.remove()
    assert torch.equal(run(), stock)
    assert {type(p) for p in processors_of(model).values()} == {type(p) for p in original.values()}
    assert all(processors_of(model)[n] is original[n] for n in original if n.endswith(("attn1", "single_attn")))


def test_P03_strict_runs_adapters_and_no_processor_that_somebody_put_there():
    pipe, model, run, run_with_image, load = flux_with_adapter()
    handle = pipe.set_attn_processor(STRICT)
    load()
    run_with_image()
    assert statuses(handle) == {"active"}
    model.set_attn_processor(diffusers.models.transformers.transformer_flux.FluxAttnProcessor())
    with pytest.raises(sp.UnsupportedAttentionError, match=r"replaced.*handle\.refresh"):
        run_with_image()


# --- P04: LoRA, fused projections, slicing, backends, defaults ---


def test_P04_attention_backend():
    model, inputs = MODELS["flux"]()
    stock = forward(model, inputs)
    with sp.apply(model, EVERYTHING) as handle:
        model.set_attention_backend("native")
        assert torch.equal(forward(model, inputs), stock)
        report = handle.report()
        assert report.fallbacks == {"backend": 2} and all("refresh" in row["note"] for row in report.rows)
        handle.refresh()
        assert not torch.equal(forward(model, inputs), stock)
        report = handle.report()
        assert report.calls == 2 and not any(row["note"] for row in report.rows)
        model.reset_attention_backend()
        assert all("refresh" in row["note"] for row in handle.report().rows)
    model, inputs = MODELS["unet_sd15"]()  # its processors know no backends, before and after
    with sp.apply(model, EVERYTHING) as handle:
        model.set_attention_backend("native")
        forward(model, inputs)
        assert handle.report().calls == len(handle.report().rows) and handle.report().fallbacks == {}


def test_P04_a_new_component_is_reported_until_refresh():
    pipe, run = flux_pipe()
    handle = pipe.set_attn_processor(EVERYTHING)
    pipe.transformer = copy.deepcopy(pipe.transformer)
    run()
    assert handle.report().calls == 0 and "transformer came after the swap" in str(handle.report())
    handle.refresh()
    run()
    assert handle.report().calls == 8 and "came after" not in str(handle.report())


# --- P04: guidance and caches that go around attention ---


def test_P03_adapters_are_not_followed_while_processors_of_guidance_are_there():
    """A pipeline takes those of PAG out again behind its last step: swapped, they would come back."""
    pipe, run = sd_pipe(diffusers.StableDiffusionPAGPipeline, pag_applied_layers="mid")
    adapter, image = unet_ip_adapter(pipe.unet), torch.randn(2, 1, 24)
    with sp.apply(pipe, EVERYTHING) as handle:
        pipe.load_ip_adapter(adapter, subfolder="", weight_name="", image_encoder_folder=None)
        run(ip_adapter_image_embeds=[image])
        assert statuses(handle) == {"replaced"} and set(handle.report().fallbacks) == {"replaced"}
        handle.refresh()
        run(ip_adapter_image_embeds=[image])
        assert statuses(handle) == {"active"} and handle.report().calls
    assert not any(sage_class.is_sage(p) for p in processors_of(pipe.unet).values())
