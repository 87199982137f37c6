"""Which scheduler steps the models of a handle.

A pipeline's models may be shared: `StableDiffusionPipeline.from_pipe(pipe, scheduler=...)` steps the same UNet with a
scheduler of its own. All schedulers of all pipelines that hold a model of the handle are followed, and the one that
began or stepped last is the one that runs, for each thread apart. A forward that belongs to none of them (forwards.py)
is counted; where the options hang on steps or noise levels, it runs in 16 bit.
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
    """One scheduler, of one pipeline; hears of its runs.

    Attributes: progress (windows.Progress). scheduler, pipe: None when they are gone.
    """

    def __init__(self, following: Following, scheduler, pipe):
        self._following, self._scheduler, self._pipe = following, weakref.ref(scheduler), weakref.ref(pipe)
        self.name = getattr(type(scheduler), "__name__", "scheduler")
        self.progress = Progress(following.windowed)

    @property
    def scheduler(self):
        return self._scheduler()

    @property
    def pipe(self):
        return self._pipe()

    @property
    def level(self):
        """Noise level of the running step, 0-d, or None before a first run."""
        run = run_of(self.scheduler)
        return None if run is None else run.level

    def begin_run(self, u) -> None:
        """Called by the scheduler's run: denoising starts at noise level u."""
        self._following.begun(self, u)

    def advance(self, u_finished, u_next) -> None:
        """Called by the scheduler's run: a step is done."""
        self._following.stepped(self, u_finished, u_next)


class _OfThread(threading.local):
    """Attributes: followed: what runs in this thread. is_lost: its latest forward belonged to no step."""

    def __init__(self):
        self.followed, self.is_lost = None, False


class Following:
    """The schedulers that a handle follows.

    Args: handle: has _parts, steps, `begin_run(u)` and `advance(u_finished, u_next)`. windowed: whether precision
        hangs on where a run is.
    Attributes: followed: list of Followed, those of the handle's own pipeline first. overlaps: steps of runs between
        whose steps another thread's run came: their planned scales are of both.
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
        """What began or stepped last in this thread, or else in any."""
        mine = self._running.followed
        return mine if mine is not None and mine in self.followed else self._latest

    @property
    def is_lost(self) -> bool:
        """Whether this thread's latest forward belonged to no step."""
        return self._running.is_lost

    def look(self, *, thoroughly: bool = True) -> None:
        """Follow the schedulers that pipelines with one of the handle's models have now.

        thoroughly: look at other pipelines than the handle's own, too. These tell of what they are given
        (_pipeline_method.py); one that only looks like a pipeline does not.
        """
        own = self._handle._pipe() if self._handle._pipe else None
        wanted = [(scheduler, own) for scheduler in _schedulers(own)]
        if thoroughly and self._handle._pipe:
            models = [part.model for part in self._handle._parts]
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
                kept.append(old)  # its pipeline is gone, and somebody goes on with its parts
            else:
                untrack(old.scheduler, old)
        self.followed = kept
        if self._latest not in kept:
            self._latest = None
        self._find(new)

    def stop(self) -> None:
        """Follow nothing any more."""
        for followed in self.followed:
            if followed.scheduler is not None:
                untrack(followed.scheduler, followed)
        self.followed, self._latest = [], None

    def reset(self) -> None:
        """Forget where all runs are, in every thread: the schedulers are followed as if they were just found."""
        self._running, self._latest, self._has_warned, self.overlaps = _OfThread(), None, False, 0
        self._handle.steps.decide(None)
        for part in self._handle._parts:
            part.forwards.forget()
        for followed in self.followed:
            followed.progress = Progress(self.windowed)
        self._find(self.followed)

    def _find(self, found: list[Followed]) -> None:
        """Hear of their runs; of a run that is prepared or under way at once."""
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
        """A run starts, or (while looking) one that may have been prepared before is found."""
        scheduler, found = followed.scheduler, self._is_looking
        place = getattr(scheduler, "begin_index", None) or 0
        followed.progress.begin(noise_levels(scheduler), place, scheduler.timesteps, is_told=not found)
        if found and not _is_prepared(scheduler):
            followed.progress.is_over = True
        if not found or self._latest is None:
            self._enter(followed)
            self._handle.begin_run(u)

    def stepped(self, followed: Followed, u_finished, u_next) -> None:
        """A step is done."""
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
        for part in self._handle._parts:
            part.forwards.mark(progress.is_told and not progress.is_over, self._handle.steps.bits)

    def place(self, part, timestep) -> None:
        """Before an eager forward of a part: set this thread's windows for the step that it belongs to.

        A forward that is captured is of the step that was entered last, and its replays are counted on the device.
        """
        if not (self.followed or self.windowed) or not part.hangs_on_steps:
            return
        if _is_capturing():
            part.forwards.count_captured(timestep, self._handle.steps.bits)
            return
        active = self.active
        if active is not None and part.forwards.belongs(active.progress, timestep):
            found: Followed | None = active
        else:
            others = [
                x
                for x in self.followed
                if x is not active and part.forwards.belongs(x.progress, timestep, resumes=True)
            ]
            found = others[0] if len(others) == 1 else None
        if found is None:
            self._lose(part)
        elif found is not self._latest or found is not active or self._running.is_lost:
            if found is active and not self._running.is_lost and found.progress.taken:
                self._overlap(found)
            # what was planned since is of other noise levels
            self._enter(found)
            self._handle.begin_run(1.0 if found.level is None else found.level)
        else:
            self._handle.steps.decide(found.progress)

    def _lose(self, part) -> None:
        part.forwards.add_stray()
        self._handle.steps.decide(None)
        if not self._running.is_lost:
            self._running.is_lost = True
            self._handle.begin_run(1.0)
        if not self._has_warned:
            self._has_warned = True
            logger.warning(
                "%s: got a forward that belongs to no step of %s; %s",
                part.name or type(part.model).__name__, self.names(), REMEDIES["unfollowed"],
            )  # fmt: skip

    def _overlap(self, followed: Followed) -> None:
        """Count a step of a run that another thread's run was planned between: one model has one plan."""
        if all(part.state is None for part in self._handle._parts):
            return
        with self._handle.lock:
            self.overlaps += 1
            is_first = self.overlaps == 1
        if is_first:
            logger.warning("%s: got runs that overlap in several threads; %s", followed.name, OVERLAP_REMEDY)

    def names(self) -> str:
        """The followed schedulers, for people."""
        return ", ".join(dict.fromkeys(x.name for x in self.followed)) or "a scheduler (it is gone)"


def _schedulers(pipe) -> list:
    """Everything a pipeline has that can be followed, its main scheduler first."""
    values = [] if pipe is None else [getattr(pipe, "scheduler", None), *list(getattr(pipe, "__dict__", {}).values())]
    found = {id(x): x for x in values if hasattr(type(x), "set_timesteps") and can_track(x)}
    return list(found.values())


def _is_prepared(scheduler) -> bool:
    """Whether a scheduler that was found looks as if a run were about to begin."""
    return (
        getattr(scheduler, "num_inference_steps", None) is not None and getattr(scheduler, "step_index", None) is None
    )


def _is_capturing() -> bool:
    return torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()
