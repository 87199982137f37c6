"""One big video on several GPUs with INT8 attention: Wan's tokens are split over them (context parallelism).

torchrun --nproc-per-node 2 examples/one_big_video.py --compare  # offline, on CPUs too: random weights, noise
torchrun --nproc-per-node 8 examples/one_big_video.py "a cat on a surfboard" --model Wan-AI/Wan2.1-T2V-14B-Diffusers

--kind ulysses gives each GPU some of the heads, so there must be one for each; ring passes keys and values around.
--compare draws with stock attention on one GPU.
"""

import os
from unittest.mock import patch

import small_videos
import torch
import torch.distributed as dist
from command_line import CommandLine
from diffusers import ContextParallelConfig, WanPipeline


def main() -> None:
    line = CommandLine(__doc__, prompt="a cat on a surfboard", steps=50, output="one_big_video.gif")
    line.add_argument("--kind", choices=("ulysses", "ring"), default="ulysses")
    args = line.parse_args()
    if "RANK" not in os.environ:
        line.error("several processes are needed: torchrun --nproc-per-node 2 examples/one_big_video.py")
    with line.loading(small_videos.wan_one_expert) as model:
        pipe = WanPipeline.from_pretrained(model, torch_dtype=line.dtype(torch.bfloat16))
    if args.device == "cuda":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl" if args.device == "cuda" else "gloo")
    pipe.to(args.device)
    inputs = {"prompt": args.prompt, "guidance_scale": 5.0}
    stock = line.draw(pipe, **inputs) if args.compare else None
    split = ContextParallelConfig(**{f"{args.kind}_degree": dist.get_world_size()})
    with patch("torch.accelerator.device_count", lambda: max(1, torch.cuda.device_count())):  # diffusers divides by it
        pipe.transformer.enable_parallelism(config=split)
    handle = pipe.set_attn_processor(line.attention(graphs="off"))  # the one line
    ours = line.draw(pipe, **inputs)
    if dist.get_rank() == 0:  # all processes have the whole video
        (report := handle.report()).print()
        line.write(ours, report, stock)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
