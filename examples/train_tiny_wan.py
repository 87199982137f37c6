"""Train `tiny_wan`, a text-to-video pipeline, from scratch on drawn clips, and save it as a diffusers folder.

    python examples/train_tiny_wan.py --workdir build/tiny_wan --session-minutes 4.6     # again, until it says "done"
    … --workdir build/probe --size probe --vae-steps 600 --picture-steps 2000 --steps 2000                   # on a CPU
    … --size probe --vae-steps 300 --picture-steps 100 --steps 500 --clips 1 --batch 4                # learns one clip

First the VAE, then the transformer together with its text encoder on latents that are encoded in advance: pictures,
which are clips of one frame, then clips; at last saving, sampling and checking. A step over pictures shows nine times
as many shapes as one over clips; from clips alone a model of this size learns colours and ways, but no outlines.
`--minutes` is the budget over all sessions; how many steps fit is measured once, in the first steps of a stage, and
then part of the checkpoint. On a GPU a step is a CUDA graph, one for each size of clips.

Clips, noise and order are a function of the seed and the step. A session that goes on from a checkpoint does what an
uninterrupted one does: to the bit where the device's kernels repeat (a CPU's do; a GPU's attention and convolutions
may add in another order).

The work folder holds state.json, log.jsonl (losses), the checkpoint in files below 16 MB, and at the end tiny_wan.tar,
check.json (how many prompts were obeyed) and sheet.png.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import math
import time
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import tiny_videos
import tiny_wan
import tiny_whole_clips as whole_clips
import torch
import torch.nn.functional as F
from tiny_checkpoint import Checkpoint, compile_blocks, copy_into, moments, plain_blocks, put_moments
from tiny_graphed_step import GraphedStep, cuda_graph
from tiny_latent_pool import LatentPool
from tiny_video_check import obeyed
from tiny_wan_check import check_folder, pack, save_pipeline
from tiny_wan_sizes import CLIPS, PATTERN, POOL_CHUNK, VAE_CLIPS, Clips

from sage_processors import pipelines
from sage_processors.files.whole_file import write_whole


SIMPLE = ("probe",)  # sizes that see simple scenes only
RENEW_EVERY = 20  # steps after which a chunk of each pool is drawn anew
PEAK_RATE = {"vae": 3e-3, "pictures": 1e-3, "clips": 1e-3}
WARM_UP = 200  # steps
TIMED_FROM, TIMED = 100, 80  # the steps of a stage that say how many fit; kernels are compiled and chosen before
ENDS = {"vae": 0.18, "pictures": 0.45}  # of the budget; clips end FINISH_S before it
FINISH_S, RESTART_S = 60.0, 35.0  # kept back for saving and checking; what a session costs before its first step
SLACK = 0.03  # of the time that a stage has left when it is planned
FRAMES_SHIFT = 2.0  # of a clip's noise levels against a picture's
EMPTY_PROMPT_SHARE = 0.1  # trained on "" for classifier-free guidance
KL_WEIGHT, L1_WEIGHT = 1e-4, 0.2
EMA_DECAY = 0.999
LATE_S = 10.0  # after its end, a stage whose steps became slower ends without the rest of its plan
SAVE_EVERY_S, LOG_EVERY = 120.0, 20
STAGES = ("vae", "pictures", "clips", "done")
PARTS = ("weights", "average", "first_moment", "second_moment")  # a file each


def seed_of(*parts: Any) -> int:
    """A seed for torch.Generator that every tuple of parts has of its own."""
    return int.from_bytes(hashlib.sha256(repr(parts).encode()).digest()[:8], "big") >> 1


class Trainer:
    """The pipeline in training; its state is what `save` writes to and the constructor reads from the work folder."""

    def __init__(self, args: argparse.Namespace):
        self.args, self.device, self.work = args, torch.device(args.device), Path(args.workdir)
        self.on_gpu = self.device.type == "cuda"
        self.began = time.monotonic()
        torch.manual_seed(args.seed)
        self.pipe = tiny_wan.build(args.size)
        self.vae, self.text, self.denoiser = (
            getattr(self.pipe, name).to(self.device) for name in ("vae", "text_encoder", "transformer")
        )
        self.state: dict[str, Any] = {"stage": "vae", "step": 0, "planned": {}, "used": 0.0, "size": args.size}
        self.state["seed"] = args.seed
        self.loaded: dict[str, list[torch.Tensor]] = {}
        self.generator = torch.Generator(self.device)
        self.checkpoint = Checkpoint(self.work, STAGES)
        if self.checkpoint.exists:
            self.load()
        self.saved_at = time.monotonic()

    def parameters(self) -> list[torch.nn.Parameter]:
        modules = (self.vae,) if self.state["stage"] == "vae" else (self.denoiser, self.text)
        return [p for module in modules for p in module.parameters()]

    def used(self) -> float:
        """Seconds used so far, over all sessions."""
        return self.state["used"] + time.monotonic() - self.began

    def session_over(self) -> bool:
        return time.monotonic() - self.began > self.args.session_minutes * 60

    def random(self, *parts: Any) -> torch.Generator:
        """The generator for one purpose at one step, the same in every session."""
        return self.generator.manual_seed(seed_of(self.args.seed, *parts))

    def autocast(self):
        # without its cache of weights: a captured step would find them cast once and for all
        return torch.autocast("cuda", torch.bfloat16, cache_enabled=False) if self.on_gpu else nullcontext()

    def save(self, groups: dict[str, list[torch.Tensor]]) -> None:
        if self.state["stage"] != "vae":
            groups = groups | {"vae": [p.detach() for p in self.vae.parameters()]}
        mean, std = tiny_wan.statistics(self.vae)
        state = self.state | {"used": self.used(), "latents_mean": list(mean), "latents_std": list(std)}
        self.checkpoint.save(state, groups)
        self.saved_at = time.monotonic()

    def load(self) -> None:
        self.state, groups = self.checkpoint.load()
        for key in ("size", "seed"):
            if self.state[key] != getattr(self.args, key):
                raise ValueError(
                    f"--{key}: got {getattr(self.args, key)}, expected {self.state[key]} as in the work folder"
                )
        mean, std = (self.state.pop(key) for key in ("latents_mean", "latents_std"))
        self.vae.register_to_config(latents_mean=mean, latents_std=std)
        if "vae" in groups:
            copy_into(list(self.vae.parameters()), groups["vae"])
        copy_into(self.parameters(), groups["weights"])
        self.loaded = {part: [x.to(self.device) for x in groups[part]] for part in PARTS[1:] if part in groups}
        print(f"resumed: stage {self.state['stage']}, step {self.state['step']}, {self.state['used']:.0f} s used")

    def run_stage(
        self,
        steps: int,
        inputs: Callable[[int], dict[str, torch.Tensor]],
        loss_of: Callable[..., torch.Tensor],
    ) -> bool:
        """Optimise `parameters()` for `steps`, or as many as fit until the stage's end; False: session over.

        Args: inputs: of a step, whose loss is `loss_of(**inputs(step))`, on a GPU as a CUDA graph.
        """
        stage, params, budget_s = self.state["stage"], self.parameters(), 60 * self.args.minutes
        end_s = ENDS[stage] * budget_s if stage in ENDS else budget_s - FINISH_S
        record = cuda_graph if self.on_gpu and self.args.graph else None
        gradients = GraphedStep(params, loss_of, record, lambda: plain_blocks(self.denoiser.blocks))
        optimizer = torch.optim.AdamW(
            params, lr=0.0, betas=(0.9, 0.99), weight_decay=0.01, foreach=not self.on_gpu, fused=self.on_gpu
        )
        average = self.loaded.get("average") or [p.detach().clone() for p in params]
        if "first_moment" in self.loaded:
            first, second = (self.loaded[part] for part in PARTS[2:])
            put_moments(optimizer, params, first, second, self.state["step"])
        self.loaded = {}
        if steps:
            self.state["planned"][stage] = steps
        planned = self.state["planned"].get(stage, 0)
        timed = not steps
        total, counted, since = torch.zeros((), device=self.device), 0, time.monotonic()
        timed_from, timed_at = self.state["step"] + TIMED_FROM, 0.0
        while not planned or self.state["step"] < planned:
            step = self.state["step"]
            # only where a line of the log ends: lines are of the same steps, wherever a session ended
            if counted == 0 and (self.session_over() or time.monotonic() - self.saved_at > SAVE_EVERY_S):
                self.save(dict(zip(PARTS, (params, average, *moments(optimizer, params)), strict=True)))
                if self.session_over():
                    return False
            rate = self.rate(stage, step, planned)
            for group in optimizer.param_groups:
                group["lr"] = rate
            loss = gradients(**inputs(step))
            torch.nn.utils.clip_grad_norm_(params, 1.0)
            optimizer.step()
            decay = min(EMA_DECAY, (1 + step) / (10 + step))
            torch._foreach_lerp_(average, [p.detach() for p in params], 1 - decay)
            self.state["step"] = step + 1
            total, counted = total + loss, counted + 1
            if not planned and step + 1 == timed_from:
                total.item()  # all work so far is done
                timed_at = time.monotonic()
            elif not planned and step + 1 == timed_from + TIMED:
                total.item()
                planned = self.plan(end_s, (time.monotonic() - timed_at) / TIMED)
            if self.state["step"] % LOG_EVERY == 0 or self.state["step"] == planned:
                mean = total.item() / counted
                pace = (time.monotonic() - since) / counted
                self.checkpoint.log(
                    self.state, loss=round(mean, 6), rate=round(rate, 8), seconds_per_step=round(pace, 4)
                )
                if self.state["step"] % (10 * LOG_EVERY) == 0 or planned < 50:
                    print(f"[{stage}] {self.state['step']}/{planned or '?'} loss {mean:.4f}, {1e3 * pace:.1f} ms/step,"
                          f" {self.used():.0f} s used", flush=True)  # fmt: skip
                if not math.isfinite(mean):
                    raise RuntimeError(f"the loss is {mean}: delete {self.work} and start again with another --seed")
                total, counted, since = torch.zeros((), device=self.device), 0, time.monotonic()
                if timed and planned and self.used() > end_s + LATE_S:
                    print(f"[{stage}] steps became slower: {self.state['step']} of {planned}, averaged", flush=True)
                    self.state["planned"][stage] = planned = self.state["step"]
        copy_into(params, average)
        for parameter in params:
            parameter.grad = None  # the graphs' memory goes with them
        return True

    @staticmethod
    def rate(stage: str, step: int, planned: int) -> float:
        warm_up = min(WARM_UP, max(1, planned // 10)) if planned else WARM_UP
        warm = min(1.0, (step + 1) / warm_up)
        done = step / planned if planned else 0.0  # the plan stands before the rate leaves its warm-up
        return PEAK_RATE[stage] * warm * (0.01 + 0.99 * 0.5 * (1 + math.cos(math.pi * done)))

    def plan(self, end_s: float, seconds: float) -> int:
        """How many steps of `seconds` each fit until `end_s`, kept in the state; later sessions cost a start each."""
        left, session = end_s - self.used(), self.args.session_minutes * 60
        later = max(0.0, left - (session - (time.monotonic() - self.began)))
        left -= RESTART_S * math.ceil(later / session) if later else 0.0
        planned = self.state["step"] + max(1, int(left * (1 - SLACK) / seconds))
        self.state["planned"][self.state["stage"]] = planned
        print(f"[{self.state['stage']}] {1e3 * seconds:.1f} ms/step: {planned} steps fit", flush=True)
        return planned

    def next_stage(self) -> None:
        """Leave the averaged weights as what the next stage starts from."""
        self.state |= {"stage": STAGES[STAGES.index(self.state["stage"]) + 1], "step": 0}
        self.save({"weights": self.parameters()})

    def clips(self, size: Clips, batch: int, *parts: Any) -> tuple[torch.Tensor, tiny_videos.Scene]:
        """Drawn clips; with --clips only as many different ones."""
        generator = self.random(*parts)
        if self.args.clips:
            generator.manual_seed(seed_of(self.args.seed, "few"))
        scene = tiny_videos.sample_scene(self.args.clips or batch, self.device, generator)
        if self.args.size in SIMPLE:
            scene = tiny_videos.simple_scene(scene)
        drawn = tiny_videos.draw(scene, size.pixels, size.frames, generator)
        if self.args.clips:
            rows = torch.arange(batch, device=self.device) % self.args.clips
            drawn, scene = drawn[rows], scene[rows]
        return drawn, scene

    def train_vae(self) -> bool:
        self.vae.train()
        pattern = VAE_CLIPS[self.args.size]

        @torch.no_grad()
        def inputs(step: int) -> dict[str, torch.Tensor]:
            size = pattern[step % len(pattern)]
            images, _ = self.clips(size, self.args.batch or size.batch, "vae", step)
            shape = tiny_wan.latent_shape(images.shape)
            return {"images": images, "noise": torch.randn(shape, device=self.device, generator=self.generator)}

        def loss_of(images: torch.Tensor, noise: torch.Tensor) -> torch.Tensor:
            with self.autocast():
                mean, logvar = (part.float() for part in whole_clips.moments(self.vae, images))
                output = whole_clips.decode(self.vae, mean + (0.5 * logvar).exp() * noise).float()
            divergence = 0.5 * (mean.square() + logvar.exp() - 1 - logvar).mean()
            return F.mse_loss(output, images) + L1_WEIGHT * F.l1_loss(output, images) + KL_WEIGHT * divergence

        if not self.run_stage(self.args.vae_steps, inputs, loss_of):
            return False
        self.vae.eval()
        self.measure_latents(CLIPS[self.args.size]["small"])
        self.next_stage()
        return True

    @torch.no_grad()
    def measure_latents(self, size: Clips) -> None:
        """Put mean and deviation of each latent channel into the VAE's config, and how good it is into the state.

        The share of its reconstructions that are judged right is the most that the transformer can reach.
        """
        batch = min(64, size.batch)
        drawn = [self.clips(size, batch, "statistics", part) for part in range(16 if self.on_gpu else 2)]
        latents = torch.cat([whole_clips.moments(self.vae, clips)[0].float() for clips, _ in drawn])
        channels = latents.transpose(0, 1).flatten(1)
        mean, std = ([round(x, 6) for x in values.tolist()] for values in (channels.mean(1), channels.std(1)))
        self.vae.register_to_config(latents_mean=mean, latents_std=std)
        clips, scene = drawn[0]
        again = tiny_wan.decode(self.vae, tiny_wan.encode(self.vae, clips))
        self.state["vae_psnr_db"] = round(10 * math.log10(4 / F.mse_loss(again, clips).item()), 2)
        self.state["vae_obeyed"] = {k: round(sum(v) / batch, 4) for k, v in obeyed(again, scene).items()}
        print(f"[vae] {self.state['vae_psnr_db']} dB PSNR, obeyed {self.state['vae_obeyed']}; std {std}", flush=True)

    def pool(self, name: str) -> LatentPool:
        """Latents fp16 [pool, 8, t, h, w] of clips, and the rows of their captions."""
        size = CLIPS[self.args.size][name]
        count = self.args.clips or size.pool
        chunk = min(count, POOL_CHUNK[name])

        @torch.no_grad()
        def make(place: int, renewal: int) -> tuple[torch.Tensor, torch.Tensor]:
            drawn, scene = self.clips(size, chunk, "pool", name, place, renewal)
            with self.autocast():
                return tiny_wan.encode(self.vae, drawn).half(), scene.caption_index()

        return LatentPool(make, -(-count // chunk), RENEW_EVERY)

    def train_denoiser(self) -> bool:
        self.vae.eval().requires_grad_(False)
        self.denoiser.train(), self.text.train()
        self.text.set_attn_implementation("eager")  # whose bias for relative places certainly has a gradient
        if self.args.compile and self.on_gpu:
            compile_blocks(self.denoiser.blocks)
        sizes, patterns = CLIPS[self.args.size], PATTERN[self.args.size]
        words = [*tiny_videos.captions(), ""]
        tokens = self.pipe.tokenizer(words, padding="max_length", max_length=tiny_wan.TEXT_TOKENS, return_tensors="pt")
        ids, masks = tokens.input_ids.to(self.device), tokens.attention_mask.to(self.device)
        pools = {name: self.pool(name) for name in sizes}

        @torch.no_grad()
        def inputs(step: int) -> dict[str, torch.Tensor]:
            stage = self.state["stage"]
            name = patterns[stage][step % len(patterns[stage])]
            latents, rows = pools[name].at(step)
            batch, generator = self.args.batch or sizes[name].batch, self.random(stage, step)

            def uniform(*shape: int) -> torch.Tensor:
                return torch.rand(*shape, device=self.device, generator=generator)

            def normal(*shape: int) -> torch.Tensor:
                return torch.randn(*shape, device=self.device, generator=generator)

            pick = torch.randint(len(latents), (batch,), device=self.device, generator=generator)
            row = torch.where(uniform(batch) < EMPTY_PROMPT_SHARE, len(words) - 1, rows[pick])
            # mostly logit-normal, moved to high noise, where shape and way are decided; some uniform for both ends.
            # More pixels and frames hide less behind the same noise: moved further, as published for resolutions
            sigma = torch.where(uniform(batch) < 0.7, torch.sigmoid(normal(batch) + 0.6), uniform(batch))
            shift = sizes[name].pixels / sizes["small"].pixels * (FRAMES_SHIFT if sizes[name].frames > 1 else 1)
            sigma = shift * sigma / (1 + (shift - 1) * sigma)
            x = latents[pick].float()
            return {"x": x, "noise": normal(*x.shape), "sigma": sigma, "ids": ids[row], "mask": masks[row]}

        def loss_of(x, noise, sigma, ids, mask) -> torch.Tensor:
            level = sigma.view(-1, 1, 1, 1, 1)
            text = tiny_wan.text_states(self.text, ids, mask)  # fp32: small, and what tells words apart may be, too
            with self.autocast():
                output = self.denoiser((1 - level) * x + level * noise, 1000 * sigma, text, return_dict=False)[0]
            return F.mse_loss(output.float(), noise - x)

        for stage, steps in (("pictures", self.args.picture_steps), ("clips", self.args.steps)):
            if self.state["stage"] == stage:
                if not self.run_stage(steps, inputs, loss_of):
                    return False
                self.next_stage()
        return True

    def finish(self) -> None:
        """Save the averaged weights in fp16, load the folder again, and look at what it draws."""
        folder = self.args.out or pipelines.folder(tiny_wan.NAME)
        save_pipeline(self.pipe, folder)
        pack(folder, self.work / f"{tiny_wan.NAME}.tar")
        moving = {name: size for name, size in CLIPS[self.args.size].items() if size.frames > 1}
        result = {key: self.state[key] for key in ("vae_psnr_db", "vae_obeyed", "planned")}
        result["bytes"] = sum(f.stat().st_size for f in folder.rglob("*") if f.is_file())
        result |= check_folder(
            folder, {name: (size.pixels, size.frames) for name, size in moving.items()}, self.device,
            self.work / "sheet.png", count=self.args.check, steps=self.args.check_steps,
            simple=self.args.size in SIMPLE,
        )  # fmt: skip
        write_whole(self.work / "check.json", json.dumps(result, indent=2) + "\n")
        print(json.dumps({k: v for k, v in result.items() if k != "clips"}, indent=2), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workdir", type=Path, required=True, help="checkpoint, log, and what comes out at the end")
    parser.add_argument("--minutes", type=float, default=11.4, help="budget over all sessions")
    parser.add_argument("--session-minutes", type=float, default=math.inf, help="stop here and leave a checkpoint")
    parser.add_argument("--vae-steps", type=int, default=0, help="train the VAE for so many steps; 0: what fits")
    parser.add_argument("--picture-steps", type=int, default=0, help="then the transformer on pictures; 0: what fits")
    parser.add_argument("--steps", type=int, default=0, help="and on clips; 0: what fits")
    parser.add_argument("--size", choices=sorted(CLIPS), default="full", help="probe: small enough for a CPU")
    parser.add_argument("--batch", type=int, default=0, help="clips per step; 0: what the size says")
    parser.add_argument(
        "--clips", type=int, default=0, help="train on so many clips only, to see that they are learnt"
    )
    parser.add_argument("--check", type=int, default=96, help="clips of the smallest size to sample and check")
    parser.add_argument("--check-steps", type=int, default=25, help="denoising steps of these")
    parser.add_argument("--out", type=Path, help="folder of the pipeline; else where it lies")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--no-compile", dest="compile", action="store_false", help="train without torch.compile")
    parser.add_argument("--no-graph", dest="graph", action="store_false", help="train without CUDA graphs")
    args = parser.parse_args()
    args.workdir.mkdir(parents=True, exist_ok=True)
    torch.set_float32_matmul_precision("high")
    torch.backends.cudnn.benchmark = True
    # cuDNN's attention backward died with illegal memory accesses on torch 2.11 and an H200.
    torch.backends.cuda.enable_cudnn_sdp(False)
    trainer = Trainer(args)
    complete = trainer.state["stage"] != "vae" or trainer.train_vae()
    complete = complete and (trainer.state["stage"] == "done" or trainer.train_denoiser())
    if complete:
        trainer.finish()
    print("done" if complete else "session over: run the same command again to go on", flush=True)


if __name__ == "__main__":
    main()
