"""INT8 attention with guidance, caches and several pipelines: cases X33 to X52, each of the state in cases.json.

A cache leaves out calls at some steps, and guidance may call a model twice a step: planned scales have to be right all
the same, so what is drawn is held against stock attention with the same cache, and drawn twice.
"""

from __future__ import annotations

import diffusers
import torch
from diffusers import hooks

import sage_processors as sp
from tests.diffusion.calls.test_processors import forward
from tests.support.combinations import shows  # noqa: F401 (pytest finds fixtures here)
from tests.support.tiny_models import MODELS
from tests.support.tiny_pipelines import flux_pipe, sd_pipe


EVERYTHING = sp.SageAttnProcessor(min_tokens=1)
STEPS = 6


def guided_flux():
    """A FLUX pipeline that calls the model twice a step, and its run."""
    pipe, run = flux_pipe()
    inputs = MODELS["flux"]()[1]
    words, pooled = inputs["encoder_hidden_states"], inputs["pooled_projections"]
    without = {"negative_prompt_embeds": -words, "negative_pooled_prompt_embeds": -pooled, "true_cfg_scale": 3.0}
    return pipe, lambda: run(steps=STEPS, **without)


def drawn(make, shows, change=lambda pipe: None, **expected):  # noqa: F811
    """Stock and swapped pictures of a pipeline that `change` changed. Returns the rows of the report of one run."""
    stock_pipe, run = make()
    change(stock_pipe)
    stock = run()
    pipe, run = make()
    with sp.apply(pipe, EVERYTHING) as handle:
        change(pipe)
        out = run()
        report = handle.report()
        shows(report, out, stock, **expected)
        assert torch.equal(run(), out), "a second run is another one"
        return report.rows


def test_X33_guidance_by_two_calls_a_step(shows):  # noqa: F811
    assert {row["calls"] for row in drawn(guided_flux, shows)} == {2 * STEPS}


def test_X34_guidance_by_a_batch_of_two(shows):  # noqa: F811
    assert {row["calls"] for row in drawn(sd_pipe, shows)} == {3}


def test_X35_pag_pipelines(shows):  # noqa: F811
    def make():
        return sd_pipe(diffusers.StableDiffusionPAGPipeline, pag_applied_layers="mid")

    rows = drawn(make, shows, exact={"replaced"})
    assert all(bool(row["fallbacks"]) == ("mid_block" in row["layer"] and "attn1" in row["layer"]) for row in rows)


def test_X36_perturbed_attention_guider(shows):  # noqa: F811
    """It perturbs by a function mode, which wants to see PyTorch's attention: of INT8 the effect would be lost."""
    model, inputs = MODELS["cogview4"]()
    config = hooks.LayerSkipConfig(indices=[0], skip_attention=False, skip_attention_scores=True, skip_ff=False)
    plain = forward(model, inputs)
    hooks.apply_layer_skip(model, config)
    stock = forward(model, inputs)
    assert not torch.equal(stock, plain)
    with sp.apply(model, EVERYTHING) as handle:
        out = forward(model, inputs)
        shows(handle.report(), out, stock, exact={"function_mode"})


def test_X37_smoothed_energy_guider(shows):  # noqa: F811
    from diffusers.hooks import smoothed_energy_guidance_utils as seg

    config = seg.SmoothedEnergyGuidanceConfig(indices=[0])
    model, inputs = MODELS["cogview4"]()
    plain = forward(model, inputs)
    seg._apply_smoothed_energy_guidance_hook(model, config, blur_sigma=1.0)
    stock = forward(model, inputs)
    assert not torch.equal(stock, plain)
    with sp.apply(model, EVERYTHING) as handle:
        out = forward(model, inputs)
        shows(handle.report(), out, stock)


def test_X38_skip_layer_guidance(shows):  # noqa: F811
    model, inputs = MODELS["flux"]()
    plain = forward(model, inputs)
    hooks.apply_layer_skip(model, hooks.LayerSkipConfig(indices=[0], fqn="transformer_blocks"))
    stock = forward(model, inputs)
    assert not torch.equal(stock, plain)
    with sp.apply(model, EVERYTHING) as handle:
        out = forward(model, inputs)
        report = handle.report()
        assert [row["calls"] for row in report.rows] == [0, 1]  # the block is left out
        shows(report, out, stock)


def cached(config, shows, make=guided_flux):  # noqa: F811
    """Rows of a run of STEPS steps with a cache."""
    return drawn(make, shows, lambda pipe: pipe.transformer.enable_cache(config(pipe)))


def test_X40_first_block_cache(shows):  # noqa: F811
    first, second = cached(lambda pipe: diffusers.FirstBlockCacheConfig(threshold=0.5), shows)
    assert first["calls"] == 2 * STEPS > second["calls"] > 0


def test_X41_pyramid_attention_broadcast(shows):  # noqa: F811
    rows = cached(
        lambda pipe: diffusers.PyramidAttentionBroadcastConfig(
            spatial_attention_block_skip_range=2, spatial_attention_timestep_skip_range=(-1, 1001),
            current_timestep_callback=lambda: pipe._current_timestep,
        ), shows,
    )  # fmt: skip
    assert all(0 < row["calls"] < 2 * STEPS for row in rows)


def test_X42_faster_cache(shows):  # noqa: F811
    rows = cached(
        lambda pipe: diffusers.FasterCacheConfig(
            spatial_attention_block_skip_range=2, spatial_attention_timestep_skip_range=(-1, 901),
            unconditional_batch_skip_range=2, unconditional_batch_timestep_skip_range=(-1, 901),
            current_timestep_callback=lambda: pipe._current_timestep, is_guidance_distilled=True,
            attention_weight_callback=lambda _: 0.5, tensor_format="BCHW",
        ), shows, flux_pipe_of_steps,
    )  # fmt: skip
    assert all(0 < row["calls"] < STEPS for row in rows)


def flux_pipe_of_steps():
    pipe, run = flux_pipe()
    return pipe, lambda: run(steps=STEPS)


def test_X43_taylor_seer(shows):  # noqa: F811
    rows = cached(
        lambda pipe: diffusers.TaylorSeerCacheConfig(
            cache_interval=2, disable_cache_before_step=2, taylor_factors_dtype=torch.float32
        ), shows,
    )  # fmt: skip
    assert any(row["calls"] < 2 * STEPS for row in rows) and all(row["calls"] for row in rows)


def test_X44_mag_cache(shows):  # noqa: F811
    rows = cached(
        lambda pipe: diffusers.MagCacheConfig(
            threshold=0.5, max_skip_steps=1, retention_ratio=0.3, num_inference_steps=STEPS, mag_ratios=[1.0] * STEPS
        ), shows,
    )  # fmt: skip
    assert all(0 < row["calls"] < 2 * STEPS for row in rows)
