"""A newcomer's path, each step in a process of its own: demo, an own checkpoint, calibrate, save, load, draw.

The install before it is `make`'s, which also runs this.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys

import pytest
from PIL import Image

import sage_processors as sp
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


@pytest.fixture
def say(tmp_path):
    """Runs a Python command in a folder outside of the checkout, as a user's shell does; what it says."""
    path = os.pathsep.join((str(ROOT), str(ROOT / "kernels")))
    environment = os.environ | {
        "PYTHONPATH": path, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "HF_HUB_OFFLINE": "1",
        "COLUMNS": "200",
    }  # fmt: skip

    def run(*words) -> str:
        command = [sys.executable, *map(str, words)]
        options = {"cwd": tmp_path, "env": environment, "capture_output": True, "text": True}
        done = subprocess.run(command, **options, timeout=300, check=False)
        assert done.returncode == 0, done.stdout + done.stderr
        assert "Traceback" not in done.stderr
        return done.stdout

    return run


@pytest.mark.slow("six processes, one after the other")
def test_a_newcomers_path(say, tmp_path):
    command = ("-m", "sage_processors")

    shown = say(*command, "demo", "--steps", 2, "--images", 1)
    assert int8_calls(shown) > 0 and "PSNR" in shown
    assert Image.open(tmp_path / "sage_demo.png").size[0] > 128

    shutil.copytree(sp.pipelines.path("tiny_sd"), tmp_path / "my checkpoint")
    budget = ("--target-psnr", 40, "--scaling", "timestep", "--images", 2, "--steps", 2, "--output", "policy.json")
    said = json.loads(say(*command, "calibrate", "my checkpoint", *budget, "--json"))
    assert said["met"] and (tmp_path / "policy.json").is_file()

    (tmp_path / "draw.py").write_text(DRAW, encoding="utf-8")
    files = ("draw.py", "my checkpoint", "policy.json", "scales.safetensors")
    learnt = say(*files, "learn")
    assert int8_calls(learnt) > 0
    drawn = say(*files, "one.png")  # a process that knows of the first one only what is in files
    assert int8_calls(drawn) > 0
    # the saved scales are what this process starts from: on the run they were learnt from, fewer are made anew
    dynamic = [float(re.search(r"([\d.]+) dynamic", text)[1]) for text in (learnt, drawn)]
    assert dynamic[1] < dynamic[0]
    assert Image.open(tmp_path / "one.png").size == (128, 128)
