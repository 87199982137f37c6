# ---
# jupyter:
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # A LoRA trained with INT8 attention
#
# `SageAttnProcessor(training="int8")` runs the forward of attention in INT8 while a model is trained; gradients come
# from PyTorch's 16-bit backward, out of the INT8 forward's output and log-sum-exp. Does a fine-tune end where one with
# exact attention ends?
#
# A LoRA of all attention projections of `tiny_sd` learns pictures that it was not trained on: 64 instead of 128
# pixels, and red, green and blue in each other's places. Every seed is trained twice on the same pictures, noise and
# initial weights: exact, and in INT8. Both are judged by exact attention, on the same held-out pictures. Training and
# judging run on a CPU in fp32.

# %%
import copy
from pathlib import Path
from types import SimpleNamespace

import drawing
import measure
import tiny_data
import torch
import torch.nn.functional as F
from diffusers import DiffusionPipeline
from IPython.display import Image, Markdown
from peft import LoraConfig
from picture_report import markdown_table

import sage_processors as sp
from sage_kernels.testing import relative_l2
from sage_processors import pipelines


# %% tags=["parameters"]
SIZE = "full"  # "small" is what CI runs: fewer seeds and steps
FIGURES = "figures"

# %%
FIGURES = Path(FIGURES)
LIVE = {
    "full": SimpleNamespace(seeds=5, steps=60, batch=4, judged=32, every=10),
    "small": SimpleNamespace(seeds=2, steps=2, batch=1, judged=2, every=1),
}[SIZE]
PIXELS, RATE = 64, 2e-3
INT8 = sp.SageAttnProcessor(training="int8", min_tokens=0, on_unsupported="raise", scaling="dynamic")
torch.set_num_threads(1)
pipe = DiffusionPipeline.from_pretrained(pipelines.path("tiny_sd"), torch_dtype=torch.float32, use_safetensors=True)
alphas, words = pipe.scheduler.alphas_cumprod, tiny_data.captions()


@torch.no_grad()
def examples(count: int, generator: torch.Generator) -> tuple[torch.Tensor, ...]:
    """Return data for v-prediction: noisy latents, timesteps, text, and the velocity to predict."""
    scene = tiny_data.sample_scene(count, torch.device("cpu"), generator)
    pictures = tiny_data.draw(scene, PIXELS, generator).roll(1, 1)
    latents = pipe.vae.encode(pictures).latent_dist.mode() * pipe.vae.config.scaling_factor
    texts = [words[row] for row in scene.caption_index().tolist()]
    ids = pipe.tokenizer(
        texts, padding="max_length", max_length=pipe.tokenizer.model_max_length, truncation=True, return_tensors="pt"
    ).input_ids
    steps = torch.randint(len(alphas), (count,), generator=generator)
    noise = torch.randn(latents.shape, generator=generator)
    signal, spread = alphas[steps].sqrt()[:, None, None, None], (1 - alphas[steps]).sqrt()[:, None, None, None]
    return signal * latents + spread * noise, steps, pipe.text_encoder(ids)[0], signal * noise - spread * latents


def loss_of(unet, batch: tuple[torch.Tensor, ...]) -> torch.Tensor:
    """Return the mean squared error of the predicted velocity."""
    noisy, steps, text, velocity = batch
    return F.mse_loss(unet(noisy, steps, encoder_hidden_states=text, return_dict=False)[0], velocity)


held_out = examples(LIVE.judged, torch.Generator().manual_seed(measure.SCENE_SEED))


def fresh(seed: int):
    """Return the model with a new LoRA in training mode, and the LoRA's parameters."""
    unet = copy.deepcopy(pipe.unet).requires_grad_(False)
    torch.manual_seed(seed)
    unet.add_adapter(LoraConfig(r=8, lora_alpha=8, target_modules=["to_q", "to_k", "to_v", "to_out.0"]))
    return unet.train(), [p for p in unet.parameters() if p.requires_grad]


