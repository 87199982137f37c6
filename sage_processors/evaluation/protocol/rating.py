"""Rate pictures or clips in INT8, and those of another exact kernel, against a reference.

Another exact kernel rounds otherwise, so that in 16 bit it draws other pictures, too. Its distance is the noise floor:
what no method can be asked to beat. Every picture is compared with it pair by pair. In fp32 on a CPU it may be none.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from ...files.strict_json import plain_data
from ...files.whole_file import whole_file
from ...options import SageAttnProcessor
from ...reporting.layer_report import NOTHING_RAN
from .. import metrics, quality, videos
from ..side_by_side import amplification
from .kept import FLOOR, OURS, REFERENCE, STOCK, own_settings, started, write_state
from .scores import ClipScore, Legibility, usable, writing
from .timing import Calls


REFERENCES = ("stock", "float32")
Tick = Callable[[], None]
Progress = Callable[[int, int], AbstractContextManager[Tick]]  # of (all steps, those done before), such as a bar
LEAST_PAIRS = 6  # with fewer, equal methods differ by chance more often than once in 20 times


def unseen(total: int, done: int) -> AbstractContextManager[Tick]:
    """Show no progress."""
    return nullcontext(lambda: None)


@contextmanager
def another_kernel() -> Iterator[None]:
    """Run attention with PyTorch's mem-efficient kernel on a GPU, its math kernel on a CPU."""
    with sdpa_kernel([SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]):
        yield


