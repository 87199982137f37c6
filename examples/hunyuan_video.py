"""HunyuanVideo with INT8 attention.

python examples/hunyuan_video.py --compare  # offline, random weights: noise
python examples/hunyuan_video.py "a cat on a surfboard" --model hunyuanvideo-community/HunyuanVideo

The text's padding is masked in every call; such calls run in INT8, too.
"""

import small_videos
import torch
from command_line import CommandLine
from diffusers import HunyuanVideoPipeline


def main() -> None:
    line = CommandLine(__doc__, prompt="a cat on a surfboard", steps=50, output="hunyuan_video.gif")
    args = line.parse_args()
    with line.loading(small_videos.hunyuan_video) as model:
        pipe = HunyuanVideoPipeline.from_pretrained(model, torch_dtype=line.dtype(torch.bfloat16)).to(args.device)
    pipe.vae.enable_tiling()  # decodes in tiles: the whole video at once needs tens of GB
    handle = pipe.set_attn_processor(line.attention())  # the one line
    line.show(pipe, handle, prompt=args.prompt)


if __name__ == "__main__":
    main()
