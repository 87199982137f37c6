"""Where attention stays in 16 bit by choice: steps of a run, noise levels, layers, noise levels of some layers.

The INT8 kernels and the model's own attention are different kernels, so the choice is made on the host, between steps:
the scheduler's step sets a flag that all layers with the same range of noise levels read, mostly one flag for all
layers of a handle. Inside of torch.compile a flag is a guard. Each combination of flags is compiled once, when it is
first needed, and a step that changes precision picks another version: two versions without ranges of some layers, and
five at most with them (config.MAX_RANGES), whatever the number of steps, and with CUDA graphs a recording for each.
"""

from __future__ import annotations

import difflib
import fnmatch

import torch


# Reasons for exact attention that a user asked for: no warning, and policy="strict" does not mind.
CHOSEN = ("window", "kept")


def stays_exact(config, span, level: float, taken: int, left: int) -> bool:
    """Whether the options keep a step in 16 bit, for layers with this `keep_noise`.

    Args: span: () or (low, high). level: the step's noise level. taken: steps of the run before it. left: steps of
        the run that are not done yet, this one included.
    """
    if taken < config.keep_first_steps or left <= config.keep_last_steps or level < config.keep_below_noise:
        return True
    return inside(span, level)


def inside(span, level: float) -> bool:
    """Whether a noise level lies in a range: () has none, (low, high) those from low to below high, or to 1."""
    return bool(span) and span[0] <= level and (level < span[1] or span[1] == 1.0)


class Window:
    """What the layers with one `keep_noise` share: whether the running step stays in 16 bit.

    Attributes: exact: read by every attention call. was_exact: of the step before.
    """

    def __init__(self, span):
        self.span, self.exact, self.was_exact = span, False, False


class Steps:
    """Counts the steps of a run on the host and says which of them stay in 16 bit.

    Attributes:
        place: index of the running step in the scheduler's timesteps. total: their number; 0 before a first run.
    """

    def __init__(self, config):
        self._config = config
        spans = (config.keep_noise, *(span for _, span in config.layer_keep_noise))
        self.windowed = bool(config.keep_first_steps or config.keep_last_steps or config.keep_below_noise)
        self.windowed = self.windowed or any(spans)
        self._windows = {span: Window(span) for span in spans}
        self.listeners = []
        self.place, self.total = 0, 0
        self._levels, self._taken = [], 0

    def window_of(self, span) -> Window:
        """The window of the layers whose `keep_noise` is `span`, one of the options."""
        return self._windows[span]

    @property
    def exact(self) -> bool:
        """Whether the running step stays in 16 bit for layers without a range of their own."""
        return self._windows[self._config.keep_noise].exact

    def begin(self, levels: torch.Tensor, place: int) -> None:
        """A run starts at timesteps[place] of a scheduler with these noise levels fp32 [N].

        With windows, waits for the device once: noise levels are compared on the host.
        """
        self.total, self.place, self._taken = len(levels), min(max(place, 0), len(levels) - 1), 0
        self._levels = levels.tolist() if self.windowed else []
        self._decide()

    def finish(self, u_finished: torch.Tensor) -> None:
        """A step, at noise level u_finished (0-d), is done.

        Pipelines may start late in the timesteps without telling the scheduler (image to image with DDIM): after the
        first step of a run, and with windows only, the place is looked up by its noise level, which waits once.
        """
        if self._levels and self._taken == 0:
            u = float(u_finished)
            if abs(self._levels[self.place] - u) > 1e-6:
                self.place = min(range(self.total), key=lambda i: abs(self._levels[i] - u))
        self._taken += 1
        self.place = min(self.place + 1, max(self.total - 1, 0))
        self._decide()

    def _decide(self) -> None:
        for window in self._windows.values() if self.windowed else ():
            level, left = self._levels[self.place], self.total - self.place
            window.was_exact = window.exact
            window.exact = stays_exact(self._config, window.span, level, self._taken, left)
        for listener in self.listeners:
            listener.step_starts(self.place)


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
    if any(fnmatch.fnmatchcase(name, pattern) for pattern in config.keep_layers):
        return True
    return bool(config.only_layers) and not any(fnmatch.fnmatchcase(name, p) for p in config.only_layers)


def option_of(config, option: str, name: str):
    """One of config.LAYER_OPTIONS of one layer: of the first pattern that matches it, else the handle's."""
    pairs = getattr(config, f"layer_{option}")
    matches = (value for pattern, value in pairs if fnmatch.fnmatchcase(name, pattern))
    return next(matches, getattr(config, option))
