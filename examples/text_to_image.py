"""Text to image with INT8 attention: any diffusers checkpoint, or without --model a small one.

python examples/text_to_image.py "a red circle on a blue background" --compare
python examples/text_to_image.py "an owl at dusk" --model Tongyi-MAI/Z-Image-Turbo --steps 9
"""

import small_pictures
import torch
from command_line import CommandLine
from diffusers import DiffusionPipeline

import sage_processors as sp


def main() -> None:
    line = CommandLine(__doc__, prompt="a red circle on a blue background", steps=25, output="image.png")
    args = line.parse_args()
    with line.loading(small_pictures.sd15) as model:
        pipe = DiffusionPipeline.from_pretrained(model, torch_dtype=line.dtype(torch.bfloat16)).to(args.device)
    handle = pipe.set_attn_processor(line.attention())  # the one line
    line.show(pipe, handle, prompt=args.prompt, **sp.quality.picture_arguments(pipe))


if __name__ == "__main__":
    main()
