"""Markdown tables made from the rows of kernels/benchmarks/results.csv."""

from __future__ import annotations

import re
from collections.abc import Iterable

from sage_kernels.facts.recipe import DEFAULT_RECIPE


LANGUAGE = {  # metric of a language model's row: heading
    "perplexity": "perplexity",
    "perplexity_ratio": "over stock",
    "identical_share": "identical texts",
    "same_tokens": "same tokens, median",
    "lead_at_difference": "lead of stock's token there, nats",
    "kv_bytes_per_token": "KV bytes a token",
}


NO_INT8 = "none: no call ran in INT8"  # in place of a ratio


def results_markdown(rows: Iterable[dict[str, str]], *, summary: bool = False) -> str:
    """Return all tables, from the newest row of every case, GPU, provider, recipe and metric.

    The newest row is the last in the file.
    summary: for readers of the documentation: one run of each pipeline, the default scaling, and lengths at which INT8
        pays.
    """
    rows = list(rows)
    quality = [row for row in rows if row["suite"] == "quality"]
    pictures = [row for row in quality if row["metric"] not in LANGUAGE]
    attention = [row for row in rows if row["suite"] == "attention_fwd"]
    whole = [row for row in rows if row["suite"] == "end_to_end"]
    return "\n\n".join(
        (
            "### Picture quality\n\n" + (_quality_summary(pictures) if summary else _quality(pictures)),
            "### Language models\n\n" + _language([row for row in quality if row["metric"] in LANGUAGE]),
            "### Attention forward\n\n" + _attention(attention, summary),
            *(() if summary else ("### How attention is called\n\n" + _calls(attention),)),
            *(() if summary else ("### What a fixed softmax reference costs\n\n" + _softmax(attention),)),
            "### Decoding over an INT8 cache\n\n" + _decoding([r for r in rows if r["suite"] == "decode"]),
            "### Whole models\n\n" + _whole_models([r for r in whole if not is_layer_row(r)], summary),
            *(() if summary else ("### Launch layers\n\n" + launch_layers(whole),)),
        )
    )


def _newest(rows: list[dict[str, str]], *names: str) -> dict[tuple[str, ...], dict[str, str]]:
    return {tuple(row[name] for name in names): row for row in rows}


QUALITY = {  # metric: heading, samples, digits to show
    "psnr_db": ("PSNR, dB", "pictures", 2),
    "ssim": ("SSIM", "pictures", 4),
    "attention_sqnr_db": ("SQNR of attention's output against exact attention, dB", "batches of pictures", 2),
}
TRANSFERRED = {"timestep_warm": "own table", "timestep_transferred": "transferred"}


def _quality(rows: list[dict[str, str]]) -> str:
    """Return a table per metric, a line per pipeline, recipe, device and number of pictures.

    Scales that were learnt with another scheduler have tables of their own.
    """
    metrics = [f"{metric}_{of}" for metric in QUALITY for of in ("mean", "worst")]
    rows = [row for row in rows if row["metric"] in metrics]
    if not rows:
        return "No rows yet: `sage-processors bench rules tiny_sd --csv kernels/benchmarks/results.csv`."
    # batch is the number of pictures: different numbers are different runs
    by_key = _newest(rows, "case", "recipe", "gpu", "batch", "metric")
    cells: dict[tuple, str] = {}
    ways: dict[str, str] = {}
    lines = set()
    for case, recipe, gpu, pictures, _ in by_key:
        pipeline, _, way = case.partition("/")
        is_transfer = ":" in pipeline  # {pipeline}_{scheduler}:{steps}
        if not is_transfer:
            ways[way] = way
        # stock attention has no recipe: it stands beside the default one
        line = (is_transfer, pipeline, recipe or DEFAULT_RECIPE, gpu, pictures)
        lines.add(line)
        for metric, (*_, digits) in QUALITY.items():
            found = [by_key.get((case, recipe, gpu, pictures, f"{metric}_{of}")) for of in ("mean", "worst")]
            if any(found):
                mean, worst = ("–" if row is None else f"{float(row['median']):.{digits}f}" for row in found)
                key = (metric, *line, way)
                cells[key] = f"{mean} ({worst})"
    in_order = sorted(lines, key=lambda line: (*line[:-1], int(line[-1] or 0)))

    def table(text, metric, transfers, columns):
        """Return [text, table] of the lines and columns with a number; [] without any."""
        own = {key[2:]: cell for key, cell in cells.items() if key[:2] == (metric, transfers)}
        used = {way: heading for way, heading in columns.items() if any(key[-1] == way for key in own)}
        body = [
            [*line, *(own.get((*line, way), "–") for way in used)]
            for is_transfer, *line in in_order
            if is_transfer == transfers and any((*line, way) in own for way in used)
        ]
        return [text, markdown_table(["pipeline", "recipe", "on", "pictures", *used.values()], body)] if body else []

    parts = []
    for metric, (heading, samples, _) in QUALITY.items():
        parts += table(f"{heading}: mean over the {samples}, in brackets the worst.", metric, False, ways)
    for metric in ("psnr_db", "attention_sqnr_db"):
        text = f"{QUALITY[metric][0]}, with a table of scales learnt with this scheduler, and with another one."
        parts += table(text, metric, True, TRANSFERRED)
    return "\n\n".join(parts)


