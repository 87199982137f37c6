"""Put INT8 attention into a model or a pipeline, and take it out again."""

from __future__ import annotations

import logging
import weakref
from dataclasses import dataclass, field

import torch
from torch import nn

from .config import SageAttnProcessor
from .discovery import (
    attention_modules,
    denoisers,
    device_of,
    discover_sites,
    input_device,
    is_pipeline,
    put_processor,
    unwrap,
)
from .processors import is_sage, sage_class, swap
from .report import Report, build_report
from .scales import ScaleState, Site
from .timestep import TimestepReader, can_track, run_of, track, untrack


logger = logging.getLogger("sage_processors")


@dataclass
class Layer:
    """One attention module and its two processors."""

    name: str
    module: nn.Module
    original: object
    sage: object
    site_indices: list = field(default_factory=list)  # into the part's ScaleState, one per call site


class _RootHook:
    """Forward pre-hook of a denoiser, and of this object only: in a copy of the model it does nothing."""

    def __init__(self, handle=None, part=None):
        self.handle, self.part = handle, part

    def __call__(self, module, args, kwargs):
        handle, part = self.handle, self.part
        if handle is None:
            return
        if not torch.compiler.is_compiling():
            handle._before_forward(part, args, kwargs)
        if part.state is not None and not part.follows_scheduler:
            part.follow_timestep(args, kwargs)

    def __reduce__(self):
        return _RootHook, ()


class Part:
    """One denoiser of a handle: its layers, the scale state they share, and the hook on it.

    Attributes: name ("" for a raw model), model, layers, state (None unless scaling="timestep"), follows_scheduler.
    """

    def __init__(self, name, model, config, handle):
        self.name, self.model, self.config = name, model, config
        self.layers: list[Layer] = []
        self._made: list[Layer] = []  # every layer ever: diffusers keeps replaced processors and may put them back
        self.state = None
        self.follows_scheduler = False
        self.device = device_of(model)
        self._reader = TimestepReader(type(model).forward, self.device)
        self._hook = model.register_forward_pre_hook(_RootHook(handle, self), with_kwargs=True, prepend=True)

    def install(self) -> None:
        """Swap every processor that is not ours, keep the others; new call sites get a new state."""
        known = {id(layer.module): layer for layer in self.layers}
        self.layers = []
        for name, module in attention_modules(self.model):
            layer = known.get(id(module))
            if layer is None or module.processor is not layer.sage:
                original = self._stock(module)
                if sage_class(type(original))._sage_calls == 0:
                    continue  # linear or hand-written attention: stays, and the report says so
                layer = Layer(
                    name, module, original, swap(original, self.config, self._label(name), device=self.device)
                )
                self._made.append(layer)
                put_processor(module, layer.sage)
            self.layers.append(layer)
        self._plan_sites()

    def _label(self, name: str) -> str:
        return f"{self.name}.{name}" if self.name else name

    def _plan_sites(self) -> None:
        sites = []
        for layer in self.layers:
            layer.site_indices = []
            if self.config.scaling == "timestep":
                for i, shape in enumerate(discover_sites(layer.module, layer.sage)):
                    layer.site_indices.append(len(sites) if shape else None)
                    if shape:
                        sites.append(Site(self._label(layer.name) + (f"#{i}" if i else ""), *shape))
        if not sites:
            self.state = None
        elif self.state is None or self.state.sites != sites:
            with torch.inference_mode(False):  # else updates outside of inference_mode would be refused
                self.state = ScaleState(sites, device=self.device, margin=self.config.margin)
                self.state.begin_run(1.0)
        self._hand_out()

    def _hand_out(self) -> None:
        """Give every call site its tensors. They are created here, before anything is compiled."""
        for layer in self.layers:
            for site, index in zip(layer.sage._sage_sites, layer.site_indices, strict=False):
                site.state = None if index is None or self.state is None else self.state.head_state(index)
                if site.state is not None:
                    site.kv_heads, site.head_dim = self.state.sites[index].kv_heads, self.state.sites[index].head_dim
            for tensor in _tensors(layer.sage):
                torch._dynamo.mark_static_address(tensor, guard=False)  # CUDA graphs refuse to mutate other inputs

    def move(self, device: torch.device) -> None:
        """Follow the model to another device. Scales and the counts of planned calls start anew."""
        self.device = device
        self._reader.to(device)
        with torch.inference_mode(False):
            if self.state is not None:
                self.state.to(device)
            for layer in self.layers:
                object.__setattr__(layer.sage, "_sage_events", layer.sage._sage_events.to(device))
        self._hand_out()

    def follow_timestep(self, args, kwargs) -> None:
        """Without a scheduler: the timestep that the model is called with says which step runs."""
        timestep = self._reader.timestep_of(args, kwargs)
        if timestep is not None:
            self.state.advance(*self._reader.read(timestep))

    def uninstall(self) -> None:
        """The original processor objects, where one of ours is in place. Processors that others put there stay."""
        self._hook.remove()
        for _, module in attention_modules(self.model):
            if is_sage(module.processor):
                put_processor(module, self._stock(module))
        for layer in self._made:
            # whoever still holds it gets the base class's behaviour
            object.__setattr__(layer.sage, "_sage_config", None)
        self.layers, self._made, self.state = [], [], None

    def _stock(self, module):
        """The stock processor behind what is on a module: the original object where we know it."""
        processor = module.processor
        if not is_sage(processor):
            return processor
        for layer in self._made:
            if layer.sage is processor:
                return layer.original
        base = type(processor)._sage_base
        for layer in self._made:  # diffusers makes processors anew by `processor.__class__()`
            if layer.module is module and type(layer.original) is base:
                return layer.original
        stock = object.__new__(base)
        stock.__dict__.update({k: v for k, v in processor.__dict__.items() if not k.startswith("_sage_")})
        return stock


