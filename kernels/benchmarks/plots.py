"""Draw the documentation's figures from results.csv.

    python kernels/benchmarks/plots.py                        # writes kernels/benchmarks/figures/*.png
    python kernels/benchmarks/plots.py --format svg --out somewhere

Of rows with the same case, GPU, provider, recipe and metric the last counts, since results.csv is only appended to.
Equal rows give equal files, byte for byte, with the same version of matplotlib.
"""

from __future__ import annotations

import argparse
import re
import sys
from pathlib import Path


HERE = Path(__file__).resolve().parent
for folder in (HERE.parent.parent, HERE.parent, HERE.parent.parent / "notebooks"):
    if str(folder) not in sys.path:
        sys.path.append(str(folder))

import drawing  # noqa: E402

from sage_kernels.facts.recipe import DEFAULT_RECIPE  # noqa: E402
from sage_kernels.results import DRIFT, is_crossover_row, is_scaling_row, read_rows  # noqa: E402
from sage_processors.evaluation.metrics import Interval  # noqa: E402
from tools.peer_tables import shown_runs  # noqa: E402


Rows = list[dict[str, str]]
WIDTH = re.compile(r"D\d+_")
SQUARE = re.compile(r"D(64|128)_N\d+_full")
# ways of bench_models.py, each with one thing more than the one before, but attention_removed
LADDER = ("torch_sdpa_cudnn", "attention_removed", DEFAULT_RECIPE, f"{DEFAULT_RECIPE}+linears_int8", "preset_fast")
PARTS = (
    "attention left", "all else left", "INT8 attention", "fused norms and rotary embeddings of heads",
    "INT8 linear layers with their norms and activations", "CUDA graphs",
)  # fmt: skip
FEWEST_WAYS = 3  # fewest ways to draw that make a panel
PANELS = 3  # pictures and clips in a line


def newest(rows: Rows) -> Rows:
    """Return the last row of every case, GPU, provider, recipe and metric, in order of first appearance."""
    names = ("case", "gpu", "provider", "recipe", "metric")
    return list({tuple(row[name] for name in names): row for row in rows}.values())


def speed_rows(rows: Rows) -> Rows:
    """Return rows of our throughput with a ratio to cuDNN: all scalings of the default recipe, one of the others."""
    chosen = [r for r in rows if r["suite"] == "attention_fwd" and r["provider"] == "sage_kernels"]
    chosen = [r for r in chosen if r["metric"] == "throughput" and not is_crossover_row(r) and is_scaling_row(r)]
    chosen = [r for r in chosen if r["recipe"] == DEFAULT_RECIPE or "/" not in r["case"]]
    return newest([r for r in chosen if r["ratio_vs_cudnn"]])


def picture_panels(rows: Rows) -> dict[tuple[str, str], Rows]:
    """Return rows of PSNR over pictures by pipeline and GPU, each from the run that compares most ways.

    A run is all rows with the same number of pictures. Runs with fewer than FEWEST_WAYS ways are left to tables.
    """
    chosen = [r for r in rows if r["suite"] == "quality" and r["metric"] == "psnr_db" and r["p20"] and r["p80"]]
    runs = {}
    for row in chosen:
        runs.setdefault((row["case"].partition("/")[0], row["gpu"], row["batch"]), []).append(row)
    panels = {}
    for (pipeline, gpu, _), run in runs.items():
        best = panels.get((pipeline, gpu), [])
        panels[pipeline, gpu] = max(best, newest(run), key=lambda x: (len(x), int(x[0]["batch"] or 0) if x else 0))
    return {place: run for place, run in panels.items() if len(run) >= FEWEST_WAYS}


