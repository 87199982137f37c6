"""A web page that draws with stock and with INT8 attention and lays one picture over the other.

pip install -e ".[app]"  # in the checkout
python examples/app.py --port 7860  # offline: tiny_sd, tiny_flux, and a small SDXL of random weights
python examples/app.py --model black-forest-labs/FLUX.1-dev
"""

import functools

import gradio as gr
import small_pictures
import torch
from command_line import LINEARS, RECIPES, SCALINGS, SMALL, CommandLine, in_words, pil
from diffusers import DiffusionPipeline

from sage_processors.cli.arguments import at_least
from sage_processors.evaluation.side_by_side import amplification


OFFLINE = {"tiny_sd": small_pictures.sd15, "tiny_flux": small_pictures.flux, "random_sdxl": small_pictures.sdxl}
LABELS = {"recipe": "Number formats of attention", "scaling": "Quantisation scales", "linears": "Linear layers"}


def page(line: CommandLine) -> gr.Interface:
    args = line.parse_args()
    models = list(OFFLINE) if args.model == SMALL else [args.model]

    @functools.lru_cache(maxsize=1)  # one model in memory
    def load(name: str):
        with line.loading(OFFLINE.get(name)) as model:
            pipe = DiffusionPipeline.from_pretrained(model, torch_dtype=line.dtype(torch.bfloat16))
        return pipe.to(args.device), line.small

    def draw(prompt, model, recipe, scaling, linears, steps, seed):
        vars(args).update(recipe=recipe, scaling=scaling, linears=linears, steps=steps, seed=seed)
        pipe, line.small = load(model)
        with pipe.set_attn_processor(line.attention()) as handle:  # the one line
            ours, report = line.draw(pipe, prompt=prompt), handle.report()
        stock = line.draw(pipe, prompt=prompt)
        gain = amplification(stock.pictures, ours.pictures)
        far = ((ours.pictures - stock.pictures).abs() * gain).clamp(0, 1)
        before, after, difference = (pil(x)[0] for x in (stock.pictures, ours.pictures, far))
        said = f"{report.verdict}\n\n{in_words(ours, report, stock)}; difference × {gain}"
        return (before, after), difference, said, str(report)

    load(models[0])  # what is wrong with it ends the command, not a request
    given = [gr.Textbox("a red circle on a blue background", label="Prompt"), gr.Dropdown(models, label="Model")]
    chosen = vars(args) | {"linears": args.linears or ("none" if args.model == SMALL else "int8")}
    for name, known in (("recipe", RECIPES), ("scaling", SCALINGS), ("linears", LINEARS)):
        given.append(gr.Dropdown(list(known), value=chosen[name], label=LABELS[name]))
    given += [gr.Slider(1, 50, args.steps, step=1, label="Steps"), gr.Number(args.seed, minimum=0, label="Seed")]
    shown = [gr.ImageSlider(label="Stock, INT8"), gr.Image(label="Difference"), gr.Markdown(), gr.Code(label="Calls")]
    return gr.Interface(draw, given, shown, title="INT8 beside stock attention", flagging_mode="never")


if __name__ == "__main__":
    line = CommandLine(__doc__, steps=25)
    line.add_argument("--port", type=at_least(1))
    page(line).launch(server_port=line.args.port)
