"""The command line, called as a user does: what it writes and prints, and short messages for what can't work."""

from __future__ import annotations

import json
import re
import shutil
import statistics
from pathlib import Path

import numpy as np
import pytest
import torch
from diffusers.utils import logging as diffusers_logging
from PIL import Image
from typer.testing import CliRunner

import sage_processors as sp
from sage_kernels.results import read_rows
from sage_processors import pipelines
from sage_processors.cli import loading
from sage_processors.cli import main as cli
from sage_processors.evaluation import quality
from sage_processors.evaluation.side_by_side import LABEL, MARGIN
from sage_processors.reporting.layer_names import patterns
from tests.support.repository import ROOT


# made now, as a handler that is made within CliRunner keeps its stderr, which is closed later
diffusers_logging.get_logger()


@pytest.fixture(autouse=True)
def _offline_and_wide(monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("COLUMNS", "200")
    import huggingface_hub.constants

    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)


def invoke(*arguments, code=0) -> str:
    result = CliRunner().invoke(cli.app, [str(a) for a in arguments])
    if result.exit_code != code:
        pytest.fail(f"exit code {result.exit_code}, expected {code}\n{result.output}\n{result.exception!r}")
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    return result.output


def demo(tmp_path, name: str, *arguments) -> tuple[str, Path]:
    path = tmp_path / "demo.png"
    return invoke("demo", name, "--steps", 1, "--output", path, *arguments), path


# --- demo ---


@pytest.mark.parametrize("name", [pytest.param("tiny_sd", marks=pytest.mark.slow("as tiny_flux")), "tiny_flux"])
def test_demo_draws_prints_and_saves(name, tmp_path):
    prompts = ["a red circle", "a yellow star on a black background"]
    output, path = demo(tmp_path, name, "--prompt", prompts[0], "--prompt", prompts[1], "--seed", 5, "--device", "cpu")
    assert str(path) in output.replace("\n", "")
    mean, worst = map(
        float, re.search(r"PSNR ([\d.]+) dB, SSIM [\d.]+ \(means\), worst PSNR ([\d.]+) dB", output).groups()
    )
    assert mean >= worst >= 45 and mean < quality.PSNR_CEILING  # not identical: INT8 really ran
    assert "active" in output and prompts[1] in output and "No attention call ran in INT8" not in output

    canvas = Image.open(path)
    assert canvas.size == (2 * (256 + MARGIN) + MARGIN, 3 * (LABEL + 256 + MARGIN))
    pipe = loading.load_pipeline(name, "cpu")
    stock = quality.generate(pipe, prompts, [5, 6], steps=1, **pipelines.call_arguments(name))
    shown = np.asarray(canvas)[LABEL : LABEL + 256 : 2, MARGIN : MARGIN + 256 : 2]
    expected = (stock[0] * 255).round().to(torch.uint8).permute(1, 2, 0).numpy()
    assert np.abs(shown.astype(int) - expected).max() <= 1


def test_P29_demo_says_when_nothing_ran_in_int8(tmp_path, monkeypatch):
    config = sp.SageAttnProcessor(min_tokens=100_000)
    monkeypatch.setattr(cli, "_config", lambda recipe, scaling: config)
    output, _ = demo(tmp_path, "tiny_flux", "--images", 1, "--device", "cpu")
    assert "No attention call ran in INT8" in output and "no call ran in INT8: both pictures are stock" in output
    assert not re.search(r"PSNR|\d dB|inf", output)


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["tiny_sd", "tiny_flux"])
def test_demo_on_a_gpu(name, tmp_path):
    """The mean PSNR of 32 pictures is that of the 256 of the committed rows, within three of its standard errors.

    A bf16 pipeline's own rounding turns single pictures by more than INT8 attention does.
    """
    means = [
        float(row["median"])
        for row in read_rows(ROOT / "kernels/benchmarks/results.csv")
        if (row["suite"], row["case"], row["metric"]) == ("quality", f"{name}/timestep", "psnr_db_mean")
        and row["recipe"] == "qk_int8_pv_bf16" and row["gpu"] != "cpu"
    ]  # fmt: skip
    output, path = demo(tmp_path, name, "--steps", 20, "--images", 32, "--json")
    found = json.loads(output[output.index("{") :])["quality"]["psnr_db"]
    error = statistics.stdev(found) / len(found) ** 0.5
    assert path.is_file() and len(found) == 32 and error < 2
    assert statistics.mean(found) >= means[-1] - 3 * error


# --- report ---


@pytest.mark.parametrize("name", ["tiny_sd", "tiny_flux"])
def test_report_lists_every_layer_without_weights(name, tmp_path):
    folder = tmp_path / name
    shutil.copytree(sp.pipelines.path(name), folder, ignore=shutil.ignore_patterns("*.safetensors", "*.bin"))
    output = invoke("report", folder)
    pipe = loading.load_pipeline(name, "cpu")
    part = "unet" if name == "tiny_sd" else "transformer"
    layers = [n.removesuffix(".processor") for n in getattr(pipe, part).attn_processors]
    assert f"layers of {part}" in output and all(pattern in output for pattern in patterns(layers))
    assert f"{len(layers)} layers active: qk_int8_pv_bf16, timestep" in output and len(layers) >= 5
    assert output.startswith("Nothing ran")


# --- bench ---


def test_prompts_of_clips_are_distinct_ones_that_tiny_wan_learnt(monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "examples")
    from tiny_videos import captions

    prompts = loading.example_prompts(64, "tiny_wan")
    assert len(set(prompts)) == 64 and set(prompts) <= set(captions())
