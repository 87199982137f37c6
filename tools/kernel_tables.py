"""Markdown tables of 8-bit linear layers, of errors by recipe and mixed precision, and of first calls."""

from __future__ import annotations

from sage_kernels import RECIPES
from sage_kernels.facts.recipe import MIXED_RECIPE

from .headline import STOCK
from .tables import markdown_table


MIXED_COLUMNS = (
    *((base, "block_mean") for base in ("int8", "int4", "mxfp4", "nvfp4")), ("nvfp4", "thrift"),
)  # fmt: skip
MIXED_TOKENS = "4096"  # bench_mixed.py's default
THRIFT = "P·V too, K as it is"
ERROR_COLUMNS = (
    ("int_flash/normal/sqrt", "rel_l1", "1024"), ("int_flash/normal/sqrt", "rel_l1", "16384"),
    ("int_flash/biased/sqrt", "centred_l1", "1024"),
)  # fmt: skip
FORMATS = ("linears_int8", "linears_fp8", "linears_int8_weights")


def linears(rows: list[dict[str, str]]) -> str:
    """Return a table of the newest run of 8-bit linear layers: a line per shape, speeds relative to bf16."""
    rows = [row for row in rows if row["suite"] == "linear"]
    if not rows:
        return "No rows yet: `kernels/benchmarks/bench_linear.py` on a GPU."
    rows = [row for row in rows if row["commit"] == rows[-1]["commit"]]
    peers = list(dict.fromkeys(row["provider"] for row in rows))
    columns = [("sage_kernels", recipe) for recipe in FORMATS if any(row["recipe"] == recipe for row in rows)]
    columns += [(name, "") for name in peers if name not in ("torch_bf16", "sage_kernels")]
    lines = []
    for case in dict.fromkeys(row["case"] for row in rows):
        run = {(row["provider"], row["recipe"]): row for row in rows if row["case"] == case}
        base = run["torch_bf16", ""]
        cells = [f"{run[x]['ratio_vs_cudnn']} ({run[x]['rel_l2_error']})" if x in run else "–" for x in columns]
        lines.append([case, base["batch"], base["seq_k"], base["seq_q"], base["median"], *cells])
    said = f"GPU: {rows[-1]['gpu']}, commit {rows[-1]['commit']}; TFLOPS of bf16, then × bf16 (relative L2)."
    header = ["shape", "rows", "in", "out", "bf16", *(recipe or provider for provider, recipe in columns)]
    return f"{said}\n\n{markdown_table(header, lines)}"


def linear_rivals(rows: list[dict[str, str]]) -> str:
    """Return a table of models run with other packages' 8-bit linear layers, a line per model.

    Columns: a stock forward; speed and error of ours (with our attention) and of each other package.
    """
    rows = [row for row in rows if row["suite"] == "end_to_end" and row["metric"] in ("time", "rel_l1")]
    usual = ("torch_sdpa_cudnn", "torch_sdpa_flash", "sage_kernels", "attention_removed")
    runs = {(row["case"], row["gpu"]): row["commit"] for row in rows if row["provider"] not in usual}  # the newest
    if not runs:
        return "No rows yet: `kernels/benchmarks/bench_end_to_end.py --rival torchao_int8` on a GPU."
    found = []
    for (case, gpu), commit in runs.items():
        of_run = [row for row in rows if (row["case"], row["gpu"], row["commit"]) == (case, gpu, commit)]
        values = {(row["provider"], row["recipe"], row["metric"]): row["median"] for row in of_run}
        found.append((case, gpu, commit, values))
    keys = dict.fromkeys((provider, recipe) for *_, values in found for provider, recipe, _ in values)
    columns = [key for key in keys if key[0] == "sage_kernels"] + [key for key in keys if key[0] not in usual]
    lines = []
    for case, gpu, commit, values in found:
        base, cells = values["torch_sdpa_cudnn", "", "time"], []
        for key in columns:
            time, error = (values.get((*key, metric)) for metric in ("time", "rel_l1"))
            cells.append("–" if time is None or error is None else f"{float(base) / float(time):.3f} ({error})")
        lines.append([case, gpu, commit, base, *cells])
    header = ["model", "GPU", "commit", "stock, ms", *(recipe or provider for provider, recipe in columns)]
    return f"× stock, a forward (relative L1 of its output):\n\n{markdown_table(header, lines)}"


