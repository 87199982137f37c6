"""FLUX.1 in little memory: INT8 attention, linear layers with 8-bit weights only, blocks offloaded to the CPU.

python examples/low_memory.py --compare  # offline: the trained tiny_flux
python examples/low_memory.py "an owl at dusk" --model black-forest-labs/FLUX.1-dev

The 16-bit weights are freed, so stock attention is drawn first, and the swap can't be taken back.
"""

import small_pictures
import torch
from command_line import CommandLine
from diffusers import FluxPipeline


def held(model: torch.nn.Module) -> float:
    """GB of memory behind a model's weights, 8-bit ones included."""
    stores = [x.untyped_storage() for x in (*model.parameters(), *model.buffers())]
    return sum({store.data_ptr(): store.nbytes() for store in stores}.values()) / 1e9


def main() -> None:
    line = CommandLine(__doc__, prompt="a red circle on a blue background", steps=28, output="low_memory.png")
    line.set_defaults(linears="int8")
    args = line.parse_args()
    if args.linears == "none":
        line.error("argument --linears: 16-bit weights can't be dropped where linear layers stay in 16 bit")
    with line.loading(small_pictures.flux) as model:
        pipe = FluxPipeline.from_pretrained(model, torch_dtype=line.dtype(torch.bfloat16))
    inputs = {"prompt": args.prompt, "guidance_scale": 3.5}
    for part in (pipe.text_encoder, pipe.text_encoder_2, pipe.vae):
        part.to(args.device)
    place = {"onload_device": torch.device(args.device), "use_stream": args.device == "cuda"}
    pipe.transformer.enable_group_offload(offload_type="block_level", num_blocks_per_group=1, **place)
    stock = line.draw(pipe, **inputs) if args.compare else None
    before = held(pipe.transformer)
    handle = pipe.set_attn_processor(line.attention(drop_weights=True))  # the one line
    ours = line.draw(pipe, **inputs)
    (report := handle.report()).print()
    print(f"Weights of the denoiser: {before:.3f} GB, then {held(pipe.transformer):.3f} GB")
    line.write(ours, report, stock)


if __name__ == "__main__":
    main()
