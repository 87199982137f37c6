"""Stable Diffusion 3.5 with INT8 attention.

python examples/sd3.py --compare  # offline, random weights: noise
python examples/sd3.py "an owl at dusk" --model stabilityai/stable-diffusion-3.5-medium

Text and picture attend jointly; head_dim is 64. The medium model also has attention over the picture alone.
"""

import small_pictures
import torch
from command_line import CommandLine
from diffusers import StableDiffusion3Pipeline


def main() -> None:
    line = CommandLine(__doc__, prompt="an owl at dusk", steps=28, output="sd3.png")
    args = line.parse_args()
    with line.loading(small_pictures.sd3) as model:
        pipe = StableDiffusion3Pipeline.from_pretrained(model, torch_dtype=line.dtype(torch.bfloat16)).to(args.device)
    handle = pipe.set_attn_processor(line.attention())  # the one line
    line.show(pipe, handle, prompt=args.prompt, guidance_scale=4.5)


if __name__ == "__main__":
    main()
