"""The fidelity commands end to end on the embedded pipelines, as small as they go."""

from __future__ import annotations

import json
import re

import torch
from typer.testing import CliRunner

import sage_processors as sp
from sage_processors.calibration import search as calibration
from sage_processors.cli.main import app
from sage_processors.evaluation import quality


def invoke(*arguments):
    return CliRunner().invoke(app, [str(x) for x in arguments])


def test_calibrate_writes_a_policy_and_its_rows(tmp_path):
    output = tmp_path / "policy.json"
    small = ["tiny_flux", "--images", 1, "--steps", 1, "--batch", 1, "--device", "cpu"]
    done = invoke("calibrate", *small, "--target-psnr", 35, "--scaling", "timestep", "--output", output)
    assert done.exit_code == 0, done.output
    said = " ".join(done.output.split())
    assert "Budget, PSNR of 35 dB or more: met on fresh seeds: 100%" in said and "NOT met" not in said
    printed = re.search(r"SageAttnProcessor\.from_policy\(.*?\)", done.output.replace("\n", ""))[0]
    assert eval(printed, {"SageAttnProcessor": sp.SageAttnProcessor}).min_tokens == quality.MIN_TOKENS  # from anywhere
    assert sp.SageAttnProcessor.from_policy(output) == sp.SageAttnProcessor(min_tokens=quality.MIN_TOKENS)
    assert json.loads(output.read_text())["budget"] == {"target_psnr": 35.0}


def test_calibrate_and_time_say_the_same_share_of_attention_calls(tmp_path):
    """Half of the calls of tiny_sd are cross-attention, too short for INT8."""
    output, small = tmp_path / "policy.json", ["tiny_sd", "--steps", 3, "--device", "cpu"]
    options = ["--images", 1, "--target-psnr", 20, "--scaling", "per_block", "--output", output]
    done = invoke("calibrate", *small, *options)
    assert "50% of attention calls in INT8" in " ".join(done.output.split()), done.output
    assert json.loads(output.read_text())["result"]["int8_share"] == 0.5
    timed = invoke("time", *small, "--policy", output, "--timed", 1)
    assert "50% of attention calls and no linear layer ran in 8 bit" in " ".join(timed.output.split()), timed.output


def test_options_of_calibrate_reach_the_search(tmp_path, monkeypatch):
    asked = {}

    def search(pipe, prompts, **options):
        asked.update(options, dtype=pipe.dtype)
        raise ValueError("that is enough")

    monkeypatch.setattr(calibration, "calibrate", search)
    small = ["tiny_flux", "--images", 1, "--device", "cpu", "--target-psnr", 10, "--output", tmp_path / "p.json"]
    more = ["--recipe", "qk_int8_pv_fp8", "--dtype", "bfloat16", "--linears", "int8", "--skip-limit", 0.1]
    done = invoke("calibrate", *small, *more)
    assert done.exit_code == 2 and "that is enough" in done.output, done.output
    assert (asked["recipes"], asked["dtype"], asked["linears"]) == (["qk_int8_pv_fp8"], torch.bfloat16, ["int8"])
    assert asked["skip_limits"] == [0.1] and asked["config"].linears.min_features == 0
    done = invoke("calibrate", *small, "--recipe", "qk_int4")
    assert done.exit_code == 2 and "qk_int4" in done.output
