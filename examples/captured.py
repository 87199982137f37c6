"""FLUX.1 from CUDA graphs of whole forwards: one launch per step instead of thousands, without a compiler.

python examples/captured.py --compare  # offline: the trained tiny_flux; a CPU has no graphs, and its steps are eager
python examples/captured.py "an owl at dusk" --model black-forest-labs/FLUX.1-dev

The report says how many steps came from a graph, and why others did not: the first five prepare scales and kernels.
"""

import small_pictures
import torch
from command_line import CommandLine
from diffusers import FluxPipeline


def main() -> None:
    line = CommandLine(__doc__, prompt="a red circle on a blue background", steps=28, output="captured.png")
    args = line.parse_args()
    with line.loading(small_pictures.flux) as model:
        pipe = FluxPipeline.from_pretrained(model, torch_dtype=line.dtype(torch.bfloat16)).to(args.device)
    handle = pipe.set_attn_processor(line.attention(graphs="auto"))
    inputs = {"prompt": args.prompt, "guidance_scale": 3.5}
    first = line.draw(pipe, **inputs)
    second = line.draw(pipe, **inputs)
    print(f"First run, which captures: {first.seconds:.2f} s; second: {second.seconds:.2f} s")
    line.show(pipe, handle, **inputs)


if __name__ == "__main__":
    main()