SUMMARY_WAYS = ("dynamic", "timestep", "timestep_warm", "static", "sigma_ratio")


def _quality_summary(rows: list[dict[str, str]]) -> str:
    """Return a table with a line per pipeline: PSNR of its run with most pictures, and attention's SQNR.

    Runs on a CPU count only if there is none on a GPU.
    """
    rows = [row for row in rows if row["recipe"] == DEFAULT_RECIPE and ":" not in row["case"]]
    rows = [row for row in rows if row["gpu"] != "cpu"] or rows

    def best_runs(metric: str) -> dict[str, tuple[tuple[str, str], dict[str, str]]]:
        """Return {pipeline: ((GPU, pictures), {way: mean})}."""
        runs: dict[str, dict] = {}
        for row in rows:
            if row["metric"] == f"{metric}_mean":
                pipeline, _, way = row["case"].partition("/")
                run = runs.setdefault(pipeline, {}).setdefault((row["gpu"], row["batch"]), {})
                run[way] = f"{float(row['median']):.{QUALITY[metric][2]}f}"
        found = {}
        for pipeline, by_run in runs.items():
            complete = {key: ways for key, ways in by_run.items() if {"dynamic", "timestep"} <= ways.keys()}
            if complete:
                key = max(complete, key=lambda key: int(key[1]))
                found[pipeline] = key, complete[key]
        return found

    psnr, sqnr = best_runs("psnr_db"), best_runs("attention_sqnr_db")
    if not psnr:
        return _quality([])
    lines = []
    for pipeline in sorted(psnr):
        (gpu, pictures), ways = psnr[pipeline]
        attention = sqnr.get(pipeline, (None, {}))[1]
        cells = [*(ways.get(way, "–") for way in SUMMARY_WAYS), *(attention.get(w, "–") for w in SUMMARY_WAYS[:2])]
        lines.append([pipeline, gpu, pictures, *cells])
    header = ["pipeline", "on", "pictures", *SUMMARY_WAYS, *(f"attention: {way}" for way in SUMMARY_WAYS[:2])]
    note = "PSNR, dB, mean over the pictures; last, SQNR of attention's output against exact attention, dB."
    return f"{note}\n\n{markdown_table(header, lines)}"


def _language(rows: list[dict[str, str]]) -> str:
    if not rows:
        return "No rows yet: `sage-processors rate tiny_lm --csv kernels/benchmarks/results.csv`."
    by_key = _newest(rows, "case", "gpu", "recipe", "metric")
    lines = []
    for case, gpu, recipe in dict.fromkeys(key[:3] for key in by_key):
        found = [by_key.get((case, gpu, recipe, metric)) for metric in LANGUAGE]
        model, _, way = case.partition("/")
        lines.append([model, way, recipe or "stock", gpu, *("–" if row is None else row["median"] for row in found)])
    return markdown_table(["model", "case", "recipe", "on", *LANGUAGE.values()], lines)