# %% [markdown]
# ## One step
#
# How far the gradients of the LoRA's weights are from those with exact attention, and what ran. The second half of a
# LoRA is 0 at first, and the first half's gradients with it; after one step of training both have gradients.

# %%
unet, parameters = fresh(0)
batch = examples(LIVE.batch, torch.Generator().manual_seed(1))
loss_of(unet, batch).backward()
with torch.no_grad():
    for parameter in parameters:
        parameter -= 0.1 * parameter.grad


def gradients() -> tuple[float, torch.Tensor]:
    loss = loss_of(unet, batch)
    return loss.item(), torch.cat([x.flatten() for x in torch.autograd.grad(loss, parameters)])


exact_loss, exact = gradients()
with sp.apply(unet, INT8) as handle:
    int8_loss, int8 = gradients()
    calls = handle.report().calls
lines = [
    ["loss, exact attention", f"{exact_loss:.6f}"],
    ["loss, INT8 attention", f"{int8_loss:.6f}"],
    ["relative L2 of the gradients", f"{float(relative_l2(int8, exact)):.4f}"],
    ["attention calls in INT8", str(calls)],
]
Markdown(markdown_table(["", "value"], lines))

# %% [markdown]
# ## Whole runs


# %%
def train(seed: int, config: sp.SageAttnProcessor | None) -> list[float]:
    """Train, and return the held-out losses with stock attention, one for every few steps."""
    unet, parameters = fresh(seed)
    optimizer = torch.optim.AdamW(parameters, lr=RATE)
    generator = torch.Generator().manual_seed(1000 + seed)
    handle = None if config is None else sp.apply(unet, config)
    curve = []
    for step in range(LIVE.steps + 1):
        if step % LIVE.every == 0:
            if handle is not None:
                handle.remove()
            with torch.no_grad():
                curve.append(loss_of(unet.eval(), held_out).item())
            unet.train()
            handle = None if config is None else sp.apply(unet, config)
        if step < LIVE.steps:
            optimizer.zero_grad()
            loss_of(unet, examples(LIVE.batch, generator)).backward()
            optimizer.step()
    return curve


curves = {seed: (train(seed, None), train(seed, INT8)) for seed in range(LIVE.seeds)}

# %%
ends = torch.tensor([[exact[-1], int8[-1]] for exact, int8 in curves.values()], dtype=torch.float64)
spread, difference = ends[:, 0].std(), (ends[:, 1] - ends[:, 0]).mean()
lines = [[str(seed), *(f"{x:.5f}" for x in ends[seed])] for seed in curves]
lines.append(["before training", *(f"{curves[0][i][0]:.5f}" for i in range(2))])
lines.append(["mean", *(f"{x:.5f}" for x in ends.mean(0))])
lines.append(["standard deviation over seeds", *(f"{x:.5f}" for x in ends.std(0))])
Markdown(markdown_table(["seed", "held-out loss, exact", "held-out loss, INT8"], lines))

# %%
within = abs(difference) < spread
Markdown(
    f"INT8 less exact, mean over {LIVE.seeds} seeds: {difference:+.5f}. Standard deviation of exact attention from "
    f"seed to seed: {spread:.5f}. The difference is {'within' if within else 'beyond'} it."
)

# %%
figure, axes = drawing.figure(width=7.0, height=4.2)
place = axes[0][0]
steps = range(0, LIVE.steps + 1, LIVE.every)
for index, label in enumerate(("exact", "INT8")):
    runs = torch.tensor([pair[index] for pair in curves.values()])
    style = drawing.style_of(index) | ({"lw": 7, "alpha": 0.35} if index == 0 else {})  # it lies below the other line
    place.plot(steps, runs.mean(0), label=f"{label}, mean of {LIVE.seeds} seeds", **style)
    place.fill_between(steps, runs.amin(0), runs.amax(0), color=style["color"], alpha=0.15, lw=0)
place.set(xlabel="training step", ylabel="held-out loss (exact attention)", title="LoRA of tiny_sd")
place.legend()
Image(drawing.save(figure, FIGURES / "lora_training.png"))
