"""Markdown tables of what kernels take apart from attention: 8-bit linear layers, and the wait of a first call."""

from __future__ import annotations

from .tables import markdown_table


FORMATS = ("linears_int8", "linears_fp8", "linears_int8_weights")


def linears(rows: list[dict[str, str]]) -> str:
    """A line for each shape of the newest run: rates, and how many times as fast as a 16-bit layer each is."""
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


def cold_start(rows: list[dict[str, str]]) -> str:
    """A line for each case and recipe, the newest row of each: seconds of first forwards without a kernel cache."""
    rows = [row for row in rows if row["suite"] == "cold_start"]
    newest = {(row["case"], row["provider"], row["recipe"], row["metric"]): row for row in rows}
    if not newest:
        return "No rows yet: `kernels/benchmarks/bench_cold_start.py` on a GPU."
    metrics, lines = ("first_forward", "worst_later_forward", "warm_up"), []
    for key in dict.fromkeys(key[:3] for key in newest):
        found = [newest.get((*key, metric)) for metric in metrics]
        lines.append([*key, found[0]["commit"] if found[0] else "", *(row["median"] if row else "–" for row in found)])
    header = ["case", "provider", "recipe", "commit", "first forward, s", "worst later one, s", "warm_up, s"]
    return markdown_table(header, lines)
