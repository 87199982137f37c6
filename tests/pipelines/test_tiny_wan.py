"""tiny_wan: its sizes, its weights, and what judges its clips."""

from __future__ import annotations

import math
import sys

import pytest
import torch


pytest.importorskip("diffusers")
pytest.importorskip("transformers")


from sage_processors import pipelines
from tests.support.repository import ROOT


sys.path.insert(0, str(ROOT / "examples"))

import small_videos
import tiny_video_check
import tiny_videos
import tiny_wan


CPU = torch.device("cpu")


def scenes(count: int, seed: int = 0) -> tiny_videos.Scene:
    return tiny_videos.sample_scene(count, CPU, torch.Generator().manual_seed(seed))


def test_noise_and_an_empty_clip_obey_nothing():
    noise = torch.rand(2, 3, 9, 64, 64, generator=torch.Generator().manual_seed(2)) * 2 - 1
    noise[1] = -1
    assert not any(tiny_video_check.obeyed(noise, scenes(2))["all"])


# --- the model and its weights ---


def test_the_model_is_small_and_its_sizes_are_those_of_its_documentation():
    pipe = tiny_wan.build()
    modules = [m for m in pipe.components.values() if isinstance(m, torch.nn.Module)]
    assert 2 * sum(p.numel() for m in modules for p in m.parameters()) < 7.9e6  # 8 MB with everything beside weights
    with torch.no_grad():
        for pixels, frames, tokens in ((64, 17, 576), (128, 33, 4352)):
            shape = (1 + (frames - 1) // tiny_wan.FRAME_SCALE, *(pixels // tiny_wan.PIXEL_SCALE,) * 2)
            assert math.prod(shape) // 4 == tokens
        clip = tiny_videos.draw(scenes(1), 32, 5)
        latents = tiny_wan.encode(pipe.vae, clip)
        assert latents.shape == (1, 8, 3, 8, 8) and tiny_wan.decode(pipe.vae, latents).shape == clip.shape


def test_without_weights_a_sentence_says_so_and_random_ones_are_taken(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(pipelines, "VIDEOS", ("tiny_film",))
    assert pipelines.video_names() == []
    with pytest.raises(FileNotFoundError, match="tiny_film has no weights here: examples/train_tiny_wan.py trains it"):
        pipelines.path("tiny_film")
    source, _ = small_videos.trained()
    assert "tiny_wan has no weights here" in capsys.readouterr().err
    assert not any(module.training for module in source.transformer.modules())


# --- what is shipped ---

shipped = pytest.mark.skipif(not pipelines.video_names(), reason="tiny_wan has no weights: nobody has trained it")


@shipped
def test_shipped_weights_are_fp16_and_small():
    from safetensors import safe_open

    files = [path for path in pipelines.path("tiny_wan").rglob("*") if path.is_file()]
    assert sum(path.stat().st_size for path in files) <= 8_000_000
    for path in files:
        if path.suffix == ".safetensors":
            with safe_open(path, "pt") as file:
                assert {file.get_slice(key).get_dtype() for key in file.keys()} == {"F16"}


@shipped
@pytest.mark.slow("draws clips with the whole of tiny_wan")
def test_shipped_tiny_wan_obeys_its_prompts():
    from tiny_wan_check import load, sample

    scene = scenes(4, seed=11)
    prompts = [tiny_videos.captions()[i] for i in scene.caption_index().tolist()]
    pipe = load(pipelines.path("tiny_wan"), CPU)
    clips = sample(pipe, prompts, list(range(4)), 64, 17, steps=8, guidance=3.0)
    found = tiny_video_check.obeyed(clips, scene)
    # of four clips, each right nine times out of ten, three or more are in 95 of 100 draws
    assert sum(found["all"]) >= 3, {key: sum(values) for key, values in found.items()}
