# ---
# jupyter:
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # How far INT8 attention moves clips
#
# `tiny_wan` draws the same prompts and seeds with stock attention and with every recipe and scaling that this version
# knows. Frames are compared by PSNR and SSIM. What only a clip has is measured by
#
# - **flicker**: the RMS of what changes from frame to frame other than in stock's clip,
# - **change per frame above stock's**: the mean |x[t+1] − x[t]|, paired; beside it stands how much it differs from one
#   stock clip to another, the size at which a difference would be one of another seed,
# - **motion error**: distance in pixels between the motions of blocks,
# - **prompts obeyed**: whether colour, shape, motion and background are those of the prompt, from the pixels,
# - **feature-FD** over frames, against drawn clips. It is **not FID**: its numbers compare with each other alone.
#
# The outcome is in `data/videos.csv`, written by `measure_video.py`, whose first lines say how, and in
# `data/skipping.csv`, by `measure_skipping.py`. The end of this notebook draws a few clips itself, with the same code.
# Error bars and intervals are 95 % over clips.

# %%
import tempfile
from pathlib import Path

import clip_tables
import drawing
import measure
import measure_skipping
import measure_video
import picture_report
import skip_tables
import torch
from IPython.display import Image, Markdown, display

import sage_processors as sp
from sage_kernels import DEFAULT_RECIPE, RECIPES
from sage_processors.evaluation import video_drawing
from sage_processors.evaluation.feature_distance import load_classifier


# %% tags=["parameters"]
SIZE = "full"  # "small" is what CI runs: fewer clips, steps and recipes in the live part
FIGURES = "figures"
MODEL = None  # folder of a pipeline in the place of tiny_wan
TABLE = "data/videos.csv"
SKIPPING = "data/skipping.csv"
OBEDIENCE = "data/obedience.csv"  # more clips of few variants; shown where it is there

# %%
FIGURES = Path(FIGURES)
LIVE = {"full": measure.Size(images=2, steps=8, batch=2), "small": measure.Size(images=2, steps=2, batch=1)}[SIZE]
USED = sorted(name for name, recipe in RECIPES.items() if not recipe.study)
LIVE_RECIPES = {"full": USED, "small": [DEFAULT_RECIPE]}[SIZE]
torch.set_num_threads(1)

# %% [markdown]
# ## The outcome
#
# A name with `_warm`, `static` and the `sigma` ones start each batch from one earlier run's frozen table; the others
# start fresh. Every device has tables of its own: on a GPU clips are drawn in bf16, whose own rounding limits PSNR,
# and stock attention draws other clips there than on a CPU.

# %%
runs = clip_tables.by_run(measure.read_table(Path(TABLE)))
for run, own in runs.items():
    for recipe, rows in clip_tables.recipes(own).items():
        display(Markdown(f"### {run}: {recipe}\n\n{picture_report.markdown(rows, 'clips')}"))

# %%
Image(drawing.save(clip_tables.compared(runs, "psnr_db_mean"), FIGURES / "video_psnr.png"))

# %%
Image(drawing.save(clip_tables.compared(runs, "flicker_mean"), FIGURES / "video_flicker.png"))

# %%
for run, own in clip_tables.by_run(measure.read_table(Path(OBEDIENCE))).items():
    display(Markdown(f"### Prompts obeyed, of more clips: {run}\n\n{clip_tables.obedience(own)}"))

# %% [markdown]
# ## Key tiles left out
#
# `skip` leaves out key tiles that earlier steps of a run found negligible. On the largest clips each
# variant has one limit for all layers, and "calibrated" has what `sp.calibrate` found on other prompts. The same clips
# are also drawn with prompts that change in the middle of a run, where what earlier steps showed is no longer true.
# Nobody can say which prompt such a clip should show: obeyed prompts are counted for those that stay.
#
# The share left out is of the pairs of a query tile and a key tile in calls that have lists, the mean over layers; its
# interval is over batches of clips. What is left out is another rounding, too: differences within the intervals, also
# those to the better, say nothing. What a row would lose by its list is found when its query tile is measured anew and
# given another, before the old one is used again. Where that is more than the limit, the rest of the head visits
# everything in that call.

# %%
options = sp.Skip()
measured = clip_tables.by_run(measure.read_table(Path(SKIPPING)))
skips = {run: own[DEFAULT_RECIPE] for run, own in measured.items()}
for run, numbers in skips.items():
    display(Markdown(f"### {run}: {DEFAULT_RECIPE}\n\n{skip_tables.table(numbers)}"))

# %%
stocks = {run: own["stock"] for run, own in measured.items()}
Image(drawing.save(skip_tables.figure(skips, stocks, measure_skipping.LOSS_DB), FIGURES / "video_skipping.png"))

# %%
for run, numbers in skips.items():
    changed = skips.get(run._replace(pipeline=run.pipeline + skip_tables.SWITCHED))
    if changed:
        listed = 1 - (options.first_steps + options.last_steps) / run.steps
        found = skip_tables.sentences(numbers, changed, stocks[run], measure_skipping.LOSS_DB, listed)
        display(Markdown(f"{run}:\n\n" + "\n".join(f"- {sentence}" for sentence in found)))
        promised, kept = (numbers["calibrated", name].value for name in ("promised_psnr_db", "psnr_db_mean"))
        assert abs(kept - promised) < 1 and skip_tables.loss(numbers, "calibrated") < measure_skipping.LOSS_DB

# %% [markdown]
# ## Live, and small

# %%
live, clips = {}, {}
classifier = load_classifier()
small = sp.pipelines.call_arguments(measure_video.NAME) | measure_video.SIZES["small"]
real = measure_video.true_features(small, classifier)
source = Path(MODEL) if MODEL else None
with tempfile.TemporaryDirectory() as work:
    for recipe in LIVE_RECIPES:
        run = measure_video.ClipMeasurement("small", LIVE, "cpu", Path(work) / recipe, source)
        variants = measure.variants(recipe)
        if SIZE == "small":
            variants = {name: variants[name] for name in ("timestep", "timestep_warm", "per_block")}
        assert all(run.run(variant) for variant in variants.values())
        live[run.name, recipe] = measure.as_rows(run.rows(recipe, list(variants), real))
        title = f"### {run.name}, {recipe}, cpu, {LIVE.steps} steps"
        display(Markdown(f"{title}\n\n{picture_report.markdown(live[run.name, recipe], 'clips')}"))
        with sp.apply(run.pipe, variants["timestep"].config):
            clips[recipe] = run.draw(run.batches[0])[0]
    stock = run.stock(0)[0]

# %% [markdown]
# The same seed, stock and INT8, and what is left between them, as a strip of frames:

# %%
ours = clips[LIVE_RECIPES[-1]]
sheet = video_drawing.strip(stock, ours, cell=128)
# 128 colours: a figure of the documentation stays small
sheet.quantize(128).save(FIGURES / "video_strip.png")
video_drawing.gif(stock, ours, FIGURES / "video.gif")
Image(FIGURES / "video_strip.png")

# %% [markdown]
# Every scaling was measured, ran in INT8 (`measure.py` refuses a run without an INT8 call), and none is far off:

# %%
for (name, recipe), found in live.items():
    psnr = {row.label: row.value for row in found if row.metric == "psnr_db_mean"}
    assert min(psnr.values()) > 25, (name, psnr)
    print(f"{name}, {recipe}: {len(psnr)} scalings, worst {min(psnr, key=psnr.get)} {min(psnr.values()):.1f} dB")
