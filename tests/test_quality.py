"""The comparison with stock pictures measures what it says; planted outliers change nothing but INT8's task."""

from __future__ import annotations

import functools

import pytest
import torch

import sage_processors as sp
from sage_processors import metrics, quality
from tests.tiny_models import MODELS


PROMPTS = ["a red circle on a blue background", "a yellow star on a black background", "a green heart"]


@functools.cache
def pipeline(name: str):
    from diffusers import DiffusionPipeline

    pipe = DiffusionPipeline.from_pretrained(sp.pipelines.path(name))
    pipe.set_progress_bar_config(disable=True)
    return pipe


def output(model, inputs) -> torch.Tensor:
    with torch.no_grad():
        return model(**inputs, return_dict=False)[0]


# --- generate ---


@pytest.mark.parametrize("name", ["tiny_sd", "tiny_flux"])
def test_generate_seed_decides_whatever_the_batch(name):
    pipe, steps = pipeline(name), []
    together = quality.generate(pipe, PROMPTS[:2], [3, 4], steps=2, on_step=lambda: steps.append(1))
    assert together.shape == (2, 3, 128, 128) and together.dtype == torch.float32 and len(steps) == 2
    assert together.min() >= 0 and together.max() <= 1
    alone = quality.generate(pipe, PROMPTS[1:2], [4], steps=2)
    assert metrics.psnr(alone, together[1:]).item() > 80
    assert metrics.psnr(alone, quality.generate(pipe, PROMPTS[1:2], [5], steps=2)).item() < 50


def test_generate_needs_one_seed_per_prompt():
    for prompts, seeds in ((PROMPTS, [0]), ([], [])):
        with pytest.raises(ValueError, match=f"seeds: got {len(seeds)} for {len(prompts)} prompts"):
            quality.generate(None, prompts, seeds, steps=1)


def test_picture_arguments_are_the_models_own():
    assert quality.picture_arguments(pipeline("tiny_sd")) == {"height": 128, "width": 128}
    assert quality.picture_arguments(pipeline("tiny_flux")) == {"height": 128, "width": 128, "max_sequence_length": 32}


# --- evaluate, floor, rows ---


def test_evaluate_measures_each_variant_against_stock():
    pipe = pipeline("tiny_flux")
    before = dict(pipe.transformer.attn_processors)
    dynamic = sp.SageAttnProcessor(scaling="dynamic")
    exact = sp.SageAttnProcessor(scaling="dynamic", min_tokens=100_000)
    variants = (quality.Variant("dynamic", dynamic), quality.Variant("exact", exact))
    results = quality.evaluate(pipe, PROMPTS, [0, 1, 2], variants, steps=2, batch=2)
    assert {n: id(p) for n, p in pipe.transformer.attn_processors.items()} == {n: id(p) for n, p in before.items()}
    layers = len(before)
    assert results["exact"].psnr_db == (quality.PSNR_CEILING,) * 3
    assert (results["exact"].int8_calls, results["exact"].fallback_calls) == (0, 2 * 2 * layers)
    assert (results["dynamic"].int8_calls, results["dynamic"].fallback_calls) == (2 * 2 * layers, 0)

    stock = quality.generate(pipe, PROMPTS[:2], [0, 1], steps=2)
    with sp.apply(pipe, dynamic):
        ours = quality.generate(pipe, PROMPTS[:2], [0, 1], steps=2)
    assert results["dynamic"].psnr_db[:2] == pytest.approx(metrics.psnr(ours, stock).tolist(), abs=0.01)
    assert all(40 < value < quality.PSNR_CEILING for value in results["dynamic"].psnr_db)


