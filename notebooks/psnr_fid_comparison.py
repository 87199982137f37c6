# ---
# jupyter:
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # How far INT8 attention moves the pictures
#
# Both embedded pipelines draw the same prompts and seeds with stock attention and with every recipe and scaling that
# this version knows. PSNR, SSIM and MS-SSIM compare each picture with the stock picture of its seed. feature-FD
# compares the whole set with true pictures, drawn by the program that the pipelines were trained on, through the
# features of a small classifier that we trained. It is **not FID**: its numbers compare with each other alone.
#
# The outcome is in `data/quality.csv`, written by `measure.py`, whose first lines say how. The second half of this
# notebook draws a few pictures itself, with the same code.

# %%
import tempfile
from pathlib import Path

import drawing
import measure
import picture_report
import torch
from IPython.display import Image, Markdown, display

import sage_processors as sp
from sage_kernels import DEFAULT_RECIPE, RECIPES
from sage_processors.evaluation.feature_distance import classifier_metrics, load_classifier
from sage_processors.evaluation.side_by_side import amplification, side_by_side


# %% tags=["parameters"]
SIZE = "full"  # "small" is what CI runs: fewer pictures, steps and pipelines in the live part
FIGURES = "figures"

# %%
FIGURES = Path(FIGURES)
LIVE = {"full": measure.Size(images=2, steps=4, batch=2), "small": measure.Size(images=1, steps=1, batch=1)}[SIZE]
USED = sorted(name for name, recipe in RECIPES.items() if not recipe.study)
LIVE_NAMES = {"full": sp.pipelines.names(), "small": ["tiny_flux"]}[SIZE]
RECIPES_OF = dict.fromkeys(LIVE_NAMES, {"full": USED, "small": [DEFAULT_RECIPE]}[SIZE])
torch.set_num_threads(1)

# %% [markdown]
# ## The outcome
#
# Intervals are 95 %: of means by the bootstrap over pictures, of feature-FD by the jackknife over 16 groups of them.
# `feature-FD above stock's` pairs the groups, so it knows a difference far better than either distance. A name with
# `_warm`, `static` and the `sigma` ones start each batch from one earlier run's frozen table; the others start fresh.

# %%
table = measure.read_table(Path("data/quality.csv"))
devices = sorted({row["device"] for row in table}, key=lambda device: (device == "cpu", device))
device = devices[0]  # a GPU's, where there is one
table = [row for row in table if row["device"] == device]
rows = {}  # of each pipeline and recipe
for name, recipe in dict.fromkeys((row["pipeline"], row["recipe"]) for row in table if row["recipe"] != "stock"):
    own = [row for row in table if row["pipeline"] == name and row["recipe"] in ("stock", recipe)]
    rows[name, recipe] = measure.as_rows(own)
    title = f"### {name}, {recipe}, on {device}, {own[0]['steps']} steps"
    display(Markdown(f"{title}\n\n{picture_report.markdown(rows[name, recipe])}"))


# %%
def comparison(metric: str, file: str) -> Image:
    shown = [key for key in rows if any(row.metric == metric for row in rows[key])]
    lines = -(-len(shown) // 2)
    figure, axes = drawing.figure(lines, 2, width=11, height=4.2 * lines)
    for place in axes.flat[len(shown) :]:
        place.set_axis_off()
    for place, key in zip(axes.flat, shown, strict=False):
        picture_report.plot(place, rows[key], metric)
        place.set_title(f"{key[0]}, {key[1]}, {rows[key][-1].images} pictures", fontsize="medium")
    return Image(drawing.save(figure, FIGURES / file))


comparison("psnr_db_mean", "psnr_per_scaling.png")

# %%
comparison("feature_fd_excess", "feature_fd_above_stock.png")

# %% [markdown]
# How to read it: where the intervals of `feature-FD above stock's` contain 0, INT8 attention has not moved the set of
# pictures by anything that this many pictures can show. The classifier's right answers on pictures it never saw:

# %%
Markdown(", ".join(f"{label} {share:.1%}" for label, share in classifier_metrics()["held_out_accuracy"].items()))

# %% [markdown]
# ## Live, and small

# %%
live, pictures = {}, {}
classifier = load_classifier()
real = measure.true_features(64, classifier)
with tempfile.TemporaryDirectory() as work:
    for name in LIVE_NAMES:
        for recipe in RECIPES_OF[name]:
            run = measure.Measurement(name, LIVE, "cpu", Path(work) / recipe, measure.prompts(4)[: LIVE.images])
            variants = measure.variants(recipe)
            assert all(run.run(variant) for variant in variants.values())
            found = measure.as_rows(run.rows(recipe, list(variants), real))
            live[name, recipe] = found
            display(Markdown(f"### {name}, {recipe}, cpu, {LIVE.steps} steps\n\n{picture_report.markdown(found)}"))
        with sp.apply(run.pipe):
            pictures[name] = (run.stock(0), run.draw(run.batches[0]))

# %% [markdown]
# The same seeds, stock and INT8 with the default options, and what is left between them:

# %%
stock = torch.cat([pair[0][:2] for pair in pictures.values()])
ours = torch.cat([pair[1][:2] for pair in pictures.values()])
titles = [name for name, pair in pictures.items() for _ in pair[0][:2]]
sheet = side_by_side(stock, ours, titles, amplification(stock, ours), cell=192)
# 128 colours: a figure of the documentation stays small
sheet.quantize(128).save(FIGURES / "stock_and_int8.png")
Image(FIGURES / "stock_and_int8.png")

# %% [markdown]
# Every scaling was measured, ran in INT8 (`measure.py` refuses a run without an INT8 call), and none is far off:

# %%
for (name, recipe), found in live.items():
    psnr = {row.label: row.value for row in found if row.metric == "psnr_db_mean"}
    assert set(psnr) == set(measure.variants(recipe)), (name, recipe)
    assert min(psnr.values()) > 25, (name, psnr)
    print(f"{name}, {recipe}: {len(psnr)} scalings, worst {min(psnr, key=psnr.get)} {min(psnr.values()):.1f} dB")
