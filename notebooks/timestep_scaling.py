# ---
# jupyter:
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # What the scales of Q and K do along the denoising trajectory
#
# Timestep scaling plans the INT8 scale of a head from the step before, or from a frozen table at the same noise level
# u = σ/√(α² + σ²). This notebook shows, for both embedded pipelines, how far the inputs of attention really reach at
# each noise level, how well each plan fits, and what each mode costs in accuracy at each step.
#
# The inputs are recorded from the exact model with prompts and seeds of their own, then run through every mode again:
# an error at one step does not carry over to the next. For whole pictures see `psnr_fid_comparison`.

# %%
from pathlib import Path

import drawing
import measure
import replay
import torch
from IPython.display import Image, Markdown
from picture_report import markdown_table

import sage_processors as sp
from sage_processors import pipelines
from sage_processors.evaluation import metrics, quality


# %% tags=["parameters"]
SIZE = "full"  # "small" is what CI runs: fewer steps
FIGURES = "figures"

# %%
FIGURES = Path(FIGURES)
STEPS = {"full": {"tiny_sd": 8, "tiny_flux": 6}, "small": {"tiny_sd": 2, "tiny_flux": 2}}[SIZE]
SEEDS = {"full": 4, "small": 1}[SIZE]  # runs that are measured
MODES = quality.study_variants()
torch.set_num_threads(1)

# %% [markdown]
# ## Record runs
#
# The first is what planned scales learn from. The others, of other prompts and seeds, are what is measured; the curves
# below are those of the second run, and what is said of two modes rests on all of them.

# %%
first, measured = {}, {}
for name, steps in STEPS.items():
    pipe, arguments = measure.load(name, "cpu"), pipelines.call_arguments(name)
    first[name], *measured[name] = (
        replay.record(pipe, [prompt], [measure.FIRST_SEED + place], steps=steps, **arguments)
        for place, prompt in enumerate(measure.prompts(1 + SEEDS))
    )
second = {name: runs[0] for name, runs in measured.items()}
for name, run in second.items():
    print(f"{name}: {len(run.sites())} layers, noise levels {[round(u, 3) for u in run.levels]}")

# %% [markdown]
# ## Every mode, step by step

# %%
found, states, by_seed = {}, {}, {}
for name in STEPS:
    for mode in MODES:
        earlier = first[name] if mode.warm else None
        runs = [replay.replay(mode.config, run, earlier) for run in measured[name]]
        found[name, mode.name], states[name, mode.name] = runs[0]
        by_seed[name, mode.name] = [sum(step.sqnr_db for step in steps) / len(steps) for steps, _ in runs]

# %% [markdown]
# ## How far the inputs reach: the scale that each head needs, by noise level
#
# From the statistics that the state of timestep scaling keeps: per noise bin and head, s = max over channels of
# √(max|q|·max|k−c|)/127, the scale after smoothing and channel balance. A power law in σ would be a straight line in
# this plot; a line of slope 0 is what normalised inputs give. A line is a head; heads of one layer have one colour.

# %%
figure, axes = drawing.figure(1, len(STEPS), width=11, height=4.2)
spans = []
for place, name in zip(axes[0], STEPS, strict=True):
    state = states[name, "timestep"]
    snapshot = state.snapshot()
    scales, seen = state.head_scales(snapshot["table"]), snapshot["table_run"] > 0
    for head in range(scales.shape[1]):
        bins = seen[:, head] & (scales[:, head] > 0)
        layer = next(i for i, site in enumerate(state.sites) if head < sum(s.kv_heads for s in state.sites[: i + 1]))
        label = f"layer {layer + 1}" if head == sum(s.kv_heads for s in state.sites[:layer]) else None
        place.plot(state.bin_levels()[bins], scales[bins, head], ms=4, lw=1.2, label=label, **drawing.style_of(layer))
        spans.append((name, (scales[bins, head].max() / scales[bins, head].min()).item()))
    place.set(xlabel="noise level u (1: pure noise)", ylabel="scale s that the head needs", yscale="log", title=name)
most = max(axes[0], key=lambda place: len(place.get_legend_handles_labels()[1]))
figure.legend(*most.get_legend_handles_labels(), loc="outside lower center", ncols=6, fontsize=8)
Image(drawing.save(figure, FIGURES / "scale_by_noise_level.png"))

# %%
lines = []
for name in STEPS:
    values = torch.tensor([span for owner, span in spans if owner == name])
    lines.append([name, str(len(values)), f"{values.median():.2f}", f"{values.max():.2f}"])
Markdown(markdown_table(["pipeline", "heads", "largest / smallest scale of a head: median", "of all heads"], lines))


# %% [markdown]
# ## The error of each mode at each step


# %%
def along_the_run(value, ylabel: str, file: str, modes) -> Image:
    figure, axes = drawing.figure(1, len(STEPS), width=11, height=4.4)
    for place, name in zip(axes[0], STEPS, strict=True):
        for index, mode in enumerate(modes):
            steps = found[name, mode.name]
            points = [value(step) for step in steps]
            place.plot(range(1, len(points) + 1), points, label=mode.name, ms=4, lw=1.2, **drawing.style_of(index))
        place.set(xlabel="denoising step", ylabel=ylabel, title=name, xticks=range(1, len(steps) + 1))
    figure.legend(*axes[0][0].get_legend_handles_labels(), loc="outside right center", fontsize=8)
    return Image(drawing.save(figure, FIGURES / file))


