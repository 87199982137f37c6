"""Time whole pictures and clips, from a prompt's ids to pixels, with rows of suites picture and clip.

    python kernels/benchmarks/bench_pictures.py --case flux_1024 --case sdxl_1024 --whole
    python kernels/benchmarks/bench_pictures.py --case wan21_1_3b_480p81
    python kernels/benchmarks/bench_pictures.py --case flux_1024 --whole --first-block-cache 0.6
    python kernels/benchmarks/bench_pictures.py --tiny --device cpu --no-save

Random weights of the published shapes: text encoders, denoiser, scheduler, VAE. Ways, in turn (--ways): stock as it
comes; stock on cuDNN; stock on cuDNN with its repeated blocks compiled, as diffusers advises; INT8 attention alone;
presets; other packages' attention in the denoiser; their linear layers, with blocks compiled. With --whole each way
draws a first and a later picture with all steps. Without it a picture is computed: a call of one step, with text
encoders and VAE, plus the time of a step, from calls without a VAE that differ by three, for every other step. Its
rows say so (case/computed).

With --first-block-cache every way draws with diffusers' FirstBlockCache of that threshold. The first way decides which
forwards stop after their first block; the others compute their numbers, and wait for them, but decide as it did.

A way has no rows unless latents after two steps are those of stock, up to the error of 8 bit.
"""

from __future__ import annotations

import argparse
import gc
import itertools
import statistics
import sys
import time
from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch
from bench_end_to_end import OURS, RESULTS, check_output
from picture_cases import DRAWINGS, Painter
from ways import CUDNN, NAMES, REMOVED, Way, chosen, is_8_bit

from sage_kernels.results import append_row, check_appendable


USUAL = ("default", "cudnn", "compiled", "int8", "fast")
FEW, MORE = 1, 3  # steps of the calls that a computed picture is made from
CHECKED_STEPS = 2  # steps after which latents are compared
CAPTURED = 6  # steps after which ours has compiled its kernels and captured its graphs


class SameDecisions:
    """Diffusers' FirstBlockCache on a painter's denoiser, whose later pictures stop where the first ones did.

    Attributes: made: {(steps of the picture, step, which forward of the step): all blocks ran}.
    """

    def __init__(self, painter: Painter, threshold: float):
        from diffusers import FirstBlockCacheConfig
        from diffusers.hooks.first_block_cache import _FBC_LEADER_BLOCK_HOOK

        self.made: dict[tuple, bool] = {}
        self._scheduler = painter.pipe.scheduler
        painter.denoiser.enable_cache(FirstBlockCacheConfig(threshold=threshold))
        registries = [getattr(module, "_diffusers_hook", None) for module in painter.denoiser.modules()]
        hooks = [found for x in registries if x is not None and (found := x.get_hook(_FBC_LEADER_BLOCK_HOOK))]
        for hook in hooks:
            hook._should_compute_remaining_blocks = torch.compiler.disable(partial(self._decide, hook))

    def _decide(self, hook, residual: torch.Tensor) -> bool:
        runs_all = type(hook)._should_compute_remaining_blocks(hook, residual)
        where = self._scheduler.num_inference_steps, self._scheduler.step_index or 0, hook.state_manager.context.name
        return self.made.setdefault(where, runs_all)

    def share(self, steps: int) -> float:
        """Return the share of forwards of a picture in which all blocks ran."""
        found = [runs_all for (of, *_), runs_all in self.made.items() if of == steps]
        return sum(found) / len(found)


class Drawn(NamedTuple):
    """Seconds and memory of one way.

    Attributes:
        first, later: seconds of the first picture and of a later one. step: seconds of a denoising step, later ones.
        peak: GiB; None on a CPU.
        slowest: longest step of a later picture over the median step; None where none was drawn whole by ours.
    """

    first: float | None
    later: float
    step: float
    peak: float | None
    slowest: float | None


def seconds(painter: Painter, steps: int, output_type: str = "pil") -> float:
    """Return the wall time of a drawing, with the GPU's work in it."""
    _wait(painter.device)
    began = time.perf_counter()
    painter.draw(steps, output_type)
    _wait(painter.device)
    return time.perf_counter() - began


def slowest_step(painter: Painter, steps: int) -> float:
    """Return the longest step of a picture over its median step, with a sync after each."""
    ends: list[float] = []

    def ended() -> None:
        _wait(painter.device)
        ends.append(time.perf_counter())

    painter.draw(steps, "latent", ended)
    times = [b - a for a, b in itertools.pairwise(ends)]
    return max(times) / statistics.median(times)


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def measure(painter: Painter, way: Way, whole: bool) -> tuple[Drawn, torch.Tensor, dict]:
    """Return the times of one way, its latents after two steps, and the reasons of attention calls in 16 bit."""
    device, steps = painter.device, painter.drawing.steps
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
    began = time.perf_counter()  # the swap counts as part of the first picture
    with way.inside(painter.denoiser, painter.pipe) as handle:
        if whole:
            seconds(painter, steps)
            first = time.perf_counter() - began
        elif way.provider == OURS:
            painter.draw(CAPTURED, "latent")
        latents = painter.draw(CHECKED_STEPS, "latent").float().clone()
        _reset_peak(device)
        slowest = None
        if whole:
            later = seconds(painter, steps)
            step = (later - seconds(painter, FEW)) / (steps - FEW)
        else:
            first, few = None, seconds(painter, FEW)
            step = (seconds(painter, FEW + MORE, "latent") - seconds(painter, FEW, "latent")) / MORE
            later = few + (steps - FEW) * step
        peak = torch.cuda.max_memory_allocated(device) / 2**30 if device.type == "cuda" else None
        if whole and way.provider == OURS and not getattr(painter.denoiser, "is_cache_enabled", False):
            slowest = slowest_step(painter, steps)
        exact = handle.report().fallbacks if hasattr(handle, "report") else {}
    return Drawn(first, later, step, peak, slowest), latents, dict(exact)


