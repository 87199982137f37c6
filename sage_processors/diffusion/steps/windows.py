"""Step windows: the denoising steps, noise levels and layers that the options keep in 16 bit.

INT8 and 16-bit attention are different kernels, so the host chooses between them, between two steps. The scheduler's
step sets a flag, and all layers with the same range of noise levels read it. Mostly one flag serves all layers of a
handle.

In a compiled model each flag is a guard. Each combination of flags is compiled once, when it is first needed. That
makes two compiled versions, or at most five if some layers have their own range (options.MAX_RANGES), for any number
of steps. CUDA graphs need a capture for each. One more version is for forwards that belong to no step of a followed
scheduler: these run in 16 bit.
"""

from __future__ import annotations

import difflib
import fnmatch
import threading

import torch

from ...option_groups import IN_16_BIT


# Reasons for 16-bit attention chosen by the user. They cause no warning, and no error with on_unsupported="raise".
CHOSEN = ("window", "kept")


def stays_16bit(config, span, level: float, taken: int, left: int) -> bool:
    """True if the options keep a step in 16 bit, for layers with the range of noise levels `span`.

    Args:
        config: SageAttnProcessor.
        span: () or (low, high), as `Keep.noise`.
        level: noise level of the step.
        taken: number of earlier steps in the run.
        left: number of steps of the run that are not done yet, this one included.
    """
    if taken < config.keep.first_steps or left <= config.keep.last_steps:
        return True
    return inside(span, level)


def inside(span, level: float) -> bool:
    """True if a noise level lies in a range: low <= level < high.

    span: (low, high), of which a high of 1 includes 1, or () for no level at all.
    """
    return bool(span) and span[0] <= level and (level < span[1] or span[1] == 1.0)


class Window(threading.local):
    """Step window of the layers with the same range of noise levels: the flag that they read.

    Each thread has values of its own, because pipelines with their own schedulers may share a model, one per thread.

    Attributes:
        span: the range of noise levels, () or (low, high).
        in_16bit: True if the running step stays in 16 bit. Read by every attention call.
        was_16bit: the same for the step before.
        is_lost: True if the step runs in 16 bit because it is unknown, and not because of the options.
    """

    def __init__(self, span, windowed: bool):
        self.span = span
        self.in_16bit = self.was_16bit = self.is_lost = windowed  # until a run begins


class Progress:
    """The progress of one scheduler in its run, counted on the host.

    Args:
        windowed: True if the options have step windows. Then noise levels are read on the host, which waits for the
            device when a run begins.
    Attributes:
        place: index of the running step in the scheduler's timesteps.
        total: number of the scheduler's timesteps; 0 before a first run.
        taken: number of finished steps in this run.
        is_over: True if no step is running.
        levels, timesteps: noise levels and timesteps, as lists of floats; empty if they can't be read.
        is_told: True if the run was seen to begin or to step. False if the scheduler was merely found with timesteps.
        token: an object that identifies the running step.
    """

    def __init__(self, windowed: bool):
        self.windowed = windowed
        self.place = self.total = self.taken = 0
        self.levels: list[float] = []
        self.timesteps: list[float] = []
        self.is_told, self.is_over, self.token = False, True, object()

    def begin(self, levels: torch.Tensor, place: int, timesteps=None, *, is_told: bool = True) -> None:
        """Begin a run at timesteps[place]. levels: the noise level of each timestep, fp32 [N]."""
        self.total, self.place, self.taken = len(levels), min(max(place, 0), len(levels) - 1), 0
        self.levels = levels.tolist() if self.windowed else []
        is_far = isinstance(timesteps, torch.Tensor) and timesteps.device.type != "cpu"
        readable = timesteps is not None and (self.windowed or not is_far)
        listed = timesteps.tolist() if isinstance(timesteps, torch.Tensor) else timesteps
        self.timesteps = [float(t) for t in listed] if readable else []
        self.is_told, self.is_over, self.token = is_told, False, object()

    def move(self, place: int) -> None:
        """Correct the running step's place, for a run that began late without telling the scheduler."""
        self.place, self.is_told = place, True

    def finish(self, u_finished: torch.Tensor) -> None:
        """End the running step. u_finished: its noise level, 0-d.

        Pipelines may start late in the timesteps without telling the scheduler (image to image with DDIM). So after
        the first step of a run the place is looked up by its noise level. This waits for the device once, and is done
        only with step windows.
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
    """All step windows of a handle: sets their flags between steps, and tells listeners of steps.

    Args: config: SageAttnProcessor.
    Attributes:
        windowed: True if the options keep any step in 16 bit.
        listeners: objects with a method `step_starts(place)`, called before each step.
        progress: the Progress of the scheduler that stepped last, in any thread.
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

    def window_of(self, span) -> Window:
        """Return the step window of the layers with the range of noise levels `span`."""
        return self._windows[span]

    @property
    def in_16bit(self) -> bool:
        """True if the running step stays in 16 bit, for layers without their own range of noise levels."""
        return self._windows[self._config.keep.noise].in_16bit

    @property
    def precision(self) -> tuple[bool, ...]:
        """For each range of noise levels, True if the running step stays in 16 bit.

        A CUDA graph of a whole forward keeps the precision of the captured step: capture one graph for each precision.
        """
        return tuple(window.in_16bit for window in self._windows.values())

    @property
    def bits(self) -> int:
        """`precision` as the bits of an int; 0 if the running step is INT8 for all layers."""
        return sum(is_16bit << i for i, is_16bit in enumerate(self.precision))

    def enter(self, progress: Progress) -> None:
        """Make the running step of `progress` the next step in this thread, and tell the listeners."""
        self.progress = progress
        for window in self._windows.values() if self.windowed else ():
            window.was_16bit = window.in_16bit
        self.decide(progress)
        for listener in self.listeners:
            listener.step_starts(progress.place)

    def decide(self, progress: Progress | None) -> None:
        """Set this thread's step windows for the running step of a run; None if the step is unknown."""
        for window in self._windows.values() if self.windowed else ():
            if progress is None or progress.is_over or not progress.is_told:
                window.is_lost = window.in_16bit = True
                continue
            window.is_lost = False
            window.in_16bit = stays_16bit(
                self._config, window.span, progress.levels[progress.place], progress.taken,
                progress.total - progress.place,
            )  # fmt: skip


def check_patterns(option: str, patterns, names: list[str]) -> None:
    """Raise ValueError for a pattern that matches no layer name, because it would do nothing.

    option: name of the option with the patterns, for the message.
    """
    for pattern in patterns:
        if not any(fnmatch.fnmatchcase(name, pattern) for name in names):
            close = difflib.get_close_matches(pattern, names, n=1, cutoff=0.0)
            hint = f"; the closest is {close[0]!r}" if close else ""
            raise ValueError(
                f"{option}: got {pattern!r}, which matches no layer, expected a name or pattern of the "
                f"{len(names)} layers in handle.report(){hint}"
            )


def is_kept(config, name: str) -> bool:
    """True if the options keep a layer in 16 bit at all steps."""
    return config.of_layer("recipe", name) == IN_16_BIT
