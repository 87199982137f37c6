"""What `time` says that it timed: size, precision, device, weights, and options that it chose by itself."""

from __future__ import annotations

import json
import shutil

import pytest
from typer.testing import CliRunner

import sage_processors as sp
from sage_processors.cli import main as cli
from sage_processors.evaluation import quality
from sage_processors.evaluation.protocol import timing


@pytest.fixture(autouse=True)
def _once(monkeypatch):
    monkeypatch.setattr(timing, "ROUNDS", 1)


def said(*words) -> str:
    env = {"COLUMNS": "200", "HF_HUB_OFFLINE": "1"}
    done = CliRunner(env=env).invoke(cli.app, ["time", *map(str, words), "--device", "cpu", "--timed", "1"])
    assert done.exit_code == 0, (done.output, done.exception)
    return done.stdout


def test_time_says_which_size_a_pipeline_really_draws():
    """FLUX rounds a size down, without an error."""
    words = ("tiny_flux", "--steps", 2, "--height", 63, "--width", 64, "--dtype", "bfloat16", "--random")
    text = said(*words)
    assert "tiny_flux: 2 steps, height 60, width 64, bfloat16 on a CPU, random weights" in text
    assert "The pipeline rounds sizes: it draws height 60, not 63." in text
    found = json.loads(said(*words, "--json"))
    assert {key: found[key] for key in ("height", "width", "frames", "prompt_tokens", "dtype", "random", "gpu")} == {
        "height": 60, "width": 64, "frames": None, "prompt_tokens": None, "dtype": "bfloat16", "random": True,
        "gpu": "",
    }  # fmt: skip
    assert found["note"] == "The pipeline rounds sizes: it draws height 60, not 63."


def test_a_size_that_would_be_rounded_to_nothing_is_refused(tmp_path):
    """With a VAE of FLUX's depth, which makes a latent pixel of 8 pixels and a token of 2 latent ones."""
    folder = tmp_path / "configs"
    shutil.copytree(sp.pipelines.path("tiny_flux"), folder, ignore=shutil.ignore_patterns("*.safetensors"))
    config = json.loads((folder / "vae" / "config.json").read_text())
    config |= {"down_block_types": ["DownEncoderBlock2D"] * 4, "up_block_types": ["UpDecoderBlock2D"] * 4}
    (folder / "vae" / "config.json").write_text(json.dumps(config | {"block_out_channels": [32] * 4}))
    words = ["time", str(folder), "--random", "--device", "cpu", "--steps", "1", "--height", "9", "--width", "64"]
    done = CliRunner().invoke(cli.app, words)
    assert done.exit_code == 2 and "--height: got 9, expected at least 16: this pipeline draws mult" in done.stderr


def test_time_says_how_many_frames_a_clip_has_and_nothing_of_a_size_as_asked():
    found = json.loads(said("tiny_wan", "--steps", 1, "--frames", 5, "--json"))
    assert (found["frames"], found["height"], found["width"], found["note"]) == (5, 64, 64, "")


def test_time_says_what_a_language_model_read():
    words = ("tiny_lm", "--prompt-tokens", 16, "--new-tokens", 4)
    text = said(*words)
    assert "tiny_lm: 4 tokens after 16, float32 on a CPU" in text and "random" not in text and "min_tokens" not in text
    found = json.loads(said(*words, "--json"))
    assert (found["prompt_tokens"], found["height"], found["random"], found["dtype"]) == (16, None, False, "float32")


@pytest.mark.parametrize(
    ("options", "head"),
    [
        ((), 'Preset "fast"; '),
        (("--recipe", "qk_int8_pv_fp8"), 'Preset "fast" with other options for recipe; '),
        (("--preset", "none"), "No preset; "),
    ],
)
def test_time_says_which_limit_it_chose_for_a_small_model(options, head):
    text = said("tiny_flux", "--steps", 1, "--height", 64, "--width", 64, *options)
    assert text.startswith(f"{head}min_tokens={quality.MIN_TOKENS}, so that so small a model runs in INT8 at all\n")
