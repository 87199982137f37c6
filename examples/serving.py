"""A server's loop: one FLUX.1 for requests of changing sizes, with INT8 attention that never recompiles.

python examples/serving.py --compare  # offline: the trained tiny_flux
python examples/serving.py --model black-forest-labs/FLUX.1-dev --sizes 1024x1024 2048x2048 1536x640

Every request draws the same picture as alone: scales are planned from earlier steps of the same request only.
"""

import argparse

import small_pictures
import torch
from command_line import CommandLine
from diffusers import FluxPipeline


def size(text: str) -> dict[str, int]:
    width, _, height = text.partition("x")
    if not (width.isdecimal() and height.isdecimal() and int(width) and int(height)):
        raise argparse.ArgumentTypeError(f"{text}: expected a width and a height, such as 1024x768")
    return {"width": int(width), "height": int(height)}


def main() -> None:
    line = CommandLine(__doc__, prompt="a red circle on a blue background", steps=28, output="serving.png")
    line.add_argument("--sizes", type=size, nargs="+", default=[size(x) for x in ("128x128", "160x96", "128x128")])
    args = line.parse_args()
    with line.loading(small_pictures.flux) as model:
        pipe = FluxPipeline.from_pretrained(model, torch_dtype=line.dtype(torch.bfloat16)).to(args.device)
    handle = pipe.set_attn_processor(line.attention())  # the one line, once
    handle.warm_up()  # kernels are compiled before the first request, not while somebody waits
    inputs, drawn, before = {"prompt": args.prompt, "guidance_scale": 3.5}, [], 0
    for request in args.sizes:
        line.small |= request
        drawn.append(line.draw(pipe, **inputs))
        calls = handle.report().calls
        size_, seconds = "{width} x {height}".format(**request), drawn[-1].seconds
        print(f"{size_} pixels: {seconds:.2f} s, {calls - before} attention calls in INT8")
        before = calls
    (report := handle.report()).print()
    handle.remove()
    for number, (request, ours) in enumerate(zip(args.sizes, drawn, strict=True)):
        line.small |= request
        stock = line.draw(pipe, **inputs) if args.compare else None
        line.write(ours, report, stock, args.output.with_stem(f"{args.output.stem}_{number}"))


if __name__ == "__main__":
    main()
