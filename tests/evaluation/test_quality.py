"""The comparison with stock pictures measures what it says."""

from __future__ import annotations

import dataclasses
import functools

import pytest
import torch

import sage_processors as sp
from sage_processors.evaluation import metrics, quality


PROMPTS = ["a red circle on a blue background", "a yellow star on a black background", "a green heart"]
SIZE = {"height": 64, "width": 64}  # a sixteenth of the work of attention


@functools.cache
def pipeline(name: str):
    from diffusers import DiffusionPipeline

    pipe = DiffusionPipeline.from_pretrained(sp.pipelines.path(name))
    pipe.set_progress_bar_config(disable=True)
    return pipe


# --- generate ---


@pytest.mark.parametrize("name", ["tiny_sd", pytest.param("tiny_flux", marks=pytest.mark.slow("as tiny_sd"))])
def test_generate_seed_decides_whatever_the_batch(name):
    pipe, steps = pipeline(name), []
    together = quality.generate(pipe, PROMPTS[:2], [3, 4], steps=1, on_step=lambda: steps.append(1))
    assert together.shape == (2, 3, 128, 128) and together.dtype == torch.float32 and len(steps) == 1
    assert together.min() >= 0 and together.max() <= 1
    alone = quality.generate(pipe, PROMPTS[1:2], [4], steps=1)
    assert metrics.psnr(alone, together[1:]).item() > 80
    assert metrics.psnr(alone, quality.generate(pipe, PROMPTS[1:2], [5], steps=1)).item() < 50


def test_generate_needs_one_seed_per_prompt():
    for prompts, seeds in ((PROMPTS, [0]), ([], [])):
        with pytest.raises(ValueError, match=f"seeds: got {len(seeds)} for {len(prompts)} prompts"):
            quality.generate(None, prompts, seeds, steps=1)


def test_picture_arguments_are_the_models_own():
    assert quality.picture_arguments(pipeline("tiny_sd")) == {"height": 128, "width": 128}
    assert quality.picture_arguments(pipeline("tiny_flux")) == {"height": 128, "width": 128, "max_sequence_length": 32}


# --- evaluate, floor, rows ---


@pytest.mark.slow("draws in three ways")
def test_evaluate_measures_each_variant_against_stock():
    pipe = pipeline("tiny_flux")
    before = dict(pipe.transformer.attn_processors)
    dynamic = sp.SageAttnProcessor(scaling="dynamic")
    exact = sp.SageAttnProcessor(scaling="dynamic", min_tokens=100_000)
    variants = (quality.Variant("dynamic", dynamic), quality.Variant("exact", exact))
    results = quality.evaluate(pipe, PROMPTS, [0, 1, 2], variants, steps=1, batch=2, arguments=SIZE)
    assert {n: id(p) for n, p in pipe.transformer.attn_processors.items()} == {n: id(p) for n, p in before.items()}
    layers = len(before)
    assert results["exact"].psnr_db == (quality.PSNR_CEILING,) * 3
    assert (results["exact"].int8_calls, results["exact"].fallback_calls) == (0, 2 * layers)
    assert (results["dynamic"].int8_calls, results["dynamic"].fallback_calls) == (2 * layers, 0)

    stock = quality.generate(pipe, PROMPTS[:2], [0, 1], steps=1, **SIZE)
    with sp.apply(pipe, dynamic):
        ours = quality.generate(pipe, PROMPTS[:2], [0, 1], steps=1, **SIZE)
    assert results["dynamic"].psnr_db[:2] == pytest.approx(metrics.psnr(ours, stock).tolist(), abs=0.01)
    assert all(40 < value < quality.PSNR_CEILING for value in results["dynamic"].psnr_db)


@pytest.mark.slow("draws pictures with a probe")
def test_evaluate_measures_attention_of_each_batch_and_leaves_its_pictures():
    """Each batch's number is that of a probe on this batch alone: no earlier batch, no warm-up."""
    pipe, config = pipeline("tiny_flux"), sp.SageAttnProcessor()
    exact = sp.SageAttnProcessor(min_tokens=100_000)
    variants = (
        quality.Variant("fresh", config),
        quality.Variant("warm", config, warm=True),
        quality.Variant("exact", exact),
    )
    seeds, size, parts = [0, 1, 2], {"steps": 2, "batch": 2, "arguments": SIZE}, (slice(0, 2), slice(2, 3))
    stock = torch.cat([quality.generate(pipe, PROMPTS[p], seeds[p], steps=2, **SIZE) for p in parts])
    results = quality.evaluate(pipe, PROMPTS, seeds, variants, stock=stock, probe=True, **size)
    plain = quality.evaluate(pipe, PROMPTS, seeds, variants, stock=stock, **size)
    for name, result in results.items():
        assert dataclasses.replace(result, attention_sqnr_db=()) == plain[name]
    assert results["exact"].attention_sqnr_db == () and plain["fresh"].attention_sqnr_db == ()

    def alone(handle, part):
        with handle.probe(every=1) as probe:
            quality.generate(pipe, PROMPTS[part], seeds[part], steps=2, **SIZE)
            (row,) = probe.summary()
        return row["sqnr_db"]

    with sp.apply(pipe, config) as handle:
        fresh = [(handle.reset(), alone(handle, part))[1] for part in parts]
    with sp.apply(pipe, config) as handle:
        quality.generate(pipe, PROMPTS[:2], [quality.WARM_UP_SEED, quality.WARM_UP_SEED + 1], steps=2, **SIZE)
        handle.freeze_scales()
        warm = [alone(handle, part) for part in parts]
    assert results["fresh"].attention_sqnr_db == pytest.approx(fresh)
    assert results["warm"].attention_sqnr_db == pytest.approx(warm)
    assert len({*fresh, *warm}) == 4 and all(35 < value < 70 for value in (*fresh, *warm))


