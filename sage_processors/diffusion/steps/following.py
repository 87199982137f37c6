"""Follow the schedulers that step a handle's models, and tell the handle of runs and steps.

Pipelines may share a model: `StableDiffusionPipeline.from_pipe(pipe, scheduler=...)` steps the same UNet with its own
scheduler. So all schedulers of all pipelines with a model of the handle are followed. The running one is the one that
began or stepped last, separately in each thread. A forward that belongs to a step of none of them (forwards.py) is
counted. It runs in 16 bit if the options have step windows.
"""

from __future__ import annotations

import logging
import threading
import weakref

import torch

from ...unsupported import OVERLAP_REMEDY, REMEDIES
from ..host.discovery import unwrap
from ..host.pipeline_method import known_pipelines
from .noise_level import can_track, noise_levels, run_of, track, untrack
from .windows import Progress


logger = logging.getLogger("sage_processors")


class Followed:
    """One followed scheduler of one pipeline; the listener of its runs.

    Attributes:
        progress: a windows.Progress.
        name: the class name of the scheduler.
    """

    def __init__(self, following: Following, scheduler, pipe):
        self._following, self._scheduler, self._pipe = following, weakref.ref(scheduler), weakref.ref(pipe)
        self.name = getattr(type(scheduler), "__name__", "scheduler")
        self.progress = Progress(following.windowed)

    @property
    def scheduler(self):
        """The scheduler, or None once it was garbage-collected."""
        return self._scheduler()

    @property
    def pipe(self):
        """The pipeline, or None once it was garbage-collected."""
        return self._pipe()

    @property
    def level(self):
        """Noise level of the running step, a 0-d tensor; None before a first run."""
        run = run_of(self.scheduler)
        return None if run is None else run.level

    def begin_run(self, u) -> None:
        """Begin a run at noise level u. Called by the scheduler's noise_level.Run."""
        self._following.begun(self, u)

    def advance(self, u_finished, u_next) -> None:
        """End the step at u_finished; u_next is next. Called by the scheduler's noise_level.Run."""
        self._following.stepped(self, u_finished, u_next)


class _OfThread(threading.local):
    """State of one thread: its running scheduler, and if its latest forward belonged to no step."""

    def __init__(self):
        self.followed, self.is_lost = None, False


