# ---
# jupyter:
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # Which linear layers can be in 8 bit
#
# INT8 linear layers cost a picture of `tiny_sd` far more than INT8 attention, and one of `tiny_flux` about as much.
# This notebook asks where that comes from, and what is left when the layers that cost most stay in 16 bit: by a rule
# that holds for any model (all projections back from the feed-forward layers, the first block, the last one), and by
# measurement, as `calibrate` does.
#
# Both pipelines are far smaller than the layers that the package swaps by itself (`Linears.min_features`), so
# everything inside of the blocks is swapped here. Pictures are drawn on a CPU in fp32.

# %%
import tempfile
from fnmatch import fnmatchcase
from pathlib import Path

import drawing
import measure
import torch
from IPython.display import Image, Markdown, display
from picture_report import PSNR_CEILING, markdown_table

import sage_processors as sp
from sage_processors.calibration.linear_choices import LinearChoices
from sage_processors.evaluation import metrics
from sage_processors.evaluation.hard_linears import inject_channel_outliers


# %% tags=["parameters"]
SIZE = "full"  # "small" is what CI runs: fewer pictures and steps
FIGURES = "figures"

# %%
FIGURES = Path(FIGURES)
LIVE = {
    "full": {
        "tiny_sd": measure.Size(images=4, steps=8, batch=4),
        "tiny_flux": measure.Size(images=2, steps=4, batch=2),
    },
    "small": {"tiny_sd": measure.Size(images=1, steps=1, batch=1)},
}[SIZE]
CANDIDATES = {"full": 8, "small": 2}[SIZE]
torch.set_num_threads(1)
work = tempfile.TemporaryDirectory()
run = {
    name: measure.Measurement(name, size, "cpu", Path(work.name), measure.prompts(4)[: size.images])
    for name, size in LIVE.items()
}
ALONE = {"linears": {"format": "int8", "min_features": 0}, "layers": {"*": {"recipe": "16bit"}}}  # attention in 16 bit


def draw(name: str, config=None) -> torch.Tensor:
    """Draw pictures with the options; None: with stock."""
    at = run[name]
    if config is None:
        return torch.cat([at.draw(batch) for batch in at.batches])
    with sp.apply(at.pipe, config):
        return torch.cat([at.draw(batch) for batch in at.batches])


stock = {name: draw(name) for name in run}


def psnr_of(name: str, config) -> metrics.Interval:
    """Return the mean PSNR to the stock pictures, dB, with its interval."""
    return metrics.mean_interval(metrics.psnr(draw(name, config), stock[name]).clamp(max=PSNR_CEILING))


# %% [markdown]
# ## Where each layer is off
#
# A probe compares every 8-bit layer with the 16-bit one, on the inputs that it gets. Rows are layers in their order in
# the model, columns the steps.

# %%
figure, axes = drawing.figure(1, len(run), width=5.5 * len(run), height=4.5)
for place, (name, at) in zip(axes[0], run.items(), strict=True):
    with sp.apply(at.pipe, sp.SageAttnProcessor(**ALONE)) as handle, handle.probe(every=1, rows=64) as probe:
        at.draw(at.batches[0])
        rows = probe.linears()
    layers = list(dict.fromkeys(row["layer"] for row in rows))
    error = torch.zeros(len(layers), LIVE[name].steps)
    for row in rows:
        error[layers.index(row["layer"]), row["step"]] = 100 * row["rel_l2"]
    shown = place.imshow(error, aspect="auto", cmap="viridis", vmin=0, vmax=5)
    place.grid(False)
    place.set(xlabel="step", ylabel="linear layer", title=name)
    place.locator_params(axis="x", integer=True)
    print(f"{name}: median {error.median():.2f} %, worst {error.max():.2f} %")
figure.colorbar(shown, ax=axes[0][-1], label="relative L2 error, %")
Image(drawing.save(figure, FIGURES / "linear_error_per_step.png"))

# %% [markdown]
# Most errors are alike: INT8 rounds what it gets to about a percent. What differs is how much the model cares.
#
# ## Which layers the model minds
#
# `calibrate(linears=...)` measures that at the denoiser's output, with one layer at a time in 8 bit.

# %%
choices = {}
for name, at in run.items():

    def one_picture(on_step, at=at):
        arguments = {"num_inference_steps": LIVE[at.name].steps, "output_type": "pt"} | at.arguments
        generator = torch.Generator().manual_seed(0)
        at.pipe(at.texts[0], generator=generator, callback_on_step_end=lambda *a: (on_step(), a[3])[1], **arguments)

    options = sp.SageAttnProcessor(linears=sp.Linears("none", min_features=0))
    choices[name] = LinearChoices(
        at.pipe, options, ("int8",), one_picture, LIVE[name].steps, 1, "counted", lambda *_: None
    )
    layers = choices[name].layers
    operations = sum(layer.operations for layer in layers.values())
    errors = sum(layer.errors["int8"] for layer in layers.values())
    worst = sorted(layers, key=lambda layer: -layers[layer].errors["int8"])[:10]
    lines = [
        [layer, f"{layers[layer].errors['int8'] / errors:.1%}", f"{layers[layer].operations / operations:.1%}"]
        for layer in worst
    ]
    header = ["layer alone in INT8", "share of all squared errors", "share of operations"]
    display(Markdown(f"### {name}\n\n{markdown_table(header, lines)}"))

