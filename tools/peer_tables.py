"""Tables of ours beside other packages' attention, and of whole pictures and clips."""

from __future__ import annotations

from sage_kernels.facts.recipe import DEFAULT_RECIPE, FP8_RECIPE
from sage_kernels.results import DRIFT

from .headline import COMPILED, OURS
from .tables import markdown_table


_PEER_SQUARES = [f"D128_N{n}_{kind}" for n in (4096, 16384, 32768) for kind in ("full", "causal")]
PEER_CASES = (*(f"{case}/{DRIFT}" for case in (*_PEER_SQUARES, "D64_N16384_full")), "D128_N16384_full", "cogvideox_49")
STOCK = "torch_sdpa_default"
OTHERS = ("sageattention", "flash_attn", "torch_flex", "torchao")  # first letters of other packages' providers


def peers(rows: list[dict[str, str]]) -> str:
    """Return a table of attention of other packages and of ours, newest runs: TFLOPS and error, by shape."""
    rows = [row for row in rows if (row["suite"], row["metric"]) == ("attention_fwd", "throughput")]
    columns = [("torch_sdpa_cudnn", ""), *((OURS, x) for x in (DEFAULT_RECIPE, FP8_RECIPE))]
    lines = []
    for case in PEER_CASES:
        timed = [row for row in rows if row["case"] == case]
        newest = {row["provider"]: row["commit"] for row in timed if row["provider"].startswith(OTHERS)}
        for commit in dict.fromkeys(row["commit"] for row in timed if row["commit"] in newest.values()):
            run = {(row["provider"], row["recipe"]): row for row in timed if row["commit"] == commit}
            columns += [key for key in run if key not in columns and key[0].startswith(OTHERS)]
            lines.append((case, commit, run))
    if not lines:
        return "No rows yet: `make bench` with other packages installed."
    columns = [key for key in columns if any(key in run for *_, run in lines)]
    body = []
    for case, commit, run in lines:
        shown = [run.get(key) for key in columns]
        body.append([case, commit, *("–" if row is None else row["median"] + _error(row) for row in shown)])
    return markdown_table(["shape", "commit", *(recipe or provider for provider, recipe in columns)], body)


def peer_models(rows: list[dict[str, str]]) -> str:
    """Return a table of whole pictures and clips, by run.

    Cells are each way's time as a share of compiled stock's. A line is a run that has compiled stock and the newest
    row of some way.
    """
    timed = [row for row in rows if row["suite"] in ("picture", "clip") and row["metric"] == "time"]
    timed = [row for row in timed if _is_whole(row["case"])]
    compiled = {(row["case"], row["commit"]): float(row["median"]) for row in timed if row["provider"] == COMPILED}
    runs: dict[tuple[str, str], dict[tuple[str, str], str]] = {run: {} for run in compiled}
    newest: dict[tuple[str, tuple[str, str]], tuple[str, str]] = {}
    for row in timed:
        run = row["case"], row["commit"]
        if run in compiled and row["provider"] != COMPILED:
            way = row["provider"], row["recipe"]
            runs[run][way] = f"{float(row['median']) / compiled[run]:.2f}{_error(row)}"
            newest[row["case"], way] = run
    shown = [run for case in dict.fromkeys(case for case, _ in runs) for run in runs if run[0] == case]
    shown = [run for run in shown if run in newest.values()]
    if not shown:
        return "No rows yet: `bench_pictures.py` with the way compiled."
    ways = [(STOCK, ""), ("torch_sdpa_cudnn", "")]
    ways += [(OURS, recipe) for recipe in (DEFAULT_RECIPE, "preset_fast", "preset_small")]
    ways += sorted({way for run in shown for way in runs[run] if way[0].startswith(OTHERS)})
    ways = [way for way in ways if any(way in runs[run] for run in shown)]
    lines = [[*run, *(runs[run].get(way, "–") for way in ways)] for run in shown]
    return markdown_table(["model", "commit", *(recipe or provider for provider, recipe in ways)], lines)


def _error(row: dict[str, str]) -> str:
    """Return a row's relative L2 error in brackets, or "" if it has none."""
    error = float(row["rel_l2_error"] or 0)
    if row["rel_l2_error"] and not error:
        return " (all in 16 bit)"  # stock's bits
    return f" ({error:.1%})" if error else ""


def shown_runs(rows: list[dict[str, str]]) -> dict[str, str]:
    """Return the commit whose run of each picture and clip is shown, as {case: commit}.

    It is our newest run beside stock as it comes and compiled stock, as in README; where there is none, the newest.
    """
    timed = [row for row in rows if row["suite"] in ("picture", "clip") and row["metric"] == "time"]
    timed = [row for row in timed if _is_whole(row["case"])]
    runs = {
        name: {(row["case"], row["commit"]) for row in timed if row["provider"] == name} for name in (COMPILED, STOCK)
    }
    ours = [(row["case"], row["commit"]) for row in timed if row["provider"] == OURS]
    return dict(ours) | dict(run for run in ours if run in runs[COMPILED] & runs[STOCK])


def whole_pictures(rows: list[dict[str, str]]) -> str:
    """Return a table of whole pictures and clips, in seconds, with the run of each model that is shown."""
    newest = shown_runs(rows)
    rows = [row for row in rows if row["suite"] in ("picture", "clip")]
    lines = []
    for case, commit in newest.items():
        run = {(r["provider"], r["recipe"], r["case"], r["metric"]): r for r in rows if r["commit"] == commit}
        for provider, recipe, place, metric in run:
            if (place, metric) != (case, "time"):
                continue

            def cell(
                part: str, metric: str = "time", digits: int = 2, way=(provider, recipe), case=case, run=run
            ) -> str:
                row = run.get((*way, f"{case}{part}", metric))
                return "–" if row is None else f"{float(row['median']):.{digits}f}"

            numbers = [cell("/first"), cell(""), cell("/step", digits=3), cell("/rest")]
            lines.append(
                [case, commit, recipe or provider, *numbers, cell("", "peak_memory", 1), cell("", "rel_l1", 4)]
            )
    header = ["model", "commit", "way", "first, s", "later, s", "a step, s", "all but steps, s", "GiB", "relative L1"]
    return markdown_table(header, lines) if lines else "No rows yet: `kernels/benchmarks/bench_pictures.py` on a GPU."


def _is_whole(case: str) -> bool:
    return not case.endswith(("/first", "/step", "/rest"))
