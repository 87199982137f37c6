"""A newcomer's path behind the install and the demo (test_install): an own checkpoint, calibrate, save, load, draw."""

from __future__ import annotations

import json
import os
import re
import runpy
import shutil
import subprocess
import sys

import pytest
from PIL import Image
from typer.testing import CliRunner

import sage_processors as sp
from sage_processors.cli import main as cli
from tests.examples.running import int8_calls
from tests.support.repository import ROOT


DRAW = """
import sys
import torch
from diffusers import DiffusionPipeline
import sage_processors as sp

folder, policy, scales, picture = sys.argv[1:]
pipe = DiffusionPipeline.from_pretrained(folder)
pipe.set_progress_bar_config(disable=True)
with pipe.set_attn_processor(sp.SageAttnProcessor.from_policy(policy, pipe)) as handle:
    if picture == "learn":
        sp.quality.generate(pipe, ["a red circle on a blue background"], [5], steps=2)
        handle.freeze_scales()
        handle.save_scales(scales)
    else:
        handle.load_scales(scales)
        drawn = sp.quality.generate(pipe, ["a red circle on a blue background"], [5], steps=2)
        pipe.image_processor.postprocess(drawn * 2 - 1)[0].save(picture)
    print(handle.report().verdict)
    print(sum(row["dynamic_calls"] for row in handle.report().rows), "dynamic")
"""


@pytest.mark.slow("draws in a process of its own")
def test_a_newcomers_path(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    shutil.copytree(sp.pipelines.path("tiny_sd"), tmp_path / "my checkpoint")
    budget = ["--target-psnr", "40", "--scaling", "timestep", "--images", "2", "--steps", "2", "--json"]
    done = CliRunner().invoke(cli.app, ["calibrate", "my checkpoint", *budget, "--output", "policy.json"])
    assert done.exit_code == 0 and json.loads(done.stdout)["met"] and (tmp_path / "policy.json").is_file()

    (tmp_path / "draw.py").write_text(DRAW, encoding="utf-8")
    files = ["draw.py", "my checkpoint", "policy.json", "scales.safetensors"]
    monkeypatch.setattr(sys, "argv", [*files, "learn"])
    runpy.run_path("draw.py")
    learnt = capsys.readouterr().out
    # a process that knows of this one only what is in files
    path = {"PYTHONPATH": os.pathsep.join((str(ROOT), str(ROOT / "kernels"))), "CUDA_VISIBLE_DEVICES": ""}
    command, options = [sys.executable, *files, "one.png"], {"capture_output": True, "text": True, "timeout": 300}
    done = subprocess.run(command, env=os.environ | path | {"HF_HUB_OFFLINE": "1"}, **options, check=False)
    assert done.returncode == 0 and "Traceback" not in done.stderr, done.stdout + done.stderr
    assert int8_calls(learnt) > 0 and int8_calls(done.stdout) > 0
    # the saved scales are what this process starts from: on the run they were learnt from, fewer are made anew
    dynamic = [float(re.search(r"([\d.]+) dynamic", text)[1]) for text in (learnt, done.stdout)]
    assert dynamic[1] < dynamic[0]
    assert Image.open(tmp_path / "one.png").size == (128, 128)
