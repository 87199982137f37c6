"""Time a whole picture, clip or text, stock and in INT8: a picture or clip from a few steps.

A call of few and one of more steps differ by what the steps between them take; the rest is the text encoder and the
decoder. Texts are written whole, as the first tokens of a model come before its CUDA graphs. Nothing waits for the GPU
within a call, so its time is that of a user's call.
"""

from __future__ import annotations

import gc
import math
import statistics
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

import torch

from ...options import SageAttnProcessor
from ...reporting.layer_report import counts
from ...reporting.layer_report import reasons as in_16_bit
from ..quality import generate


FEW = 2  # steps of the short call
ROUNDS = 3  # calls of either length; the median counts
LONG = 5.0  # seconds of calls of one length after which no more are made, where all steps are run
WORTH_IT = 0.97  # of stock's time


class Timing(NamedTuple):
    """Time of one way to run a model.

    Attributes:
        total: seconds of a picture, clip or text. step: seconds of a step or token. rest: seconds of all else.
        first: seconds that the first call took longer: compiling, capturing, quantising weights.
        peak_gib: most GPU memory allocated at once, GiB; None on a CPU.
    """

    total: float
    step: float
    rest: float
    first: float
    peak_gib: float | None


class Calls(NamedTuple):
    """Calls of attention and of linear layers that a handle reports, in 8 bit and in 16 bit.

    Attributes:
        cache_calls: those of int8_calls that read an INT8 cache.
        why: why no attention call, or no linear layer's, ran in 8 bit; "" if both did or nothing is known.
    """

    int8_calls: int
    other_calls: int
    linear_calls: int
    other_linear_calls: int
    cache_calls: int = 0
    why: str = ""

    @classmethod
    def of(cls, report: Any) -> Calls:
        linears = report.linears
        ran, others = (0, 0) if linears is None else (linears.ran, sum(linears.fallbacks.values()))
        cached = sum(row.get("cache_calls", 0) for row in report.rows)
        idle = {"attention": report, "linear layers": linears}
        said = [f"{what}: {reason}" for what, part in idle.items() if part and (reason := _why_idle(part))]
        return cls(report.calls, sum(report.fallbacks.values()), ran, others, cached, "; ".join(said))

    @classmethod
    def total(cls, several: Iterable[Sequence[Any]]) -> Calls:
        """Return the sum of several, with the first reason."""
        parts = [cls(*one) for one in several]
        numbers = [sum(int(part[i]) for part in parts) for i in range(5)]
        return cls._make([*numbers, next((part.why for part in parts if part.why), "")])

    @property
    def ran(self) -> bool:
        """True if anything ran in 8 bit."""
        return bool(self.int8_calls or self.linear_calls)

    def in_words(self) -> str:
        """Say which part ran in 8 bit, and why another did not."""
        of_cache = self.cache_calls == self.int8_calls > 0 < self.other_calls  # prompts ran in 16 bit
        said = [
            f"{ran / (ran + others):.0%} of {what}" if ran else f"no {one}"
            for what, one, ran, others in (
                ("attention calls", "attention call", 0 if of_cache else self.int8_calls, self.other_calls),
                ("linear layers' calls", "linear layer", self.linear_calls, self.other_linear_calls),
            )
        ]
        words = f"{' and '.join(said)} ran in 8 bit"
        words += ": of attention, the cache alone is in 8 bit" * of_cache
        return words + self.reason * (not self.int8_calls or not self.linear_calls)

    @property
    def reason(self) -> str:
        """Why something did not run, in brackets."""
        return f" ({self.why})" * bool(self.why)


def _why_idle(report: Any) -> str:
    """Return why no call of a report ran in 8 bit: what its layers are, or why their calls were in 16 bit."""
    if report.ran:
        return ""
    idle = counts(row["status"] for row in report.rows if row["status"] != "active")
    idle = idle.replace(" small", " of too few features (min_features)")
    return ", ".join(filter(None, (idle, in_16_bit(report.fallbacks) if report.fallbacks else "")))


def time_calls(
    call: Callable[[int], Any], steps: int, device: torch.device, *, few: int = FEW, more: int = 6, whole: bool = False
) -> Timing:
    """Time `call(steps)` from calls of two lengths: `few` steps, and `more` or, if `whole`, all of them.

    Raises: ValueError unless 1 <= few < more.
    """
    if not 1 <= few < more:
        raise ValueError(f"more: got {more} steps, expected more than {few}")
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    longer = steps if whole and steps > few else more
    first_steps = longer if whole else few
    first = _seconds(call, first_steps, device)
    enough = LONG if whole else math.inf  # short calls are the warm-up of the longer ones, so none is left out
    known = {n: _settled(call, n, device, enough) for n in (few, longer)}
    step = max(known[longer] - known[few], 0.0) / (longer - few)
    rest = max(known[few] - few * step, 0.0)
    total = known[longer] if longer == steps else rest + steps * step
    peak = torch.cuda.max_memory_allocated(device) / 2**30 if device.type == "cuda" else None
    return Timing(total, step, min(rest, total), max(first - known[first_steps], 0.0), peak)


