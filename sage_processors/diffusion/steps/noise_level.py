"""The noise level of the running denoising step, for every scheduler, without a host sync.

The noise level is u = σ/√(α² + σ²) of the noised sample α·x0 + σ·ε: 0 is clean, 1 is pure noise. It does not depend
on how a scheduler numbers its timesteps, so scales learnt with one scheduler can serve another. It has two sources:
* With a pipeline, the scheduler. Its class is swapped for a subclass that reports `set_timesteps`, `set_begin_index`
  and `step`. Instance attributes would not do: deepcopy copies them, and the copy would report for the original.
* Without a pipeline, the `timestep` argument of the model.
Everything is computed with tensor operations on the device of the timestep tensor, so a step with a CUDA timestep
never syncs.
"""

from __future__ import annotations

import functools
import inspect
import weakref
from typing import Any

import torch


def _config(scheduler, name, default=None):
    return getattr(scheduler.config, name, default) if hasattr(scheduler, "config") else default


def _from_sigmas(scheduler, sigmas: torch.Tensor) -> torch.Tensor:
    """Return the noise levels of a scheduler's `sigmas`, by the scheduler's own definition of sigma."""
    sigma_data = _config(scheduler, "sigma_data")
    if sigma_data:  # EDM preconditioning, consistency models
        return sigmas / (sigmas**2 + sigma_data**2).sqrt()
    flow = (
        _config(scheduler, "use_flow_sigmas", False)
        or _config(scheduler, "prediction_type") == "flow_prediction"
        # variance-exploding schedulers of diffusers have alphas_cumprod; a scheduler without is a flow
        or getattr(scheduler, "alphas_cumprod", None) is None
    )
    if not flow:
        return sigmas / (1.0 + sigmas**2).sqrt()
    if _config(scheduler, "invert_sigmas", False):
        sigmas = 1.0 - sigmas
    return sigmas / ((1.0 - sigmas) ** 2 + sigmas**2).sqrt()


def numbers_of(values: Any) -> torch.Tensor:
    """Return a scheduler's timesteps or sigmas (a tensor, array or list) as an fp32 tensor."""
    if isinstance(values, torch.Tensor):
        return values.detach().to(torch.float32)
    return torch.tensor(values, dtype=torch.float32, device="cpu")


def noise_levels(scheduler) -> torch.Tensor:
    """Return the noise level of every entry of `scheduler.timesteps`, after its `set_timesteps`.

    Returns: fp32 [len(timesteps)] in [0, 1], on the device of `timesteps`. A scheduler of unknown kind gets levels
        that fall evenly from 1: one for each step, but not comparable with those of other schedulers.
    """
    timesteps = numbers_of(scheduler.timesteps)
    count, device = timesteps.numel(), timesteps.device
    sigmas, alphas = getattr(scheduler, "sigmas", None), getattr(scheduler, "alphas_cumprod", None)
    if _config(scheduler, "prediction_type") == "trigflow":
        levels = timesteps.sin()
    # KDPM2 calls the model between two sigmas every other time, at a fractional timestep
    elif sigmas is not None and len(sigmas) >= count and getattr(scheduler, "sigmas_interpol", None) is None:
        levels = _from_sigmas(scheduler, numbers_of(sigmas).to(device)[:count])
    elif alphas is not None:
        levels = (1.0 - numbers_of(alphas).to(device)).sqrt()
        place = timesteps.clamp(0, levels.numel() - 1)
        known = ~place.isnan()
        place = torch.where(known, place, 0.0)
        levels = torch.lerp(levels[place.floor().long()], levels[place.ceil().long()], place.frac())
        levels = torch.where(known, levels, 1.0)
    else:
        levels = 1.0 - torch.arange(count, device=device, dtype=torch.float32) / max(count, 1)
    return levels.nan_to_num(1.0, 1.0, 0.0).clamp(0.0, 1.0)


