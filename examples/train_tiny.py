"""Train the two embedded pipelines from scratch on drawn pictures, and save them as diffusers folders.

    python examples/train_tiny.py --pipeline tiny_sd --minutes 9.5 --workdir training

The whole run is time-boxed: first the VAE, then the denoiser together with its text encoders, with learning rates that
follow the elapsed time so that training is always annealed when the time is up, then saving, sampling and checking.
`--session-minutes` stops earlier and leaves a checkpoint; the same command line then goes on where it stopped.
"""

from __future__ import annotations

import argparse
import json
import math
import time
from contextlib import nullcontext
from pathlib import Path

import tiny_data
import tiny_models
import torch
import torch.nn.functional as F
from diffusers import FluxPipeline
from tiny_check import check_folder

from sage_processors import pipelines
from sage_processors.files.whole_file import whole_file


NAMES = ("tiny_sd", "tiny_flux")
DENOISER = {"tiny_sd": "unet", "tiny_flux": "transformer"}
TEXT_ENCODERS = {"tiny_sd": ("text_encoder",), "tiny_flux": ("text_encoder", "text_encoder_2")}
PEAK_RATE = {"vae": 1.5e-3, "tiny_sd": 7e-4, "tiny_flux": 1e-3}
VAE_SHARE, VAE_MAX_S = 0.18, 110.0  # of the time; beyond about 100 s the VAE hardly improves
FINISH_S = 45.0  # kept back for saving, sampling and checking
EMPTY_PROMPT_SHARE = 0.1  # trained on "" for classifier-free guidance
EMA_DECAY = 0.998


class Clock:
    """Seconds of training used so far, over all sessions; `total` is the budget that the schedules follow."""

    def __init__(self, minutes: float, session_minutes: float, used: float):
        self.start, self.used_before, self.total = time.monotonic(), used, minutes * 60
        self.session_end = session_minutes * 60

    def used(self) -> float:
        return self.used_before + time.monotonic() - self.start

    def session_over(self) -> bool:
        return time.monotonic() - self.start > self.session_end


