"""Markdown table of attention's time against picture quality, for ways to choose scales."""

from __future__ import annotations

from sage_kernels.facts.recipe import DEFAULT_RECIPE

from .tables import markdown_table


# way in the rows of suite quality -> how a user asks for it, and the share of its steps in 16 bit
WAYS = {
    "timestep": ('`scaling="timestep"`', 0.0),
    "timestep_first4_16bit": ("the same, `keep=sp.Keep(first_steps=4)`", 4 / 25),
    "dynamic": ('`scaling="dynamic"`', 0.0),
}
PIPELINES = ("tiny_flux", "tiny_flux_hard")
SHAPES = {
    "flux_1024": "FLUX 1024²",
    "flux_2048": "FLUX 2048²",
    "cogvideox_49": "CogVideoX",
    "wan21_1_3b_480p81_self": "Wan 1.3B",
}


def scaling_front(rows: list[dict[str, str]]) -> str:
    """Return a table with a line for each way: PSNR of its pictures, and attention's time."""
    speed, psnr, pictures = _speeds(rows), {}, {}
    for row in rows:
        pipeline, _, way = row["case"].partition("/")
        if (row["suite"], row["gpu"], pipeline in PIPELINES, way in WAYS) == ("quality", "cpu", True, True):
            psnr[pipeline, way, row["metric"]] = float(row["median"])
            pictures[pipeline] = row["batch"]
    if not (speed and psnr):
        return "No rows yet: `kernels/benchmarks/bench_rules.py`, `kernels/benchmarks/bench.py`."
    lines = []
    for way, (said, exact) in WAYS.items():
        found = [[psnr.get((name, way, f"psnr_db_{kind}")) for kind in ("mean", "worst")] for name in PIPELINES]
        cells = ["–" if None in pair else f"{pair[0]:.1f}, {pair[1]:.1f}" for pair in found]
        suffix = "/per_token" if way == "dynamic" else ""
        cells += [f"{exact + (1 - exact) / speed[shape + suffix]:.2f}" for shape in SHAPES]
        lines.append([said, *cells])
    header = ["25 steps", *(f"`{name}`, {pictures[name]} seeds" for name in PIPELINES), *SHAPES.values()]
    note = "PSNR in dB, mean and worst, in fp32 on a CPU. Attention's time in all steps, where cuDNN's in 16 bit is 1,"
    return f"{note} from the speed of one call on an H200.\n\n{markdown_table(header, lines)}"


def _speeds(rows: list[dict[str, str]]) -> dict[str, float]:
    """Return the speed over cuDNN by case, of the newest commit that timed all cases on an H200.

    A case is a shape, or a shape followed by "/per_token".
    """
    cases = {*SHAPES, *(f"{shape}/per_token" for shape in SHAPES)}
    runs: dict[str, dict[str, float]] = {}
    for row in rows:
        of_calls = (row["suite"], row["recipe"], row["metric"]) == ("attention_fwd", DEFAULT_RECIPE, "throughput")
        if of_calls and row["case"] in cases and row["ratio_vs_cudnn"] and "H200" in row["gpu"]:
            runs.setdefault(row["commit"], {})[row["case"]] = float(row["ratio_vs_cudnn"])
    return next((found for found in reversed(runs.values()) if found.keys() == cases), {})