# squares of some sizes, and all shapes of models
SUMMARY_SQUARES = re.compile(r"D(64|128)_N(4096|16384|65536)_(full|causal)$|(?!D\d)")


def _attention(rows: list[dict[str, str]], summary: bool = False) -> str:
    """Return two tables: speeds by shape and GPU; the largest error of each recipe and scaling."""
    from sage_kernels.results import is_crossover_row, is_scaling_row

    rows = [r for r in rows if r["metric"] == "throughput" and not is_crossover_row(r) and is_scaling_row(r)]
    if summary:  # the bare shape is the default, timestep scaling with a plan
        rows = [row for row in rows if "/" not in row["case"] and SUMMARY_SQUARES.match(row["case"])]
    cells: dict[tuple, str] = {}
    errors: dict[tuple, str] = {}
    shapes: dict[tuple, None] = {}  # in the order of their rows
    for (case, gpu, recipe), row in _newest(
        [row for row in rows if row["provider"] == "sage_kernels"], "case", "gpu", "recipe"
    ).items():
        shape, _, scaling = case.partition("/")
        way = (recipe, scaling or "timestep")
        ratio = f" ({row['ratio_vs_cudnn']}×)" if row["ratio_vs_cudnn"] else ""
        cells[shape, gpu, way] = row["median"] + ratio
        shapes.setdefault((shape, gpu), None)
        if row["rel_l2_error"]:
            errors[way] = max(errors.get(way, ""), row["rel_l2_error"], key=lambda x: float(x or 0))
    if not cells:
        return "No rows yet: `make bench` on a machine with a GPU."
    cudnn = _newest([row for row in rows if row["provider"] == "torch_sdpa_cudnn"], "case", "gpu")
    ways = sorted(dict.fromkeys(way for *_, way in cells), key=lambda way: (way[0], way[1] != "timestep", way[1]))
    lines = []
    for shape, gpu in shapes:
        other = cudnn.get((shape, gpu))
        lines.append([shape, gpu, other["median"] if other else "–", *(cells.get((shape, gpu, x), "–") for x in ways)])
    speed = markdown_table(["shape", "on", "cuDNN", *(f"{scaling}, {recipe}" for recipe, scaling in ways)], lines)
    worst = markdown_table(
        ["recipe", "scaling", "largest relative L2 error"],
        [[recipe, scaling, errors.get((recipe, scaling), "–")] for recipe, scaling in ways],
    )
    note = "TFLOPS, quantisation included, and in brackets the ratio to cuDNN of the same run."
    return "\n\n".join((note, speed, worst))


def _calls(rows: list[dict[str, str]]) -> str:
    """Return a table of attention called eagerly, from a CUDA graph and compiled.

    A line for each shape, GPU and recipe: speeds of one run, host times, and numbers of launches.
    """
    from sage_kernels.results import CALLS

    rows = [row for row in rows if row["provider"] == "sage_kernels"]
    by_key = _newest(rows, "case", "gpu", "recipe", "metric", "commit")
    runs = _newest([r for r in rows if r["case"].endswith(f"/{CALLS[0]}")], "case", "gpu", "recipe")
    lines = []
    for (case, gpu, recipe), row in runs.items():
        shape = case.partition("/")[0]

        def value(way, metric, shape=shape, gpu=gpu, recipe=recipe, commit=row["commit"]):
            found = by_key.get((f"{shape}/{way}", gpu, recipe, metric, commit))
            if found is None:
                return "–"
            ratio = found["ratio_vs_cudnn"]
            return found["median"] + (f" ({ratio}×)" if ratio and metric == "throughput" else "")

        numbers = [value(way, metric) for metric in ("throughput", "host_time", "launches") for way in CALLS]
        lines.append([shape, recipe, gpu, *numbers])
    if not lines:
        return "No rows yet: `python kernels/benchmarks/bench_calls.py` on a machine with a GPU."
    note = (
        "TFLOPS, quantisation included, and in brackets the ratio to cuDNN called in the same way; microseconds until "
        "a call returns; kernels that a call is, its quantisation included."
    )
    names = ["as called", "CUDA graph", "compiled"]
    header = ["shape", "recipe", "on", *names, f"µs: {names[0]}", *names[1:], f"kernels: {names[0]}", *names[1:]]
    return f"{note}\n\n{markdown_table(header, lines)}"


