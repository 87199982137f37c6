"""CogVideoX, text to video with INT8 attention.

python examples/cogvideox.py --compare  # offline, random weights: noise
python examples/cogvideox.py "a cat on a surfboard" --model zai-org/CogVideoX-5b

Text and video are one sequence; head_dim is 64. The 2B checkpoint was trained in fp16, the 5B one in bf16.
"""

import small_videos
import torch
from command_line import CommandLine
from diffusers import CogVideoXPipeline


def main() -> None:
    line = CommandLine(__doc__, prompt="a cat on a surfboard", steps=50, output="cogvideox.gif")
    args = line.parse_args()
    with line.loading(small_videos.cogvideox) as model:
        pipe = CogVideoXPipeline.from_pretrained(model, torch_dtype=line.dtype(torch.bfloat16)).to(args.device)
    pipe.vae.enable_tiling()  # decodes 49 frames in little memory
    handle = pipe.set_attn_processor(line.attention())  # the one line
    line.show(pipe, handle, prompt=args.prompt, guidance_scale=6.0)


if __name__ == "__main__":
    main()
