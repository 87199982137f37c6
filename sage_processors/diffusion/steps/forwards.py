"""Whether a forward of a model belongs to the step that a scheduler is at.

A scheduler tells when it is stepped, and never whether it is the one that a forward is for: another pipeline may share
the model, or a user's own loop may call it. A forward belongs to a running step if the model is given the timestep
that it was given before in this step (guidance calls a model several times), and, where the scheduler's timesteps can
be read, the one that is due. Eager forwards are decided on the host; numbers that lie on a GPU are waited for only
where precision hangs on them, in the first step of a run. Elsewhere, in compiled code and in CUDA graphs, they are
compared on the device and counted.
"""

from __future__ import annotations

import numbers
import threading

import torch

from sage_kernels.compat import mark_static_address

from ...reporting.event_counter import EventCounter
from .windows import Progress


# How pipelines give t to their models: as it is, in thousandths, and reversed. What is none of these can't be checked.
FORMS = (lambda t: t, lambda t: t / 1000.0, lambda t: 1.0 - t / 1000.0)
SIZES = (lambda t: abs(t), lambda t: abs(t) / 1000.0, lambda t: 1.0)  # of what is rounded on the way there


def _number(timestep, wait: bool) -> float | None:
    """The timestep of a call (the largest of several), or None where reading it would wait for a device."""
    if isinstance(timestep, numbers.Real):
        return float(timestep)
    if not isinstance(timestep, torch.Tensor) or timestep.numel() == 0 or timestep.device.type == "meta":
        return None
    return float(timestep.detach().amax()) if timestep.device.type == "cpu" or wait else None


def _rounding(timestep) -> float:
    """Relative error that a timestep of this dtype may have, rounded twice."""
    known = isinstance(timestep, torch.Tensor) and timestep.dtype.is_floating_point
    return 2.0 * torch.finfo(timestep.dtype if known else torch.float32).eps


def _version(timestep) -> int | None:
    """Changes with every write to a tensor; inference tensors keep no count."""
    is_counted = isinstance(timestep, torch.Tensor) and not timestep.is_inference()
    return timestep._version if is_counted else None


class _Seen(threading.local):
    """The latest forward in this thread that belonged to a step.

    Attributes: token, run: of its step (windows.Progress). timestep, version, number: what the model was given.
        calls: forwards in this step so far. most: in a whole step of this run.
    """

    def __init__(self):
        self.token = self.run = self.timestep = self.version = self.number = None
        self.calls = self.most = 0


