"""FLUX.1 with INT8 attention, torch.compile and CUDA graphs: first the swap, then the compiler.

python examples/compiled.py --compare  # offline: the trained tiny_flux
python examples/compiled.py "an owl at dusk" --model black-forest-labs/FLUX.1-dev --cuda-graphs

Steps don't recompile, though each has scales of its own: the scales are on the device, where a graph reads them.
"""

import small_pictures
import torch
from command_line import CommandLine
from diffusers import FluxPipeline


def main() -> None:
    line = CommandLine(__doc__, prompt="a red circle on a blue background", steps=28, output="compiled.png")
    line.add_argument("--cuda-graphs", action="store_true", help="one launch a block: saves the time between kernels")
    line.add_argument("--backend", default="inductor", choices=torch.compiler.list_backends(None), help="the compiler")
    args = line.parse_args()
    with line.loading(small_pictures.flux) as model:
        pipe = FluxPipeline.from_pretrained(model, torch_dtype=line.dtype(torch.bfloat16)).to(args.device)
    handle = pipe.set_attn_processor(line.attention(graphs="off"))  # the one line, first
    mode = {"mode": "reduce-overhead"} if args.cuda_graphs else {}
    pipe.transformer.compile_repeated_blocks(fullgraph=True, backend=args.backend, **mode)  # then the compiler
    if args.cuda_graphs:  # PyTorch asks to be told when the results of a forward may be written over
        pipe.transformer.register_forward_pre_hook(lambda *_: torch.compiler.cudagraph_mark_step_begin())
    inputs = {"prompt": args.prompt, "guidance_scale": 3.5}
    first = line.draw(pipe, **inputs)
    frames = torch._dynamo.utils.counters["frames"]["total"]
    second = line.draw(pipe, **inputs)
    compiled = torch._dynamo.utils.counters["frames"]["total"] - frames
    print(f"First run, which compiles: {first.seconds:.1f} s; second: {second.seconds:.1f} s, {compiled} compilations")
    line.show(pipe, handle, **inputs)


if __name__ == "__main__":
    main()