def test_evaluate_fresh_state_forgets_the_batch_before():
    pipe, config = pipeline("tiny_flux"), sp.SageAttnProcessor(scaling="timestep")
    variants = (quality.Variant("fresh", config), quality.Variant("warm", config, warm=True))
    prompts, seeds = [PROMPTS[0]] * 2, [7, 7]  # the same picture twice, in two batches
    results = quality.evaluate(pipe, prompts, seeds, variants, steps=3, batch=1)
    assert results["fresh"].psnr_db[0] == results["fresh"].psnr_db[1]
    # the warm state has seen another seed, then this very picture: its plans differ from the fresh ones
    assert results["warm"].psnr_db[0] != results["fresh"].psnr_db[0]
    assert results["warm"].int8_calls == 3 * results["fresh"].int8_calls // 2


def test_evaluate_checks_batch():
    with pytest.raises(ValueError, match="batch: got 0"):
        quality.evaluate(None, PROMPTS, [0, 1, 2], (), batch=0)


def test_floor_is_16_bit_against_fp32_and_leaves_the_pipeline():
    from diffusers import DiffusionPipeline

    pipe = DiffusionPipeline.from_pretrained(sp.pipelines.path("tiny_flux")).to(torch.bfloat16)
    pipe.set_progress_bar_config(disable=True)
    before = {n: (p.data_ptr(), p.clone()) for n, p in pipe.transformer.named_parameters()}
    result = quality.floor(pipe, PROMPTS[:1], [0], steps=2)
    assert (result.name, result.recipe) == ("stock_bf16", "")
    assert 20 < result.psnr_db[0] < 90
    for name, parameter in pipe.transformer.named_parameters():
        assert parameter.data_ptr() == before[name][0] and torch.equal(parameter, before[name][1])
    with pytest.raises(ValueError, match="float32, expected float16 or bfloat16"):
        quality.floor(pipeline("tiny_sd"), PROMPTS[:1], [0])


def test_rows_hold_median_mean_and_worst():
    result = quality.Quality("timestep", "qk_int8_pv_bf16", (50.0, 60.0, 61.0, 62.0, 70.0), (0.9, 1.0, 1.0, 1.0, 1.0))
    rows = {row["metric"]: row for row in result.rows("tiny_sd")}
    assert {row["case"] for row in rows.values()} == {"tiny_sd/timestep"} and rows["ssim"]["unit"] == "1"
    assert {row["suite"] for row in rows.values()} == {"quality"} and rows["psnr_db"]["batch"] == 5
    assert [rows["psnr_db"][c] for c in ("median", "p20", "p80")] == [61.0, 58.0, 63.6]
    assert rows["psnr_db_mean"]["median"] == 60.6 and rows["psnr_db_worst"]["median"] == 50.0
    assert rows["ssim_mean"]["median"] == 0.98 and rows["ssim_worst"]["median"] == 0.9


def test_append_results_writes_the_houses_columns(tmp_path):
    from sage_kernels.results import COLUMNS, read_header, read_rows

    path = tmp_path / "results.csv"
    ours = quality.Quality("dynamic", "qk_int8_pv_bf16", (60.0,), (1.0,))
    stock = quality.Quality("stock_bf16", "", (58.0,), (1.0,))
    quality.append_results(path, "tiny_flux", [ours, stock], device="cpu")
    assert tuple(read_header(path)) == tuple(COLUMNS)
    rows = read_rows(path)
    assert len(rows) == 12 and {row["gpu"] for row in rows} == {"cpu"} and all(row["date"] for row in rows)
    assert [row["provider"] for row in rows] == ["sage_kernels"] * 6 + ["torch_sdpa"] * 6


