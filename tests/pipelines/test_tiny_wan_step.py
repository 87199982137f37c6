"""What makes tiny_wan's training fast leaves its numbers as they are: whole clips, captured steps, the pool."""

from __future__ import annotations

import argparse
import math
import sys

import pytest
import torch


pytest.importorskip("diffusers")
pytest.importorskip("transformers")

from tests.support.repository import ROOT


sys.path.insert(0, str(ROOT / "examples"))

import tiny_wan
import tiny_whole_clips as whole_clips
import train_tiny_wan
from tiny_graphed_step import GraphedStep
from tiny_latent_pool import LatentPool


@pytest.fixture(scope="module")
def pipe():
    torch.manual_seed(0)
    return tiny_wan.build()


# --- whole clips ---


@pytest.mark.parametrize("frames", [1, 5, 9])
@torch.no_grad()
def test_a_whole_clip_is_what_diffusers_makes_of_its_frames(pipe, frames):
    clips = torch.rand(2, 3, frames, 16, 16, generator=torch.Generator().manual_seed(0)) * 2 - 1
    theirs = pipe.vae.encode(clips).latent_dist
    mean, logvar = whole_clips.moments(pipe.vae, clips)
    torch.testing.assert_close(mean, theirs.mean, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(logvar, theirs.logvar, rtol=1e-4, atol=1e-5)
    assert mean.shape == tiny_wan.latent_shape(clips.shape)
    latents = torch.randn(mean.shape, generator=torch.Generator().manual_seed(1))
    drawn = whole_clips.decode(pipe.vae, latents).clamp(-1, 1)
    torch.testing.assert_close(drawn, pipe.vae.decode(latents).sample, rtol=1e-4, atol=1e-5)


def test_a_whole_clip_has_the_gradients_of_its_frames(pipe):
    vae, clips = pipe.vae, torch.rand(1, 3, 5, 16, 16, generator=torch.Generator().manual_seed(0)) * 2 - 1
    weight = torch.randn(clips.shape, generator=torch.Generator().manual_seed(1))

    def gradients(drawn):
        vae.zero_grad()
        (drawn * weight).sum().backward()
        return torch.cat([p.grad.flatten().clone() for p in vae.parameters()])

    drawn = whole_clips.decode(vae, whole_clips.moments(vae, clips)[0])
    weight *= drawn.abs() < 1  # theirs ends there
    ours = gradients(drawn)
    theirs = gradients(vae.decode(vae.encode(clips).latent_dist.mode()).sample)
    assert (ours - theirs).norm() < 1e-4 * theirs.norm()


def test_text_states_are_those_of_the_pipeline(pipe):
    words = ["a red square moving left behind a blue bar on a white background", "a cyan ring bouncing", ""]
    theirs, _ = pipe.encode_prompt(
        words, do_classifier_free_guidance=False, max_sequence_length=tiny_wan.TEXT_TOKENS, dtype=torch.float32
    )
    tokens = pipe.tokenizer(words, padding="max_length", max_length=tiny_wan.TEXT_TOKENS, return_tensors="pt")
    ours = tiny_wan.text_states(pipe.text_encoder, tokens.input_ids, tokens.attention_mask)
    torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)


# --- captured steps ---


def record(run, parameters):
    """A stand-in for a CUDA graph: runs again on the captured inputs, into the memory of the captured results."""
    loss = run().clone()
    gradients = [parameter.grad for parameter in parameters]

    def replay() -> None:
        loss.copy_(run())
        for kept, parameter in zip(gradients, parameters, strict=True):
            kept.copy_(parameter.grad)
            parameter.grad = None

    return loss, gradients, replay


def trainer_of(tmp_path) -> train_tiny_wan.Trainer:
    arguments = {
        "workdir": tmp_path, "minutes": 1.0, "session_minutes": math.inf, "vae_steps": 2, "picture_steps": 2,
        "steps": 3, "size": "probe", "batch": 2, "clips": 4, "device": "cpu", "seed": 0,
        "compile": False, "graph": False,
    }  # fmt: skip
    return train_tiny_wan.Trainer(argparse.Namespace(**arguments))


def test_replayed_steps_train_the_same_weights_to_the_bit(tmp_path, monkeypatch):
    def trained(name):
        (tmp_path / name).mkdir()
        trainer = trainer_of(tmp_path / name)
        assert trainer.train_vae() and trainer.train_denoiser()
        modules = (trainer.vae, trainer.denoiser, trainer.text)
        return [p.detach().clone() for module in modules for p in module.parameters()]

    eager, calls = trained("eager"), []

    def counting(run, parameters):
        calls.append(len(parameters))
        return record(run, parameters)

    step = GraphedStep
    monkeypatch.setattr(train_tiny_wan, "GraphedStep", lambda parameters, loss, *_: step(parameters, loss, counting))
    replayed = trained("replayed")
    assert len(calls) == 3  # a stage each: the probe has one size in each
    assert all(torch.equal(a, b) for a, b in zip(eager, replayed, strict=True))


# --- the pool ---


def test_a_pool_that_starts_later_holds_what_one_that_went_along_does():
    def make(chunk, renewal):
        return torch.full((2, 1), 100.0 * chunk + renewal), torch.full((2,), chunk)

    along = LatentPool(make, chunks=3, every=4)
    seen = set()
    for step in range(40):
        latents, rows = along.at(step)
        fresh = LatentPool(make, chunks=3, every=4).at(step)
        assert torch.equal(latents, fresh[0]) and torch.equal(rows, fresh[1])
        seen |= set(latents.flatten().tolist())
    jumped = LatentPool(make, chunks=3, every=4)
    jumped.at(2)
    assert torch.equal(jumped.at(39)[0], latents)
    assert rows.tolist() == [0, 0, 1, 1, 2, 2] and len(seen) == 3 + 9  # every fourth step one was drawn anew
