"""Wan, image to video with INT8 attention: a picture becomes the first frame.

python examples/wan_image.py --compare  # offline, two experts with random weights: noise
python examples/wan_image.py "the owl takes off" --image owl.png --model Wan-AI/Wan2.2-I2V-A14B-Diffusers

The checkpoints of 2.1 attend to the picture in separate calls of 257 tokens, which run in 16 bit on a GPU.
"""

import small_videos
import torch
from command_line import SHAPES, CommandLine, image
from diffusers import AutoencoderKLWan, WanImageToVideoPipeline


def main() -> None:
    line = CommandLine(__doc__, prompt="the circle rolls away", steps=40, output="wan_image.gif")
    line.add_argument("--image", type=image, default=SHAPES, help="the first frame")
    args = line.parse_args()
    with line.loading(small_videos.wan_image) as model:
        vae = AutoencoderKLWan.from_pretrained(model, subfolder="vae", torch_dtype=torch.float32)
        dtype = line.dtype(torch.bfloat16)
        pipe = WanImageToVideoPipeline.from_pretrained(model, vae=vae, torch_dtype=dtype).to(args.device)
    handle = pipe.set_attn_processor(line.attention())  # the one line, for both experts
    line.show(pipe, handle, image=args.image, prompt=args.prompt, guidance_scale=3.5)


if __name__ == "__main__":
    main()