def test_evaluate_starts_every_batch_from_a_scale_file(tmp_path):
    """A table of another scheduler and step count is used: no step is scaled by its own call."""
    import diffusers

    pipe, config = pipeline("tiny_flux"), sp.SageAttnProcessor()
    own, path = pipe.scheduler, tmp_path / "scales.safetensors"
    try:
        pipe.scheduler = diffusers.FlowMatchEulerDiscreteScheduler(shift=1.0)
        with sp.apply(pipe, config) as handle:
            quality.generate(pipe, PROMPTS[:1], [9], steps=5)
            handle.save_scales(path)
        pipe.scheduler = diffusers.FlowMatchEulerDiscreteScheduler(shift=3.0)
        dynamic = []
        variants = (quality.Variant("fresh", config), quality.Variant("loaded", config, scales=path))
        handles = []
        results = quality.evaluate(
            pipe, PROMPTS[:2], [0, 1], variants, steps=3, batch=1,
            on_handle=lambda handle: (handles.append(handle), setattr(handle, "remove", counting(handle, dynamic))),
        )  # fmt: skip
    finally:
        pipe.scheduler = own
    # dynamic calls of the last batch, whose shape and first noise level the file's run had seen
    assert len(handles) == 2 and dynamic[0] > 0 and dynamic[1] == 0
    assert all(value > 40 for value in results["loaded"].psnr_db)
    assert results["loaded"].psnr_db != results["fresh"].psnr_db


def counting(handle, into):
    remove = handle.remove

    def call():
        into.append(sum(row["dynamic_calls"] for row in handle.report().rows))
        remove()

    return call


def test_evaluate_takes_pictures_drawn_earlier_and_counts_what_options_keep():
    pipe, config = pipeline("tiny_flux"), sp.SageAttnProcessor(keep_first_steps=1, keep_layers=("*single*",))
    stock = quality.generate(pipe, PROMPTS[:1], [0], steps=2)
    variants = (quality.Variant("x", config),)
    given = quality.evaluate(pipe, PROMPTS[:1], [0], variants, steps=2, stock=stock)["x"]
    assert given == quality.evaluate(pipe, PROMPTS[:1], [0], variants, steps=2)["x"]
    double, single = 2, 3
    assert (given.int8_calls, given.chosen_calls) == (double, double + 2 * single)
    other = quality.evaluate(pipe, PROMPTS[:1], [0], variants, steps=2, stock=1 - stock)["x"]
    assert other.psnr_db[0] < 20


def test_study_variants_are_every_planned_rule():
    from sage_processors.scale_rules import RULES

    variants = {variant.name: variant for variant in quality.study_variants()}
    assert {v.config.scaling for v in variants.values()} == {*RULES, "dynamic"}
    assert {variants[n].config.gamma for n in ("sigma_power", "sigma_ratio", "sigma_ratio_printed")} == {
        "fit",
        1.0,
        -1.0,
    }
    assert all(variants[n].warm for n in ("static", "sigma_power", "sigma_ratio", "sigma_ratio_printed"))


# --- biased keys ---


def test_biased_keys_leave_exact_attention_and_shift_every_key_alike(monkeypatch):
    from sage_processors import processors

    model, inputs = MODELS["flux"]()
    stock, seen = output(model, inputs), []
    attend = processors._attend

    def recording(query, key, *rest):
        seen.append(key.clone())
        return attend(query, key, *rest)

    monkeypatch.setattr(processors, "_attend", recording)
    with sp.apply(model, sp.SageAttnProcessor(min_tokens=1, scaling="dynamic")):
        plain = output(model, inputs)
        with quality.bias_keys(30.0) as constants:
            biased = output(model, inputs)
    assert processors._attend is recording and len(constants) == 2
    for before, after, constant in zip(seen[:2], seen[2:4], constants.values(), strict=True):
        torch.testing.assert_close(constant, before.std((0, 1)) * torch.linspace(-30, 30, before.shape[3]))
        if after is seen[2]:  # the second layer's inputs have felt the first one's codes
            torch.testing.assert_close(after, before + constant)
    # K smoothed: the same codes up to fp32 rounding of the sum
    assert metrics.sqnr_db(biased, stock) > metrics.sqnr_db(plain, stock) - 1
    with quality.bias_keys(30.0), sp.apply(model, sp.SageAttnProcessor(min_tokens=10_000)):
        assert torch.equal(output(model, inputs), stock)