def test_evaluate_checks_batch():
    with pytest.raises(ValueError, match="batch: got 0"):
        quality.evaluate(None, PROMPTS, [0, 1, 2], (), batch=0)


@pytest.mark.slow("draws in two dtypes")
def test_floor_is_16_bit_against_fp32_and_leaves_the_pipeline():
    from diffusers import DiffusionPipeline

    pipe = DiffusionPipeline.from_pretrained(sp.pipelines.path("tiny_flux")).to(torch.bfloat16)
    pipe.set_progress_bar_config(disable=True)
    before = {n: (p.data_ptr(), p.clone()) for n, p in pipe.transformer.named_parameters()}
    result = quality.floor(pipe, PROMPTS[:1], [0], steps=1)
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
    assert "attention_sqnr_db" not in rows
    measured = dataclasses.replace(result, attention_sqnr_db=(46.0, 47.0, 45.0))
    rows = {row["metric"]: row for row in measured.rows("tiny_sd") if row["metric"].startswith("attention")}
    assert {(row["unit"], row["batch"], row["case"]) for row in rows.values()} == {("dB", 5, "tiny_sd/timestep")}
    assert [rows["attention_sqnr_db"][c] for c in ("median", "p20", "p80")] == [46.0, 45.4, 46.6]
    assert [rows[f"attention_sqnr_db_{of}"]["median"] for of in ("mean", "worst")] == [46.0, 45.0]


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


def test_evaluate_takes_pictures_drawn_earlier_and_counts_what_options_keep():
    pipe, config = (
        pipeline("tiny_flux"),
        sp.SageAttnProcessor(keep=sp.Keep(first_steps=1), layers={"*single*": {"recipe": "16bit"}}),
    )
    stock = quality.generate(pipe, PROMPTS[:1], [0], steps=2)
    variants = (quality.Variant("x", config),)
    given = quality.evaluate(pipe, PROMPTS[:1], [0], variants, steps=2, stock=stock)["x"]
    assert given == quality.evaluate(pipe, PROMPTS[:1], [0], variants, steps=2)["x"]
    double, single = 2, 3
    assert (given.int8_calls, given.chosen_calls) == (double, double + 2 * single)
    other = quality.evaluate(pipe, PROMPTS[:1], [0], variants, steps=2, stock=1 - stock)["x"]
    assert other.psnr_db[0] < 20


def test_study_variants_are_every_planned_rule():
    from sage_kernels.planning.rules import ADAPTIVE, RULES

    variants = {variant.name: variant for variant in quality.study_variants()}
    # but for the one whose pictures depend on those before
    assert {v.config.scaling.name for v in variants.values()} == {*RULES, "dynamic"} - {ADAPTIVE}
    assert {variants[n].config.scaling.gamma for n in ("sigma_power", "sigma_ratio", "sigma_ratio_printed")} == {
        "fit",
        1.0,
        -1.0,
    }
    assert all(variants[n].warm for n in ("static", "sigma_power", "sigma_ratio", "sigma_ratio_printed"))


@pytest.mark.slow("draws six pictures, and three stock ones")
def test_pictures_with_p_and_v_in_int8_are_within_3_db_of_those_with_16_bit():
    """Whose keys are many and alike, as image tokens and padded prompts are: P rounded to nearest is 5 dB off."""
    words = zip(
        "red yellow green".split(),
        "circle star heart".split(),
        "blue black yellow".split(),
        strict=True,
    )
    prompts = [f"a {color} {shape} on a {ground} background" for color, shape, ground in words]
    recipes = ("qk_int8_pv_bf16", "qk_int8_pv_int8")
    variants = [quality.Variant(recipe, sp.SageAttnProcessor(recipe=recipe)) for recipe in recipes]
    results = quality.evaluate(pipeline("tiny_sd"), prompts, range(3), variants, steps=2, batch=3)
    usual, int8 = (sum(results[recipe].psnr_db) / 3 for recipe in recipes)
    assert usual - int8 <= 3.0
