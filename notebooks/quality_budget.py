# ---
# jupyter:
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # How much quality for how much speed
#
# Between "every attention call in INT8" and "every call in 16 bit" lie many policies: other scalings, the first or
# last steps in 16 bit, the most sensitive layers in 16 bit. This notebook measures some on pictures, says what share
# of the attention time each would take, and draws the front of those that no other policy beats in both.
#
# `tiny_flux` is the pipeline whose attention is the most sensitive of the two embedded ones; `tiny_flux_hard` is the
# same model, exactly, with outliers in channels of Q that K undoes.

# %%
import tempfile
from pathlib import Path

import drawing
import measure
import torch
from IPython.display import Image, Markdown, display
from picture_report import PSNR_CEILING, markdown_table

import sage_processors as sp
from sage_kernels import DEFAULT_RECIPE
from sage_kernels.results import read_rows
from sage_processors.evaluation import metrics


# %% tags=["parameters"]
SIZE = "full"  # "small" is what CI runs: fewer pictures and steps
FIGURES = "figures"

# %%
FIGURES = Path(FIGURES)
PIPELINES = {"full": ("tiny_flux", "tiny_flux_hard"), "small": ("tiny_flux",)}[SIZE]
LIVE = {"full": measure.Size(images=2, steps=5, batch=2), "small": measure.Size(images=1, steps=2, batch=1)}[SIZE]
torch.set_num_threads(1)

# %% [markdown]
# ## What a call costs
#
# The speed of INT8 attention over cuDNN's 16-bit attention in the same run, from `kernels/benchmarks/results.csv`:
# the newest row of each scaling on the shape that all scalings were timed on. The CPU path is for checking and has no
# speed of its own, and the embedded pipelines are far smaller than this shape: the times below are those of a model of
# that shape that reacts to INT8 like this one. All layers of `tiny_flux` have the same shape, so calls count alike.

# %%
CASE = "D128_N8192_full"
timed = [
    row
    for row in read_rows("../kernels/benchmarks/results.csv")
    if row["case"].partition("/")[0] == CASE
    and row["provider"] == "sage_kernels"
    and row["ratio_vs_cudnn"]
    and row["recipe"] == DEFAULT_RECIPE
]
speed = {row["case"].partition("/")[2] or "timestep": float(row["ratio_vs_cudnn"]) for row in timed}
speed["dynamic"] = speed["per_token"]
print(f"{timed[-1]['gpu']}, {CASE}, times cuDNN: {speed}")

# %% [markdown]
# ## Which layers mind
#
# Each layer alone in INT8, all others in 16 bit.

# %%
work = tempfile.TemporaryDirectory()
texts = measure.prompts(4)[: LIVE.images]
run = {name: measure.Measurement(name, LIVE, "cpu", Path(work.name), texts) for name in PIPELINES}


def draw_with(name: str, config=None) -> tuple[torch.Tensor, float]:
    """Draw pictures with the options (None: stock). Returns them and the share of INT8 attention calls."""
    at = run[name]
    with at.planted():
        if config is None:
            return torch.cat([at.draw(batch) for batch in at.batches]), 0.0
        pictures, int8, exact = [], 0, 0
        with sp.apply(at.pipe, config) as handle:
            for batch in at.batches:
                handle.reset()
                pictures.append(at.draw(batch))
                report = handle.report()
                int8, exact = int8 + report.calls, exact + sum(report.fallbacks.values())
    return torch.cat(pictures), int8 / (int8 + exact)


def psnr_of(name: str, config) -> tuple[metrics.Interval, float]:
    """Return the mean PSNR to the stock pictures with its interval, dB, and the share of INT8 calls."""
    pictures, share = draw_with(name, config)
    return metrics.mean_interval(metrics.psnr(pictures, stock[name]).clamp(max=PSNR_CEILING)), share


stock = {name: draw_with(name)[0] for name in PIPELINES}
with sp.apply(run["tiny_flux"].pipe) as handle:
    layers = [row["layer"] for row in handle.report().rows]
alone = {
    layer: psnr_of(
        "tiny_flux", sp.SageAttnProcessor(layers={layer: {"recipe": "qk_int8_pv_bf16"}, "*": {"recipe": "16bit"}})
    )[0].value
    for layer in layers
}
by_need = sorted(layers, key=alone.get)
Markdown(markdown_table(["layer, alone in INT8", "PSNR, dB"], [[name, f"{alone[name]:.2f}"] for name in by_need]))

# %% [markdown]
# ## The policies


# %%
def policies() -> dict[str, sp.SageAttnProcessor]:
    """Return {name: options}: measured scalings, then more and more steps and layers in 16 bit."""
    named = {scaling: sp.SageAttnProcessor(scaling=scaling) for scaling in ("timestep", "dynamic", "per_block")}
    for count in (1, 2)[: LIVE.steps - 1]:
        named[f"first {count} in 16 bit"] = sp.SageAttnProcessor(keep=sp.Keep(first_steps=count))
        named[f"last {count} in 16 bit"] = sp.SageAttnProcessor(keep=sp.Keep(last_steps=count))
    for count in range(1, len(layers)):
        rules = {layer: {"recipe": "16bit"} for layer in by_need[:count]}
        named[f"{count} layer{'s' * (count > 1)} in 16 bit"] = sp.SageAttnProcessor(layers=rules)
    return named


