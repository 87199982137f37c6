"""Sample a saved `tiny_wan` as a user would, and measure how often its clips show their prompts."""

from __future__ import annotations

import json
import tarfile
from pathlib import Path

import tiny_videos
import tiny_wan
import torch
from diffusers import AutoencoderKLWan, WanPipeline
from PIL import Image
from tiny_video_check import obeyed


SCENE_SEED = 1  # of the prompts
GUIDANCE = (3.0, 5.0)  # tried at the smallest size; the first one at the others
SHOWN = 12  # clips on the sheet


def load(folder: Path, device: torch.device) -> WanPipeline:
    """The pipeline as Wan's authors run it: the VAE in fp32, the rest in bf16; all fp32 on a CPU."""
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    vae = AutoencoderKLWan.from_pretrained(folder, subfolder="vae", torch_dtype=torch.float32)
    pipe = WanPipeline.from_pretrained(folder, vae=vae, torch_dtype=dtype).to(device)
    pipe.set_progress_bar_config(disable=True)
    return pipe


def sample(
    pipe: WanPipeline, prompts: list[str], seeds: list[int], pixels: int, frames: int, *, steps: int, guidance: float
) -> torch.Tensor:
    """Clips fp32 [B, 3, T, H, W] in [-1, 1] on the CPU; noise comes from the CPU."""
    clips = pipe(
        prompts,
        height=pixels,
        width=pixels,
        num_frames=frames,
        num_inference_steps=steps,
        guidance_scale=guidance,
        generator=[torch.Generator().manual_seed(seed) for seed in seeds],
        max_sequence_length=tiny_wan.TEXT_TOKENS,
        output_type="pt",
    ).frames
    return clips.float().cpu().transpose(1, 2) * 2 - 1


def check_folder(
    folder: Path,
    sizes: dict[str, tuple[int, int]],
    device: torch.device,
    sheet: Path,
    *,
    count: int,
    steps: int,
    simple: bool = False,
) -> dict:
    """Rates of `tiny_video_check.obeyed` per size and guidance.

    Args: sizes: {name: (pixels, frames)}, the smallest first, which gets `count` clips and a sheet; the others a
        quarter of them each. steps: of denoising. simple: prompts of `tiny_videos.simple_scene` only.
    Raises: RuntimeError on non-finite pixels.
    """
    pipe, words, rates, answers = load(folder, device), tiny_videos.captions(), {}, {}
    for place, (name, (pixels, frames)) in enumerate(sizes.items()):
        number = count if place == 0 else max(1, count // 4)
        scene = tiny_videos.sample_scene(number, torch.device("cpu"), torch.Generator().manual_seed(SCENE_SEED))
        scene = tiny_videos.simple_scene(scene) if simple else scene
        prompts = [words[i] for i in scene.caption_index().tolist()]
        batch = max(1, 32 * 64 * 64 * 17 // (pixels * pixels * frames)) if device.type == "cuda" else 4
        for guidance in GUIDANCE if place == 0 else GUIDANCE[:1]:
            parts = [range(start, min(start + batch, number)) for start in range(0, number, batch)]
            options = {"pixels": pixels, "frames": frames, "steps": steps, "guidance": guidance}
            clips = torch.cat([sample(pipe, [prompts[i] for i in part], list(part), **options) for part in parts])
            if not torch.isfinite(clips).all():
                raise RuntimeError(f"{folder}: {name} draws non-finite pixels")
            found, case = obeyed(clips, scene), f"{name}_{pixels}x{pixels}x{frames}_guidance_{guidance:g}"
            rates[case] = {key: round(sum(values) / number, 4) for key, values in found.items()}
            answers[case] = [f"{prompt}: {[k for k in found if not found[k][i]]}" for i, prompt in enumerate(prompts)]
            if place == 0 and guidance == GUIDANCE[0]:
                save_sheet(clips[:SHOWN], sheet)
    return {"steps": steps, "rates": rates, "clips": answers}


def save_sheet(clips: torch.Tensor, path: Path) -> None:
    """Write every other frame of clips [B, 3, T, H, W] in [-1, 1] as one PNG, a clip a line."""
    rows = clips[:, :, ::2].permute(0, 3, 2, 4, 1)
    pixels = rows.reshape(rows.shape[0] * rows.shape[1], -1, 3)
    Image.fromarray(((pixels.clamp(-1, 1) + 1) * 127.5).round().byte().numpy()).save(path)


def save_pipeline(pipe: WanPipeline, folder: Path) -> None:
    """Save weights in fp16; the pipeline stays on the CPU, in fp16."""
    for module in (pipe.vae, pipe.text_encoder, pipe.transformer):
        module.to("cpu", torch.float16).eval().requires_grad_(False)
    pipe.save_pretrained(folder)
    path = folder / "text_encoder" / "config.json"  # transformers loads in the dtype it reads here, diffusers in fp32
    path.write_text(json.dumps({**json.loads(path.read_text()), "dtype": "float32"}, indent=2) + "\n")


def pack(folder: Path, path: Path) -> None:
    """One tar file of a pipeline's folder."""
    with tarfile.open(path, "w") as archive:
        archive.add(folder, arcname=folder.name)
