"""The README's table of figures: rows of results.csv, and stock of the same run."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

from sage_kernels.facts.recipe import DEFAULT_RECIPE


HEADER = ("what", "ours", "stock, called the same way", "fastest stock of the same run")
OURS = "sage_kernels"
COMPILED = "torch_compiled_cudnn"
# PyTorch's own ways to run attention, in words; other packages are no stock
STOCK = {
    "torch_sdpa_default": "diffusers' default",
    "torch_sdpa_cudnn": "cuDNN",
    "torch_sdpa_flash": "FlashAttention 2",
    COMPILED: "cuDNN, compiled",
    "torch_flex": "FlexAttention",
    "stock_static_compiled": "compiled static cache",
    "stock_dynamic": "growing cache",
    "stock_torch_flash": "PyTorch's flash",
}
COUNTED_UP = ("throughput", "tokens_per_second")  # metrics of which more is better
PICTURES = ("tiny_sd", "tiny_flux")  # small pipelines whose PSNR stands in front of the table
# models of others: a name, and the recipe of the rows of their distance to fp32 over bf16's own
REAL = {
    "smollm2": ("SmolLM2", f"{DEFAULT_RECIPE}/rotated"),
    "gemma3": ("Gemma 3", f"{DEFAULT_RECIPE}/rotated"),
    "minilm": ("MiniLM", f"{DEFAULT_RECIPE}/int8"),
}
DISTANCES = ("kl_over_bf16", "distance_over_bf16")


class Figure(NamedTuple):
    """One line of the table.

    Attributes:
        what: name of the measurement, in words.
        suite, case, metric, recipe: of the row in results.csv; the newest counts.
        number: formats all numbers of the line.
        same_way: provider of stock that is called as ours is.
        beside: a provider that the run must have; runs without it don't count.
    """

    what: str
    suite: str
    case: str
    metric: str
    number: Callable[[float], str]
    recipe: str = "preset_fast"
    same_way: str = "torch_sdpa_cudnn"
    beside: str = ""


def _milliseconds(value: float) -> str:
    return f"{value:.0f} ms" if value >= 10 else f"{value:.2f} ms"


def _seconds(value: float) -> str:
    return f"{value:.2f} s"


def _picture(what: str, case: str, suite: str = "picture", beside: str = COMPILED, **how: Any) -> Figure:
    """Return the line of a whole picture or clip; compiled stock must have drawn it in the same run."""
    how = {"metric": "time", "number": _seconds} | how
    return Figure(what, suite, case, same_way="torch_sdpa_default", beside=beside, **how)


FIGURES = (
    _picture("FLUX.1 at 1024², a picture of 28 steps", "flux_1024"),
    _picture("its first picture, with all preparation", "flux_1024/first", beside=""),
    _picture("its peak memory", "flux_1024", metric="peak_memory", number="{:.1f} GiB".format),
    _picture("FLUX.1 at 2048², a picture of 28 steps*", "flux_2048/computed"),
    _picture("Qwen-Image at 1328², a picture of 50 steps*", "qwen_image_1328/computed"),
    _picture("SDXL at 1024², a picture of 30 steps*", "sdxl_1024/computed"),
    _picture("Wan 2.1 1.3B, a clip of 81 frames, 480p, 50 steps*", "wan21_1_3b_480p81/computed", "clip"),
    _picture("Wan 2.1 14B, the same*", "wan_14b_480p81/computed", "clip"),
    Figure(
        "attention alone, 16,384 tokens, head_dim 128", "attention_fwd", "D128_N16384_full/drift", "throughput",
        "{:.0f} TFLOPS".format, DEFAULT_RECIPE,
    ),
    Figure(  # until there are rows of the recipe preset_fast: bench_end_to_end.py --fast
        "Llama 8B: a prompt of 131,072 tokens (by hand: no rotation, all layers in 8 bit; "
        "no preset was timed)",
        "end_to_end", "llama8b_prefill_131072", "time",
        lambda value: f"{value / 1000:.2f} s", f"{DEFAULT_RECIPE}+linears_int8",
    ),
    Figure(
        "Llama 8B: a new token after 4,096", "generate", "llama8b_b1_4096", "time",
        _milliseconds, same_way="stock_static_compiled",
    ),
    Figure(
        "its first 16 layers, `generate_batch` of 64 prompts", "generate", "batching_llama8b_l16_64x4000",
        "tokens_per_second", "{:,.0f} tokens/s".format, same_way="stock_torch_flash",
    ),
)  # fmt: skip


def figures_markdown(rows: Iterable[dict[str, str]]) -> str:
    """Return the table in Markdown, from the newest row of each figure.

    In front of it are the three numbers that users ask for first. The GPU is the one with most figures. Figures
    without a row are left out.
    """
    by_gpu: dict[str, list[dict[str, str]]] = {}
    quality: list[dict[str, str]] = []
    for row in rows:
        quality += [row] if row["metric"] in DISTANCES else []
        if row["gpu"] != "cpu":
            by_gpu.setdefault(row["gpu"], []).append(row)
            quality += [row] if (row["suite"], row["metric"]) == ("quality", "psnr_db_mean") else []
    found = {gpu: [*filter(None, (line_of(figure, own) for figure in FIGURES))] for gpu, own in by_gpu.items()}
    gpu = max(found, key=lambda gpu: len(found[gpu]), default="")
    if not gpu or not found[gpu]:
        return "No rows yet."
    table = [HEADER, ("---",) * len(HEADER), *found[gpu]]
    text = "\n".join("| " + " | ".join(line) + " |" for line in table)
    return f"{_first(by_gpu[gpu], quality)}{text}\n\nMeasured on: {gpu}. Above 1× ours is better, below it stock is."


def _first(rows: list[dict[str, str]], quality: list[dict[str, str]]) -> str:
    """Return what a user asks for first, as a list: seconds a picture, memory, quality."""
    time, memory = (line_of(figure, rows) for figure in (FIGURES[0], FIGURES[2]))
    lines = [("Time", time and f"{time[1]} a picture of FLUX.1 (1024², 28 steps); {time[2]}")]
    lines += [("Memory", memory and f"{memory[1]} at its peak; {memory[2]}"), ("Quality", _quality(quality))]
    return "\n".join(f"- **{name}**: {said}" for name, said in lines if said) + "\n\n"


def run_of(row: dict[str, str], rows: list[dict[str, str]]) -> dict[str, dict[str, str]]:
    """Return {provider of stock: its row} of the run that a row of ours is part of.

    A commit may have several runs; stock's rows come before ours.
    """
    same = ("suite", "case", "metric", "commit", "gpu")
    place = next(i for i, other in enumerate(rows) if other is row)
    before = (other for other in rows[:place] if other["provider"] in STOCK)
    return {other["provider"]: other for other in before if all(other[x] == row[x] for x in same)}


def line_of(figure: Figure, rows: list[dict[str, str]]) -> tuple[str, ...] | None:
    """Return the cells of one line, or None if there is no row of ours or of stock called the same way.

    The newest row of ours counts whose run has stock called the same way, and what the figure must stand beside. The
    worst run of that day is named beside it if its ratio is a tenth lower: stock's time then depends on the host.
    """
    own_key = (figure.suite, figure.metric, figure.case, OURS, figure.recipe)
    ours = [r for r in rows if (r["suite"], r["metric"], r["case"], r["provider"], r["recipe"]) == own_key]
    wanted = {figure.same_way, figure.beside} - {""}
    runs = [(run, row) for row in reversed(ours) if wanted <= (run := run_of(row, rows)).keys()]
    if not runs:
        return None
    best = max if figure.metric in COUNTED_UP else min
    run, own = runs[0]
    fastest = best(run, key=lambda name: float(run[name]["median"]))

    def ratio(name: str, run: dict[str, dict[str, str]], row: dict[str, str]) -> float:
        pair = float(row["median"]), float(run[name]["median"])
        return pair[0] / pair[1] if figure.metric in COUNTED_UP else pair[1] / pair[0]

    def cell(name: str) -> str:
        number, shown = figure.number(float(run[name]["median"])), ratio(name, run, own)
        worst = min(ratio(name, *other) for other in runs if name in other[0] and other[1]["date"] == own["date"])
        said = f" ({worst:.2f}× in another run)" if worst < 0.9 * shown else ""
        return f"{STOCK[name]}, {number}: {shown:.2f}×{said}"

    return figure.what, figure.number(float(own["median"])), cell(figure.same_way), cell(fastest)


def _real(rows: list[dict[str, str]], part: str) -> str:
    """Return each real model's distance to fp32 over bf16's own, of the worst kind of text.

    part: "attention", in models in fp32; "in_bf16", in those in bf16; or "all", in fp32 with linear layers and caches.
    """
    said = []
    for model, (name, attention) in REAL.items():
        parts = {"attention": attention, "in_bf16": f"{DEFAULT_RECIPE}/bf16_rotated", "all": f"{DEFAULT_RECIPE}/all"}
        recipe = parts[part]
        own = [row for row in rows if row["case"].partition("/")[0] == model and row["recipe"] == recipe]
        newest = {row["case"]: float(row["median"]) for row in own}  # the last of a case stays
        if newest:
            said.append(f"{max(newest.values()):.2f} ({name})")
    return ", ".join(said)


def _quality(rows: list[dict[str, str]]) -> str:
    said = []
    for name in PICTURES:
        drawn = [row for row in rows if (row["case"], row["recipe"]) == (f"{name}/timestep", DEFAULT_RECIPE)]
        if drawn:
            most = max(int(row["batch"]) for row in drawn)
            newest = [row for row in drawn if int(row["batch"]) == most][-1]
            said.append(f"{float(newest['median']):.1f} dB ({name}, {most} pictures)")
    if not said:
        return ""
    attention, in_bf16, everything = (_real(rows, part) for part in ("attention", "in_bf16", "all"))
    words = "of INT8 attention alone: "
    words += (
        f"error of real models (KL or cosine distance to fp32) over bf16's: {attention} in fp32" if attention else ""
    )
    words += f", {in_bf16} inside bf16" if attention and in_bf16 else ""
    words += "; " if attention else ""
    words += f"PSNR to stock of small pipelines of our own: {', '.join(said)}; "
    words += f"the error with INT8 layers and caches: {everything}; " if everything else ""
    return f"{words}no large checkpoint is rated"
