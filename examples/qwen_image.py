"""Qwen-Image with INT8 attention.

python examples/qwen_image.py --compare  # offline, random weights: noise
python examples/qwen_image.py "a shop sign that says OPEN" --model Qwen/Qwen-Image

Prompts are padded and masked; calls with such masks run in INT8, too. Look at small letters before you rely on it.
"""

import small_pictures
import torch
from command_line import CommandLine
from diffusers import QwenImagePipeline


def main() -> None:
    line = CommandLine(__doc__, prompt="a shop sign that says OPEN", steps=50, output="qwen_image.png")
    args = line.parse_args()
    with line.loading(small_pictures.qwen_image) as model:
        pipe = QwenImagePipeline.from_pretrained(model, torch_dtype=line.dtype(torch.bfloat16)).to(args.device)
    handle = pipe.set_attn_processor(line.attention())  # the one line
    line.show(pipe, handle, prompt=args.prompt, negative_prompt=" ", true_cfg_scale=4.0)


if __name__ == "__main__":
    main()