along_the_run(lambda step: step.sqnr_db, "SQNR of attention's output, dB", "error_per_step.png", MODES)

# %% [markdown]
# ## How much of the INT8 range is used, and how many tiles of keys leave their plan
#
# Utilisation is the largest code of a tile of 128 keys over 127, averaged over the tiles that are not beyond their
# plan. A tile that goes beyond it, or uses less than 7/8 of it, takes a scale of its own: no element is ever clipped.
# With the default margin of 0.9 most tiles with a large value do so by design, and the others get finer steps.

# %%
planned = [mode for mode in MODES if any(step.planned > 0 for step in found["tiny_sd", mode.name])]
along_the_run(lambda step: step.utilisation, "utilisation of ±127", "utilisation_per_step.png", planned)

# %%
along_the_run(lambda step: 100 * step.beyond, "tiles beyond their plan, %", "beyond_plan_per_step.png", planned)


# %%
def mean(values) -> str:
    kept = [value for value in values if value == value]
    return f"{sum(kept) / len(kept):.2f}" if kept else "–"


header = ["pipeline", "mode", "SQNR mean, dB", "worst step, dB", "utilisation", "tiles beyond plan", "heads planned"]
lines = []
for name in STEPS:
    for mode in MODES:
        steps = found[name, mode.name]
        cells = [name, mode.name, mean(s.sqnr_db for s in steps), f"{min(s.sqnr_db for s in steps):.2f}"]
        cells += [mean(getattr(s, field) for s in steps) for field in ("utilisation", "beyond", "planned")]
        lines.append(cells)
Markdown(markdown_table(header, lines))

# %% [markdown]
# ## Which modes differ
#
# The mean SQNR of a run minus that of timestep scaling on the same run: mean over the runs and its 95 % interval, by
# the bootstrap. Modes whose interval holds 0 are not told apart here.

# %%
lines = []
for name in STEPS:
    for mode in MODES:
        if mode.name != "timestep":
            over = metrics.paired_interval(by_seed[name, mode.name], by_seed[name, "timestep"])
            lines.append([name, mode.name, f"{over.value:+.2f}", f"{over.low:+.2f} to {over.high:+.2f}"])
Markdown(markdown_table(["pipeline", "mode", "SQNR over timestep's, dB", "95 % interval"], lines))

# %% [markdown]
# ## The σ-ratio formulas without the guard
#
# In our modes a tile that leaves its plan rescales itself, which hides how wrong a plan was: `sigma_ratio_printed`
# above is near the others because most of its tiles left the plan. Here the scale of K is the formula's, elements
# beyond ±127 are clipped, and nothing is balanced: s = s_ref·(u/u_ref)^γ with s_ref from the step in the middle.

# %%
formulas = {"γ = −1, as printed": -1.0, "γ = 0, one scale": 0.0, "γ = 1, as corrected": 1.0}
figure, axes = drawing.figure(1, len(STEPS), width=11, height=4.2)
lines = []
for place, name in zip(axes[0], STEPS, strict=True):
    curves = {label: replay.without_guard(second[name], exponent) for label, exponent in formulas.items()}
    curves["timestep, with guard"] = [step.sqnr_db for step in found[name, "timestep"]]
    for index, (label, points) in enumerate(curves.items()):
        place.plot(range(1, len(points) + 1), points, label=label, ms=4, lw=1.2, **drawing.style_of(index))
        lines.append([name, label, mean(points), f"{min(points):.2f}"])
    place.set(xlabel="denoising step", ylabel="SQNR of attention's output, dB", title=name)
    place.set_xticks(range(1, len(points) + 1))
figure.legend(*axes[0][0].get_legend_handles_labels(), loc="outside right center", fontsize=8)
Image(drawing.save(figure, FIGURES / "sigma_formulas_without_guard.png"))

# %%
Markdown(markdown_table(["pipeline", "formula", "SQNR mean, dB", "worst step, dB"], lines))

# %% [markdown]
# ## The same in a live run
#
# What the handle reports after a run of the default options (texts left exact, as on a GPU): calls, calls without a
# plan, the share of K's elements that the plan would have clipped.

# %%
pipe = measure.load("tiny_sd", "cpu")
with sp.apply(pipe, sp.SageAttnProcessor(min_tokens=quality.MIN_TOKENS)) as handle:
    quality.generate(pipe, measure.prompts(1), [measure.FIRST_SEED], steps=STEPS["tiny_sd"])
    report = handle.report()
ran = [row for row in report.rows if row["calls"]]
lines = [[r["layer"], str(r["calls"]), f"{r['dynamic_calls']:.0f}", f"{r['clipped_fraction']:.5f}"] for r in ran]
Markdown(markdown_table(["layer", "INT8 calls", "without a plan", "elements beyond plan"], lines))

# %%
assert report.calls == 4 * STEPS["tiny_sd"] and all(
    row["dynamic_calls"] <= 1.01 + row["misfit_fraction"] * row["calls"]
    for row in ran  # the first, and those of plans that did not fit
)
for name in STEPS:
    means = {mode.name: sum(s.sqnr_db for s in found[name, mode.name]) / STEPS[name] for mode in MODES}
    assert means["timestep"] > means["dynamic"] - 3, means
    assert all(step.beyond <= 1 for mode in planned for step in found[name, mode.name][1:])
    print(name, {mode: round(value, 1) for mode, value in means.items()})