def test_biased_keys_are_undone_after_an_error_and_refuse_bad_factors():
    from sage_processors import processors

    attend = processors._attend
    with pytest.raises(RuntimeError, match="inside"), quality.bias_keys():
        raise RuntimeError("inside")
    assert processors._attend is attend
    for factor in (-1.0, float("nan")):
        with pytest.raises(ValueError, match="factor: got"), quality.bias_keys(factor):
            pass


# --- outlier injection ---


@pytest.mark.parametrize(
    "name", ["unet_sd15", "unet_sdxl", "flux", "sd3", "sd35_dual", "cogvideox", "wan_t2v", "wan_i2v"]
)
@pytest.mark.parametrize("a", [64.0, 256.0])
def test_injection_is_exact_in_fp32_and_undone(name, a):
    model, inputs = MODELS[name]()
    stock = output(model, inputs)
    weights = {n: p.clone() for n, p in model.named_parameters()}
    with quality.inject_outliers(model, a, pairs=2) as names:
        assert names and any(not torch.equal(p, weights[n]) for n, p in model.named_parameters())
        assert torch.equal(output(model, inputs), stock)
    assert all(torch.equal(p, weights[n]) for n, p in model.named_parameters())


@pytest.mark.parametrize(("name", "tensor"), [("unet_sd15", "to_q"), ("flux", "norm_q"), ("flux", "norm_added_q")])
def test_injection_plants_pairs_of_channels_in_every_head(name, tensor):
    model, inputs = MODELS[name]()
    seen = []
    modules = [m for n, m in model.named_modules() if n.endswith("." + tensor)]
    heads = next(m.heads for m in model.modules() if getattr(m, tensor, None) is modules[0])
    modules[0].register_forward_hook(lambda module, args, out: seen.append(out))
    output(model, inputs)
    with quality.inject_outliers(model, 64.0, pairs=2):
        output(model, inputs)
    plain, hard = (
        x.reshape(-1, heads, x.shape[-1] // heads) if tensor == "to_q" else x.flatten(0, -2)[:, None] for x in seen
    )
    factor = (hard.abs().amax(0) / plain.abs().amax(0)).round()
    half = factor.shape[-1] // 2
    expected = torch.ones_like(factor)
    expected[:, [0, 1, half, half + 1]] = 64
    assert torch.equal(factor, expected)


def test_injection_makes_int8_harder():
    pipe, config = pipeline("tiny_flux"), sp.SageAttnProcessor(scaling="per_head")
    variants = (quality.Variant("per_head", config),)
    plain = quality.evaluate(pipe, PROMPTS[:1], [0], variants, steps=2)["per_head"]
    with quality.inject_outliers(pipe.transformer, 64.0, 2):
        hard = quality.evaluate(pipe, PROMPTS[:1], [0], variants, steps=2)["per_head"]
    assert hard.psnr_db[0] < plain.psnr_db[0] - 10


def test_injection_restores_after_an_exception():
    model, _ = MODELS["unet_sd15"]()
    weights = {n: p.clone() for n, p in model.named_parameters()}
    with pytest.raises(RuntimeError, match="inside"), quality.inject_outliers(model):
        raise RuntimeError("inside")
    assert all(torch.equal(p, weights[n]) for n, p in model.named_parameters())


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"a": 3.0}, "a: got 3.0, expected a power of two"),
        ({"a": 0.5}, "a: got 0.5"),
        ({"a": float("inf")}, "a: got inf"),
        ({"pairs": 0}, "pairs: got 0"),
        ({"pairs": 500}, "pairs: got 500, expected at most"),
    ],
)
def test_injection_refuses_bad_arguments(arguments, message):
    model, _ = MODELS["unet_sd15"]()
    with pytest.raises(ValueError, match=message), quality.inject_outliers(model, **arguments):
        pass


def test_injection_refuses_models_without_attention():
    with pytest.raises(ValueError, match="no attention with to_q and to_k in Linear"):
        with quality.inject_outliers(torch.nn.Linear(2, 2)):
            pass
