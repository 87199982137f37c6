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
ATTENTION_IN_16_BIT = "attention in 16 bit"  # beside a ratio that linear layers made


def results_markdown(rows: Iterable[dict[str, str]]) -> str:
    """Return the tables of docs/results.md.

    They show the newest row, the last in the file, of every case, GPU, provider, recipe and
    metric. One run of each pipeline, the default scaling, lengths at which INT8 pays.
    """
    suites: dict[str, list[dict[str, str]]] = {}
    for row in rows:
        is_text = row["suite"] == "quality" and row["metric"] in LANGUAGE
        suites.setdefault("language" if is_text else row["suite"], []).append(row)
    whole = [row for row in suites.get("end_to_end", []) if not is_layer_row(row)]
    tables = {
        "Picture quality": _quality(suites.get("quality", [])),
        "Language models": _language(suites.get("language", [])),
        "Attention forward": _attention(suites.get("attention_fwd", [])),
        "Decoding over an INT8 cache": _decoding(suites.get("decode", [])),
        "Whole models": _whole_models(whole),
    }
    return "\n\n".join(f"### {title}\n\n{table}" for title, table in tables.items())


def _newest(rows: list[dict[str, str]], *names: str) -> dict[tuple[str, ...], dict[str, str]]:
    return {tuple(row[name] for name in names): row for row in rows}


SUMMARY_WAYS = ("dynamic", "timestep", "timestep_warm", "static", "sigma_ratio")


def _quality(rows: list[dict[str, str]]) -> str:
    """Return a table with a line per pipeline: PSNR of its run with most pictures, and attention's SQNR.

    Runs on a CPU count only if there is none on a GPU.
    """
    rows = [row for row in rows if row["recipe"] == DEFAULT_RECIPE and ":" not in row["case"]]
    rows = [row for row in rows if row["gpu"] != "cpu"] or rows

    def runs_of(metric: str) -> dict[str, dict[tuple[str, str, str], dict[str, str]]]:
        """Return {pipeline: {(GPU, pictures, commit): {way: mean}}}, in the order of the rows."""
        runs: dict[str, dict] = {}
        for row in rows:
            if row["metric"] == f"{metric}_mean":
                pipeline, _, way = row["case"].partition("/")
                run = runs.setdefault(pipeline, {}).setdefault((row["gpu"], row["batch"], row["commit"]), {})
                run[way] = f"{float(row['median']):.2f}"
        return runs

    psnr, sqnr = {}, runs_of("attention_sqnr_db")
    for pipeline, by_run in runs_of("psnr_db").items():
        complete = [key for key, ways in by_run.items() if {"dynamic", "timestep"} <= ways.keys()]
        if complete:  # the newest of those with most pictures
            key = max(reversed(complete), key=lambda key: int(key[1]))
            psnr[pipeline] = key, by_run[key]
    if not psnr:
        return "No rows yet: `python kernels/benchmarks/bench_rules.py tiny_sd`."
    lines = []
    for pipeline in sorted(psnr):
        (gpu, pictures, commit), ways = psnr[pipeline]
        attention = next((x for key, x in sqnr.get(pipeline, {}).items() if key[::2] == (gpu, commit)), {})
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


def _attention(rows: list[dict[str, str]]) -> str:
    """Return tables of speed by shape and GPU, and of the largest error of each recipe.

    A case without a suffix has planned scales.
    """
    rows = [row for row in rows if row["metric"] == "throughput" and "/" not in row["case"]]
    rows = [row for row in rows if SUMMARY_SQUARES.match(row["case"])]
    by_key = _newest(rows, "case", "gpu", "provider", "recipe")
    ours = [key for key in by_key if key[2] == "sage_kernels"]
    if not ours:
        return "No rows yet: `make bench` on a machine with a GPU."
    recipes = sorted({recipe for *_, recipe in ours})
    lines = []
    for case, gpu in dict.fromkeys(key[:2] for key in ours):
        other, cells = by_key.get((case, gpu, "torch_sdpa_cudnn", "")), []
        for recipe in recipes:
            row = by_key.get((case, gpu, "sage_kernels", recipe), {"median": "–", "ratio_vs_cudnn": ""})
            cells.append(row["median"] + (f" ({row['ratio_vs_cudnn']}×)" if row["ratio_vs_cudnn"] else ""))
        lines.append([case, gpu, other["median"] if other else "–", *cells])
    errors = {x: [e for key in ours if key[3] == x and (e := by_key[key]["rel_l2_error"])] for x in recipes}
    worst = [[recipe, "timestep", max(errors[recipe], key=float, default="–")] for recipe in recipes]
    note = "TFLOPS, quantisation included, and in brackets the ratio to cuDNN of the same run."
    speed = markdown_table(["shape", "on", "cuDNN", *(f"timestep, {recipe}" for recipe in recipes)], lines)
    return "\n\n".join((note, speed, markdown_table(["recipe", "scaling", "largest relative L2 error"], worst)))


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


