"""Put INT8 attention into a model or a pipeline, and remove it again."""

from __future__ import annotations

import logging
import threading
import weakref
from pathlib import Path
from typing import Any

import torch
from torch import nn

from sage_kernels.planning.rules import FROM_TABLE

from ..linears.swap import LinearSwap, swap_of
from ..options import SageAttnProcessor
from .auto_rotation import AutoRotation
from .checks import check_swapped, refuse_bare_options, warn_of_idle_layers
from .denoiser import Denoiser
from .graphs.model_graphs import ModelGraphs, can_replay
from .host.discovery import denoisers, input_device, is_pipeline, unwrap
from .host.pipeline_method import listen
from .host.root_hook import RootHook
from .reports.probe import Probe
from .reports.report import Report, build_report
from .reports.scale_files import load_scales, save_scales
from .reports.warm_up import KernelsAhead, WarmUp, warm_up
from .steps.following import Following
from .steps.windows import Steps


logger = logging.getLogger("sage_processors")

_REMOVED = "This handle was removed: the models run their original attention."
_STAY = (
    "{0}: {1} linear layers stay in 8 bit, since their 16-bit weights were dropped; load the model again for these."
)


class Handle:
    """INT8 attention in a model or pipeline. As a context manager it removes it again at the end.

    A handle belongs to the model object it was made for. `save_pretrained` writes stock weights and configs, and a
    model loaded from them is stock. A copy of the model (copy.deepcopy, pickle, torch.save) keeps INT8 attention with
    the same options, except that it has no step windows and computes its scales from the inputs of each call. A copy
    has no handle; `apply(copy)` gives it one.

    Attributes: config (SageAttnProcessor), steps (windows.Steps: the running step and its precision).
    """

    def __init__(self, target: Any, config: SageAttnProcessor) -> None:
        self.config = config
        self._denoisers: list[Denoiser] = []
        self._pipe = weakref.ref(target) if is_pipeline(target) else None
        self._model = None if self._pipe else target
        self._active = True
        self.lock = threading.RLock()
        self.steps = Steps(config)
        self.following = Following(self, self.steps.windowed)
        self._probe: Probe | None = None
        self._rotation = AutoRotation(self)
        self._kernels = KernelsAhead()
        self._last_report = Report([], [_REMOVED])
        try:
            self.refresh()
            check_swapped(self)
            warn_of_idle_layers(self)
            for denoiser in self._denoisers:
                if config.linears.drop_weights and denoiser.linears is not None:
                    denoiser.linears.drop()  # its kernels are being compiled (`start_compiling`)
                self._kernels.swapped(denoiser)
        except Exception:
            self.remove()  # leave nothing half swapped
            raise

    def start_compiling(self, denoiser: Denoiser, linears: LinearSwap) -> None:
        """Compile a denoiser's kernels in the background while its 8-bit weights are made."""
        self._kernels.swapped(denoiser, linears)

    def report(self) -> Report:
        """Report per layer the recipe, scaling, calls, 16-bit calls with reasons, and clipped fraction. Syncs.

        After `remove`, or the end of a with block, it is the report of what ran until then.
        """
        if not self._active:
            return self._last_report
        self._follow_schedulers()
        with self.lock:
            return build_report(self)

    def refresh(self) -> None:
        """Swap processors, models and schedulers that are new since the last swap.

        IP-Adapters, fuse_qkv_projections and a new pipe.transformer bring such ones. Layers keep their scales and
        counts. The attention back end that a processor has now serves its 16-bit calls. A processor without a
        scaled_dot_product_attention call stays, and the report names it.
        """
        self._check_active()
        models = self._models()
        if self._pipe and self._pipe() is None:
            raise RuntimeError(
                "pipe: got a handle whose pipeline was garbage-collected, expected a living one: keep a reference to "
                "the pipeline, or call set_attn_processor of the one in use"
            )
        if not models:
            raise ValueError(
                "pipe: got a pipeline without a unet, transformer or controlnet, expected at least one of them"
            )
        self._kernels.get_ready(models.values(), self.config.linears.format)
        for denoiser in [p for p in self._denoisers if models.get(p.name) is not p.model]:
            denoiser.uninstall()
            self._denoisers.remove(denoiser)
        for name, model in models.items():
            refuse_bare_options(model)
            known = next((p for p in self._denoisers if p.name == name), None)
            lone = swap_of(model) if known is None else None
            if lone is not None and not lone.dropped:  # made by quantize_linears; the handle's options replace it
                lone.remove()
            denoiser = Denoiser(name, model, self.config, self) if known is None else known
            if known is None:
                self._denoisers.append(denoiser)
                denoiser.use_graphs(self._graphs_of(denoiser))
            elif denoiser.graphs is not None:
                denoiser.graphs.forget()
            denoiser.follow_home()
            denoiser.install()
        self._follow_schedulers()
        self._attach()

    def _attach(self) -> None:
        """Attach the probes to newly swapped layers."""
        if self._probe is not None:
            self._probe.attach()
        self._rotation.watch()

    def _models(self) -> dict[str, Any]:
        """Return the current denoising models by component name."""
        return denoisers(self._pipe()) if self._pipe else {"": self._model}

    @property
    def has_learnt(self) -> bool:
        """True if a run has left scales or rotations that `freeze_scales` can freeze. Syncs."""
        states = [denoiser.state for denoiser in self._denoisers if denoiser.state is not None]
        return self._rotation.decided or any(state.has_learnt for state in states)

    def freeze_scales(self) -> None:
        """Start all later runs from the scales learnt so far, unchanged until `reset`.

        Without this, scales are planned within each run, and its first step computes its own, so that a run depends on
        its inputs and options alone. With frozen scales no run starts without a plan. Pictures change in their last
        bits, and all runs after the call are again repeatable. Layers with rotation="auto" keep their decision.
        `load_scales` freezes the scales it has read. Syncs.
        Raises: ValueError for a scaling that plans nothing from other runs, or before a first run; RuntimeError for
            a removed handle.
        """
        self._check_active()
        if not self._rotation.decided and self.config.scaling.name not in FROM_TABLE:
            raise ValueError(
                f"handle: got scaling={self.config.scaling.name!r}, which plans nothing from other runs, expected "
                f"one of {list(FROM_TABLE)}; there is nothing to freeze"
            )
        if not self.has_learnt:
            raise ValueError("handle: got no scales yet, expected a run before they are frozen; or call load_scales")
        for denoiser in self._denoisers:
            denoiser.freeze_scales()
        self._rotation.watch()

    def new_run(self) -> None:
        """Begin a denoising run with the model's next call, for a model without a pipeline.

        Once called, call it before every run. Without it the `timestep` argument tells: a run begins when the timestep
        turns back, or is the first one of the run again. This misses a run that starts below the timestep of an
        interrupted run, and one after a run of a single call. Also, only the device knows it then, so recipes with
        8-bit P get no softmax reference from the step before.
        Raises: ValueError for a pipeline with a scheduler, which tells where a run begins.
        """
        if self._scheduler is not None:
            raise ValueError("handle: got one of a pipeline, whose scheduler says where a run begins; leave it out")
        for denoiser in self._denoisers:
            denoiser.new_run()

    def reset(self) -> None:
        """Forget all scales and counts, frozen ones too, as if `apply` had just been called."""
        with self.lock:
            for denoiser in self._denoisers:
                denoiser.reset()
            self.following.reset()
            self._rotation.reset()

    def warm_up(self, progress: bool = True, *, device: torch.device | str | None = None) -> WarmUp:
        """Compile the kernels that a run of this model needs, at all of its steps, and wait for them.

        The first run on a machine compiles for some seconds, in the background from the swap on; later ones find the
        kernels in Triton's cache. Call this to wait before, not within, that run. Does nothing on a CPU.

        Args:
            progress: show a bar while something is compiled (needs rich).
            device: the device on which the model will run; None: its current one.
        Returns: WarmUp(kernels, seconds, cached).
        Raises: the error of a failed compile; NotImplementedError for a GPU without such kernels; RuntimeError for a
            removed handle.
        """
        self._check_active()
        return warm_up(self._denoisers, progress=progress, device=None if device is None else torch.device(device))

    def _check_active(self) -> None:
        if not self._active:
            raise RuntimeError("handle: got a handle that was removed, expected a live one; call apply again")

    def _graphs_of(self, denoiser: Denoiser) -> ModelGraphs | None:
        """Return new CUDA graphs for a denoiser; None if the options or its `model.compile()` rule them out."""
        return ModelGraphs(self, denoiser) if self.config.graphs == "auto" and can_replay(denoiser.model) else None

    def probe(self, *, every: int = 4, heads: int = 4, rows: int = 32) -> Probe:
        """Start and return a probe.Probe: it compares INT8 with fp32 attention in one step of `every`."""
        self._check_active()
        if self._probe is not None:
            self._probe.stop()
        self._probe = Probe(self, every=every, heads=heads, rows=rows)
        return self._probe

    def save_scales(self, path: str | Path) -> None:
        """Write the scales learnt by a planned scaling to a .safetensors file. Raises: see scale_files.py."""
        save_scales(self, path)

    def load_scales(self, path: str | Path, on_mismatch: str = "error") -> bool:
        """Start all runs from the scales in a file of `save_scales` for the same model.

        They are frozen, but not with "timestep_adaptive". Arguments, result and errors: see scale_files.py.
        """
        return load_scales(self, path, on_mismatch)

    def remove(self) -> None:
        """Put the original processors and linear layers back. A second call does nothing.

        Linear layers of a model whose 16-bit weights were dropped (drop_weights=True) stay in 8 bit, as nothing is
        there to put back. The log and the report say so; a later `apply` with the same `linears` takes them over.
        """
        if not self._active:
            return
        try:
            report = self.report()
        except Exception as error:  # such as an error of the GPU: the model must be given back all the same
            logger.warning("handle: got no last report: %s", error)
            report = Report([], [])
        stay = {p.name or type(p.model).__name__: p.linears.dropped for p in self._denoisers if p.linears is not None}
        said = [_STAY.format(name, number) for name, number in stay.items() if number]
        for line in said:
            logger.warning("%s", line)
        report.notes[:0] = [_REMOVED, *said]
        self._last_report, self._active = report, False
        if self._probe is not None:
            self._probe.stop()
        self.following.stop()
        for denoiser in self._denoisers:
            denoiser.uninstall()
        self._denoisers = []

    def begin_run(self, u: float | torch.Tensor) -> None:
        """Begin a run at noise level u, or resume it there after another run. Called by `following`."""
        with self.lock:
            self._rotation.begin_run()
            progress = None if self.following.is_lost else self.steps.progress
            for denoiser in self._denoisers:
                if denoiser.follows_scheduler:
                    denoiser.begin_run(u, progress)

    def advance(self, u_finished: torch.Tensor, u_next: torch.Tensor) -> None:
        """End a step at noise level u_finished; the next is at u_next. Called by `following`."""
        with self.lock:
            for denoiser in self._denoisers:
                if denoiser.follows_scheduler:
                    denoiser.advance(u_finished, u_next, self.steps.progress)
            self._rotation.step_done()

    def _before_forward(self, denoiser: Denoiser, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Notice replaced processors, a moved model, and another scheduler. For eager forwards only."""
        if denoiser.watch():
            self._attach()
        device = input_device((*args, *kwargs.values()))
        if device is not None and device != denoiser.device and device.type != "meta":
            denoiser.move(device)
            level = None if self.following.active is None else self.following.active.level
            if denoiser.state is not None:
                denoiser.state.begin_run(1.0 if level is None else level)
        self._follow_schedulers(thoroughly=False)
        self._kernels.before_forward(denoiser)
        self.following.place(denoiser, denoiser.timestep_of(args, kwargs))
        denoiser.check_peers(args, kwargs)

    def _follow_schedulers(self, *, thoroughly: bool = True) -> None:
        self.following.look(thoroughly=thoroughly)
        for denoiser in self._denoisers:
            denoiser.follows_scheduler = bool(self.following.followed)

    @property
    def _scheduler(self) -> Any:
        """The scheduler that stepped last; None if no scheduler is followed."""
        return None if self.following.active is None else self.following.active.scheduler

    def __enter__(self) -> Handle:
        return self

    def __exit__(self, *exception: object) -> None:
        self.remove()

    def __repr__(self) -> str:
        state = f"{sum(len(p.layers) for p in self._denoisers)} layers" if self._active else "removed"
        return f"<sage_processors.Handle: {self.config}, {state}>"


def remove_handles(target: Any) -> None:
    """Remove the live handles of a pipeline's denoisers, or of one model."""
    earlier = (handle_of_denoisers(x) for x in (denoisers(target).values() if is_pipeline(target) else (target,)))
    for handle in list(earlier):
        if handle is not None:
            handle.remove()


def handle_of_denoisers(target: Any) -> Handle | None:
    """Return the live handle of a denoiser, or of a pipeline's first denoiser with one; else None."""
    target = unwrap(target)
    for model in denoisers(target).values() if is_pipeline(target) else (target,):
        for hook in getattr(model, "_forward_pre_hooks", {}).values():
            if isinstance(hook, RootHook) and hook.handle is not None:
                found: Handle = hook.handle
                return found
    return None


def tell_handles(pipe: Any) -> None:
    """Let the handles of a pipeline's models look for schedulers, after it was given a new component."""
    handles = [handle_of_denoisers(x) for x in list(vars(pipe).values()) if isinstance(unwrap(x), nn.Module)]
    for handle in {id(handle): handle for handle in handles if handle is not None}.values():
        handle._follow_schedulers()


listen(tell_handles)