def many_gpus(rows: list[dict[str, str]]) -> str:
    """Return a table of forwards split over GPUs: the newest run of each model, number and kind.

    A run without the forward on one GPU has no figures.
    """
    rows = [row for row in rows if row["suite"] == "parallel" and row["metric"] == "time"]
    alone = {
        (row["case"].removesuffix("/x1"), row["recipe"], row["commit"]): row
        for row in rows
        if row["case"][-3:] == "/x1"
    }
    found = {(*row["case"].rsplit("/", 1), row["recipe"]): row for row in rows}  # the newest
    lines = []
    for model, place in dict.fromkeys(key[:2] for key in found):
        gpus, _, kind = place.removeprefix("x").partition("_")
        cells = []
        for recipe in ("", "qk_int8_pv_bf16", "preset_fast"):
            row = found.get((model, place, recipe))
            one = None if row is None else alone.get((model, recipe, row["commit"]))
            if row is None or one is None:
                cells.append("–")
                continue
            scaling = float(one["median"]) / float(row["median"]) / int(gpus)
            ratio = f", {row['ratio_vs_cudnn']} ×" if recipe else ""
            cells.append(f"{float(row['median']):.1f}{ratio}" + f", {scaling:.2f}" * (gpus != "1"))
        of = next(row for key, row in found.items() if key[:2] == (model, place))
        lines.append([model, gpus, kind or "–", *cells, of["gpu"], of["commit"]])
    header = ["model", "GPUs", "kind", "stock cuDNN", "INT8 attention", 'preset "fast"', "GPU", "commit"]
    return markdown_table(header, lines) if lines else "No rows yet: `kernels/benchmarks/bench_parallel.py` on GPUs."


def models(rows: list[dict[str, str]]) -> str:
    """Return a table of each denoiser's newest run: preset "fast", eager stock, and the fastest stock."""
    rows = [row for row in rows if row["suite"] == "models"]
    commits = {(row["case"], row["gpu"]): row["commit"] for row in rows if row["recipe"] == "preset_fast"}
    lines = []
    for (case, gpu), commit in commits.items():
        run = [r for r in rows if (r["case"], r["gpu"], r["commit"]) == (case, gpu, commit)]
        times = {r["recipe"] or r["provider"]: float(r["median"]) for r in run if r["metric"] == "time"}
        errors = {r["recipe"]: r["median"] for r in run if r["metric"] == "rel_l1"}
        eager = next(times[name] for name in ("torch_sdpa_cudnn", "torch_sdpa") if name in times)
        ours, fastest = times.pop("preset_fast"), min(value for name, value in times.items() if name in STOCK)
        shares = [f"{ours / time:.2f}" for time in (eager, fastest)]
        others = "; ".join(f"{name} {value:.1f}" for name, value in times.items() if name != "torch_sdpa_cudnn")
        numbers = (f"{x:.1f}" for x in (eager, fastest, ours))
        lines.append([case, gpu, commit, *numbers, *shares, errors["preset_fast"], others or "–"])
    header = ["model", "GPU", "commit", "eager stock, ms", "fastest stock, ms", '"fast", ms']
    header += ["share of eager stock", "share of the fastest", "relative L1", "others, ms"]
    return markdown_table(header, lines) if lines else "No rows yet: `kernels/benchmarks/bench_models.py` on a GPU."