class Run:
    """The progress of one scheduler in its run, in noise levels.

    Listeners are called with `begin_run(u)` at the start of a run and `advance(u_finished, u_next)` after each step.

    Args: scheduler: has timesteps. Held by a weak reference, because the scheduler holds this object.
    """

    def __init__(self, scheduler):
        self._scheduler = weakref.ref(scheduler)
        self.listeners: list[Any] = []
        self.level: torch.Tensor | None = None  # of the running step, fp32 0-d
        self._timesteps: Any = None  # this and the next three: tensors, once a run was prepared
        self._levels: Any = None
        self._places: Any = None
        self._place: Any = None

    def start(self, place: int = 0) -> None:
        """Begin a run at timesteps[place]."""
        scheduler = self._scheduler()
        timesteps = getattr(scheduler, "timesteps", None)
        if timesteps is None or len(timesteps) == 0:
            return
        self._timesteps = numbers_of(timesteps)
        self._levels = noise_levels(scheduler)
        self._places = torch.arange(self._levels.numel(), device=self._levels.device)
        place = min(max(int(place), 0), self._levels.numel() - 1)
        self._place = self._places[place : place + 1]
        self.level = self._levels[place]
        for listener in self.listeners:
            listener.begin_run(self.level)

    def finish_step(self, timestep) -> None:
        """End the step at a timestep: a number or a tensor, of which the largest value counts."""
        if self._levels is None:
            self.start()
        if self._levels is None:
            return
        if isinstance(timestep, torch.Tensor):
            timestep = timestep.detach()
            if timestep.numel() == 0:
                return
            timestep = timestep.amax() if timestep.numel() > 1 else timestep.reshape(())
            if timestep.device.type not in ("cpu", self._timesteps.device.type):
                # move the tables to the timestep's device: moving the timestep would wait for the device
                for name in ("_timesteps", "_levels", "_places", "_place"):
                    setattr(self, name, getattr(self, name).to(timestep.device))
        # a timestep of NaN is equally far from all, so that the run goes on where it is
        distance = (self._timesteps - timestep).abs().nan_to_num(torch.inf, torch.inf)
        # second-order samplers visit a timestep twice: of equal matches, the one nearest to where the run should be
        detour = torch.where(distance == distance.min(), (self._places - self._place).abs(), self._places.numel())
        found = detour.argmin(keepdim=True)
        self._place = (found + 1).clamp(max=self._places.numel() - 1)
        # index_select: indexing with a 0-d tensor would read it on the host
        finished, self.level = (self._levels.index_select(0, i)[0] for i in (found, self._place))
        for listener in self.listeners:
            listener.advance(finished, self.level)


def _new(base):
    return base.__new__(base)


@functools.cache
def _tracked_class(base: Any) -> Any:
    """Return a scheduler's subclass that reports to its Run, `_sage`.

    It has the name of its base, because diffusers saves the name of a scheduler's class.
    """

    def reporting(method, report):
        @functools.wraps(method)  # pipelines inspect the signatures of set_timesteps and step
        def call(self, *args, **kwargs):
            result = method(self, *args, **kwargs)
            run = run_of(self)
            if run is not None:
                report(run, self, args, kwargs)
            return result

        return call

    def argument(method, name):
        names = list(inspect.signature(method).parameters)[1:]
        place = names.index(name) if name in names else len(names)
        return lambda args, kwargs: kwargs[name] if name in kwargs else args[place] if place < len(args) else None

    members: dict[str, Any] = {
        "__module__": base.__module__,
        "__qualname__": base.__qualname__,
        "__doc__": base.__doc__,
        "_sage_base": base,
    }
    timestep_of = argument(base.step, "timestep")

    def stepped(run, scheduler, args, kwargs):
        timestep = timestep_of(args, kwargs)
        if timestep is not None:
            run.finish_step(timestep)

    members["step"] = reporting(base.step, stepped)
    members["set_timesteps"] = reporting(base.set_timesteps, lambda run, scheduler, args, kwargs: run.start())
    if hasattr(base, "set_begin_index"):
        begin_of = argument(base.set_begin_index, "begin_index")
        members["set_begin_index"] = reporting(
            base.set_begin_index, lambda run, scheduler, args, kwargs: run.start(begin_of(args, kwargs) or 0)
        )

    def __reduce_ex__(self, protocol):
        # copies and pickles are plain schedulers, which report nothing
        state = {name: value for name, value in self.__dict__.items() if name != "_sage"}
        return _new, (base,), state

    members["__reduce_ex__"] = __reduce_ex__
    return type(base.__name__, (base,), members)


def can_track(scheduler) -> bool:
    """True for a scheduler with the methods that are needed to follow it."""
    return all(callable(getattr(scheduler, name, None)) for name in ("step", "set_timesteps"))


def run_of(scheduler) -> Run | None:
    """Return the run of a tracked scheduler; None for any other object."""
    return scheduler.__dict__.get("_sage") if hasattr(scheduler, "__dict__") else None


