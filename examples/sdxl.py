"""Stable Diffusion XL with INT8 attention.

python examples/sdxl.py --compare  # offline, random weights: noise
python examples/sdxl.py "an owl at dusk" --model stabilityai/stable-diffusion-xl-base-1.0

Calls for 1024 x 1024 pixels are short on a large GPU and may run in 16 bit: try --height 2048 --width 2048.
The VAE overflows in fp16: the pipeline casts it up by itself.
"""

import small_pictures
import torch
from command_line import CommandLine
from diffusers import StableDiffusionXLPipeline


def main() -> None:
    line = CommandLine(__doc__, prompt="an owl at dusk", steps=30, output="sdxl.png")
    args = line.parse_args()
    with line.loading(small_pictures.sdxl) as model:
        pipe = StableDiffusionXLPipeline.from_pretrained(model, torch_dtype=line.dtype(torch.float16)).to(args.device)
    handle = pipe.set_attn_processor(line.attention())  # the one line
    line.show(pipe, handle, prompt=args.prompt, guidance_scale=5.0)


if __name__ == "__main__":
    main()