def _settled(call: Callable[[int], Any], steps: int, device: torch.device, enough: float) -> float:
    """Return the median of `ROUNDS` calls in s, or of the fewer ones that took `enough` seconds together."""
    found: list[float] = []
    while len(found) < ROUNDS and sum(found) < enough:
        found.append(_seconds(call, steps, device))
    return statistics.median(found)


def _seconds(call: Callable[[int], Any], steps: int, device: torch.device) -> float:
    synchronize = torch.cuda.synchronize if device.type == "cuda" else lambda device: None
    synchronize(device)
    began = time.perf_counter()
    call(steps)
    synchronize(device)
    return time.perf_counter() - began


def picture_call(
    pipe: Any, prompt: str, arguments: dict[str, Any], size: dict[str, int] | None = None
) -> Callable[[int], None]:
    """Return a function of a number of steps, for drawing a picture or clip.

    Args: arguments: more for the pipeline's call. size: gets the height and width that are drawn, and a clip's frames.
    """

    def call(steps: int) -> None:
        shape = generate(pipe, [prompt], [0], steps=steps, **arguments).shape
        if size is not None:
            size.update({"frames": shape[1]} if len(shape) == 5 else {}, height=shape[-2], width=shape[-1])

    return call


def text_call(model: Any, prompt_tokens: int) -> Callable[[int], None]:
    """Return a function of a number of tokens, for writing them behind a prompt.

    The cache is the one that `generate` makes.
    """
    ids = _some_tokens(model, prompt_tokens)

    def call(number: int) -> None:
        options = {"do_sample": False, "max_new_tokens": number, "min_new_tokens": number}
        model.generate(ids, attention_mask=torch.ones_like(ids), **options)

    return call


def embedding_call(model: Any, tokens: int) -> Callable[[int], None]:
    """Return a function of a number of calls, in each of which an encoder reads the same text."""
    ids = _some_tokens(model, tokens)

    @torch.no_grad()
    def call(number: int) -> None:
        for _ in range(number):
            model(input_ids=ids, attention_mask=torch.ones_like(ids))

    return call


def _some_tokens(model: Any, count: int) -> torch.Tensor:
    return torch.arange(count, device=model.device)[None] * 7919 % model.config.get_text_config().vocab_size


def time_both(
    target: Any, call: Callable[[int], Any], config: SageAttnProcessor, *, steps: int,
    on_way: Callable[[str], None] = lambda way: None, **options: Any,
) -> tuple[dict[str, Timing], Calls]:  # fmt: skip
    """Return {"stock": Timing, "int8": Timing} of a pipeline or model, and what ran of the latter.

    call: of `picture_call`, `text_call` or `embedding_call`. on_way: told the name of what is timed next.
    options: of `time_calls`.
    """
    from ...entry import apply

    def run(way: str, swap: Callable[[], AbstractContextManager[Any]]) -> tuple[Timing, Any]:
        gc.collect()
        on_way(way)
        began = time.perf_counter()
        with swap() as handle:
            swapped = time.perf_counter() - began
            found = time_calls(call, steps, target.device, **options)
            return found._replace(first=found.first + swapped), handle and handle.report()

    stock, _ = run("stock", nullcontext)
    ours, report = run("int8", lambda: apply(target, config))
    return {"stock": stock, "int8": ours}, Calls.of(report)


def device_name(device: torch.device) -> str:
    """Return the name of a GPU, or "a CPU"."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else "a CPU"


def _seconds_of(timing: Timing) -> str:
    return f"{timing.total:.2f}" if timing.total >= 0.1 else f"{timing.total:.2g}"


def verdict(found: dict[str, Timing], calls: Calls, device: torch.device, what: str) -> str:
    """Return yes or no for this device in a sentence. what: such as "picture" or "text"."""
    stock, ours = found["stock"], found["int8"]
    ratio = ours.total / stock.total
    numbers = f"{_seconds_of(ours)} s a {what}, stock {_seconds_of(stock)} s ({ratio:.2f})"
    name = device_name(device)
    if not calls.ran:
        return f"No: nothing of this model ran in 8 bit on {name}, {numbers}{calls.reason}."
    if device.type != "cuda":
        said = f"No GPU, so INT8 ran in its reference, whose times say nothing about a GPU: {numbers}"
        return f"{said}; {calls.in_words()}."
    memory = "" if ours.peak_gib is None else f", {ours.peak_gib:.1f} GiB for stock's {stock.peak_gib:.1f}"
    return f"{'Yes' if ratio <= WORTH_IT else 'No'}, on {name}: {numbers}{memory}; {calls.in_words()}."
