"""Decide if a model's forward belongs to the running step of a scheduler, and count strays.

A scheduler tells when it is stepped, but not which forwards are for it: another pipeline may share the model, or a
user's own loop may call it. A forward belongs to the running step if its timestep is that of the earlier forwards in
this step (guidance calls a model several times). If the scheduler's timesteps can be read, it must also be the
timestep that is due.

Eager forwards are decided on the host. A timestep on a GPU is waited for only if there are step windows, and mostly in
the first step of a run. Other timesteps, and those in compiled code and CUDA graphs, are compared and counted on the
device.
"""

from __future__ import annotations

import numbers
import threading

import torch

from sage_kernels.compat import mark_static_address

from ...reporting.event_counter import EventCounter
from .windows import Progress


# How pipelines pass t to their models: as it is, in thousandths, or reversed. Other forms can't be checked.
FORMS = (lambda t: t, lambda t: t / 1000.0, lambda t: 1.0 - t / 1000.0)
SIZES = (lambda t: abs(t), lambda t: abs(t) / 1000.0, lambda t: 1.0)  # magnitude of the numbers rounded on the way


def _number(timestep, wait: bool) -> float | None:
    """Return the largest timestep of a call; None if it can't be read, or only by waiting for a device.

    wait: read it from a device all the same, which syncs.
    """
    if isinstance(timestep, numbers.Real):
        return float(timestep)
    if not isinstance(timestep, torch.Tensor) or timestep.numel() == 0 or timestep.device.type == "meta":
        return None
    return float(timestep.detach().amax()) if timestep.device.type == "cpu" or wait else None


def _rounding(timestep) -> float:
    """Return the relative error of a timestep that was rounded twice to its dtype."""
    known = isinstance(timestep, torch.Tensor) and timestep.dtype.is_floating_point
    return 2.0 * torch.finfo(timestep.dtype if known else torch.float32).eps


def _version(timestep) -> int | None:
    """Return a tensor's count of in-place writes; None for inference tensors, which have none."""
    is_counted = isinstance(timestep, torch.Tensor) and not timestep.is_inference()
    return timestep._version if is_counted else None


class _Seen(threading.local):
    """The latest forward in this thread that belonged to a step.

    Attributes:
        run, token: the windows.Progress of its step, and the step's token.
        timestep, version, number: the timestep argument, its count of writes, and its value if it could be read.
        calls: number of forwards in this step so far.
        most: largest number of forwards in a finished step of this run.
    """

    def __init__(self):
        self.token = self.run = self.timestep = self.version = self.number = None
        self.calls = self.most = 0


class Forwards:
    """The forwards of one model: decides if each belongs to a step, and counts those that do not.

    Args: device: where the model runs.
    """

    def __init__(self, device):
        self._form: int | None = None  # of FORMS, once it is known
        self._seen = _Seen()
        self.to(device)

    def to(self, device) -> None:
        """Move the counters to another device and start from zero."""
        self._strays, self._misplaced = EventCounter(1, device), EventCounter(1, device)
        with torch.inference_mode(False):
            # number of forwards in the running step (-1: no step is running), and the latest timestep
            self._since = torch.full((), -1, dtype=torch.int64, device=device)
            self._latest = torch.zeros((), dtype=torch.float32, device=device)
            self._precision = torch.zeros((), dtype=torch.int64, device=device)
        self._precision_there = 0
        for tensor in (self._since, self._latest, self._precision):
            mark_static_address(tensor, guard=False)

    @property
    def strays(self) -> int:
        """Number of forwards so far that belong to no step. Syncs."""
        return self._strays.numbers()[0]

    @property
    def misplaced(self) -> int:
        """Number of CUDA graph replays so far in steps that should run in another precision. Syncs."""
        return self._misplaced.numbers()[0]

    def zero(self) -> None:
        """Set both counters to zero."""
        self._strays.zero()
        self._misplaced.zero()

    def forget(self) -> None:
        """Forget the earlier forwards of all threads, so that the next one is compared with none."""
        self._form, self._seen = None, _Seen()
        self.mark(False)

    def add_stray(self) -> None:
        """Count a forward that belongs to no step."""
        self._strays.add(0)

    def mark(self, running: bool, precision: int = 0) -> None:
        """Tell compiled and captured forwards of the running step. Call it between forwards.

        Args: running: False if no step is running. precision: `windows.Steps.bits` of the step.
        """
        self._since.fill_(0 if running else -1)
        if precision != self._precision_there:
            self._precision.fill_(precision)
            self._precision_there = precision

    def count_compiled(self, timestep) -> None:
        """Count a forward in compiled code if no scheduler steps it. Runs on the device alone."""
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
        """Capture the counting of replays that belong to no step, or to a step of another precision.

        Device operations only. precision: `windows.Steps.bits` of the captured step.
        """
        is_elsewhere = isinstance(timestep, torch.Tensor) and timestep.device != self._latest.device
        misplaced = (self._since >= 0) & (self._precision != precision)
        self._misplaced.traced[0].add_(misplaced.to(torch.int64))
        self.count_compiled(None if is_elsewhere else timestep)  # a copy from the host would be captured as a constant

    def belongs(self, progress: Progress, timestep, *, resumes: bool = False) -> bool:
        """True if an eager forward with this timestep belongs to the running step of a run.

        Args:
            timestep: a tensor, a number or None.
            resumes: True if the scheduler is not the one that stepped last. Its timesteps must match then.
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
            return True  # without a timestep that can be read, nothing speaks against it
        if timestep.data_ptr() == last.data_ptr() and timestep.shape == last.shape:
            return _version(timestep) == seen.version  # the same memory, as both tensors are alive
        # wait only for more calls than a whole step of this run has had
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
            # an unknown form is accepted, unless this model was given a known one before
            return self._form is None and progress.is_told and not resumes
        due = progress.timesteps[place] == progress.timesteps[progress.place]
        if not due and not (first and progress.is_told):
            return False
        self._form = form
        if not due or not progress.is_told:
            progress.move(place)
        return True

    def _place(self, progress, number: float, rounding: float) -> tuple[int | None, int | None]:
        """Return (index in the run's timesteps, form) of a timestep; None for what is unknown.

        Of several matches, the one nearest to the running step counts. The form is an index into FORMS, None if
        several fit.
        """
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
