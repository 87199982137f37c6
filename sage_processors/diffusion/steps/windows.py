"""Where attention stays in 16 bit by choice: steps of a run, noise levels, layers, noise levels of some layers.

The INT8 kernels and the model's own attention are different kernels, so the choice is made on the host, between steps:
the scheduler's step sets a flag that all layers with the same range of noise levels read, mostly one flag for all
layers of a handle. Inside of torch.compile a flag is a guard. Each combination of flags is compiled once, when it is
first needed, and a step that changes precision picks another version: two versions without ranges of some layers, and
five at most with them (config.MAX_RANGES), whatever the number of steps, and with CUDA graphs a recording for each.
One more is for forwards that belong to no step of a scheduler that is followed: these run in 16 bit.
"""

from __future__ import annotations

import difflib
import fnmatch
import threading

import torch

from ...option_groups import IN_16_BIT


# Reasons for 16-bit attention that a user asked for: no warning, and no error with on_unsupported="raise".
CHOSEN = ("window", "kept")


def stays_exact(config, span, level: float, taken: int, left: int) -> bool:
    """Whether the options keep a step in 16 bit, for layers with this `keep_noise`.

    Args: span: () or (low, high). level: the step's noise level. taken: steps of the run before it. left: steps of
        the run that are not done yet, this one included.
    """
    if taken < config.keep.first_steps or left <= config.keep.last_steps:
        return True
    return inside(span, level)


def inside(span, level: float) -> bool:
    """Whether a noise level lies in a range: () has none, (low, high) those from low to below high, or to 1."""
    return bool(span) and span[0] <= level and (level < span[1] or span[1] == 1.0)


class Window(threading.local):
    """What the layers with one `keep_noise` share: whether the running step stays in 16 bit.

    Each thread has its own: pipelines with schedulers of their own may share a model, a thread each.

    Attributes:
        exact: read by every attention call. was_exact: of the step before.
        is_lost: exact because nobody knows which step runs, and not because the options say so.
    """

    def __init__(self, span, windowed: bool):
        self.span = span
        self.exact = self.was_exact = self.is_lost = windowed  # until a run begins


class Progress:
    """How far one scheduler is in its run, counted on the host.

    Args: windowed: whether precision hangs on it. Then noise levels are read on the host, which waits for the device
        when a run begins.
    Attributes:
        place: index of the running step in the scheduler's timesteps. total: their number; 0 before a first run.
        taken: steps of the run so far. is_over: no step is running.
        levels, timesteps: lists of floats where they can be read; else empty.
        is_told: the run was seen to begin or to step; otherwise the scheduler was merely found with timesteps.
        token: an object of the running step's own.
    """

    def __init__(self, windowed: bool):
        self.windowed = windowed
        self.place = self.total = self.taken = 0
        self.levels: list[float] = []
        self.timesteps: list[float] = []
        self.is_told, self.is_over, self.token = False, True, object()

    def begin(self, levels: torch.Tensor, place: int, timesteps=None, *, is_told: bool = True) -> None:
        """A run starts at timesteps[place] of a scheduler with these noise levels fp32 [N]."""
        self.total, self.place, self.taken = len(levels), min(max(place, 0), len(levels) - 1), 0
        self.levels = levels.tolist() if self.windowed else []
        is_far = isinstance(timesteps, torch.Tensor) and timesteps.device.type != "cpu"
        readable = timesteps is not None and (self.windowed or not is_far)
        listed = timesteps.tolist() if isinstance(timesteps, torch.Tensor) else timesteps
        self.timesteps = [float(t) for t in listed] if readable else []
        self.is_told, self.is_over, self.token = is_told, False, object()

    def move(self, place: int) -> None:
        """The run started at another place than the scheduler was told: image to image with DDIM does so."""
        self.place, self.is_told = place, True

    def finish(self, u_finished: torch.Tensor) -> None:
        """A step, at noise level u_finished (0-d), is done.

        Pipelines may start late in the timesteps without telling the scheduler (image to image with DDIM): after the
        first step of a run, and with windows only, the place is looked up by its noise level, which waits once.
        """
        if self.levels and self.taken == 0:
            u = float(u_finished)
            if abs(self.levels[self.place] - u) > 1e-6:
                self.place = min(range(self.total), key=lambda i: abs(self.levels[i] - u))
        self.taken += 1
        self.is_over = self.place + 1 >= self.total
        self.place = min(self.place + 1, max(self.total - 1, 0))
        self.is_told, self.token = True, object()


class Steps:
    """Which steps stay in 16 bit: sets the windows between steps, and tells listeners.

    Attributes: windowed: whether any step does. progress: of the scheduler that stepped last, in any thread.
    """

    def __init__(self, config):
        self._config = config
        spans = (config.keep.noise, *(span for _, span in config.rules("keep_noise")))
        self.windowed = bool(config.keep.first_steps or config.keep.last_steps or any(spans))
        self._windows = {span: Window(span, self.windowed) for span in spans}
        self.listeners = []
        self.progress = Progress(self.windowed)

    @property
    def place(self) -> int:
        """Index of the running step in the scheduler's timesteps."""
        return self.progress.place

    @property
    def total(self) -> int:
        """Number of the scheduler's timesteps; 0 before a first run."""
        return self.progress.total

    def window_of(self, span) -> Window:
        """The window of the layers whose `keep_noise` is `span`, one of the options."""
        return self._windows[span]

    @property
    def exact(self) -> bool:
        """Whether the running step stays in 16 bit for layers without a range of their own."""
        return self._windows[self._config.keep.noise].exact

    @property
    def precision(self) -> tuple[bool, ...]:
        """Whether the running step stays in 16 bit, for each range of noise levels that layers have.

        A CUDA graph of a whole forward holds that of the step that was captured: capture one for each.
        """
        return tuple(window.exact for window in self._windows.values())

    @property
    def bits(self) -> int:
        """`precision` as a number; 0 where no step stays in 16 bit."""
        return sum(exact << i for i, exact in enumerate(self.precision))

    def enter(self, progress: Progress) -> None:
        """A step of this run runs next in this thread."""
        self.progress = progress
        for window in self._windows.values() if self.windowed else ():
            window.was_exact = window.exact
        self.decide(progress)
        for listener in self.listeners:
            listener.step_starts(progress.place)

    def decide(self, progress: Progress | None) -> None:
        """Set this thread's windows for the running step of `progress`; None: nobody knows which step runs."""
        for window in self._windows.values() if self.windowed else ():
            if progress is None or progress.is_over or not progress.is_told:
                window.is_lost = window.exact = True
                continue
            window.is_lost = False
            window.exact = stays_exact(
                self._config, window.span, progress.levels[progress.place], progress.taken,
                progress.total - progress.place,
            )  # fmt: skip


def check_patterns(option: str, patterns, names: list[str]) -> None:
    """Raise ValueError for a pattern that matches none of the layer names: it would do nothing, silently."""
    for pattern in patterns:
        if not any(fnmatch.fnmatchcase(name, pattern) for name in names):
            close = difflib.get_close_matches(pattern, names, n=1, cutoff=0.0)
            hint = f"; the closest is {close[0]!r}" if close else ""
            raise ValueError(
                f"{option}: got {pattern!r}, which matches no layer, expected a name or pattern of the "
                f"{len(names)} layers in handle.report(){hint}"
            )


def is_kept(config, name: str) -> bool:
    """Whether the options leave this layer in 16 bit at all steps."""
    return config.of_layer("recipe", name) == IN_16_BIT
