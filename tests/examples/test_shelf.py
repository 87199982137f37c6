"""Every example of the shelf runs offline: INT8 calls ran, and what it drew is near stock's, and not stock's."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

import pytest
import torch
from PIL import Image

import sage_processors as sp
from tests.examples.running import EXAMPLES, IDENTICAL_DB, PATTERNS, int8_calls, psnr, run


# Least PSNR at two steps, dB: some 6 below what was measured. Random weights damp what attention does, trained don't.
PICTURES = {
    "sd15": 64, "sdxl": 70, "sd3": 84, "flux": 42, "flux_kontext": 48, "qwen_image": 105, "img2img": 62,
    "controlnet": 62, "low_memory": 40,
}  # fmt: skip
VIDEOS = {"cogvideox": 64, "ltx_video": 78, "hunyuan_video": 84, "wan": 50, "wan_image": 84}


@pytest.mark.parametrize("name", PATTERNS)
def test_examples_are_short_and_say_how_they_are_run(name):
    text = (EXAMPLES / f"{name}.py").read_text(encoding="utf-8")
    assert len(text.splitlines()) < 60
    assert f"examples/{name}.py" in text.split('"""')[1]


def test_the_shelf_has_what_it_lists():
    page = (EXAMPLES / "README.md").read_text(encoding="utf-8")
    assert sorted(set(re.findall(r"\]\((\w+)\.py\)", page))) == PATTERNS
    told = re.findall(r"\[(\w+)\]\(\w+\.py\) .*(?:\||PSNR above) (\d+) dB", page)
    assert {name: int(least) for name, least in told if name in PICTURES | VIDEOS} == PICTURES | VIDEOS


QUICK = ("sd15", "flux")  # a UNet, a transformer; test_examples.py draws the video of wan, whose experts are quick
DRAWN = [x if x in QUICK else pytest.param(x, marks=pytest.mark.slow("as its like")) for x in (*PICTURES, *VIDEOS)]


@pytest.mark.parametrize("name", DRAWN)
def test_P30_draws_in_int8_what_stock_attention_draws(name, tmp_path, monkeypatch, capsys):
    path = tmp_path / ("x.png" if name in PICTURES else "x.gif")
    run(name, monkeypatch, "--steps", 2, "--compare", "--output", path)
    shown = capsys.readouterr().out
    assert int8_calls(shown) > 0
    (decibels,) = psnr(shown)
    assert (PICTURES | VIDEOS)[name] < decibels < IDENTICAL_DB
    with Image.open(path) as drawn:
        assert name in PICTURES or drawn.n_frames == (17 if name == "wan" else 9)  # trained, or random weights
        assert len(drawn.convert("RGB").resize((16, 16)).getcolors()) > 16  # something is drawn
    assert (tmp_path / "x_compare.png").is_file() == (name in PICTURES)


