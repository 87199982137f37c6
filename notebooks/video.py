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
# The outcome is in `data/videos.csv`, written by `measure_video.py`, whose first lines say how. The second half of
# this notebook draws a few clips itself, with the same code. Error bars and intervals are 95 % over clips.

# %%
import tempfile
from pathlib import Path

import measure
import measure_video
import torch
from IPython.display import Image, Markdown, display

import sage_processors as sp
from sage_kernels import DEFAULT_RECIPE, RECIPES
from sage_processors.evaluation import drawing, picture_report, video_drawing
from sage_processors.evaluation.feature_distance import load_classifier


# %% tags=["parameters"]
SIZE = "full"  # "small" is what CI runs: fewer clips, steps and recipes in the live part
FIGURES = "figures"
MODEL = None  # folder of a pipeline in the place of tiny_wan
TABLE = "data/videos.csv"

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
# start fresh.

# %%
table = measure.read_table(Path(TABLE))
rows = {}  # of each size of clips, recipe and device
for name, recipe, device in dict.fromkeys((r["pipeline"], r["recipe"], r["device"]) for r in table):
    if recipe == "stock":
        continue
    own = [r for r in table if (r["pipeline"], r["device"]) == (name, device) and r["recipe"] in ("stock", recipe)]
    rows[name, recipe] = measure.as_rows(own)
    title = f"### {name}, {recipe}, on {device}, {own[0]['steps']} steps"
    display(Markdown(f"{title}\n\n{picture_report.markdown(rows[name, recipe], 'clips')}"))


# %%
def comparison(found: dict, metric: str, file: str) -> Image:
    lines = -(-len(found) // 2)
    figure, axes = drawing.figure(lines, 2, width=11, height=4.2 * lines)
    for place in axes.flat[len(found) :]:
        place.set_axis_off()
    for place, (key, numbers) in zip(axes.flat, found.items(), strict=False):
        picture_report.plot(place, numbers, metric)
        place.set_title(f"{key[0]}, {key[1]}, {numbers[-1].images} clips", fontsize="medium")
    return Image(drawing.save(figure, FIGURES / file))


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
# Means over clips, of the measured table where there is one, else of the few clips above:

# %%
comparison(rows or live, "psnr_db_mean", "video_psnr.png")

# %%
comparison(rows or live, "flicker_mean", "video_flicker.png")

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