class Trainer:
    """One pipeline in training; its state is what `save` writes to and the constructor reads from the work folder."""

    def __init__(self, name: str, args: argparse.Namespace):
        self.name, self.args, self.device = name, args, torch.device(args.device)
        self.on_gpu = self.device.type == "cuda"
        self.pipe = tiny_models.build(name)
        self.modules = {
            k: m.to(self.device) for k, m in self.pipe.components.items() if isinstance(m, torch.nn.Module)
        }
        self.checkpoint = Path(args.workdir) / f"{name}.pt"
        self.state = {"stage": "vae", "step": 0, "used": 0.0, "stage_start": 0.0, "ema": None, "optimizer": None}
        if self.checkpoint.exists():
            loaded = torch.load(self.checkpoint, map_location=self.device, weights_only=True)
            for key, weights in loaded.pop("modules").items():
                self.modules[key].load_state_dict(weights)
            self.modules["vae"].register_to_config(**loaded.pop("vae_config"))
            self.state = loaded
            print(f"[{name}] resumed: stage {loaded['stage']}, step {loaded['step']}, {loaded['used']:.0f} s used")
        elif args.init:
            self.load_pipeline(args.init / name)
        else:
            zero_modulation(self.modules[DENOISER[name]])
        self.clock = Clock(args.minutes, args.session_minutes, self.state["used"])
        self.report_at = self.saved_at = time.monotonic()
        self.images_since = 0
        torch.manual_seed(args.seed + self.state["step"])

    def load_pipeline(self, folder: Path) -> None:
        """Go on from a saved pipeline: its VAE stays, the denoiser and the text encoders are trained further."""
        saved = type(self.pipe).from_pretrained(folder)
        for key, module in self.modules.items():
            module.load_state_dict(saved.components[key].float().state_dict())
        config = {k: saved.vae.config[k] for k in ("scaling_factor", "shift_factor")}
        self.modules["vae"].register_to_config(**config)
        self.state["stage"] = "denoiser"
        print(f"[{self.name}] goes on from {folder}", flush=True)

    def autocast(self):
        return torch.autocast("cuda", torch.bfloat16) if self.on_gpu else nullcontext()

    def save(self, optimizer: torch.optim.Optimizer | None = None) -> None:
        """Write the checkpoint; a reader never sees half of it."""
        self.state["used"] = self.clock.used()
        self.state["optimizer"] = optimizer.state_dict() if optimizer else None
        config = {k: self.modules["vae"].config[k] for k in ("scaling_factor", "shift_factor")}
        weights = {k: m.state_dict() for k, m in self.modules.items()}
        with whole_file(self.checkpoint) as file:
            torch.save({**self.state, "modules": weights, "vae_config": config}, file)
        self.saved_at = time.monotonic()

    def run_stage(self, stage: str, end_s: float, params: list, loss_of_step) -> bool:
        """Optimise `params` until `end_s` of the budget (or args.steps); False if the session ended before that."""
        optimizer = torch.optim.AdamW(params, lr=0.0, betas=(0.9, 0.99), weight_decay=0.01, fused=self.on_gpu)
        if self.state["optimizer"]:
            optimizer.load_state_dict(self.state["optimizer"])
        if self.state["ema"] is None:
            self.state["ema"] = [p.detach().clone() for p in params]
        start, steps = self.state["stage_start"], self.args.steps
        while True:
            step, used = self.state["step"], self.clock.used()
            done = step / steps if steps else (used - start) / max(end_s - start, 1e-9)
            if done >= 1:
                break
            if self.clock.session_over():
                self.save(optimizer)
                self.load_average(params)
                return False
            rate = PEAK_RATE["vae" if stage == "vae" else self.name] * min(1, (step + 1) / 200)
            for group in optimizer.param_groups:
                group["lr"] = rate * (0.01 + 0.99 * 0.5 * (1 + math.cos(math.pi * done)))
            loss, batch = loss_of_step(step)
            optimizer.zero_grad(set_to_none=True)
            loss.backward()
            torch.nn.utils.clip_grad_norm_(params, 1.0)
            optimizer.step()
            decay = min(EMA_DECAY, (1 + step) / (10 + step))
            torch._foreach_lerp_(self.state["ema"], [p.detach() for p in params], 1 - decay)
            self.state["step"] = step + 1
            self.images_since += batch
            if step % 10 == 0:
                self.report(stage, loss.item(), end_s)  # .item() also keeps the queue of launched work short
                if time.monotonic() - self.saved_at > 60:
                    self.save(optimizer)
        self.load_average(params)
        self.state.update(ema=None, optimizer=None, step=0, stage_start=self.clock.used())
        return True

    @torch.no_grad()
    def load_average(self, params: list) -> None:
        for p, average in zip(params, self.state["ema"], strict=True):
            p.copy_(average)

    def report(self, stage: str, loss: float, end_s: float) -> None:
        seconds = time.monotonic() - self.report_at
        if seconds > 15 or self.state["step"] == 1 or self.args.steps:
            left = (end_s - self.clock.used()) / 60
            rate = self.images_since / max(seconds, 1e-9)
            line = f"[{self.name}] {stage} step {self.state['step']} loss {loss:.4f} {rate:.0f} img/s"
            print(f"{line} {left:.1f} min left", flush=True)
            self.report_at, self.images_since = time.monotonic(), 0
        if not math.isfinite(loss):
            raise RuntimeError(
                f"[{self.name}] the loss is {loss}: start again from the last checkpoint with another --seed"
            )

    def pictures(self, batch: int, pixels: int = tiny_models.PIXELS) -> tuple[torch.Tensor, tiny_data.Scene]:
        scene = tiny_data.sample_scene(batch, self.device)
        return tiny_data.draw(scene, pixels), scene

    def train_vae(self) -> bool:
        vae = self.modules["vae"].train()
        share = min(VAE_SHARE * self.clock.total, VAE_MAX_S)

        def loss_of_step(step: int):
            images, _ = self.pictures(self.args.batch or (96 if self.on_gpu else 2))
            with self.autocast():
                posterior = vae.encode(images).latent_dist
                output = vae.decode(posterior.sample(), return_dict=False)[0].float()
            mean, logvar = posterior.mean.float(), posterior.logvar.float()
            divergence = 0.5 * (mean.square() + logvar.exp() - 1 - logvar).mean()
            return F.mse_loss(output, images) + 0.1 * F.l1_loss(output, images) + 1e-4 * divergence, len(images)

        if not self.run_stage("vae", share, list(vae.parameters()), loss_of_step):
            return False
        vae.eval().requires_grad_(False)
        self.normalize_latents(vae)
        images, _ = self.pictures(64 if self.on_gpu else 2)
        with torch.no_grad():
            error = F.mse_loss(vae(images).sample.clamp(-1, 1), images)
        self.state["vae_psnr_db"] = 10 * math.log10(4 / error.item())
        print(f"[{self.name}] VAE reconstructs at {self.state['vae_psnr_db']:.1f} dB PSNR", flush=True)
        self.state["stage"] = "denoiser"
        self.save()
        return True

    @torch.no_grad()
    def normalize_latents(self, vae) -> None:
        """Fold the mean and deviation of each latent channel into the 1x1 convolutions around the latents.

        Then every channel is near N(0, 1), what no scalar factor could do; the config still states what was measured.
        """

        def statistics() -> tuple[torch.Tensor, torch.Tensor]:
            many = 32 if self.on_gpu else 1
            latents = [vae.encode(self.pictures(32)[0]).latent_dist.mode().float() for _ in range(many)]
            pixels = torch.cat(latents).transpose(0, 1).flatten(1)
            return pixels.mean(1), pixels.std(1)

        mean, std = statistics()
        outer, inner = vae.quant_conv, vae.post_quant_conv
        scale = torch.cat([1 / std, torch.ones_like(std)])
        outer.weight.mul_(scale[:, None, None, None])
        outer.bias.copy_(outer.bias * scale - torch.cat([mean / std, 2 * std.log()]))
        inner.bias.add_(inner.weight[:, :, 0, 0] @ mean)
        inner.weight.mul_(std[None, :, None, None])
        mean, std = statistics()
        factors = {"scaling_factor": round(1 / std.square().mean().sqrt().item(), 4)}
        if self.name == "tiny_flux":  # StableDiffusionPipeline knows no shift
            factors["shift_factor"] = round(mean.mean().item(), 4)
        vae.register_to_config(**factors)

    def train_denoiser(self) -> bool:
        vae = self.modules["vae"].eval().requires_grad_(False)
        denoiser = self.modules[DENOISER[self.name]].train()
        texts = [self.modules[k].train() for k in TEXT_ENCODERS[self.name]]
        if self.name == "tiny_flux":
            # The model casts the timestep to the dtype of these features; bf16 would round it to steps of 4 of 1000.
            denoiser.x_embedder.register_forward_hook(lambda module, inputs, output: output.float())
        call = FastCall(denoiser, self.args.compile and self.on_gpu)
        tables = self.caption_tables()
        alphas = self.pipe.scheduler.alphas_cumprod.to(self.device) if self.name == "tiny_sd" else None
        params = [p for module in (denoiser, *texts) for p in module.parameters()]

        def loss_of_step(step: int):
            shape = self.shape_of_step(step)
            with torch.no_grad(), self.autocast():
                images, scene = self.pictures(shape["batch"], shape["pixels"])
                shift = vae.config.shift_factor or 0.0
                latents = (vae.encode(images).latent_dist.mode().float() - shift) * vae.config.scaling_factor
            row = scene.caption_index()
            row = torch.where(torch.rand(row.shape, device=self.device) < EMPTY_PROMPT_SHARE, len(tables[0]) - 1, row)
            with self.autocast():
                if self.name == "tiny_sd":
                    loss = sd_loss(call, texts, [table[row] for table in tables], latents, alphas)
                else:
                    ids = [tables[0][row], F.pad(tables[1][row], (0, shape["tokens"] - tiny_models.T5_TOKENS))]
                    loss = flux_loss(call if shape["usual"] else denoiser, texts, ids, latents)
            return loss, shape["batch"]

        if not self.run_stage("denoiser", self.clock.total - FINISH_S, params, loss_of_step):
            return False
        self.state["stage"] = "done"
        self.save()
        return True

    def shape_of_step(self, step: int) -> dict:
        """Batch, picture size and T5 length of a step: mostly the usual one, and for FLUX its pipeline's defaults.

        FluxPipeline without arguments pads the text to 512 tokens and draws 256x256 pixels with this VAE, so the model
        sees both now and then, after it has learnt the usual shape.
        """
        usual = self.args.batch or (128 if self.on_gpu else 2)
        shape = {"batch": usual, "pixels": tiny_models.PIXELS, "tokens": tiny_models.T5_TOKENS, "usual": True}
        if self.name == "tiny_sd":
            return shape
        late = bool(self.args.steps) or self.clock.used() > 0.35 * self.clock.total
        if late and step % 16 == 3:
            return {**shape, "batch": max(1, usual // 2), "tokens": 512, "usual": False}
        if late and step % 32 == 7:
            return {
                "batch": max(1, usual // 6),
                "pixels": 256,
                "tokens": 512 if step % 64 == 7 else 32,
                "usual": False,
            }
        return shape

    def caption_tables(self) -> list[torch.Tensor]:
        """Token ids of every caption per tokenizer, int64 [captions + 1, length]; the last row is the empty prompt."""
        words = [*tiny_data.captions(), ""]
        tokenizers = [self.pipe.tokenizer] + ([self.pipe.tokenizer_2] if self.name == "tiny_flux" else [])
        options = {"padding": "max_length", "truncation": True, "return_tensors": "pt"}
        return [t(words, max_length=t.model_max_length, **options).input_ids.to(self.device) for t in tokenizers]

    def finish(self) -> None:
        """Save the averaged weights in fp16, then load the folder again and look at what it draws."""
        folder = pipelines.folder(self.name) if self.args.out is None else self.args.out / self.name
        for module in self.modules.values():
            module.to("cpu", torch.float16, memory_format=torch.contiguous_format).eval().requires_grad_(False)
        self.pipe.save_pretrained(folder)
        for key in TEXT_ENCODERS[self.name]:
            # transformers loads with the dtype it reads here, diffusers in fp32: without this they would not fit.
            path = folder / key / "config.json"
            path.write_text(json.dumps({**json.loads(path.read_text()), "dtype": "float32"}, indent=2) + "\n")
        work = Path(self.args.workdir)
        result = {"pipeline": self.name, "vae_psnr_db": self.state.get("vae_psnr_db")}
        result |= check_folder(folder, self.device, work / f"{self.name}_grid.png", quick=bool(self.args.steps))
        result["bytes"] = sum(f.stat().st_size for f in folder.rglob("*") if f.is_file())
        (work / f"{self.name}_check.json").write_text(json.dumps(result, indent=2) + "\n")
        print(json.dumps({k: v for k, v in result.items() if k != "prompts"}, indent=2), flush=True)


class FastCall:
    """Calls a module through torch.compile, and goes on without it, saying so, where compiling fails."""

    def __init__(self, module: torch.nn.Module, compiled: bool):
        self.module, self.proved = module, False
        self.fast = torch.compile(module, dynamic=False) if compiled else module

    def __call__(self, *args, **kwargs):
        try:
            output = self.fast(*args, **kwargs)
            self.proved = True
            return output
        except Exception as error:
            if self.proved or self.fast is self.module:
                raise
            print(f"torch.compile failed, training without it: {type(error).__name__}: {str(error)[:300]}", flush=True)
            self.fast = self.module
            return self.module(*args, **kwargs)


def zero_modulation(denoiser: torch.nn.Module) -> None:
    """Let every FLUX block start as the identity (the zero initialisation of DiT); diffusers leaves it to trainers."""
    for name, module in denoiser.named_modules():
        modulates = name.endswith(("norm1.linear", "norm1_context.linear", ".norm.linear", "norm_out.linear"))
        if isinstance(module, torch.nn.Linear) and (modulates or name == "proj_out"):
            torch.nn.init.zeros_(module.weight)
            torch.nn.init.zeros_(module.bias)


def sd_loss(unet, texts: list, ids: list[torch.Tensor], latents: torch.Tensor, alphas: torch.Tensor) -> torch.Tensor:
    """v-prediction at uniform steps: v = sqrt(a) * noise - sqrt(1 - a) * latents, as DDIMScheduler reads it."""
    context = texts[0](ids[0])[0]
    t = torch.randint(len(alphas), (len(latents),), device=latents.device)
    noise = torch.randn_like(latents)
    signal, spread = alphas[t].sqrt()[:, None, None, None], (1 - alphas[t]).sqrt()[:, None, None, None]
    output = unet(signal * latents + spread * noise, t, encoder_hidden_states=context, return_dict=False)[0]
    return F.mse_loss(output.float(), signal * noise - spread * latents)


def flux_loss(transformer, texts: list, ids: list[torch.Tensor], latents: torch.Tensor) -> torch.Tensor:
    """Flow matching: the model sees (1 - sigma) * x + sigma * noise and sigma, and predicts noise - x."""
    batch, channels, height, width = latents.shape
    device = latents.device
    pooled, context = texts[0](ids[0]).pooler_output, texts[1](ids[1])[0]
    x = FluxPipeline._pack_latents(latents, batch, channels, height, width)
    image_ids = FluxPipeline._prepare_latent_image_ids(batch, height // 2, width // 2, device, torch.float32)
    text_ids = torch.zeros(context.shape[1], 3, device=device)
    # Mostly logit-normal, moved to high noise, where the shape is decided; some uniform to cover both ends.
    normal = torch.sigmoid(torch.randn(batch, device=device) + 0.8)
    uniform = torch.rand(batch, device=device)
    sigma = torch.where(torch.rand(batch, device=device) < 0.7, normal, uniform)
    noise = torch.randn_like(x)
    mix = sigma[:, None, None]
    output = transformer(
        hidden_states=(1 - mix) * x + mix * noise,
        timestep=sigma,
        guidance=None,
        pooled_projections=pooled.float(),
        encoder_hidden_states=context,
        txt_ids=text_ids,
        img_ids=image_ids,
        return_dict=False,
    )[0]
    return F.mse_loss(output.float(), noise - x)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pipeline", choices=(*NAMES, "all"), default="all")
    parser.add_argument("--minutes", type=float, default=10.0, help="budget per pipeline, over all sessions")
    parser.add_argument("--session-minutes", type=float, default=math.inf, help="stop here and leave a checkpoint")
    parser.add_argument("--preview", action="store_true", help="save and check whatever there is when a session stops")
    parser.add_argument("--workdir", type=Path, required=True, help="checkpoints, sample grid and check results")
    parser.add_argument("--init", type=Path, help="folder of saved pipelines to train further")
    parser.add_argument("--out", type=Path, help="where the pipeline folders are written; else where they lie")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--steps", type=int, default=0, help="train this many steps per stage instead: a smoke test")
    parser.add_argument("--batch", type=int, default=0, help="pictures per step; 0 chooses by device")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--no-compile", dest="compile", action="store_false", help="train without torch.compile")
    args = parser.parse_args()
    args.workdir.mkdir(parents=True, exist_ok=True)
    torch.set_float32_matmul_precision("high")
    torch.backends.cudnn.benchmark = True
    # cuDNN's attention backward died with illegal memory accesses on torch 2.11 and an H200.
    torch.backends.cuda.enable_cudnn_sdp(False)
    for name in NAMES if args.pipeline == "all" else (args.pipeline,):
        trainer = Trainer(name, args)
        complete = trainer.state["stage"] != "vae" or trainer.train_vae()
        complete = complete and (trainer.state["stage"] == "done" or trainer.train_denoiser())
        if not complete:
            print(f"[{name}] session over: run the same command again to go on", flush=True)
        if complete or (args.preview and trainer.state["stage"] == "denoiser"):
            trainer.finish()


if __name__ == "__main__":
    main()
