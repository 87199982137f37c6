"""Stable Diffusion 1.5 with INT8 attention.

python examples/sd15.py --compare  # offline, the trained tiny_sd
python examples/sd15.py "an owl at dusk" --model stable-diffusion-v1-5/stable-diffusion-v1-5

Its calls are short, with head_dim 40, 80 and 160: on a GPU most run in 16 bit, as the report says.
"""

import small_pictures
import torch
from command_line import CommandLine
from diffusers import StableDiffusionPipeline


def main() -> None:
    line = CommandLine(__doc__, prompt="a red circle on a blue background", steps=25, output="sd15.png")
    args = line.parse_args()
    with line.loading(small_pictures.sd15) as model:
        pipe = StableDiffusionPipeline.from_pretrained(model, torch_dtype=line.dtype(torch.float16)).to(args.device)
    handle = pipe.set_attn_processor(line.attention())  # the one line
    line.show(pipe, handle, prompt=args.prompt, guidance_scale=7.5)


if __name__ == "__main__":
    main()