def _softmax(rows: list[dict[str, str]]) -> str:
    """Return a table of the softmax guard's cost, by shape, GPU and recipe.

    Speeds with the guard, without it, with a running max, and with all rows done again.
    """
    from sage_kernels.results import SOFTMAX

    by_key = _newest(rows, "case", "gpu", "recipe", "metric")
    lines = []
    for case, gpu, recipe, metric in by_key:
        shape, _, what = case.partition("/")
        if (what, metric) != (SOFTMAX[0], "throughput"):
            continue
        found = {what: by_key.get((f"{shape}/{what}", gpu, recipe, metric)) for what in SOFTMAX}
        speeds = ["–" if x is None else f"{x['median']} ({x['ratio_vs_cudnn']}×)" for x in found.values()]
        guarded, unguarded = (found[what] for what in SOFTMAX[:2])
        cost = "–"
        if guarded is not None and unguarded is not None:
            cost = f"{1 - float(guarded['median']) / float(unguarded['median']):.1%}"
        again = by_key.get((case, gpu, recipe, "redone_share"))
        lines.append([shape, recipe, gpu, *speeds, cost, "–" if again is None else f"{float(again['median']):.2%}"])
    if not lines:
        return "No rows yet: see kernels/NOTES.md."
    note = "TFLOPS from CUDA graphs, with a plan, and in brackets the ratio to cuDNN of the same run."
    header = ["shape", "recipe", "on", "as it ships", "no guard", "running max", "all rows done again"]
    return f"{note}\n\n{markdown_table([*header, 'the guard costs', 'rows done again, as it ships'], lines)}"


def _decoding(rows: list[dict[str, str]]) -> str:
    """Return a table of decode attention over the INT8 cache, beside the fastest over a 16-bit cache."""
    rows = [row for row in rows if row["metric"] == "time"]
    ours = _newest([row for row in rows if row["provider"] == "sage_kernels"], "case", "gpu")
    if not ours:
        return "No rows yet: `python kernels/benchmarks/bench_decode.py` on a machine with a GPU."
    lines = []
    for (case, gpu), row in ours.items():
        others = _newest([x for x in rows if x["provider"] != "sage_kernels"], "case", "gpu", "provider", "commit")
        plain, _, how = case.partition("/")
        found = [
            x
            for (name, on, _, commit), x in others.items()
            if (on, commit) == (gpu, row["commit"]) and name in (case, f"{plain}/packed" + (f"/{how}" if how else ""))
        ]
        if not found:
            continue
        best = min(found, key=lambda x: float(x["median"]))
        ratio = f"{float(best['median']) / float(row['median']):.2f}"
        lines.append([plain, how or "as called", gpu, row["median"], best["median"], best["provider"], ratio])
    header = ["case", "how", "on", "ours, ms", "best 16-bit, ms", "which", "16-bit / ours"]
    return markdown_table(header, lines)