def _whole_models(rows: list[dict[str, str]]) -> str:
    """Return a table of forwards of whole models.

    Of several ways to run a model with one recipe it has the usual one, or the one that was timed last; with skipped
    tiles likewise.
    """
    if not rows:
        return "No rows yet: `python kernels/benchmarks/bench_end_to_end.py` on a machine with a GPU."
    by_key = _newest(rows, "case", "gpu", "provider", "recipe", "metric")
    by_run = _newest(rows, "case", "gpu", "provider", "recipe", "metric", "commit")
    timed = [row for row in rows if (row["provider"], row["metric"]) == ("sage_kernels", "time")]
    timed.sort(key=lambda row: "/" not in row["case"])  # stable; the usual ones go last, so they win below
    shown = {(_model_of(row["case"]), row["gpu"], row["recipe"]): row["case"] for row in timed}
    from sage_kernels.results import is_without_int8

    lines = []
    for case, gpu, _, recipe, metric in by_key:
        row = by_key.get((case, gpu, "sage_kernels", recipe, metric))
        if row is None or metric != "time" or shown[_model_of(case), gpu, recipe] != case:
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
        ratio = row["ratio_vs_cudnn"] or "–"
        if without:
            same_run = before.get((case, gpu, "torch_sdpa_cudnn", "", "time", row["commit"]))
            linears_ran = "+linears" in recipe and error not in ("–", "0.00000") and same_run is not None
            if linears_ran:
                ratio = f"{float(same_run['median']) / float(row['median']):.3f}, {ATTENTION_IN_16_BIT}"
            else:
                ratio = NO_INT8
        lines.append([case, recipe, f"{gpu}, {row['commit']}", _with_spread(row), *stock, ratio, *peaks, error])
    header = ["model", "recipe", "on, commit", "ours, ms", "cuDNN, ms", "flash, ms", "attention removed, ms"]
    header += ["cuDNN / ours, same run", "peak GiB, cuDNN", "peak GiB, ours", "relative L1"]
    note = "In brackets, where they lie more than a quarter apart: the 20th and 80th percentile, of a busy host. Only "
    note += "lines of one commit compare: those of others are of another day, kernels and host."
    return f"{note}\n\n{markdown_table(header, lines)}"


def _model_of(case: str) -> tuple[str, bool]:
    """Return the model of a case, and True if it leaves out tiles."""
    model, *how = case.split("/")
    return model, any(part.startswith("skip") for part in how)


def _with_spread(row: dict[str, str]) -> str:
    """Return a row's median, with the spread of its values if that is large."""
    low, high = (float(row.get(name) or 0) for name in ("p20", "p80"))
    return row["median"] + (f" ({low:.1f} – {high:.1f})" if high > 1.25 * low else "")


LAYERS = re.compile(r"(?P<model>.+)/(?P<variant>everything|without_\w+)$")  # in kernels/NOTES.md


def is_layer_row(row: dict[str, str]) -> bool:
    """Return True for a row that measures a layer of the launch path, not a model's speed."""
    return LAYERS.match(row["case"]) is not None


def markdown_table(header: list[str], lines: list[list[str]]) -> str:
    """Return a Markdown table of texts."""
    rows = [header, ["---"] * len(header), *lines]
    return "\n".join("| " + " | ".join(row) + " |" for row in rows)