class Handle:
    """What `apply` returns. Use it as a context manager to have the original processors back at the end.

    Attributes: config (SageAttnProcessor).
    """

    def __init__(self, target, config: SageAttnProcessor):
        self.config = config
        self._parts: list[Part] = []
        self._pipe = weakref.ref(target) if is_pipeline(target) else None
        self._model = None if self._pipe else target
        self._scheduler = None
        self._active = True
        self.refresh()

    def report(self) -> Report:
        """What really ran: per layer recipe, scaling, calls, exact calls with reasons, clipped fraction. Syncs."""
        self._follow_scheduler()
        return build_report(self)

    def refresh(self) -> None:
        """Swap again what was replaced: by IP-Adapters, fuse_qkv_projections, a new pipe.transformer or scheduler."""
        if not self._active:
            raise RuntimeError(
                "handle: got a handle that was removed, expected a live one; call sage_processors.apply again"
            )
        models = denoisers(self._pipe()) if self._pipe else {"": self._model}
        if not models:
            raise ValueError(
                "pipe: got a pipeline without a unet, transformer or controlnet, expected at least one of them"
            )
        for part in [p for p in self._parts if models.get(p.name) is not p.model]:
            part.uninstall()
            self._parts.remove(part)
        for name, model in models.items():
            _refuse_bare_options(model)
            part = next((p for p in self._parts if p.name == name), None)
            if part is None:
                part = Part(name, model, self.config, self)
                self._parts.append(part)
            elif part.device != device_of(model):
                part.move(device_of(model))
            part.install()
        if not any(part.layers for part in self._parts):
            self.remove()
            raise ValueError(
                "model: got no attention processor that calls scaled_dot_product_attention, "
                "expected a diffusers model with at least one"
            )
        self._follow_scheduler()

    def reset(self) -> None:
        """Forget all scales and counts: the next run behaves as the first one after `apply`."""
        for part in self._parts:
            if part.state is not None:
                part.state.reset()
                part.state.begin_run(1.0)
            part._reader.to(part.device)
            for layer in part.layers:
                layer.sage._sage_events.zero_()

    def remove(self) -> None:
        """Put the original processor objects back and stop following the scheduler. Harmless when repeated."""
        self._active = False
        if self._scheduler is not None:
            untrack(self._scheduler, self)
            self._scheduler = None
        for part in self._parts:
            part.uninstall()
        self._parts = []

    def begin_run(self, u) -> None:
        """Called by the scheduler's run: denoising starts at noise level u."""
        for part in self._parts:
            if part.state is not None and part.follows_scheduler:
                part.state.begin_run(u)

    def advance(self, u_finished, u_next) -> None:
        """Called by the scheduler's run: a step is done."""
        for part in self._parts:
            if part.state is not None and part.follows_scheduler:
                part.state.advance(u_finished, u_next)

    def _before_forward(self, part: Part, args, kwargs) -> None:
        """Eager only: notice that the model moved or that the pipeline got another scheduler."""
        device = input_device((*args, *kwargs.values()))
        if device is not None and device != part.device:
            part.move(device)
            run = run_of(self._scheduler) if self._scheduler is not None else None
            if part.state is not None:
                part.state.begin_run(1.0 if run is None or run.level is None else run.level)
        self._follow_scheduler()

    def _follow_scheduler(self) -> None:
        pipe = self._pipe() if self._pipe and self._active else None
        scheduler = getattr(pipe, "scheduler", None)
        if pipe is None or scheduler is self._scheduler:
            return
        if self._scheduler is not None:
            untrack(self._scheduler, self)
        self._scheduler = scheduler if can_track(scheduler) else None
        for part in self._parts:
            part.follows_scheduler = self._scheduler is not None
        if self._scheduler is not None:
            track(self._scheduler, self)

    def __enter__(self):
        return self

    def __exit__(self, *exception):
        self.remove()

    def __repr__(self):
        state = f"{sum(len(p.layers) for p in self._parts)} layers" if self._active else "removed"
        return f"<sage_processors.Handle: {self.config}, {state}>"


