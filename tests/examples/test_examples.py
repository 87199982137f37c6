"""The examples run as they stand, small and offline."""

from __future__ import annotations

import sys

import pytest
import torch
from PIL import Image

import sage_processors as sp
from tests.examples.running import EXAMPLES, IDENTICAL_DB, int8_calls, psnr, run


sys.path.insert(0, str(EXAMPLES))

from small_random_videos import FAMILIES, random_video


@pytest.mark.parametrize("model", ["tiny_sd", pytest.param("tiny_flux", marks=pytest.mark.slow("as a folder below"))])
def test_text_to_image(model, tmp_path, monkeypatch, capsys):
    path = tmp_path / "image.png"
    prompt = "a red circle on a blue background"
    run("text_to_image", monkeypatch, prompt, "--model", model, "--steps", 1, "--compare", "--output", path)
    assert Image.open(path).size == (128, 128) and (tmp_path / "image_compare.png").is_file()
    output = capsys.readouterr().out
    assert int8_calls(output) > 0
    assert "INT8 attention" in output and 45 < psnr(output)[0] < IDENTICAL_DB


def test_text_to_image_takes_a_folder_and_options(tmp_path, monkeypatch, capsys):
    path, folder = tmp_path / "image.png", sp.pipelines.path("tiny_flux")
    options = ("--scaling", "per_block", "--seed", 3, "--steps", 1, "--output", path)
    run("text_to_image", monkeypatch, "--model", folder, *options)
    output = capsys.readouterr().out
    assert Image.open(path).size == (128, 128)
    assert "per_block" in output and "PSNR" not in output and int8_calls(output) > 0


def test_text_to_video(tmp_path, monkeypatch, capsys):
    path = tmp_path / "video.gif"
    run("text_to_video", monkeypatch, "--steps", 2, "--compare", "--output", path)
    output, advice = capsys.readouterr()
    assert "no weights" not in advice
    assert Image.open(path).n_frames == 17 and int8_calls(output) > 0 and 54 < psnr(output)[0] < IDENTICAL_DB


def test_text_to_video_without_weights_says_so_and_draws_with_random_ones(tmp_path, monkeypatch, capsys):
    path = tmp_path / "video.gif"
    monkeypatch.setattr(sp.pipelines, "VIDEOS", ())
    run("text_to_video", monkeypatch, "--steps", 1, "--output", path)
    output, advice = capsys.readouterr()
    assert "tiny_wan has no weights here" in advice
    assert Image.open(path).n_frames == 9 and int8_calls(output) > 0


def test_text_to_video_takes_a_folder(tmp_path, monkeypatch, capsys):
    """The path of a real checkpoint: from_pretrained, then prompt embeddings made from text by the pipeline itself."""
    from transformers import T5TokenizerFast, UMT5Config, UMT5EncoderModel

    pipe, _ = random_video("wan")
    pieces = [
        ("<pad>", 0.0),
        ("</s>", 0.0),
        ("<unk>", 0.0),
        *((f"\u2581{word}", -2.0) for word in ("a", "red", "circle")),
    ]
    tokenizer = T5TokenizerFast(vocab=pieces, extra_ids=0, model_max_length=16)
    config = UMT5Config(vocab_size=len(tokenizer), d_model=32, d_kv=16, d_ff=32, num_layers=1, num_heads=2)
    pipe.register_modules(tokenizer=tokenizer, text_encoder=UMT5EncoderModel(config))
    pipe.save_pretrained(tmp_path / "wan")
    path = tmp_path / "video.gif"
    size = ("--num_frames", 5, "--height", 128, "--width", 128)
    options = ("--model", tmp_path / "wan", "--steps", 1, *size, "--output", path)
    run("text_to_video", monkeypatch, "a red circle", *options)
    assert Image.open(path).n_frames == 5 and int8_calls(capsys.readouterr().out) > 0


@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_P30_random_video_is_always_the_same_and_in_eval_mode(family):
    state = torch.get_rng_state()
    (one, arguments), (two, again) = random_video(family), random_video(family)
    assert torch.equal(torch.get_rng_state(), state)
    pairs = zip(one.transformer.parameters(), two.transformer.parameters(), strict=True)
    modules = [model for model in one.components.values() if isinstance(model, torch.nn.Module)]
    assert modules and not any(part.training for model in modules for part in model.modules())
    assert all(torch.equal(a, b) for a, b in pairs) and torch.equal(arguments["prompt_embeds"], again["prompt_embeds"])