def mixed(rows: list[dict[str, str]]) -> str:
    """Return tables of the newest run of bench_mixed.py at its default length.

    A line for each family of inputs: relative L1 without and with 5 % of the blocks in 16 bit, for each base format.
    Then the same by share of the blocks, and by the way of choosing blocks.
    """
    rows = [row for row in rows if row["suite"] == "attention_error" and row["recipe"] == MIXED_RECIPE]
    rows = [row for row in rows if row["seq_k"] == MIXED_TOKENS and not row["case"].endswith("_rows")]
    if not rows:
        return "No rows yet: `kernels/benchmarks/bench_mixed.py`."
    rows = [row for row in rows if row["commit"] == rows[-1]["commit"]]
    errors = {tuple(row["case"].split("/")[1:]): float(row["median"]) for row in rows}
    lines = []
    for family in dict.fromkeys(family for family, *_ in errors):
        cells = []
        for base, selector in MIXED_COLUMNS:
            without, with_ = (errors[family, base, selector, budget] for budget in ("0", "0.05"))
            cells.append(f"{100 * without:.2f} → {100 * with_:.2f} ({100 * (1 - with_ / without):.0f})")
        lines.append([family, *cells])
    budgets = {b: e for (f, base, s, b), e in errors.items() if (f, base, s) == ("clustered", "nvfp4", "block_mean")}
    recovered = [f"{100 * (1 - error / budgets['0']):.0f}" for budget, error in budgets.items() if budget != "0"]
    shares = [f"{100 * float(budget):g} %" for budget in budgets if budget != "0"]
    kinds = ("block_mean", "quest", "local")
    chosen = [f"{100 * errors['clustered', 'nvfp4', kind, '0.05']:.2f}" for kind in kinds]
    first = rows[0]
    said = f"{first['gpu']}, commit {first['commit']}; {first['seq_q']} tokens, {first['head_dim']} channels. "
    said += "Relative L1 in %, without → with 5 % of the blocks in 16 bit (share of the error that this took away, %)."
    header = ["inputs", *(f"{base}, {THRIFT}" if selector == "thrift" else base for base, selector in MIXED_COLUMNS)]
    return "\n\n".join(
        [
            said,
            markdown_table(header, lines),
            "NVFP4 on clustered inputs: share of the error taken away (%) by budget, relative L1 (%) by selector.",
            markdown_table([*shares, *kinds], [[*recovered, *chosen]]),
        ]
    )


def recipe_errors(rows: list[dict[str, str]]) -> str:
    """Return a table of the newest run of bench_seeds.py: errors by recipe, on normal and biased inputs."""
    rows = [row for row in rows if row["case"].startswith("int_flash/")]
    if not rows:
        return "No rows yet: `kernels/benchmarks/bench_seeds.py`."
    rows = [row for row in rows if row["commit"] == rows[-1]["commit"] and row["head_dim"] == "128"]
    errors = {(row["recipe"], row["case"], row["metric"], row["seq_k"]): row["median"] for row in rows}
    lines = []
    for recipe in RECIPES:
        found = [float(errors[recipe, case, metric, keys]) for case, metric, keys in ERROR_COLUMNS]
        lines.append([f"`{recipe}`", *(f"{100 * error:.2f}" for error in found)])
    header = ["recipe", "N(0, 1), 1,024 keys", "16,384", "biased, 1,024 keys"]
    said = (
        f"{rows[-1]['gpu']}, commit {rows[-1]['commit']}; fp16, 128 channels, a scale a token. Relative L1 in %; of "
    )
    said += "biased inputs, relative to what moves about V's mean."
    return f"{said}\n\n{markdown_table(header, lines)}"


def cold_start(rows: list[dict[str, str]]) -> str:
    """Return a table of the seconds of first forwards without a kernel cache, by case and recipe."""
    rows = [row for row in rows if row["suite"] == "cold_start"]
    newest = {(row["case"], row["provider"], row["recipe"], row["metric"]): row for row in rows}
    if not newest:
        return "No rows yet: `kernels/benchmarks/bench_cold_start.py` on a GPU."
    metrics, lines = ("first_forward", "worst_later_forward", "warm_up"), []
    for key in dict.fromkeys(key[:3] for key in newest):
        found = [newest.get((*key, metric)) for metric in metrics]
        where = [found[0][name] if found[0] else "" for name in ("gpu", "commit")]
        lines.append([*key, *where, *(row["median"] if row else "–" for row in found)])
    header = ["case", "provider", "recipe", "GPU", "commit", "first forward, s", "worst later one, s", "warm_up, s"]
    return markdown_table(header, lines)
