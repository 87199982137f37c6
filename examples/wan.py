"""Wan, text to video with INT8 attention: 2.1 with one denoiser, 2.2 with two experts, each swapped.

python examples/wan.py "a red square moving left" --compare  # offline: tiny_wan as both of two experts
python examples/wan.py "a cat on a surfboard" --model Wan-AI/Wan2.1-T2V-1.3B-Diffusers
python examples/wan.py "a cat on a surfboard" --model Wan-AI/Wan2.2-T2V-A14B-Diffusers --height 720 --width 1280

The report tells the layers of `transformer` (high noise) from those of `transformer_2` (low noise).
"""

import small_videos
import torch
from command_line import CommandLine
from diffusers import AutoencoderKLWan, WanPipeline


def main() -> None:
    line = CommandLine(__doc__, prompt="a cat on a surfboard", steps=50, output="wan.gif")
    args = line.parse_args()
    with line.loading(small_videos.wan_two_experts) as model:
        vae = AutoencoderKLWan.from_pretrained(model, subfolder="vae", torch_dtype=torch.float32)  # as Wan's authors
        pipe = WanPipeline.from_pretrained(model, vae=vae, torch_dtype=line.dtype(torch.bfloat16)).to(args.device)
    handle = pipe.set_attn_processor(line.attention())  # the one line, for both experts
    line.show(pipe, handle, prompt=args.prompt, guidance_scale=5.0)


if __name__ == "__main__":
    main()