def _whole_models(rows: list[dict[str, str]], summary: bool = False) -> str:
    """Return a table of forwards of whole models.

    summary: of several ways to run a model with one recipe only the usual one, or the one that was timed last.
    """
    if not rows:
        return "No rows yet: `python kernels/benchmarks/bench_end_to_end.py` on a machine with a GPU."
    by_key = _newest(rows, "case", "gpu", "provider", "recipe", "metric")
    by_run = _newest(rows, "case", "gpu", "provider", "recipe", "metric", "commit")
    timed = [row for row in rows if (row["provider"], row["metric"]) == ("sage_kernels", "time")]
    timed.sort(key=lambda row: "/" not in row["case"])  # stable; the usual ones go last, so they win below
    shown = {(row["case"].partition("/")[0], row["gpu"], row["recipe"]): row["case"] for row in timed}
    from sage_kernels.results import is_without_int8

    lines = []
    for case, gpu, _, recipe, metric in by_key:
        row = by_key.get((case, gpu, "sage_kernels", recipe, metric))
        if row is None or metric != "time":
            continue
        if summary and shown[case.partition("/")[0], gpu, recipe] != case:
            continue

        place = next(i for i, other in enumerate(rows) if other is row)
        before = _newest(rows[:place], "case", "gpu", "provider", "recipe", "metric", "commit")

        def value(provider, metric="time", recipe="", case=case, gpu=gpu, commit=row["commit"], before=before):
            key = (case, gpu, provider, recipe, metric)
            # of the same run if it was measured there: the others' rows come before ours
            same_run = by_run if provider == "sage_kernels" else before
            found = same_run.get((*key, commit), by_key.get(key))
            return "–" if found is None else _with_spread(found)

        stock = [value(name) for name in ("torch_sdpa_cudnn", "torch_sdpa_flash", "attention_removed")]
        peaks = [value("torch_sdpa_cudnn", "peak_memory"), value("sage_kernels", "peak_memory", recipe)]
        error = value("sage_kernels", "rel_l1", recipe)
        # int8_calls of the same run only: another run may have run in INT8
        calls = by_run.get((case, gpu, "sage_kernels", recipe, "int8_calls", row["commit"]))
        without = is_without_int8(row, None if calls is None else calls["median"])
        ratio = NO_INT8 if without else row["ratio_vs_cudnn"] or "–"
        lines.append([case, recipe, gpu, _with_spread(row), *stock, ratio, *peaks, error])
    header = ["model", "recipe", "on", "ours, ms", "cuDNN, ms", "flash, ms", "attention removed, ms"]
    header += ["cuDNN / ours, same run", "peak GiB, cuDNN", "peak GiB, ours", "relative L1"]
    note = "In brackets, where they lie more than a quarter apart: the 20th and 80th percentile, of a busy host."
    return f"{note}\n\n{markdown_table(header, lines)}"


def _with_spread(row: dict[str, str]) -> str:
    """Return a row's median, with the spread of its values if that is large."""
    low, high = (float(row.get(name) or 0) for name in ("p20", "p80"))
    return row["median"] + (f" ({low:.1f} – {high:.1f})" if high > 1.25 * low else "")


LAYERS = re.compile(r"(?P<model>.+)/(?P<variant>everything|without_\w+)$")  # rows of bench_launch_layers.py


def is_layer_row(row: dict[str, str]) -> bool:
    """Return True for a row that measures a layer of the launch path, not a model's speed."""
    return LAYERS.match(row["case"]) is not None


def launch_layers(rows: list[dict[str, str]]) -> str:
    """Return a table of models with all layers of the launch path and without each, a line per run."""
    runs: dict[tuple[str, ...], list[dict[str, str]]] = {}
    for row in rows:
        found_in = LAYERS.match(row["case"])
        if found_in is None:
            continue
        model, variant = found_in.group("model", "variant")
        of_model = runs.setdefault((model, row["commit"], row["gpu"], row["unit"]), [])
        if not of_model or variant in of_model[-1]:  # a variant that comes again begins another run
            of_model.append({})
        of_model[-1][variant] = f"{float(row['median']):.1f} ({float(row['p20']):.1f} – {float(row['p80']):.1f})"
    if not runs:
        return "No rows yet: `python kernels/benchmarks/bench_launch_layers.py` on a machine with a GPU."
    variants = list(dict.fromkeys(variant for found in runs.values() for run in found for variant in run))
    lines = [
        [model, commit, gpu, "tokens/s" if unit == "1/s" else unit, *(run.get(x, "–") for x in variants)]
        for (model, commit, gpu, unit), found in runs.items()
        for run in found
    ]
    note = "Eager calls in turns, median of the turns, in brackets the 20th and 80th percentile."
    header = ["model", "commit", "on", "unit", *(x.replace("_", " ") for x in variants)]
    return f"{note}\n\n{markdown_table(header, lines)}"


def markdown_table(header: list[str], lines: list[list[str]]) -> str:
    """Return a Markdown table of texts."""
    rows = [header, ["---"] * len(header), *lines]
    return "\n".join("| " + " | ".join(row) + " |" for row in rows)
