"""Text to video with INT8 attention: any diffusers checkpoint, or without --model a small one.

python examples/text_to_video.py "a red square moving left" --compare  # offline: tiny_wan
python examples/text_to_video.py "a cat on a surfboard" --model genmo/mochi-1-preview --num_frames 49
"""

import small_videos
import torch
from command_line import CommandLine
from diffusers import DiffusionPipeline


def main() -> None:
    line = CommandLine(__doc__, prompt="a red square moving left on a white background", steps=50, output="video.gif")
    args = line.parse_args()
    with line.loading(small_videos.trained) as model:
        pipe = DiffusionPipeline.from_pretrained(model, torch_dtype=line.dtype(torch.bfloat16)).to(args.device)
    handle = pipe.set_attn_processor(line.attention())  # the one line
    line.show(pipe, handle, prompt=args.prompt)


if __name__ == "__main__":
    main()