def draw_rivals(rows: Rows):
    """Draw TFLOPS of ours and of other packages by shape, of the run of most packages with inputs that drift.

    Each bar names its provider and its error. Returns a Figure, or None without such a run.
    """
    rows = [r for r in rows if r["suite"] == "attention_fwd" and r["metric"] == "throughput"]
    rows = [r for r in rows if r["case"].endswith(f"/{DRIFT}")]
    if not rows:
        return None
    packages: dict[str, set[str]] = {}
    for row in reversed(rows):  # newest first: of as many, the newest run
        packages.setdefault(row["commit"], set()).add(row["provider"])
    run = max(packages, key=lambda commit: len(packages[commit]))
    rows = newest([r for r in rows if r["commit"] == run])
    names = list(dict.fromkeys(_provider(row) for row in rows))
    shapes = list(dict.fromkeys(row["case"] for row in rows))
    columns, most = min(4, len(shapes)), max(float(row["median"]) for row in rows)
    lines, size = -(-len(shapes) // columns), {"width": 2.3 * columns + 1.6, "sharey": True}
    figure, axes = drawing.figure(lines, columns, height=lines * (0.36 * len(names) + 0.8), **size)
    for place in axes.flat[len(shapes) :]:
        place.axis("off")
    for place, shape in zip(axes.flat, shapes, strict=False):
        found = {_provider(r): r for r in rows if r["case"] == shape}
        inside = {"xytext": (4, 0), "textcoords": "offset points", "va": "center", "size": 8}
        for y, name in enumerate(names):
            if name not in found:
                place.annotate("not in this run", (0, y), color="black", **inside)
            else:
                value, error = float(found[name]["median"]), float(found[name]["rel_l2_error"] or 0)
                ours = found[name]["provider"] == "sage_kernels"
                place.barh(y, value, 0.7, color=drawing.COLORS[0 if ours else 1])
                place.annotate(f"{value:.0f}; {error:.1%}", (0, y), color="white" if ours else "black", **inside)
        place.set_yticks(range(len(names)), names)
        place.grid(axis="y", visible=False)
        place.set_title(shape.partition("/")[0].replace("_", " "), fontsize=10)
        place.set(xlabel="TFLOPS; relative L2", xlim=(0, 1.05 * most))
    axes[0, 0].invert_yaxis()
    return figure


def draw_wholes(rows: Rows):
    """Draw seconds of whole pictures and clips: a bar for each way, denoising and the rest stacked.

    A panel for each model's run that the tables show. Returns a Figure, or None without one.
    """
    runs = shown_runs(rows)
    rows = [r for r in rows if r["suite"] in ("picture", "clip") and r["metric"] == "time"]
    models = [case for case in runs if any(row["case"] == f"{case}/rest" for row in rows)]
    if not models:
        return None
    lines = -(-len(models) // PANELS)
    figure, axes = drawing.figure(lines, min(PANELS, len(models)), width=12, height=2.6 * lines)
    for unused in axes.flat[len(models) :]:
        unused.set_axis_off()
    for place, model in zip(axes.flat, models, strict=False):
        own = [row for row in rows if row["commit"] == runs[model]]
        run = newest([row for row in own if row["case"] == model])
        whole = [float(row["median"]) for row in run]
        rest = [
            float([r for r in own if r["case"] == f"{model}/rest" and _provider(r) == _provider(row)][-1]["median"])
            for row in run
        ]
        steps = [a - b for a, b in zip(whole, rest, strict=True)]
        place.barh(range(len(run)), steps, 0.7, color=drawing.COLORS[0], label="denoising steps")
        place.barh(range(len(run)), rest, 0.7, left=steps, color=drawing.COLORS[1], label="text encoders, VAE, others")
        for y, value in enumerate(whole):
            place.annotate(f"{value:.2f}", (value, y), xytext=(4, 0), textcoords="offset points", va="center", size=8)
        place.set_yticks(range(len(run)), [_provider(row) for row in run], fontsize=8)
        place.invert_yaxis()
        place.grid(axis="y", visible=False)
        place.margins(x=0.18)
        place.set_xlabel("s")
        place.set_title(model, fontsize=10)
    figure.legend(*axes[0, 0].get_legend_handles_labels(), loc="outside lower center", ncols=2, fontsize=9)
    return figure


def parts_of(rows: Rows) -> dict[str, dict[str, float]]:
    """Return {model: {part: percent of stock's time}} of suite models, the newest run of each that has every way.

    What is left of stock's time, attention and all else, then what each change took away. Attention is what the
    forward loses without it; the share that INT8 takes of it is that of the same attention timed alone.
    """
    alone = [row for row in speed_rows(rows) if row["recipe"] == DEFAULT_RECIPE]
    speed = {(row["case"].removesuffix("_self"), row["gpu"]): float(row["ratio_vs_cudnn"]) for row in alone}
    runs: dict[tuple[str, str, str], dict[str, float]] = {}
    for row in rows:
        if (row["suite"], row["metric"]) == ("models", "time"):
            runs.setdefault((row["case"], row["gpu"], row["commit"]), {})[_provider(row)] = float(row["median"])
    found = {}
    for (model, gpu, _), run in runs.items():
        if set(LADDER) <= set(run) and (model, gpu) in speed:
            stock, removed, int8, linears, fast = (100 * run[x] / run[LADDER[0]] for x in LADDER)
            attention = (stock - removed) / speed[model, gpu]
            taken = stock - removed - attention
            saved = (taken, stock - int8 - taken, int8 - linears, linears - fast)
            found[model] = dict(zip(PARTS, (attention, fast - attention, *saved), strict=True))
    return found


def draw_parts(rows: Rows):
    """Draw where the time of a stock forward went: a stacked bar for each model. Returns a Figure or None."""
    found = parts_of(rows)
    if not found:
        return None
    figure, axes = drawing.figure(width=10, height=1.3 + 0.5 * len(found))
    place, left = axes[0, 0], [0.0] * len(found)
    for index, part in enumerate(PARTS):
        widths = [max(parts[part], 0.0) for parts in found.values()]
        color = drawing.COLORS[index]
        place.barh(
            range(len(found)), widths, 0.7, left=left, color=color, label=part, hatch="//" * (index > 1), ec="w"
        )
        for y, (start, width) in enumerate(zip(left, widths, strict=True)):
            if width >= 4:  # narrower ones have no room for a number
                clear = {"facecolor": "white", "edgecolor": "none", "pad": 0.6}
                place.text(start + width / 2, y, f"{width:.0f}", ha="center", va="center", size=8, bbox=clear)
        left = [a + b for a, b in zip(left, widths, strict=True)]
    place.set_yticks(range(len(found)), found)
    place.invert_yaxis()
    place.grid(axis="y", visible=False)
    place.set(xlabel="% of eager stock's time, cuDNN. Plain: what is left; hatched: what took time away")
    figure.legend(*place.get_legend_handles_labels(), loc="outside lower center", ncols=3, fontsize=8)
    return figure


def _provider(row: dict[str, str]) -> str:
    return row["recipe"] or row["provider"]


def draw_lengths(rows: Rows):
    """Draw ours / cuDNN over the number of tokens, a line per head_dim and recipe, and for models' shapes.

    Timestep scaling, on the GPU with the most rows. Returns a Figure or None.
    """
    rows = [row for row in speed_rows(rows) if "/" not in row["case"]]
    gpus = [row["gpu"] for row in rows]
    squares = [row for row in rows if SQUARE.fullmatch(row["case"])]
    models = [row for row in rows if not WIDTH.match(row["case"])]
    if not squares or not models:
        return None
    gpu = max(dict.fromkeys(gpus), key=gpus.count)
    figure, axes = drawing.figure(1, 2, width=11, height=4)
    lines: dict[str, dict[int, float]] = {}
    for row in squares:
        if row["gpu"] == gpu:
            name = f"D={row['head_dim']}, {row['recipe']}"
            lines.setdefault(name, {})[int(row["seq_q"])] = float(row["ratio_vs_cudnn"])
    for index, (name, points) in enumerate(sorted(lines.items())):
        tokens = sorted(points)
        axes[0, 0].plot(tokens, [points[n] for n in tokens], label=name, **drawing.style_of(index))
    axes[0, 0].set_xscale("log", base=2)
    ticks = sorted({n for points in lines.values() for n in points})
    axes[0, 0].set_xticks(ticks, [str(n) for n in ticks], rotation=30)
    axes[0, 0].set(xlabel="tokens (self-attention, 64 heads in all)", ylabel="speed, ours / cuDNN 16 bit", title=gpu)
    axes[0, 0].legend(fontsize=9)
    axes[0, 0].axhline(1, color="#333333", lw=1, ls="--")
    shown = [row for row in models if row["gpu"] == gpu and row["recipe"] == DEFAULT_RECIPE]
    values = [float(row["ratio_vs_cudnn"]) for row in shown]
    axes[0, 1].barh(range(len(shown)), values, color=drawing.COLORS[0])
    for y, value in enumerate(values):
        clear = {"facecolor": "white", "edgecolor": "none", "pad": 0.8}  # of the line where both are equally fast
        axes[0, 1].annotate(
            f"{value:.2f}", (value, y), xytext=(4, 0), textcoords="offset points", va="center", size=9, bbox=clear
        )
    axes[0, 1].margins(x=0.1)
    axes[0, 1].set_yticks(range(len(shown)), [row["case"] for row in shown])
    axes[0, 1].invert_yaxis()
    axes[0, 1].axvline(1, color="#333333", lw=1, ls="--")
    axes[0, 1].grid(axis="y", visible=False)
    axes[0, 1].set(xlabel="speed, ours / cuDNN 16 bit", title=f"attention of models, {DEFAULT_RECIPE}")
    return figure


def draw_pictures(rows: Rows):
    """Draw bars of median PSNR with percentiles, a panel per pipeline and GPU. Returns a Figure or None."""
    panels = picture_panels(rows)
    if not panels:
        return None
    columns = min(2, len(panels))
    lines = -(-len(panels) // columns)
    figure, axes = drawing.figure(lines, columns, width=5.2 * columns, height=2.6 * lines)
    for place in axes.flat[len(panels) :]:
        place.axis("off")
    for place, ((pipeline, gpu), chosen) in zip(axes.flat, panels.items(), strict=False):
        values = [Interval(*(float(row[name]) for name in ("median", "p20", "p80"))) for row in chosen]
        labels = [row["case"].partition("/")[2] for row in chosen]
        drawing.bars(place, labels, values, unit="PSNR to stock, dB (median, 20 % to 80 %)")
        place.set_title(f"{pipeline}, {gpu}, {chosen[0]['batch']} pictures", fontsize=10)
    return figure


FIGURES = {
    "speed_by_length": draw_lengths,
    "rivals": draw_rivals,
    "wholes": draw_wholes,
    "parts": draw_parts,
    "psnr_per_scaling": draw_pictures,
}


def write(results: Path, out: Path, suffix: str) -> list[Path]:
    """Draw every figure that has rows into the folder `out`. Returns the files.

    Raises: ValueError if results.csv or the folder does not exist.
    """
    if not results.is_file():
        raise ValueError(f"results: got {str(results)!r}, which does not exist, expected a results.csv")
    rows = read_rows(results)
    made = ((name, draw(rows)) for name, draw in FIGURES.items())
    return [drawing.save(figure, out / f"{name}.{suffix}") for name, figure in made if figure is not None]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--results", type=Path, default=HERE / "results.csv")
    parser.add_argument("--out", type=Path, default=HERE / "figures", help="folder, made if it is missing")
    parser.add_argument("--format", choices=("png", "svg"), default="png")
    arguments = parser.parse_args()
    arguments.out.mkdir(parents=True, exist_ok=True)
    files = write(arguments.results, arguments.out, arguments.format)
    print("\n".join(map(str, files)) or f"no rows to draw in {arguments.results}")
    return 0 if files else 1


if __name__ == "__main__":
    sys.exit(main())