def on_front(points: list[tuple[float, float]]) -> list[bool]:
    """Return True for each (time, PSNR) that no other point beats in both."""
    return [not any(t <= time and p >= psnr and (t, p) != (time, psnr) for t, p in points) for time, psnr in points]


measured = {}
for name in PIPELINES:
    for label, config in policies().items():
        interval, share = psnr_of(name, config)
        measured[name, label] = (interval, share, 1 - share + share / speed[config.scaling.name])

# %%
for name in PIPELINES:
    labels = [label for owner, label in measured if owner == name]
    front = on_front([(measured[name, label][2], measured[name, label][0].value) for label in labels])
    lines = []
    for label, best in sorted(zip(labels, front, strict=True), key=lambda pair: measured[name, pair[0]][2]):
        interval, share, time = measured[name, label]
        psnr = f"{interval.value:.2f} [{interval.low:.2f}, {interval.high:.2f}]"
        lines.append([label, psnr, f"{share:.0%}", f"{time:.3f}", "yes" if best else ""])
    header = ["policy", "PSNR, dB", "calls in INT8", "attention time, 16 bit = 1", "on the front"]
    display(Markdown(f"### {name}, {LIVE.images} pictures, {LIVE.steps} steps\n\n{markdown_table(header, lines)}"))

# %% [markdown]
# Few pictures on a CPU in fp32, so the intervals are wide; the order of scalings on many pictures is in
# `psnr_fid_comparison`.
#
# ## The front

# %%
figure, axes = drawing.figure(1, len(PIPELINES), width=6.5 * len(PIPELINES), height=4.8)
for place, name in zip(axes[0], PIPELINES, strict=True):
    labels = [label for owner, label in measured if owner == name]
    points = [(measured[name, label][2], measured[name, label][0].value) for label in labels]
    front = sorted(point for point, best in zip(points, on_front(points), strict=True) if best)
    place.step(*zip(*front, strict=True), where="post", color="#8C8C8C", lw=1, zorder=1)
    for index, (label, (time, psnr)) in enumerate(zip(labels, points, strict=True)):
        interval, same = measured[name, label][0], [i for i, point in enumerate(points) if abs(point[0] - time) < 1e-3]
        time += 0.005 * (same.index(index) - (len(same) - 1) / 2)  # side by side, not one upon the other
        spread = [[psnr - interval.low], [interval.high - psnr]]
        style = drawing.style_of(index)
        place.errorbar(time, psnr, yerr=spread, ms=7, lw=0, elinewidth=1, capsize=2, label=label, **style)
    place.set(xlabel="attention time (16 bit = 1)", ylabel="PSNR to stock, dB", title=name)
figure.legend(*axes[0][0].get_legend_handles_labels(), loc="outside right center", fontsize=8)
Image(drawing.save(figure, FIGURES / "quality_budget.png"))

# %% [markdown]
# ## A budget answered
#
# The fastest of these policies that meets each target:

# %%
lines = []
for name in PIPELINES:
    for target in (42, 48, 52, 56, 60):
        good = [label for owner, label in measured if owner == name and measured[owner, label][0].value >= target]
        # of equally fast ones the better
        good.sort(key=lambda label: (measured[name, label][2], -measured[name, label][0].value))
        label = good[0] if good else "none of these: 16 bit"
        time = f"{measured[name, label][2]:.3f}" if good else "1"
        lines.append([name, f"{target} dB", label, time])
Markdown(markdown_table(["pipeline", "PSNR at least", "policy", "attention time, 16 bit = 1"], lines))

# %% [markdown]
# ## The same question, asked of `calibrate`
#
# It searches recipe, scaling, windows and layers by itself, and looks at pictures of fresh seeds before it says that a
# budget is met. Its cost is counted in operations and bytes, not timed, so that the same search gives the same policy
# on every machine; it is not the time of the figure above.

# %%
found = sp.calibrate(
    run["tiny_flux"].pipe, texts, target_psnr=42, steps=LIVE.steps, batch=LIVE.batch, cost="counted",
    progress=False,
)  # fmt: skip
lines = [
    [row["label"], f"{row['cost']:.3f}", f"{row['psnr_db']:.2f}", f"{row['int8_share']:.0%}"] for row in found.curve
]
header = ["tried on the search's seeds", "counted attention time", "PSNR, dB", "calls in INT8"]
display(Markdown(markdown_table(header, lines)))
verdict = "met" if found.met else "not met, best reachable:"
print(f"42 dB on fresh seeds {verdict} {found.result['psnr_db']:.2f} dB, {found.result['int8_share']:.0%} in INT8")

# %%
assert found.met == (found.result["psnr_db"] >= 42) and found.curve
for (name, label), (interval, share, time) in measured.items():
    assert 0 < share <= 1 and 0 < time < 1.5 and interval.value > 10, (name, label, interval, share, time)
work.cleanup()
