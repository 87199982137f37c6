"""FLUX.1 Kontext: change a picture by a prompt, with INT8 attention.

python examples/flux_kontext.py --compare  # offline, with the weights of tiny_flux, which was not trained for it
python examples/flux_kontext.py "add a hat" --image cat.png --model black-forest-labs/FLUX.1-Kontext-dev

The given picture's tokens stand beside those of the new one: calls are twice as long as FLUX's, and gain more.
"""

import small_pictures
import torch
from command_line import SHAPES, CommandLine, image
from diffusers import FluxKontextPipeline


def main() -> None:
    line = CommandLine(__doc__, prompt="make the circle green", steps=28, output="flux_kontext.png")
    line.add_argument("--image", type=image, default=SHAPES, help="the picture to change")
    args = line.parse_args()
    with line.loading(small_pictures.flux_kontext) as model:
        pipe = FluxKontextPipeline.from_pretrained(model, torch_dtype=line.dtype(torch.bfloat16)).to(args.device)
    handle = pipe.set_attn_processor(line.attention())  # the one line
    line.show(pipe, handle, image=args.image, prompt=args.prompt, guidance_scale=2.5)


if __name__ == "__main__":
    main()
