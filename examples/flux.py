"""FLUX.1 [dev] with INT8 attention.

python examples/flux.py --compare  # offline, the trained tiny_flux
python examples/flux.py "an owl at dusk" --model black-forest-labs/FLUX.1-dev --height 2048 --width 2048

At 1024 x 1024 pixels attention is a small part of the time; most of the rest is linear layers, which run in INT8, too.
"""

import small_pictures
import torch
from command_line import CommandLine
from diffusers import FluxPipeline


def main() -> None:
    line = CommandLine(__doc__, prompt="a red circle on a blue background", steps=28, output="flux.png")
    args = line.parse_args()
    with line.loading(small_pictures.flux) as model:
        pipe = FluxPipeline.from_pretrained(model, torch_dtype=line.dtype(torch.bfloat16)).to(args.device)
    handle = pipe.set_attn_processor(line.attention())  # the one line
    line.show(pipe, handle, prompt=args.prompt, guidance_scale=3.5)


if __name__ == "__main__":
    main()
