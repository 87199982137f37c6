"""LTX-Video, text to video with INT8 attention.

python examples/ltx_video.py --compare  # offline, random weights: noise
python examples/ltx_video.py "a cat on a surfboard" --model Lightricks/LTX-Video

head_dim is 64, and its VAE compresses so much that calls are short: the report says which run in 16 bit.
"""

import small_videos
import torch
from command_line import CommandLine
from diffusers import LTXPipeline


def main() -> None:
    line = CommandLine(__doc__, prompt="a cat on a surfboard", steps=50, output="ltx_video.gif")
    args = line.parse_args()
    with line.loading(small_videos.ltx_video) as model:
        pipe = LTXPipeline.from_pretrained(model, torch_dtype=line.dtype(torch.bfloat16)).to(args.device)
    handle = pipe.set_attn_processor(line.attention())  # the one line
    line.show(pipe, handle, prompt=args.prompt, negative_prompt="worst quality, blurry, jittery")


if __name__ == "__main__":
    main()