# %% [markdown]
# ## What is left when layers stay in 16 bit
#
# Rules that name no model's layers, then the candidates of `calibrate`: what takes most error away for its operations
# goes first.

# %%
ENDS = {
    "tiny_sd": ("*.down_blocks.0.*", "*.up_blocks.1.attentions.1.*"),
    "tiny_flux": ("*.transformer_blocks.0.*", "*.single_transformer_blocks.2.*"),
}
DOWN, OUT, UP = ("*.net.2", "*single*.proj_out"), ("*.to_out.0", "*.to_add_out"), ("*.net.0.proj", "*.proj_mlp")


def kept(name: str, patterns) -> sp.SageAttnProcessor:
    """Return options with linear layers in 8 bit, except those that match one of the patterns."""
    names = choices[name].layers
    found = [p for p in patterns if any(fnmatchcase(layer, p) for layer in names)]
    return sp.SageAttnProcessor(**ALONE).with_rules(*(sp.LayerRule(p, linears="none") for p in found))


def share_of(name: str, config) -> float:
    return choices[name].share(config)


results, attention = {}, {}
for name in run:
    first, last = ENDS[name]
    rules = {
        "all in 8 bit": (),
        "feed-forward, down": DOWN,
        "feed-forward, up": UP,
        "attention's output": OUT,
        "down and attention's output": (*DOWN, *OUT),
        "first block": (first,),
        "last block": (last,),
    }
    rules = rules if SIZE == "full" else dict(list(rules.items())[:3])
    results[name] = {}
    for label, patterns in rules.items():
        config = kept(name, patterns)
        results[name]["rule", label] = share_of(name, config), psnr_of(name, config)
    candidates = choices[name].candidates(sp.SageAttnProcessor(**ALONE))
    wanted = [0.95, 0.9, 0.85, 0.8, 0.75, 0.7, 0.5, 0.3][:CANDIDATES]
    for share in wanted:
        best = min(candidates, key=lambda config: abs(choices[name].share(config) - share))
        found = choices[name].share(best)
        results[name]["measured", f"{len(best.rules('linears'))} layers by their error"] = found, psnr_of(name, best)
    attention[name] = psnr_of(name, sp.SageAttnProcessor())

# %%
for name in run:
    lines = [
        [label, f"{share:.0%}", f"{psnr.value:.2f} [{psnr.low:.2f}, {psnr.high:.2f}]"]
        for (_, label), (share, psnr) in results[name].items()
    ]
    lines.append(["no linear layer, attention in INT8", "0%", f"{attention[name].value:.2f}"])
    header = ["in 16 bit", "operations in 8 bit", "PSNR, dB"]
    title = f"### {name}, {LIVE[name].images} pictures, {LIVE[name].steps} steps"
    display(Markdown(f"{title}\n\n{markdown_table(header, lines)}"))

# %%
figure, axes = drawing.figure(1, len(run), width=5.5 * len(run), height=4.5)
for place, name in zip(axes[0], run, strict=True):
    for index, kind in enumerate(("rule", "measured")):
        points = sorted((share, psnr.value) for (owner, _), (share, psnr) in results[name].items() if owner == kind)
        style = drawing.style_of(index) | {"lw": 0 if kind == "rule" else 1.2}
        place.plot(*zip(*points, strict=True), label={"rule": "rules", "measured": "by measured error"}[kind], **style)
    place.axhline(attention[name].value, color="#8C8C8C", ls="--", label="attention alone in INT8")
    place.axhline(attention[name].value - 6, color="#8C8C8C", ls=":", label="6 dB below")
    place.axvline(0.7, color="#d9d9d9", zorder=0)
    place.set(xlabel="linear operations in 8 bit", ylabel="PSNR to stock, dB", title=name)
axes[0][0].legend(fontsize=8)
Image(drawing.save(figure, FIGURES / "psnr_by_linear_share.png"))

# %% [markdown]
# On `tiny_sd` nothing that leaves 70 % of the operations in 8 bit comes within 6 dB of attention alone. The best that
# does is a rule, the feed-forward layers' way down in 16 bit; only later candidates surpass it. On `tiny_flux`
# linear layers cost no more than attention to begin with, and that rule takes more of the operations for less. The
# intervals of so few pictures are wide, so small differences say nothing. By default the package protects modulation
# and embeddings only; more than that is a rule in `layers`, or a budget that `calibrate` is given.
#
# ## Outliers
#
# Channels 8, 64 and 512 times larger in front of the linear layers, which the weights undo: exact pictures stay, and
# the balance of channels finds them in the weights.

# %%
lines = []
for name, at in run.items():
    plain = results[name]["rule", "all in 8 bit"][1]
    with inject_channel_outliers(getattr(at.pipe, "unet", None) or at.pipe.transformer) as norms:
        hard = psnr_of(name, sp.SageAttnProcessor(**ALONE))
    lines.append([name, str(len(norms)), f"{plain.value:.2f}", f"{hard.value:.2f}"])
    assert hard.value > plain.value - 3
header = ["pipeline", "norms with outliers behind them", "PSNR without, dB", "PSNR with, dB"]
Markdown(markdown_table(header, lines))

# %%
for name in run:
    assert all(0 < share <= 1 and psnr.value > 30 for share, psnr in results[name].values())
work.cleanup()