def rate(
    pipe: Any,
    prompts: Sequence[tuple[str, str]],
    seeds: Sequence[int],
    config: SageAttnProcessor,
    folder: Path,
    *,
    name: str,
    steps: int,
    batch: int = 4,
    reference: str = "stock",
    clip: ClipScore | None = None,
    arguments: dict[str, Any] | None = None,
    progress: Progress = unseen,
) -> dict[str, Any]:
    """Draw every prompt in each way, and measure, as `go_on`. Pictures are written beside rating.json.

    Args:
        pipe: a text-to-image or text-to-video pipeline. prompts: pairs (category, prompt). seeds: one for each.
        config: the options under test. name: of the checkpoint.
        reference: "stock", or "float32" for all of the pipeline in fp32 (twice the memory of a 16-bit one).
        clip: None: no CLIP score. arguments: more for the pipeline's call. progress: by denoising steps.
    Returns: settings, rows (one for each prompt), summary, notes and verdict.
    Raises: ValueError for a folder with a rating of other settings.
    """
    settings = {
        **own_settings(pipe, name, config), "steps": steps, "reference": reference, "clip": clip and clip.name,
        "prompts": [list(pair) for pair in prompts], "seeds": list(seeds), "arguments": plain_data(arguments or {}),
        "batch": batch,
    }  # fmt: skip
    asked = [
        {"category": category, "prompt": prompt, "seed": seed}
        for (category, prompt), seed in zip(prompts, seeds, strict=True)
    ]
    four = reference == "float32" and pipe.dtype != torch.float32
    state = started(folder, settings, asked, dict.fromkeys((OURS, FLOOR, *[STOCK] * four), ("psnr_db", "ssim")))
    (folder / "pictures").mkdir(exist_ok=True)
    scores: dict[str, Callable] = {} if clip is None else {"clip": clip}
    zeros = torch.zeros(1, 3, 64, 64, dtype=torch.float32, device="cpu")
    missing = usable("LPIPS", lambda: metrics.lpips(zeros, zeros))
    notes = [missing] if missing else []
    if any(writing(prompt) for _, prompt in prompts):
        try:
            scores["legibility"] = Legibility()
        except ImportError as error:
            notes.append(f"Legibility: {error}")

    def measure(part: slice, tick: Tick) -> list[dict[str, Any]]:
        texts = [prompt for _, prompt in prompts[part]]
        draw = {"steps": steps, "on_step": tick, **(arguments or {})}
        drawn, calls = _drawn(pipe, texts, list(seeds[part]), config, reference, draw)
        measured = {way: _measured(x, drawn[REFERENCE], not missing) for way, x in drawn.items() if way != REFERENCE}
        for way, x in drawn.items() if scores else ():
            middle = x[:, x.shape[1] // 2] if x.dim() == 5 else x
            measured.setdefault(way, {}).update({key: score(middle, texts) for key, score in scores.items()})
        rows = []
        for i, own_words in enumerate(asked[part]):
            own = {
                way: {key: values[i] for key, values in found.items() if values[i] is not None}
                for way, found in measured.items()
            }
            number = part.start + i
            row = {"number": number, **own_words, "metrics": own, "calls": calls}
            rows.append(row | {"pictures": _saved(drawn, i, number, folder)})
        return rows

    return go_on(state | {"notes": notes}, folder, len(asked), batch, measure, summarise, progress, (3 + four) * steps)


def go_on(
    state: dict[str, Any], folder: Path, count: int, batch: int,
    measure: Callable[[slice, Tick], list[dict[str, Any]]],
    summarised: Callable[[list[dict[str, Any]]], dict[str, Any]], progress: Progress, ticks: int,
) -> dict[str, Any]:  # fmt: skip
    """Measure the batches in which a rating lacks rows, and write rating.json after each.

    Args:
        state: of `started`. count: rows when it is done. measure: returns the rows of a part; calls what it is given
            `ticks` times. summarised: returns summary and verdict of rows.
    """
    rows = {row["number"]: row for row in state["rows"]}
    parts = [range(start, min(start + batch, count)) for start in range(0, count, batch)]
    missing = [part for part in parts if not rows.keys() >= set(part)]
    with progress(ticks * len(parts), ticks * (len(parts) - len(missing))) as tick:
        for part in missing:
            rows |= {row["number"]: row for row in measure(slice(part.start, part.stop), tick)}
            state["rows"] = [rows[number] for number in sorted(rows)]
            state |= summarised(state["rows"])
            write_state(state, folder)
    return state if missing else state | summarised(state["rows"])


def append_rows(path: Path, name: str, state: dict[str, Any], recipe: str) -> None:
    """Append PSNR and SSIM of INT8 and of the noise floor to results.csv, as cases of `name`."""
    device = state["settings"]["device"]
    found = []
    for way, case, own in ((OURS, "rated", recipe), (FLOOR, "another_kernel", "")):
        values = {key: tuple(row["metrics"][way][key] for row in state["rows"]) for key in ("psnr_db", "ssim")}
        ran, others = (state["summary"][key] if own else 0 for key in ("int8_calls", "other_calls"))
        found.append(quality.Quality(case, own, values["psnr_db"], values["ssim"], ran, others))
    quality.append_results(path, name, found, device=device)


def _drawn(pipe, texts, seeds, config, reference, draw) -> tuple[dict[str, torch.Tensor], Calls]:
    """Return {way: pictures} and what ran, of one batch."""
    from ...entry import apply

    found = {}
    with quality.same_noise(pipe):
        if reference == "float32" and pipe.dtype != torch.float32:
            with quality.in_float32(pipe):
                found[REFERENCE] = quality.generate(pipe, texts, seeds, **draw)
            found[STOCK] = quality.generate(pipe, texts, seeds, **draw)
        else:
            found[REFERENCE] = quality.generate(pipe, texts, seeds, **draw)
        with another_kernel():
            found[FLOOR] = quality.generate(pipe, texts, seeds, **draw)
        with apply(pipe, config) as handle:
            found[OURS] = quality.generate(pipe, texts, seeds, **draw)
            calls = Calls.of(handle.report())
    return found, calls


def _measured(x: torch.Tensor, reference: torch.Tensor, lpips: bool) -> dict[str, list[float]]:
    compared = quality.compare("", "", x, reference)
    found = {"psnr_db": list(compared.psnr_db), "ssim": list(compared.ssim)}
    if x.dim() == 5:
        found["flicker"] = videos.flicker(x, reference).tolist()
    elif lpips:
        found["lpips"] = metrics.lpips(x, reference).tolist()
    return found


def _saved(drawn: dict[str, torch.Tensor], i: int, number: int, folder: Path) -> dict[str, str]:
    """Write the reference, ours and their amplified difference as PNGs, of a clip its middle frame."""
    from PIL import Image

    shown = {way: drawn[way][i] for way in (REFERENCE, OURS)}
    shown = {way: x[x.shape[0] // 2] if x.dim() == 4 else x for way, x in shown.items()}
    gain = amplification(shown[REFERENCE][None], shown[OURS][None])
    shown[f"difference x {gain}"] = ((shown[OURS] - shown[REFERENCE]).abs() * gain).clamp(0, 1)
    names = {}
    for place, (way, x) in enumerate(shown.items()):
        names[way] = f"pictures/{number:04}_{place}.png"
        pixels = (x.clamp(0, 1) * 255).round().to(torch.uint8).permute(1, 2, 0).numpy()
        with whole_file(folder / names[way]) as file:
            Image.fromarray(pixels).save(file, format="png")
    return names


def summarise(rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return means, paired differences from the noise floor with 95 % intervals, and a verdict."""
    summary = averaged(rows)
    summary["worst_psnr_db"] = min(row["metrics"][OURS]["psnr_db"] for row in rows)
    return {"summary": summary, "verdict": _verdict(len(rows), summary)}


def averaged(rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return the means of all ways and metrics, differences from the noise floor, and calls, of rows."""
    values: dict[str, dict[str, list[float]]] = {}  # a prompt without writing has no legibility
    for way in dict.fromkeys((REFERENCE, STOCK, FLOOR, OURS, *(way for row in rows for way in row["metrics"]))):
        for row in rows:
            for key, value in row["metrics"].get(way, {}).items():
                values.setdefault(way, {}).setdefault(key, []).append(value)
    ours, floor = values[OURS], values[FLOOR]
    apart = {key: list(metrics.paired_interval(ours[key], floor[key])) for key in ours if key in floor}
    calls = Calls.total(row["calls"] for row in rows)
    return {
        "means": {way: {key: list(metrics.mean_interval(x)) for key, x in own.items()} for way, own in values.items()},
        "ours_minus_floor": apart,
        **calls._asdict(),
    }  # fmt: skip


def ran(summary: dict[str, Any]) -> Calls:
    """Return the calls of all measurements of a rating."""
    return Calls(*(summary[name] for name in Calls._fields))


def _verdict(count: int, summary: dict[str, Any]) -> str:
    """Return the rating in one sentence."""
    if not ran(summary).ran:
        return f"Not rated: {NOTHING_RAN}{ran(summary).reason}."
    means, worst = summary["means"], summary["worst_psnr_db"]
    are_clips = "flicker" in means[OURS]
    drawn, frames = ("clips", ", means over frames") if are_clips else ("pictures", "")
    ours, floor = (means[way]["psnr_db"][0] for way in (OURS, FLOOR))
    apart = metrics.Interval(*summary["ours_minus_floor"]["psnr_db"])
    if count < LEAST_PAIRS:
        head = f"{count} of at least {LEAST_PAIRS} {drawn}, too few to say how INT8 compares with another exact kernel"
    elif floor == quality.PSNR_CEILING:
        head = f"Another exact kernel draws the very same {drawn} here; INT8 does not"
    elif apart.low > 0:
        head = "INT8 is nearer to the reference than another exact kernel"
    elif apart.high >= 0:
        head = f"INT8 is no further from the reference than another exact kernel, as far as these {drawn} tell"
    else:
        interval = f"{-apart.value:.1f} dB ({-apart.high:.1f} to {-apart.low:.1f})"
        head = f"INT8 is {interval} further from the reference than another exact kernel"
    return (
        f"{head}: PSNR {quality.decibels(ours)}, where the other kernel has {quality.decibels(floor)}; SSIM "
        f"{means[OURS]['ssim'][0]:.4f} and {means[FLOOR]['ssim'][0]:.4f}; worst of {count} {drawn} "
        f"{quality.decibels(worst)}{frames}; {ran(summary).in_words()}."
    )
