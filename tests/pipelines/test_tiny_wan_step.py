"""What makes tiny_wan's training fast leaves its numbers as they are: whole clips, captured steps, the pool."""

from __future__ import annotations

import argparse
import math
import sys

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode


pytest.importorskip("diffusers")
pytest.importorskip("transformers")

from tests.support.repository import ROOT


sys.path.insert(0, str(ROOT / "examples"))

import tiny_videos
import tiny_wan
import tiny_whole_clips as whole_clips
import train_tiny_wan
from tiny_checkpoint import compile_blocks, plain_blocks
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


def test_the_text_encoder_starts_with_whose_colour_a_colour_is(pipe):
    words = ["a red circle bouncing on a blue background", "a blue circle bouncing on a red background"]
    tokens = pipe.tokenizer(words, padding="max_length", max_length=tiny_wan.TEXT_TOKENS, return_tensors="pt")
    with torch.no_grad():
        states = tiny_wan.text_states(pipe.text_encoder, tokens.input_ids, tokens.attention_mask)
    assert tokens.input_ids[0, 1] == tokens.input_ids[1, 6]  # red: of the circle, of the background
    assert torch.cosine_similarity(states[0, 1], states[1, 6], dim=0) < 0.9


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


def test_each_kind_of_inputs_is_captured_once_and_inputs_are_copied(capsys):
    weight = torch.nn.Parameter(torch.tensor(2.0))
    captured = []

    def counting(run, parameters):
        captured.append(1)
        return record(run, parameters)

    step = GraphedStep([weight], lambda x: (weight * x).sum(), counting)
    for values in ([1.0, 2.0], [3.0, 4.0], [5.0], [1.0, 1.0]):
        x = torch.tensor(values)
        loss = step(x=x)
        assert loss.item() == 2 * sum(values) and weight.grad.item() == sum(values)
        x.zero_()
    assert len(captured) == 2 and capsys.readouterr().out.count("captured a step") == 2


def test_a_capture_that_fails_says_so_and_goes_on_without(capsys):
    def fails(run, parameters):
        run()
        raise RuntimeError("operation not permitted when stream is capturing")

    weight = torch.nn.Parameter(torch.tensor(2.0))
    step = GraphedStep([weight], lambda x: weight * x, fails)
    for value in (3.0, 4.0):
        assert step(x=torch.tensor(value)).item() == 2 * value and weight.grad.item() == value
    assert capsys.readouterr().out.count("eager steps from here on: RuntimeError: operation not permitted") == 1


def test_a_capture_that_fails_is_tried_again_without_what_may_stand_in_the_way(capsys):
    weight, compiled = torch.nn.Parameter(torch.tensor(2.0)), [True]

    def fails_if_compiled(run, parameters):
        if compiled[0]:
            raise RuntimeError("not in a graph")
        return record(run, parameters)

    step = GraphedStep([weight], lambda x: weight * x, fails_if_compiled, lambda: compiled.__setitem__(0, False))
    for value in (3.0, 4.0):
        assert step(x=torch.tensor(value)).item() == 2 * value and weight.grad.item() == value
    assert step.record is not None and "a simpler step: RuntimeError: not in a graph" in capsys.readouterr().out


def test_blocks_are_compiled_and_plain_again(monkeypatch):
    monkeypatch.setattr(torch, "compile", lambda function, **_: lambda x: function(x) + 1)
    blocks = torch.nn.ModuleList([torch.nn.Identity()])
    compile_blocks(blocks)
    assert blocks[0](torch.zeros(())).item() == 1
    plain_blocks(blocks)
    assert blocks[0](torch.zeros(())).item() == 0


class Capturable(TorchDispatchMode):
    """Raises where a CUDA graph could not be captured: values asked for, tensors from the host, random numbers."""

    FORBIDDEN = ("_local_scalar_dense", "nonzero", "lift_fresh", "masked_select", "unique", "equal", "item",
                 "rand", "randn", "randint", "normal_", "uniform_", "bernoulli_", "native_dropout")  # fmt: skip

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func._schema.name.split("::")[1]
        overload = func._overloadname
        if name in self.FORBIDDEN or (name, overload) == ("repeat_interleave", "Tensor"):
            raise AssertionError(f"{func} in a step that is captured")
        return func(*args, **kwargs or {})


def test_steps_can_be_captured(tmp_path, monkeypatch):
    kinds = []

    def watched(run, parameters):
        run()  # what is made once, is made
        with Capturable():
            run()
        kinds.append(len(parameters))
        return record(run, parameters)

    step = GraphedStep
    monkeypatch.setattr(train_tiny_wan, "GraphedStep", lambda parameters, loss, *_: step(parameters, loss, watched))
    trainer = trainer_of(tmp_path)
    assert trainer.train_vae() and trainer.train_denoiser()
    assert len(kinds) == 3  # none fell back
    with pytest.raises(AssertionError, match="captured"), Capturable():
        torch.ones(1).item()


def test_a_stage_that_becomes_slower_than_planned_ends_when_its_time_is_over(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(train_tiny_wan, "LOG_EVERY", 2)
    trainer = trainer_of(tmp_path)
    trainer.args.vae_steps = 0
    trainer.state["planned"] = {"vae": 500}
    trainer.began -= 60  # of the minute's share that the VAE has
    assert trainer.train_vae()
    assert trainer.state["planned"] == {"vae": 2} and trainer.state["stage"] == "pictures"
    assert "steps became slower: 2 of 500" in capsys.readouterr().out


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


def test_clips_are_drawn_without_tables_from_the_host():
    scene = tiny_videos.sample_scene(2, torch.device("cpu"), torch.Generator().manual_seed(0))
    tiny_videos.draw(scene, 16, 5)
    made = tiny_videos._tables(torch.device("cpu"))
    assert tiny_videos._tables(torch.device("cpu")) is made
