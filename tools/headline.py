"""The README's table of figures: a few rows of results.csv, each with its reference."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import NamedTuple

from sage_kernels.facts.recipe import DEFAULT_RECIPE


HEADER = ("what", "INT8 attention", "measured against", "ratio")
CUDNN, OURS = "torch_sdpa_cudnn", "sage_kernels"


class Figure(NamedTuple):
    """One line of the table.

    Attributes:
        what: name of the measurement, in words.
        suite, case, metric, recipe: of the row in results.csv; the newest counts.
        against: name of the reference, in words; {} stands for its number.
        number: formats both numbers.
        reference: (case, provider) of the reference's row; None: there is no other row to compare with.
        anywhere: True: from the newest run on any GPU; False: from the newest run on the table's GPU.
    """

    what: str
    suite: str
    case: str
    metric: str
    against: str
    number: Callable[[float], str]
    reference: tuple[str, str] | None
    recipe: str = DEFAULT_RECIPE
    anywhere: bool = False


def _milliseconds(value: float) -> str:
    return f"{value:.0f} ms" if value >= 10 else f"{value:.2f} ms"


FIGURES = (
    Figure(
        "attention alone, 16,384 tokens of 128 channels", "attention_fwd", "D128_N16384_full", "throughput",
        "cuDNN in bf16, {}", "{:.0f} TFLOPS".format, ("D128_N16384_full", CUDNN),
    ),
    Figure(
        "Wan 2.1 1.3B, 480p, 81 frames, a forward", "end_to_end", "wan21_1_3b_480p81", "time",
        "cuDNN, {}", _milliseconds, ("wan21_1_3b_480p81", CUDNN),
    ),
    Figure(
        "the same, compiled, P·V in FP8, INT8 linear layers", "end_to_end", "wan21_1_3b_480p81/compiled", "time",
        "cuDNN, {}", _milliseconds, ("wan21_1_3b_480p81/compiled", CUDNN),
        "qk_int8_pv_fp8+linears_int8", True,
    ),
    Figure(
        "FLUX.1 at 2048², a forward", "end_to_end", "flux_2048", "time",
        "cuDNN, {}", _milliseconds, ("flux_2048", CUDNN),
    ),
    Figure(
        "the same, compiled, INT8 linear layers", "end_to_end", "flux_2048/compiled", "time",
        "cuDNN, {}", _milliseconds, ("flux_2048/compiled", CUDNN),
        f"{DEFAULT_RECIPE}+linears_int8", True,
    ),
    Figure(
        "FLUX.1 at 1024², a forward", "end_to_end", "flux_1024", "time",
        "cuDNN, {}", _milliseconds, ("flux_1024", CUDNN),
    ),
    Figure(
        "the same, INT8 linear layers", "end_to_end", "flux_1024", "time",
        "cuDNN, {}", _milliseconds, ("flux_1024", CUDNN), f"{DEFAULT_RECIPE}+linears_int8", True,
    ),
    Figure(
        "the same, compiled, CUDA graphs, INT8 linear layers", "end_to_end", "flux_1024/compiled_graphs", "time",
        "cuDNN, {}", _milliseconds, ("flux_1024/compiled_graphs", CUDNN),
        f"{DEFAULT_RECIPE}+linears_int8", True,
    ),
    Figure(
        "the same, `graphs=\"auto\"`, INT8 linear layers", "end_to_end", "flux_1024/captured/together4", "time",
        "cuDNN from a CUDA graph, {}", _milliseconds, ("flux_1024/captured/together4", CUDNN),
        f"{DEFAULT_RECIPE}+linears_int8", True,
    ),
    Figure(
        "INT8 KV cache: attention of a token, 8 × 131,072 tokens", "decode", "llama8b_decode_131072_b8", "time",
        "cuDNN over a bf16 cache, {}", _milliseconds, ("llama8b_decode_131072_b8", CUDNN), "kv_int8",
    ),
    Figure(
        "INT8 KV cache: memory, a token and layer", "decode", "llama8b_decode_131072_b8", "kv_bytes_per_token",
        "a bf16 cache, {}", "{:,.0f} bytes".format, ("llama8b_decode_131072_b8", CUDNN), "kv_int8",
    ),
    Figure(
        "PSNR, small pipelines of our own: `tiny_sd`", "quality", "tiny_sd/timestep", "psnr_db_mean",
        "stock attention in bf16, same seeds", "{:.1f} dB".format, None,
    ),
    Figure(
        "PSNR, small pipelines of our own: `tiny_flux`", "quality", "tiny_flux/timestep", "psnr_db_mean",
        "stock attention in bf16, same seeds", "{:.1f} dB".format, None,
    ),
)  # fmt: skip


def figures_markdown(rows: Iterable[dict[str, str]]) -> str:
    """Return the table in Markdown, from the newest row of each figure.

    The table's GPU is the one with most figures. Figures with `anywhere` may be of another GPU, and are marked then.
    Figures without a row are left out.
    """
    rows = [row for row in rows if row["gpu"] != "cpu"]
    by_gpu: dict[str, list[dict[str, str]]] = {}
    for row in rows:
        by_gpu.setdefault(row["gpu"], []).append(row)
    found = {gpu: [_line(figure, own) for figure in FIGURES] for gpu, own in by_gpu.items()}
    main = max(found, key=lambda gpu: len(list(filter(None, found[gpu]))), default="")
    lines, marks = [], {main: ""}
    for place, figure in enumerate(FIGURES):
        newest = _ours(figure, rows)[-1:] if figure.anywhere else []
        gpu = newest[0]["gpu"] if newest else main
        line = found[gpu][place] if gpu else None
        if line is not None:
            what, *numbers = line
            lines.append((what + marks.setdefault(gpu, "†" * len(marks)), *numbers))
    if not lines:
        return "No rows yet."
    table = [HEADER, ("---",) * len(HEADER), *lines]
    text = "\n".join("| " + " | ".join(line) + " |" for line in table)
    others = "".join(f"; {mark} {gpu}" for gpu, mark in marks.items() if mark)
    return f"{text}\n\nMeasured on: {main}{others}."


def _ours(figure: Figure, rows: list[dict[str, str]]) -> list[dict[str, str]]:
    wanted = (figure.suite, figure.metric, figure.case, OURS, figure.recipe)
    return [r for r in rows if (r["suite"], r["metric"], r["case"], r["provider"], r["recipe"]) == wanted]


def _line(figure: Figure, rows: list[dict[str, str]]) -> tuple[str, ...] | None:
    case = [row for row in rows if (row["suite"], row["metric"]) == (figure.suite, figure.metric)]
    ours = _ours(figure, rows)
    if not ours:
        return None
    if figure.reference is None:
        most = max(ours, key=lambda row: int(row["batch"]))  # the largest number of pictures
        newest = [row for row in ours if row["batch"] == most["batch"]][-1]
        against = f"{figure.against}, mean of {newest['batch']} pictures"
        return figure.what, figure.number(float(newest["median"])), against, "–"
    newest = ours[-1]
    others = [row for row in case if (row["case"], row["provider"]) == figure.reference]
    # the reference of the same run: a commit may have several runs, and the reference's rows come before ours
    place = next(i for i, row in enumerate(rows) if row is newest)
    before = {id(row) for row in rows[:place]}
    same_run = [row for row in others if row["commit"] == newest["commit"] and id(row) in before]
    if not same_run:
        return None
    own, other = float(newest["median"]), float(same_run[-1]["median"])
    ratio = own / other if figure.metric == "throughput" else other / own
    return figure.what, figure.number(own), figure.against.format(figure.number(other)), f"{ratio:.2f}×"