def apply(target, config: SageAttnProcessor | None = None) -> Handle:
    """Run the attention of a diffusers pipeline or model in INT8.

    Args:
        target: a DiffusionPipeline (all its denoisers: unet, transformer, transformer_2, controlnet(s); never the VAE
            or the text encoders; timestep scaling follows pipe.scheduler) or one model (timestep scaling follows its
            `timestep` argument).
        config: options; SageAttnProcessor() if None.
    Returns: a Handle. Applying again replaces the options: the earlier handle is removed first.
    Raises: TypeError for other arguments, ValueError if there is nothing to swap.
    """
    config = SageAttnProcessor() if config is None else config
    if not isinstance(config, SageAttnProcessor):
        raise TypeError(
            f"config: got {type(config).__name__}, expected sage_processors.SageAttnProcessor; "
            "for one of diffusers' own processors use the model's set_attn_processor"
        )
    target = unwrap(target)
    if not (is_pipeline(target) or isinstance(target, nn.Module)):
        raise TypeError(
            f"target: got {type(target).__name__}, expected a DiffusionPipeline or a model (torch.nn.Module)"
        )
    earlier = (handle_of(model) for model in (denoisers(target).values() if is_pipeline(target) else (target,)))
    for handle in list(earlier):
        if handle is not None:
            handle.remove()
    return Handle(target, config)


def handle_of(target) -> Handle | None:
    """The live handle of a model, or of a pipeline's first denoiser that has one; None without."""
    target = unwrap(target)
    for model in denoisers(target).values() if is_pipeline(target) else (target,):
        for hook in getattr(model, "_forward_pre_hooks", {}).values():
            if isinstance(hook, _RootHook) and hook.handle is not None:
                return hook.handle
    return None


def processors_for(model, config: SageAttnProcessor | None = None) -> dict:
    """`{name: processor}` for diffusers' own dict form, `model.set_attn_processor(processors_for(model))`.

    The processors belong to a handle as with `apply` (`handle_of(model)` returns it); they are also in place already.
    Raises: TypeError for a model without set_attn_processor, which `apply` can still do.
    """
    model = unwrap(model)
    if not hasattr(model, "set_attn_processor") or not hasattr(model, "attn_processors"):
        raise TypeError(
            f"model: got {type(model).__name__}, expected one with set_attn_processor; "
            "use sage_processors.apply(model) instead"
        )
    apply(model, config)
    return dict(model.attn_processors)


def _tensors(processor):
    yield processor._sage_events
    for site in processor._sage_sites:
        if site.state is not None:
            yield from site.state


def _refuse_bare_options(model) -> None:
    for name, module in attention_modules(model):
        if isinstance(module.processor, SageAttnProcessor):
            raise TypeError(
                f"model: got a SageAttnProcessor as the processor of {name!r}, expected the model's own processors; "
                "load the model again and give the options to pipe.set_attn_processor or sage_processors.apply"
            )