class Following:
    """The schedulers that a handle follows.

    Args:
        handle: the Handle; told of runs and steps through `begin_run(u)` and `advance(u_finished, u_next)`.
        windowed: True if the options have step windows.
    Attributes:
        followed: list of Followed, those of the handle's own pipeline first.
        overlaps: number of steps in which the run of another thread changed the planned scales.
    """

    def __init__(self, handle, windowed: bool):
        self._handle, self.windowed = handle, windowed
        self.followed: list[Followed] = []
        self._running = _OfThread()
        self._latest: Followed | None = None  # in any thread
        self._is_looking = False
        self._has_warned = False
        self.overlaps = 0

    @property
    def active(self) -> Followed | None:
        """The scheduler that began or stepped last in this thread, or else in any thread."""
        mine = self._running.followed
        return mine if mine is not None and mine in self.followed else self._latest

    @property
    def is_lost(self) -> bool:
        """True if this thread's latest forward belonged to no step."""
        return self._running.is_lost

    def look(self, *, thoroughly: bool = True) -> None:
        """Follow the current schedulers of all pipelines with a model of the handle.

        thoroughly: look at other pipelines than the handle's own, too. Pipelines announce new components
        (pipeline_method.py), but objects that merely look like a pipeline don't.
        """
        own = self._handle._pipe() if self._handle._pipe else None
        wanted = [(scheduler, own) for scheduler in _schedulers(own)]
        if thoroughly and self._handle._pipe:
            models = [denoiser.model for denoiser in self._handle._denoisers]
            for pipe in known_pipelines():
                if pipe is not own and any(unwrap(x) is m for x in list(vars(pipe).values()) for m in models):
                    wanted += [(scheduler, pipe) for scheduler in _schedulers(pipe)]
        known = {id(x.scheduler): x for x in self.followed if x.scheduler is not None}
        kept, new = [], []
        for scheduler, pipe in wanted:
            if id(scheduler) not in known:
                known[id(scheduler)] = Followed(self, scheduler, pipe)
                new.append(known[id(scheduler)])
            if known[id(scheduler)] not in kept:
                kept.append(known[id(scheduler)])
        for old in self.followed:
            if old in kept or old.scheduler is None:
                continue
            if old.pipe is None or (not thoroughly and old.pipe is not own):
                kept.append(old)  # its pipeline is gone, but its scheduler and models may still be in use
            else:
                untrack(old.scheduler, old)
        self.followed = kept
        if self._latest not in kept:
            self._latest = None
        self._find(new)

    def stop(self) -> None:
        """Stop following all schedulers."""
        for followed in self.followed:
            if followed.scheduler is not None:
                untrack(followed.scheduler, followed)
        self.followed, self._latest = [], None

    def reset(self) -> None:
        """Forget the progress of all runs in all threads, as if the schedulers were just found."""
        self._running, self._latest, self._has_warned, self.overlaps = _OfThread(), None, False, 0
        self._handle.steps.decide(None)
        for denoiser in self._handle._denoisers:
            denoiser.forwards.forget()
        for followed in self.followed:
            followed.progress = Progress(self.windowed)
        self._find(self.followed)

    def _find(self, found: list[Followed]) -> None:
        """Listen to schedulers. A run that is already prepared or under way is announced at once."""
        self._is_looking = True
        try:
            for followed in found:
                if followed.scheduler is not None:
                    untrack(followed.scheduler, followed)
                    track(followed.scheduler, followed)
        finally:
            self._is_looking = False
        if self._latest is None and self.followed:
            self._latest = self.followed[0]

    def begun(self, followed: Followed, u) -> None:
        """Take up a run that starts now; within `_find` it may have been prepared earlier."""
        scheduler, found = followed.scheduler, self._is_looking
        place = getattr(scheduler, "begin_index", None) or 0
        followed.progress.begin(noise_levels(scheduler), place, scheduler.timesteps, is_told=not found)
        if found and not _is_prepared(scheduler):
            followed.progress.is_over = True
        if not found or self._latest is None:
            self._enter(followed)
            self._handle.begin_run(u)

    def stepped(self, followed: Followed, u_finished, u_next) -> None:
        """End a step of this scheduler, at noise level u_finished; the next one is at u_next."""
        if self._latest is not followed and self._running.followed is followed:
            self._overlap(followed)
        followed.progress.finish(u_finished)
        self._enter(followed)
        self._handle.advance(u_finished, u_next)

    def _enter(self, followed: Followed) -> None:
        self._running.followed = self._latest = followed
        self._running.is_lost = False
        self._handle.steps.enter(followed.progress)
        self._mark(followed.progress)

    def _mark(self, progress: Progress) -> None:
        for denoiser in self._handle._denoisers:
            denoiser.forwards.mark(progress.is_told and not progress.is_over, self._handle.steps.bits)

    def place(self, denoiser, timestep) -> None:
        """Set this thread's step windows for the step of an eager forward that is about to run.

        A forward that is being captured belongs to the step entered last. Its replays are counted on the device.
        """
        if not (self.followed or self.windowed) or not denoiser.depends_on_steps:
            return
        if _is_capturing():
            denoiser.forwards.count_captured(timestep, self._handle.steps.bits)
            return
        active = self.active
        if active is not None and denoiser.forwards.belongs(active.progress, timestep):
            found: Followed | None = active
        else:
            others = [
                x
                for x in self.followed
                if x is not active and denoiser.forwards.belongs(x.progress, timestep, resumes=True)
            ]
            found = others[0] if len(others) == 1 else None
        if found is None:
            self._lose(denoiser)
        elif found is not self._latest or found is not active or self._running.is_lost:
            if found is active and not self._running.is_lost and found.progress.taken:
                self._overlap(found)
            # scales planned by another run since then are for other noise levels
            self._enter(found)
            self._handle.begin_run(1.0 if found.level is None else found.level)
        else:
            self._handle.steps.decide(found.progress)

    def _lose(self, denoiser) -> None:
        denoiser.forwards.add_stray()
        self._handle.steps.decide(None)
        if not self._running.is_lost:
            self._running.is_lost = True
            self._handle.begin_run(1.0)
        if not self._has_warned:
            self._has_warned = True
            logger.warning(
                "%s: got a forward that belongs to no step of %s; %s",
                denoiser.name or type(denoiser.model).__name__, self.names(), REMEDIES["unfollowed"],
            )  # fmt: skip

    def _overlap(self, followed: Followed) -> None:
        """Count a step of a run that shares the model, and so its one plan, with another thread's run."""
        if all(denoiser.state is None for denoiser in self._handle._denoisers):
            return
        with self._handle.lock:
            self.overlaps += 1
            is_first = self.overlaps == 1
        if is_first:
            logger.warning("%s: got runs that overlap in several threads; %s", followed.name, OVERLAP_REMEDY)

    def names(self) -> str:
        """Return the class names of the followed schedulers, for messages."""
        return ", ".join(dict.fromkeys(x.name for x in self.followed)) or "a scheduler (it is gone)"


def _schedulers(pipe) -> list:
    """Return all schedulers of a pipeline that can be followed, its main one first."""
    values = [] if pipe is None else [getattr(pipe, "scheduler", None), *list(getattr(pipe, "__dict__", {}).values())]
    found = {id(x): x for x in values if hasattr(type(x), "set_timesteps") and can_track(x)}
    return list(found.values())


def _is_prepared(scheduler) -> bool:
    """True if a scheduler has timesteps and has not stepped yet, as just before a run."""
    return (
        getattr(scheduler, "num_inference_steps", None) is not None and getattr(scheduler, "step_index", None) is None
    )


def _is_capturing() -> bool:
    return torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()
