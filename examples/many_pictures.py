"""Many pictures on many GPUs: accelerate gives every process a share of the prompts and its own pipeline.

torchrun --nproc-per-node 2 examples/many_pictures.py --compare  # offline, on CPUs too: the trained tiny_sd
torchrun --nproc-per-node 8 examples/many_pictures.py --file prompts.txt --model black-forest-labs/FLUX.1-dev
"""

import small_pictures
import torch
from accelerate import PartialState
from command_line import CommandLine, text_file
from diffusers import DiffusionPipeline

from sage_processors.cli.loading import example_prompts


def main() -> None:
    line = CommandLine(__doc__, steps=28, output="many.png")
    line.add_argument("--file", type=text_file, help="a prompt a line")
    args = line.parse_args()
    prompts = [prompt for prompt in (args.file or "").splitlines() if prompt.strip()] or example_prompts(4)
    with line.loading(small_pictures.sd15) as model:
        pipe = DiffusionPipeline.from_pretrained(model, torch_dtype=line.dtype(torch.bfloat16))
    state = PartialState(cpu=args.device == "cpu")
    pipe.to(state.device)
    pipe.set_progress_bar_config(disable=not state.is_main_process)
    first, rank, output = args.seed, state.process_index, args.output
    with state.split_between_processes(list(enumerate(prompts))) as mine:
        for number, prompt in mine:
            args.seed, args.prompt = first + number, prompt  # a picture's seed does not depend on who draws it
            args.output = output.with_stem(f"{output.stem}_{number}")
            print(f"Process {rank} of {state.num_processes}, picture {number}: {prompt}", flush=True)
            line.show(pipe, pipe.set_attn_processor(line.attention()), prompt=prompt)  # the one line
    state.wait_for_everyone()
    state.destroy_process_group()


if __name__ == "__main__":
    main()
