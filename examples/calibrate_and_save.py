"""Find the fastest options that meet a quality budget, keep them in a file, and draw with them.

python examples/calibrate_and_save.py --policy policy.json --compare  # offline: the trained tiny_flux
python examples/calibrate_and_save.py --policy policy.json --model black-forest-labs/FLUX.1-dev --target-psnr 40

The second run finds the file and draws at once, as a server would. The file is only for the model it was made with.
"""

import small_pictures
import torch
from command_line import CommandLine
from diffusers import FluxPipeline

import sage_processors as sp
from sage_processors.cli.arguments import at_least, json_file
from sage_processors.cli.loading import example_prompts


def main() -> None:
    line = CommandLine(__doc__, prompt="a red circle on a blue background", steps=28, output="calibrated.png")
    line.add_argument("--policy", type=json_file, default="policy.json", help="read if it is there, else measured")
    line.add_argument("--target-psnr", type=at_least(1), default=40, help="mean against stock attention, dB")
    line.add_argument("--pictures", type=at_least(1), default=8, help="that are drawn for each trial")
    args = line.parse_args()
    with line.loading(small_pictures.flux) as model:
        pipe = FluxPipeline.from_pretrained(model, torch_dtype=line.dtype(torch.bfloat16)).to(args.device)
    formats = [] if args.linears in (None, "none") else [args.linears]
    with line.running():
        if not args.policy.exists():
            found = sp.calibrate(
                pipe, example_prompts(args.pictures), target_psnr=args.target_psnr, steps=args.steps,
                recipes=[args.recipe], scalings=[args.scaling], linears=formats,
                config=line.attention().with_linears("none"), path=args.policy,
            )  # fmt: skip
            found.print()
        options = sp.SageAttnProcessor.from_policy(args.policy, pipe)  # what another process does
    print(f"Policy: {args.policy}")
    handle = pipe.set_attn_processor(options)  # the one line
    line.show(pipe, handle, prompt=args.prompt, guidance_scale=3.5)


if __name__ == "__main__":
    main()