class Forwards:
    """The forwards of one model: whether they belong to a step, and how many did not.

    Args: device: of the model.
    """

    def __init__(self, device):
        self._form: int | None = None  # of FORMS, once it is known
        self._seen = _Seen()
        self.to(device)

    def to(self, device) -> None:
        """Count on another device from now on, from zero."""
        self._strays, self._misplaced = EventCounter(1, device), EventCounter(1, device)
        with torch.inference_mode(False):
            # forwards since the latest step, -1 while no step is running, and the timestep of the latest
            self._since = torch.full((), -1, dtype=torch.int64, device=device)
            self._latest = torch.zeros((), dtype=torch.float32, device=device)
            self._precision = torch.zeros((), dtype=torch.int64, device=device)
        self._precision_there = 0
        for tensor in (self._since, self._latest, self._precision):
            mark_static_address(tensor, guard=False)

    @property
    def strays(self) -> int:
        """Forwards so far that belong to no step. Syncs."""
        return self._strays.numbers()[0]

    @property
    def misplaced(self) -> int:
        """Replays of a CUDA graph so far in steps for which the options ask for another precision. Syncs."""
        return self._misplaced.numbers()[0]

    def zero(self) -> None:
        """Count anew."""
        self._strays.zero()
        self._misplaced.zero()

    def forget(self) -> None:
        """Expect nothing of the next forward: what earlier ones were given, in any thread, is forgotten."""
        self._form, self._seen = None, _Seen()
        self.mark(False)

    def add_stray(self) -> None:
        """Count one."""
        self._strays.add(0)

    def mark(self, running: bool, precision: int = 0) -> None:
        """Between forwards: a step begins, or (False) none is running. precision: its `windows.Steps.bits`."""
        self._since.fill_(0 if running else -1)
        if precision != self._precision_there:
            self._precision.fill_(precision)
            self._precision_there = precision

    def count_compiled(self, timestep) -> None:
        """In compiled code: count this forward if it belongs to no step. Device operations only."""
        since, latest = self._since, self._latest
        stray = since < 0
        if timestep is not None:
            if not isinstance(timestep, torch.Tensor):
                timestep = torch.full((), float(timestep), dtype=torch.float32, device=latest.device)
            t = timestep.detach().to(latest.device, torch.float32).amax()
            stray = stray | ((since > 0) & (t != latest))
            latest.copy_(t)
        self._strays.traced[0].add_(stray.to(torch.int64))
        since.add_((since >= 0).to(torch.int64))

    def count_captured(self, timestep, precision: int) -> None:
        """While a CUDA graph is captured: have each replay counted that belongs to no step, or to one of another
        precision than that of the captured step. Device operations only."""
        is_elsewhere = isinstance(timestep, torch.Tensor) and timestep.device != self._latest.device
        misplaced = (self._since >= 0) & (self._precision != precision)
        self._misplaced.traced[0].add_(misplaced.to(torch.int64))
        self.count_compiled(None if is_elsewhere else timestep)  # a graph holds what a copy from the host found once

    def belongs(self, progress: Progress, timestep, *, resumes: bool = False) -> bool:
        """Whether an eager forward with this timestep (tensor, number or None) is one of the running step.

        resumes: the scheduler is not the one that stepped last: its timesteps must speak for it.
        """
        if progress.is_over:
            return False
        seen = self._seen
        if seen.token is progress.token:
            if not self._is_repeated(progress, timestep):
                return False
            seen.calls += 1
        elif self._is_due(progress, timestep, resumes):
            same_run = seen.run is progress and progress.taken > 0
            seen.most = max(seen.most, seen.calls) if same_run else 0
            seen.token, seen.run, seen.calls = progress.token, progress, 1
        else:
            return False
        seen.timestep, seen.version, seen.number = timestep, _version(timestep), _number(timestep, wait=False)
        return True

    def _is_repeated(self, progress, timestep) -> bool:
        seen, number = self._seen, _number(timestep, wait=False)
        last = seen.timestep
        if number is not None and seen.number is not None:
            return number == seen.number
        if not (isinstance(timestep, torch.Tensor) and isinstance(last, torch.Tensor)):
            return True  # a model that is given no timestep, or one that can't be read
        if timestep.data_ptr() == last.data_ptr() and timestep.shape == last.shape:
            return _version(timestep) == seen.version  # both are alive, so it is the very same memory
        # so many calls were seen in a whole step of this run: no reason to wait for the same thing again
        if progress.windowed and seen.calls >= seen.most:
            return _number(timestep, wait=True) == _number(last, wait=True)
        if timestep.device == last.device == self._latest.device:
            moved = timestep.detach().amax() != last.detach().amax()
            self._strays.traced[0].add_(moved.to(torch.int64))
        return True

    def _is_due(self, progress, timestep, resumes: bool) -> bool:
        first = progress.taken == 0
        number = _number(timestep, wait=progress.windowed and (first or resumes))
        if number is None or not progress.timesteps:
            return progress.is_told and not (resumes and progress.windowed)
        place, form = self._place(progress, number, _rounding(timestep))
        if place is None:
            # a form of its own is no reason for distrust, unless this model was seen to be given another
            return self._form is None and progress.is_told and not resumes
        due = progress.timesteps[place] == progress.timesteps[progress.place]
        if not due and not (first and progress.is_told):
            return False
        self._form = form
        if not due or not progress.is_told:
            progress.move(place)
        return True

    def _place(self, progress, number: float, rounding: float) -> tuple[int | None, int | None]:
        """Index of a timestep, the nearest to where the run is, and its form where only one fits; else None."""
        found = [
            (abs(place - progress.place), place, form)
            for form in (range(len(FORMS)) if self._form is None else (self._form,))
            for place, t in enumerate(progress.timesteps)
            if abs(number - FORMS[form](t)) <= rounding * SIZES[form](t)
        ]
        if not found:
            return None, None
        distance, place, form = min(found)
        return place, form if len({f for d, _, f in found if d == distance}) == 1 else None