def _reset_peak(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)


def run_case(name: str, options: argparse.Namespace, csv: Path | None) -> list[str]:
    """Draw one case in every way and append its rows. Returns the failures."""
    drawing = DRAWINGS[name].tiny() if options.tiny else DRAWINGS[name]
    device, failures, stock, cudnn = torch.device(options.device), [], None, None
    painter = Painter(drawing, device)
    cached = None if options.first_block_cache is None else SameDecisions(painter, options.first_block_cache)
    painter.draw(FEW)  # or the first way alone would pay for what text encoders and VAE do once a process
    for way in chosen(options.ways, 0 if options.tiny else None):
        label = f"{drawing.name:24} {way.provider:22} {way.recipe:16}"
        try:
            drawn, latents, exact = measure(painter, way, options.whole)
            stock = latents if stock is None else stock
            l1, l2 = check_output(latents, stock)
        except Exception as error:  # the other ways are measured all the same
            failures.append(f"{label}: {type(error).__name__}: {str(error).strip().partition(chr(10))[0]}")
            print(f"FAILED {failures[-1]}", flush=True)
            continue
        if cached is not None:
            print(f"all blocks ran in {cached.share(painter.drawing.steps):.3f} of the forwards", flush=True)
        cudnn = drawn.later if way.provider == CUDNN else cudnn
        ratio = cudnn / drawn.later if cudnn else None
        print(
            f"{label} first {drawn.first or float('nan'):7.2f} s  later {drawn.later:7.2f} s  step "
            f"{drawn.step * 1000:7.1f} ms  {drawn.peak or 0:.1f} GiB  {ratio or float('nan'):.3f}x  L1 {l1:.4f}  "
            f"16 bit {exact}",
            flush=True,
        )
        if csv is not None:
            save(csv, drawing, way, drawn, ratio, l1, l2, options)
    return failures


def save(csv: Path, drawing, way: Way, drawn: Drawn, ratio, l1: float, l2: float, options) -> None:
    """Append the rows of one way."""
    sizes, quantizes = drawing.denoiser.attention(), is_8_bit(way.provider)
    shared = {
        "suite": drawing.suite, "provider": way.provider, "recipe": way.recipe, "batch": sizes["batch"],
        "heads": sizes["heads"], "kv_heads": sizes["kv_heads"], "seq_q": sizes["seq_q"], "seq_k": sizes["seq_kv"],
        "head_dim": sizes["head_dim"], "causal": sizes["causal"], "includes_quantization": quantizes,
        "rel_l2_error": f"{l2:.5f}" if quantizes else "",
    }  # fmt: skip
    case = drawing.name if options.whole else f"{drawing.name}/computed"
    case += "" if options.first_block_cache is None else "/first_block_cache"
    ratio = "" if ratio is None else f"{ratio:.3f}"
    append_row(csv, **shared, case=case, metric="time", unit="s", median=f"{drawn.later:.3f}", ratio_vs_cudnn=ratio)
    if drawn.first is not None:
        append_row(csv, **shared, case=f"{case}/first", metric="time", unit="s", median=f"{drawn.first:.3f}")
    rest = max(drawn.later - drawing.steps * drawn.step, 0.0)  # text encoders, VAE, and the pipeline's own work
    for part, value in (("step", drawn.step), ("rest", rest)):
        append_row(csv, **shared, case=f"{case}/{part}", metric="time", unit="s", median=f"{value:.5f}")
    if drawn.peak is not None:
        append_row(csv, **shared, case=case, metric="peak_memory", unit="GiB", median=f"{drawn.peak:.3f}")
    if drawn.slowest is not None:
        append_row(csv, **shared, case=case, metric="slowest_step", unit="1", median=f"{drawn.slowest:.3f}")
    if quantizes:
        append_row(csv, **shared, case=case, metric="rel_l1", unit="1", median=f"{l1:.5f}")


def parse(arguments=None) -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--case", action="append", choices=sorted(DRAWINGS), help="may be repeated; all by default")
    parser.add_argument("--whole", action="store_true", help="draw whole pictures instead of computing their time")
    parser.add_argument(
        "--ways", nargs="+", choices=[x for x in NAMES if x != REMOVED], default=USUAL, help="ways to draw"
    )
    parser.add_argument("--tiny", action="store_true", help="tiny models of the same classes; needs --csv to save")
    parser.add_argument("--first-block-cache", type=float, metavar="THRESHOLD", help="of diffusers; with --whole")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--csv", type=Path, help="where rows go; results.csv by default")
    parser.add_argument("--no-save", action="store_true", help="print only")
    options = parser.parse_args(arguments)
    if options.first_block_cache is not None and not options.whole:
        parser.error("--first-block-cache needs --whole: steps take different times")
    return options


@torch.no_grad()
def main(arguments=None) -> int:
    """Run the command. Returns 1 if a way failed."""
    options = parse(arguments)
    csv = None if options.no_save else options.csv or (None if options.tiny else RESULTS)
    if csv is not None:
        check_appendable(csv)
    failures = []
    for name in options.case or DRAWINGS:
        try:
            failures += run_case(name, options, csv)
        except Exception as error:  # a model that does not fit, for one: the other models are measured all the same
            failures.append(name)
            print(f"FAILED {name}: {type(error).__name__}: {str(error).strip().partition(chr(10))[0]}", flush=True)
        gc.collect()
        if options.device.startswith("cuda"):
            torch.cuda.empty_cache()
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