def track(scheduler, listener) -> Run:
    """Make a scheduler call a listener's `begin_run` and `advance` from now on.

    If a run is already prepared, `begin_run` is called at once.
    """
    run = run_of(scheduler)
    if run is None:
        run = Run(scheduler)
        base: Any = type(scheduler)
        scheduler.__class__ = _tracked_class(base)
        scheduler.__dict__["_sage"] = run
    if not any(known is listener for known in run.listeners):
        run.listeners.append(listener)
        run.start()
    return run


def untrack(scheduler, listener) -> None:
    """Undo `track`. The scheduler gets its own class back when it has no listeners left."""
    run = run_of(scheduler)
    if run is None:
        return
    run.listeners[:] = [known for known in run.listeners if known is not listener]
    if not run.listeners:
        del scheduler.__dict__["_sage"]
        scheduler.__class__ = type(scheduler)._sage_base


class TimestepReader:
    """Noise levels and run starts from the `timestep` argument of a model, without a scheduler.

    Uses device operations only, so it can be traced and never syncs. Models are given t in 0..1000, t/1000 or
    1 - t/1000. The largest value seen tells the first form from the others. The last one gives a reversed noise level,
    which serves as an index just as well.
    In a run, timesteps go one way. A timestep that turns back, or equals the first of the run, begins another run. A
    run that starts below the timestep of an interrupted one, or after a run of a single call, is taken for the
    earlier run's next step.

    Attributes:
        level: noise level of the latest call, fp32 0-d.
        begins: 1 if the latest call began a run, int32 0-d.
    """

    def __init__(self, forward, device):
        parameters = list(inspect.signature(forward).parameters)[1:]  # of the unbound method: without self
        self._name = next((name for name in ("timestep", "timesteps", "t") if name in parameters), None)
        self._index = None if self._name is None else parameters.index(self._name)
        self.to(device)

    def to(self, device) -> None:
        """Move to a device and forget all earlier calls."""
        with torch.inference_mode(False):
            self._largest = torch.zeros((), dtype=torch.float32, device=device)
            self.level = torch.ones((), dtype=torch.float32, device=device)
            self.begins = torch.ones((), dtype=torch.int32, device=device)
            # of the current run: its first timestep (NaN: none yet), its latest one, and its direction (-1, 0, 1)
            self._walk = torch.full((3,), torch.nan, dtype=torch.float32, device=device)

    def begin_run(self) -> None:
        """Let the next call begin a run, at any timestep."""
        self._walk.fill_(torch.nan)

    def snapshot(self) -> torch.Tensor:
        """Return (largest timestep seen, level of the latest call), a copy on the CPU, fp32 [2]. Syncs."""
        return torch.stack([self._largest, self.level]).cpu()

    def restore(self, snapshot: torch.Tensor) -> None:
        """Go on from a `snapshot`; the next call begins a run. Writes to the tensors in place."""
        largest, level = snapshot.to(self.level.device)
        self._largest.copy_(largest)
        self.level.copy_(level)
        self.begin_run()

    def timestep_of(self, args, kwargs):
        """Return the timestep argument of a model call; None if the model takes none or got none."""
        if self._index is None:
            return None
        return kwargs.get(self._name) if self._index >= len(args) else args[self._index]

    def read(self, timestep, held: torch.Tensor | None = None) -> tuple[torch.Tensor, torch.Tensor]:
        """Return (noise level of the previous call, noise level of this call), fp32 0-d tensors.

        held: int32 0-d; 1 keeps the largest timestep as it is, and with it the form of timesteps (frozen scales).
        """
        if not isinstance(timestep, torch.Tensor):
            timestep = torch.full((), float(timestep), dtype=torch.float32, device=self.level.device)
        t = timestep.detach().to(self.level.device, torch.float32).abs().amax()
        t = torch.where(t.isfinite(), t, self._largest)  # NaN would stay the largest value forever
        largest = torch.maximum(self._largest, t)
        if held is not None:
            largest = torch.where(held > 0, self._largest, largest)
        self._largest.copy_(largest)
        previous = self.level.clone()
        self._follow(t)
        self.level.copy_(torch.where(self._largest > 1.5, t / 1000.0, t).clamp(0.0, 1.0))
        return previous, self.level

    def _follow(self, t: torch.Tensor) -> None:
        first, latest, way = self._walk.unbind()
        step = (t - latest).sign()
        begins = first.isnan() | (t == first) | (step * way < 0)
        way = torch.where(begins, 0.0, torch.where(way == 0, step, way))
        self._walk.copy_(torch.stack([torch.where(begins, t, first), t, way]))
        self.begins.copy_(begins)