def test_P30_both_experts_of_wan_are_swapped(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(sp.pipelines, "VIDEOS", ())
    run("wan", monkeypatch, "--steps", 4, "--output", tmp_path / "x.gif")
    shown = capsys.readouterr().out
    both = re.findall(r"^(\w+)\.blocks\.0-1\.attn1 +([\d.]+)", shown, re.M) or re.findall(
        r"layers of (transformer(?:_2)?)\b", shown
    )
    assert "Noise level of transformer follows" in shown and "Noise level of transformer_2 follows" in shown, both
    assert int8_calls(shown) == 4 * 2 * 2  # each of 4 steps with guidance, by one of two experts of two blocks


@pytest.mark.slow("as test_compile, by the example")
def test_compiled_steps_do_not_recompile(tmp_path, monkeypatch, capsys):
    torch._dynamo.reset()
    run("compiled", monkeypatch, "--backend", "eager", "--steps", 2, "--compare", "--output", tmp_path / "x.png")
    torch._dynamo.reset()
    shown = capsys.readouterr().out
    assert re.search(r"second: [\d.]+ s, 0 compilations", shown) and int8_calls(shown) > 0
    assert 42 < psnr(shown)[0] < IDENTICAL_DB


def test_captured_steps_say_where_they_came_from(tmp_path, monkeypatch, capsys):
    run("captured", monkeypatch, "--steps", 1, "--compare", "--output", tmp_path / "x.png")
    shown = capsys.readouterr().out
    assert "0 forwards of transformer came from CUDA graphs, eager ones: device: 6." in shown
    assert int8_calls(shown) > 0 and 42 < psnr(shown)[0] < IDENTICAL_DB


def test_low_memory_frees_the_16_bit_weights(tmp_path, monkeypatch, capsys):
    run("low_memory", monkeypatch, "--steps", 1, "--output", tmp_path / "x.png")
    before, after = map(float, re.search(r"([\d.]+) GB, then ([\d.]+) GB", capsys.readouterr().out).groups())
    assert 0 < after < 0.35 * before  # fp32 on a CPU: a quarter, and scales, biases, norms


@pytest.mark.slow("as test_calibrate_command, by the example")
def test_calibration_is_kept_and_read(tmp_path, monkeypatch, capsys):
    policy = tmp_path / "policy.json"
    options = ("--policy", policy, "--steps", 2, "--pictures", 1, "--compare", "--output", tmp_path / "x.png")
    run("calibrate_and_save", monkeypatch, *options)
    measured, content = capsys.readouterr().out, policy.read_bytes()
    assert json.loads(content)
    run("calibrate_and_save", monkeypatch, *options)
    read = capsys.readouterr().out
    assert policy.read_bytes() == content and len(read) < len(measured)
    assert int8_calls(read) > 0 and psnr(read)[0] == pytest.approx(psnr(measured)[-1], abs=0.01) and psnr(read)[0] > 40


@pytest.mark.slow("as test_same_seed, by the example")
def test_serving_draws_every_size_as_if_it_were_the_only_one(tmp_path, monkeypatch, capsys):
    options = ("--steps", 2, "--compare", "--output", tmp_path / "x.png")
    run("serving", monkeypatch, *options, "--sizes", "128x128", "160x96", "128x128")
    shown = capsys.readouterr().out
    calls = [int(number) for number in re.findall(r"(\d+) attention calls in INT8", shown)]
    assert len(calls) == 3 and calls[0] == calls[1] == calls[2] > 0 and int8_calls(shown) == sum(calls)
    assert all(40 < decibels < IDENTICAL_DB for decibels in psnr(shown))
    first, other, again = (Image.open(tmp_path / f"x_{i}.png") for i in range(3))
    assert first.size == (128, 128) and other.size == (160, 96) and first.tobytes() == again.tobytes()


def test_a_long_context_is_read_in_int8_and_held_in_half(monkeypatch, capsys):
    run("llama_long_context", monkeypatch, "--new-tokens", 8, "--compare")
    shown = capsys.readouterr().out
    stock, ours = re.findall(
        r"(\d+) tokens read, (\d+) written .*?KV cache \d+ bytes a token, ([\d.]+) of bf16", shown
    )
    assert int8_calls(shown) == 3 * int(ours[1])  # of three layers: the prompt, and all new tokens but the last
    assert stock[0] == ours[0] and int(ours[0]) > 400 and float(ours[2]) < 0.52 and float(stock[2]) == 2  # fp32
    assert int(re.search(r"The first (\d+) of (\d+) tokens are those", shown)[1]) >= 1


def test_a_vision_encoder_runs_in_int8(monkeypatch, capsys):
    run("vision_encoder", monkeypatch, "--compare")
    shown = capsys.readouterr().out
    worst = float(re.search(r"worst token ([\d.e-]+)", shown)[1])
    assert int8_calls(shown) == 2 and 0 < worst < 0.005  # attention is a small part of what a random layer adds


@pytest.mark.parametrize("name", [pytest.param("sd15", marks=pytest.mark.slow("as flux")), "flux"])
def test_a_users_own_folder_is_loaded(name, tmp_path, monkeypatch, capsys):
    """The path of a real checkpoint: --model with a folder. On it, no default is made small."""
    folder = tmp_path / "own"
    shutil.copytree(sp.pipelines.path("tiny_sd" if name == "sd15" else "tiny_flux"), folder)
    size = ("--height", 128, "--width", 128)
    run(name, monkeypatch, "--model", folder, *size, "--steps", 1, "--output", tmp_path / "x.png")
    assert int8_calls(capsys.readouterr().out) > 0 and Image.open(tmp_path / "x.png").size == (128, 128)


def test_nothing_is_left_in_the_folder_for_temporary_files(tmp_path, monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    folder = Path(tmp_path / "drawn")
    folder.mkdir()
    run("sd3", monkeypatch, "--steps", 1, "--output", folder / "x.png")
    assert [path.name for path in tmp_path.iterdir()] == ["drawn"]
