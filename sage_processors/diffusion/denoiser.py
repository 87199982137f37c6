"""One denoiser of a handle: its swapped attention processors and the quantisation scales they share."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import torch
from torch import nn

from sage_kernels import RECIPES
from sage_kernels.compat import mark_static_address
from sage_kernels.facts.crossover import is_measured
from sage_kernels.facts.recipe import MIXED_RECIPE
from sage_kernels.planning.rules import rule_for
from sage_kernels.planning.state import ScaleState, Site

from ..linears.leftovers import take_out_leftovers
from ..linears.swap import LinearSwap, swap_of
from ..linears.swap_checks import LOADED
from ..torch_modes import AsUnderNoGrad
from .calls.peers import Peers, parallel_of
from .calls.row_maxima_op import keep_rows_of
from .calls.sage_class import attention_calls_in, count_bypassed, is_pag, is_sage, sage_class, swap
from .graphs.model_graphs import ModelGraphs
from .heads.head_norms import HeadNorms
from .host.discovery import attention_modules, device_of, discover_sites, put_processor, signs_of
from .host.patches import Patches
from .host.root_hook import RootHook
from .layer import Layer
from .site_state import Parked, lists_of_layers, place_lists
from .steps.forwards import Forwards
from .steps.noise_level import TimestepReader
from .steps.windows import is_kept


class Denoiser:
    """One denoising model of a handle: its layers, their shared scale state, and the hooks on the model.

    Attributes:
        name: the component's name in the pipeline; "" for a model without a pipeline.
        state: a ScaleState; None without planned scales.
        linears: a LinearSwap; None without 8-bit linear layers.
        graphs: a ModelGraphs; None without CUDA graphs.
        guests: Sage processors that a pipeline puts into the model within its steps (PAG), by id.
        perturbed: True after a forward with PAG processors that are not ours.
        peers: a Peers; None without context parallelism.
        follows_scheduler: True if a scheduler tells where a run is.
        is_told: True if the user says where a run begins, without a scheduler.
        frozen: True while the scales stay as they are.
    """

    def __init__(self, name, model, config, handle):
        self.name, self.model, self.config, self._steps = name, model, config, handle.steps
        self._start_compiling = handle.start_compiling
        self._lock = handle.lock
        take_out_leftovers(model, attention=True)
        self.layers: list[Layer] = []
        self._made: list[Layer] = []  # all layers so far: diffusers may put replaced processors back
        self.state: Any = None
        self.linears: LinearSwap | None = None
        self.graphs: ModelGraphs | None = None
        self.peers: Peers | None = None
        self._signs: tuple[Any, ...] = ()  # see signs_of
        self._head_norms, self._parked = HeadNorms(), Parked()
        self._patches: dict[type, Patches] = {}
        self.guests: dict[int, Any] = {}
        self.perturbed = False
        self.follows_scheduler = self.frozen = self.is_told = False
        self.device = self._home = device_of(model)
        self._reader = TimestepReader(model.__class__.forward, self.device)
        self.forwards = Forwards(self.device)
        root = RootHook(handle, self)
        self._hooks = [model.register_forward_pre_hook(root, with_kwargs=True, prepend=True)]
        self._hooks += AsUnderNoGrad().install(model)

    def install(self) -> None:
        """Swap every processor that is not ours. If the call sites changed, make a new scale state."""
        known = {id(layer.module): layer for layer in self.layers}
        self.layers = []
        for name, module in attention_modules(self.model):
            layer = known.get(id(module))
            if layer is None or module.processor is not layer.sage:
                original = self._stock(module)
                if attention_calls_in(type(original)) == 0:
                    continue  # linear, sliced or hand-written attention stays; the report lists it
                sage = self._sage_processor_for(original, self._label(name))
                self._count_on(module, sage)
                layer = Layer(name, module, original, sage)
                self._made.append(layer)
                put_processor(module, layer.sage)
            layer.own.accept_backend(layer.sage)
            self.layers.append(layer)
        self._signs = signs_of(self.model, self._modules())
        self._plan_sites()
        self._head_norms.put(self.layers, self._label)
        self._swap_linears()

    def _swap_linears(self) -> None:
        config = self.config
        kept = swap_of(self.model)
        if self.linears is not None:
            self.linears.refresh()
        elif kept is not None and kept.dropped and kept.serves(config.linears, config.rules("linears"), self.name):
            self.linears = kept
            kept.count_anew()
        elif kept is not None and kept.loaded is not None:
            raise RuntimeError(LOADED.format(self.name or type(self.model).__name__, kept.loaded[0]))
        elif any(format != "none" for format in (config.linears.format, *dict(config.rules("linears")).values())):
            self.linears = LinearSwap(
                self.model, linears=config.linears.format, layers=config.rules("linears"),
                min_features=config.linears.min_features, drop_weights=config.linears.drop_weights,
                on_unsupported=config.on_unsupported, name=self.name,
                on_chosen=lambda swap: self._start_compiling(self, swap),
            )  # fmt: skip
            has_gpu, is_chosen = torch.cuda.is_available(), config.preset is not None
            if is_chosen and self.graphs is None and has_gpu and not is_measured(torch.device("cuda")):
                self.linears.run_in_graphs_alone()

    def _sage_processor_for(self, original, label: str):
        """Return the Sage processor for an original one, with the options of its layer."""
        config = self.config.for_layer(label)
        window = self._steps.window_of(config.keep.noise)
        kind: Any = sage_class(type(original))
        if kind not in self._patches:
            self._patches[kind] = Patches(kind._sage_binding)
        shared: dict[str, Any] = {"window": window, "lock": self._lock, "patches": self._patches[kind]}
        return swap(original, config, label, device=self.device, kept=is_kept(self.config, label), **shared)

    def _count_on(self, module, sage) -> None:
        """Give a new processor the counts and the rotation of the module's processor before it."""
        earlier = next((layer.sage for layer in reversed(self._made) if layer.module is module), None)
        if earlier is not None:
            sage._sage.events.take_over(earlier._sage.events)
            sage._sage.rotated = earlier._sage.rotated
            for site, before in zip(sage._sage.sites, earlier._sage.sites, strict=False):
                site.elements = before.elements

    def _label(self, name: str) -> str:
        return f"{self.name}.{name}" if self.name else name

    def _plan_sites(self) -> None:
        sites: list[Site] = []
        for layer in self.layers:
            layer.site_indices = []
            own = layer.own.config
            if own.scaling.is_planned and own.recipe != MIXED_RECIPE:
                for i, shape in enumerate(discover_sites(layer.module, layer.sage)):
                    layer.site_indices.append(len(sites) if shape else None)
                    if shape:
                        name = self._label(layer.name) + (f"#{i}" if i else "")
                        sites.append(Site(name, *shape, _rotation_of(layer.sage)))
        if self.state is not None and self.state.sites != sites:
            self._parked.park(self.state)
            self.state = None
        if sites and self.state is None:
            with torch.inference_mode(False):  # inference tensors can't be updated outside of inference_mode
                rule = rule_for(self.config.scaling)
                self.state = ScaleState(sites, device=self.device, margin=self.config.scaling.margin, rule=rule)
                if self._parked.move_into(self.state):
                    rule.refit(self.state)
                else:
                    self.state.begin_run(1.0)
                self.state.kept.skip_lists = lists_of_layers(self.config, sites, self.device)
                if self.frozen:
                    self.state.freeze()
        self._hand_out()

    def _hand_out(self) -> None:
        """Give every call site its tensors of the scale state. Runs before the model is compiled."""
        for layer in self.layers:
            for site, index in zip(layer.own.sites, layer.site_indices, strict=False):
                site.state = None if index is None or self.state is None else self.state.head_state(index)
                if site.state is not None:
                    site.kv_heads, site.head_dim = self.state.sites[index].kv_heads, self.state.sites[index].head_dim
                    kept = self.state.kept
                    site.keeps_rows = RECIPES[layer.own.config.recipe].keeps_rows
                    site.skip_lists, site.skip_site = kept.skip_lists, index
                    if site.keeps_rows or kept.skip_lists is not None:
                        maxima = kept.row_maxima if site.keeps_rows else None
                        keep_rows_of(site.state, maxima, index, kept.skip_lists)
            for tensor in _tensors(layer.sage):
                mark_static_address(tensor, guard=False)  # CUDA graphs may write to no other inputs

    def rotate(self, layer: Layer, on: bool) -> None:
        """Switch the Hadamard rotation of one layer on or off. Call it between two steps."""
        layer.own.rotated = on
        for index in layer.site_indices:
            if index is not None:
                self.state.set_rotation(index, _rotation_of(layer.sage))

    def layer_names(self) -> list[str]:
        """Return the names of the swapped layers, as in the report."""
        return [self._label(layer.name) for layer in self.layers]

    def move(self, device: torch.device) -> None:
        """Move all tensors to the model's new device. The counts of planned calls start from zero."""
        self.device = device
        self._reader.to(device)
        self.forwards.to(device)
        with torch.inference_mode(False):
            of_layers = [x for layer in self.layers for x in (layer.own.events, layer.own.probe)]
            for owner in (self.state, *of_layers):
                if owner is not None:
                    owner.to(device)
        self._hand_out()

    def follow_home(self) -> None:
        """Move to the device of the model's weights, if the weights moved since the last look."""
        home, self._home = self._home, device_of(self.model)
        if self._home not in (home, self.device):  # offloaded weights rest on another device than they run on
            self.move(self._home)

    def freeze_scales(self) -> None:
        """Start all later runs from the scales learnt so far, unchanged until `reset`."""
        self.frozen = True
        if self.state is not None:
            with torch.inference_mode(False):
                self.state.freeze()

    def new_run(self) -> None:
        """Begin a run with the next call, without a scheduler. Call it before every later run, too."""
        self.is_told = True
        if self.linears is not None:
            self.linears.begin_run()
        self._reader.begin_run()
        if self.state is not None:
            self.state.begin_run(1.0)

    def reset(self) -> None:
        """Forget all scales and counts."""
        self.frozen = self.is_told = False
        self._parked.clear()
        self._reader.to(self.device)
        self.forwards.zero()
        if self.state is not None:
            self.state.reset()
            self.state.begin_run(1.0)
        self.perturbed = False
        for processor in (*(layer.sage for layer in self.layers), *self.guests.values()):
            processor._sage.events.zero()

    def use_graphs(self, graphs: ModelGraphs | None) -> None:
        """Take forwards from these CUDA graphs from now on; None runs them eagerly again."""
        if self.graphs is not None:
            self.graphs.stop()
        self.graphs = graphs
        if graphs is not None:
            graphs.start()

    @property
    def depends_on_steps(self) -> bool:
        """True if results depend on the denoising step: scales are planned or step windows are set."""
        return self.state is not None or self._steps.windowed

    def timestep_of(self, args, kwargs):
        """Return the timestep argument of a model call; None without one, or if it is a meta tensor."""
        timestep = self._reader.timestep_of(args, kwargs)
        return None if isinstance(timestep, torch.Tensor) and timestep.is_meta else timestep

    def _modules(self) -> list[nn.Module]:
        return [layer.module for layer in self.layers]

    @property
    def will_follow(self) -> bool:
        """True if the next forward swaps processors that diffusers put into the model.

        These are processors of its own, or our earlier ones. False while PAG processors are in place, because the
        pipeline takes these out again by itself.
        """
        modules = self._modules()
        if any(is_pag(module.processor) for module in modules):
            return False
        there = {(id(module), id(module.processor)) for module in modules}
        now, every = ({(id(x.module), id(x.sage)) for x in layers} for layers in (self.layers, self._made))
        return self._signs != signs_of(self.model, modules) or not (every - now).isdisjoint(there)

    def watch(self) -> bool:
        """Notice processors that are not the handle's, at the start of a forward.

        If diffusers put them there, with an adapter or for fused projections, all are swapped. Otherwise a PAG
        processor of ours becomes a guest, and for any other one the forward is counted as "replaced". It has to be
        counted now, because the processor may be put back before the report.
        Returns: True if processors were swapped.
        """
        for patches in self._patches.values():
            patches.look()
        others = [layer for layer in self.layers if layer.module.processor is not layer.sage]
        if others and self.will_follow:
            with self._lock:
                self.install()
            return True
        for layer in others:
            processor: Any = layer.module.processor
            if is_sage(processor) and is_pag(processor) and processor._sage.config is not None:
                self.guests[id(processor)] = processor
            else:
                count_bypassed(layer.sage, processor)
                self.perturbed |= is_pag(processor)
        return False

    def check_peers(self, args, kwargs) -> None:
        """Compare this forward with that of the other processes, if any. Raises: see Peers.check."""
        parallel = parallel_of(self.layers)
        if parallel is None:
            self.peers = None
            return
        if self.peers is None or self.peers.parallel is not parallel:
            self.peers = Peers(parallel, f"{self.config}, graphs {self.graphs is not None}")
        self.peers.check(args, kwargs)

    def follow_timestep(self, args, kwargs) -> None:
        """Plan the running step from the timestep in the model's arguments. For models without a scheduler."""
        timestep = self.timestep_of(args, kwargs)
        if timestep is None:
            return
        with nullcontext() if torch.compiler.is_compiling() else self._lock:
            levels = self._reader.read(timestep, self.state.frozen)
            if not self.is_told:
                self.state.kept.stop()  # only the device knows where a run begins
            elif self.state.kept.skip_lists is not None:
                # each call counts as a step here, although guidance makes several calls in a step
                self.state.kept.skip_lists.stop()
            self.state.advance(*levels, self._reader.begins)

    def begin_run(self, u, progress=None) -> None:
        """Start a run of the scheduler at noise level u in [0, 1], a float or a 0-d tensor.

        progress: the scheduler's windows.Progress; None if the running step is unknown.
        """
        if self.linears is not None:
            self.linears.begin_run()
        if self.state is not None:
            self.state.begin_run(u)
            self._place_lists(progress, u)

    def advance(self, u_finished, u_next, progress) -> None:
        """End the step at noise level u_finished and plan the next one at u_next."""
        if self.state is not None:
            self.state.advance(u_finished, u_next)
            if self.state.kept.skip_lists is not None:
                self.state.kept.skip_lists.in_order(u_finished, u_next)
            self._place_lists(progress, u_next)

    def _place_lists(self, progress, u) -> None:
        if self.state.kept.skip_lists is not None:
            place_lists(self.state.kept.skip_lists, progress, u)

    def uninstall(self) -> None:
        """Put the original processors and linear layers back. Processors set by others stay."""
        self.use_graphs(None)
        if self.linears is not None and not self.linears.dropped:
            self.linears.remove()
        self.linears = None
        self._head_norms.remove()
        for hook in self._hooks:
            hook.remove()
        take_out_leftovers(self.model, attention=True)
        for _, module in attention_modules(self.model):
            if is_sage(module.processor):
                put_processor(module, self._stock(module))
        for layer in self._made:
            # a Sage processor that somebody still holds behaves like its base class
            layer.own.config = None
        self.layers, self._made, self.state = [], [], None
        self._parked.clear()

    def _stock(self, module):
        """Return the stock processor for a module: the original object if it is known, else a new one."""
        processor = module.processor
        if not is_sage(processor):
            return processor
        base = type(processor)._sage_base
        own = [layer for layer in self._made if layer.module is module]
        for layer in own:
            if layer.sage is processor:
                return layer.give_back()
        for layer in own:  # diffusers may make a new one by `processor.__class__()`, unless it has weights
            if type(layer.original) is base and not isinstance(processor, nn.Module):
                return layer.original
        for layer in self._made:  # a processor that was given to another layer
            if layer.sage is processor:
                return layer.original
        stock = object.__new__(base)
        stock.__dict__.update({k: v for k, v in processor.__dict__.items() if k != "_sage"})
        return stock


def _rotation_of(processor) -> str:
    return "hadamard" if processor._sage.rotated else "none"


def _tensors(processor):
    for site in processor._sage.sites:
        if site.state is not None:
            yield from site.state
