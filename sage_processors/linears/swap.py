"""Run the linear layers of a model in 8 bit, and give the 16-bit ones back."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Collection
from typing import Any

import torch
from torch import nn

from sage_kernels.facts.crossover import NEVER

from ..option_groups import Linears
from ..patching.block_state import has_place
from ..patching.derived import derive_class
from ..patching.on_import import when_imported
from ..patching.patched import Owner, is_left
from ..postponed.block import block_class, enclose, is_enclosed
from ..torch_modes import AsUnderNoGrad
from .balance import find_neighbours, share_known, share_measured
from .compiled.graph_fusion import fuse_in_compiled_code
from .head_rotation import HeadRotations
from .leftovers import give_back_block, give_back_layer, give_back_norm, take_out_leftovers
from .modules import is_swapped, linear_class, norm_class
from .postponed.norm_layers import ANY_WIDTH, NormState, norm_form, norm_width
from .qkv import join_neighbours
from .report import LinearReport, notes_of, rows_of
from .swap_checks import DROPPED, agree_with
from .swap_hooks import EndHook, PrepareHook
from .weights.layers import Choice, choose, repeated_blocks
from .weights.linear_state import LEAST_WORK, LinearState, Shared, linear_state
from .weights.room import Room
from .weights.storage import Storage, placeholder


class LinearSwap:
    """The linear layers of one model in 8 bit, as returned by `quantize_linears`.

    As a context manager it puts the 16-bit layers back at the end. Modules stay the same objects with another class:
    names, parameters, hooks, state_dict and save_pretrained are as before. A copy of the model stays in 8 bit.

    Args:
        drop_weights: the caller calls `drop` next. It makes the weights one by one and frees 16-bit ones in between.
        gated: as in `quantize_linears`. measured: {name of a layer: its balance [K]}.
        ready: {name of a layer: (8-bit weight, balance [K] or None)}, if 8-bit weights are there already. It is empty
            afterwards. The 16-bit weights need not be there and are dropped.
        on_chosen: called with this swap once it has its layers, before their 8-bit weights are made.
    """

    def __init__(
        self, model: nn.Module, *, linears: str, layers: tuple[tuple[str, str], ...] = (),
        min_features: int | None = None, on_unsupported: str = "fallback", name: str = "", drop_weights: bool = False,
        gated: str = "8bit", measured: dict[str, Any] | None = None, ready: dict[str, Any] | None = None,
        on_chosen: Callable[[LinearSwap], None] = lambda swap: None,
    ) -> None:  # fmt: skip
        self.model, self.name, self.drop_weights, self._drops_next = model, name, False, drop_weights
        self.min_features = min_features
        self._options = dict[str, Any](linears=linears, layers=layers, min_features=min_features, gated=gated)
        self._measured = measured or {}
        self._owner = Owner(self)
        self._on_unsupported = on_unsupported
        self._shared = Shared(LEAST_WORK if min_features is None else 0, model, self._owner)
        self._shared.room = None if drop_weights or ready is not None else Room()
        self._states: dict[int, tuple[Any, LinearState]] = {}
        self._norms, self._blocks, self._rotations = dict[int, Any](), dict[int, Any](), HeadRotations()
        self.choices: list[Choice] = []
        self.loaded: tuple[str, int | None] | None = None  # format and min_features of the SageConfig that loaded it
        self.unseen_forwards = 0  # forwards of the model in which no layer ran eagerly
        self._trains = False  # gradients were enabled in the latest forward
        self._active, self._hooks = True, []
        self._lenders: list[LinearSwap] = []  # other swaps that gave layers to this one
        found = self._swapped_already()
        take_out_leftovers(model, attention=False)
        try:
            self._take_from_others(found)
            self._swap_chosen()
            on_chosen(self)
            self._fill(ready)
            hook = PrepareHook(self._shared, self)
            self._hooks.append(model.register_forward_pre_hook(hook, prepend=True, with_kwargs=True))
            if not is_swapped(model):  # a layer that was swapped alone is a part of what calls it
                self._hooks.append(model.register_forward_hook(EndHook(self._shared), prepend=True, always_call=True))
                self._hooks += AsUnderNoGrad().install(model)
            when_imported("torch._inductor.config", fuse_in_compiled_code, ready="pre_grad_custom_pass")
        except Exception:
            self._put_back()
            raise

    def _label(self, name: str) -> str:
        return ".".join(part for part in (self.name, name) if part)

    @property
    def names(self) -> list[str]:
        """Names of all linear layers, swapped or not. Patterns of options are matched with them."""
        return [choice.name for choice in self.choices]

    def refresh(self) -> None:
        """Swap new layers (LoRA, fused projections, new blocks) and compare the numbers of all weights.

        Only this notices a weight that was written to through `.data` of a tensor from model.parameters().
        Raises: RuntimeError after `remove`.
        """
        if not self._active:
            raise RuntimeError("swap: got one that was removed, expected a live one; call quantize_linears again")
        self._swap_chosen()
        self._fill()

    def _fill(self, ready: dict[str, Any] | None = None) -> None:
        if ready is not None:
            share_known([m for m, _ in self._states.values()], [ready[s.label][1] for _, s in self._states.values()])
        for module, state in self._states.values():
            if ready is not None:
                rows = ready.pop(state.label)[0]  # what is written is not kept twice
                state.storage.write(state.index, rows)
                self._drop(module, rows.codes.device)
            state.touched = state.bias_touched = True
            if not (self._drops_next or self._is_quantised_later(module)):
                self._prepare_one(module, state)

    def _swapped_already(self) -> list[Any]:
        """Return chosen layers that are swapped already. Raises: RuntimeError for a dropped 16-bit weight."""
        chosen = choose(self.model, label=self._label, drop_weights=self.drop_weights, **self._options)
        modules: list[Any] = [choice.module for choice in chosen if choice.format != "none"]
        found = [module for module in modules if linear_state(module) is not None]
        for state in (module._sage for module in found):
            if state.dropped:
                raise RuntimeError(DROPPED.format(state.label))
        return found

    def _take_from_others(self, modules: list[Any]) -> None:
        """Take swapped layers from the swaps that have them."""
        for module in modules:
            state: Any = linear_state(module)
            if state is not None:
                if state.shared.owner.swap not in self._lenders:
                    self._lenders.append(state.shared.owner.swap)
                self._leave(module)
        for swap in self._lenders:
            swap._swap_chosen(())

    def _swap_chosen(self, given_back: Collection[int] | None = None) -> None:
        """Swap all layers that the options choose now, and put the others back.

        A layer of another live swap stays there. given_back: ids of the only modules that may be swapped; None: all.
        """
        self.choices = choose(self.model, label=self._label, drop_weights=self.drop_weights, **self._options)
        wanted = {id(c.module): c for c in self.choices if c.format != "none"}
        for key, (module, _) in list(self._states.items()):
            if self.state_of(module) is None:
                del self._states[key]
            elif key not in wanted:
                self._leave(module)
                del self._states[key]
        for key, choice in wanted.items():
            if key in self._states or (given_back is not None and key not in given_back):
                continue
            state = linear_state(choice.module)
            if state is not None and not is_left(state.shared.owner):
                continue
            if state is not None:  # it came with a copy of another layer: start again
                self._leave(choice.module)
            self._enter(choice)
        self._shared.replays.counters = [state.events for state in self.states()]
        join_neighbours(self.model, self._states)
        for _, state in self._states.values():
            state.find_short()
        share_measured(list(self._states.values()), self._measured)
        find_neighbours(self.model, [module for module, _ in self._states.values()])
        self._postpone_norms()
        self._enclose_blocks()
        self._rotations.put(self.model, bool(self._states))

    def _enter(self, choice: Choice) -> None:
        module = choice.module
        state = LinearState(choice.name, choice.format, self._on_unsupported, self._shared)
        state.storage, state.is_gated = Storage([module]), choice.is_gated
        object.__setattr__(module, "_sage", state)
        derive_class(module, linear_class)
        self._states[id(module)] = (module, state)

    def _leave(self, module: Any) -> None:
        if module._sage.dropped:
            raise RuntimeError(DROPPED.format(module._sage.label))
        give_back_layer(module)

    def _postpone_norms(self) -> None:
        widths = {module.in_features for module, state in self._states.values() if not state.is_weight_only}
        widths |= {ANY_WIDTH} if widths else set()
        for name, module in self.model.named_modules():
            if id(module) in self._norms or is_swapped(module) or norm_width(module) not in widths:
                continue
            form = norm_form(module)
            if form is None:
                continue
            norm = NormState(self._label(name), *form)
            norm.owner = self._owner
            object.__setattr__(module, "_sage", norm)
            derive_class(module, norm_class)
            self._norms[id(module)] = module

    def _enclose_blocks(self) -> None:
        """Let layers inside of each repeated block postpone their results."""
        for prefix in repeated_blocks(self.model):
            block: Any = self.model.get_submodule(prefix.removesuffix("."))
            if is_enclosed(block) or not has_place(block) or not any(id(m) in self._states for m in block.modules()):
                continue
            enclose(block, self._owner)
            derive_class(block, block_class)
            self._blocks[id(block)] = block

    @property
    def blocks(self) -> list[Any]:
        """Blocks of the model in which results may be postponed."""
        return list(self._blocks.values())

    def _is_quantised_later(self, module: Any) -> bool:
        """Return True if the weight is better quantised later, on the device of the first call.

        On a CPU a whole model takes minutes, so weights there are quantised on the GPU if there is one.
        """
        weight = module._parameters.get("weight")
        return weight is None or weight.is_meta or (weight.device.type == "cpu" and torch.cuda.is_available())

    def _prepare_one(self, module: Any, state: LinearState) -> None:
        version = state.version
        is_ready = state.prepare(module)
        if version and state.version != version and state.neighbours is not None:
            state.neighbours.follow_weight(module)
        if is_ready and self.drop_weights:
            self._drop(module)

    def drop(self) -> None:
        """Free the 16-bit weight of every layer with an 8-bit one; later ones as soon as these are made.

        Large layers with one row per sample, which were in 16 bit until now, get 8-bit weights too.
        """
        self.drop_weights, self._drops_next, self._shared.room = True, False, None
        self._swap_chosen()
        for module, state in self._states.values():
            if state.is_filled or not self._is_quantised_later(module):
                self._prepare_one(module, state)

    def _drop(self, module: Any, device: torch.device | str | None = None) -> None:
        state, weight = module._sage, module._parameters["weight"]
        if state.dropped or not state.is_filled or (weight.is_meta and device is None):
            return
        module._parameters["weight"] = placeholder(weight.shape, weight.dtype, device or weight.device)
        state.dropped = True
        state.find_short()

    def _before_forward(self) -> None:
        shared, ran_before = self._shared, self._shared.forwards > 0
        self.check_weights()
        self.unseen_forwards += ran_before and not shared.was_called
        shared.begin_forward()
        if self._trains:
            for module, state in self._states.values():
                state.may_be_trained(module)
        self._trains = torch.is_grad_enabled()
        shared.was_called = False
        for module, state in self._states.values():
            weight = module._parameters.get("weight")
            if state.dropped or weight is None or (state.is_fresh(weight) and not self.drop_weights):
                continue
            # compiled code makes no weights, so offloaded ones are made here after the first forward
            if state.is_filled or ran_before or not self._is_quantised_later(module):
                self._prepare_one(module, state)

    def begin_run(self) -> None:
        """Begin a denoiser's run: weights are checked for uncounted writes before their next use."""
        self._shared.check.want(weakref.WeakMethod(self._samples))

    def _samples(self) -> list[tuple[LinearState, tuple[torch.Tensor, torch.Tensor]]]:
        found = ((state, state.samples(module)) for module, state in self._states.values())
        return [(state, pair) for state, pair in found if pair is not None]

    def check_weights(self) -> None:
        """Check the weights for uncounted writes, once in a run. Syncs then."""
        self._shared.check.make()

    def count_replays(self) -> None:
        """Add the calls of replayed graphs to the layers' counters. Syncs."""
        self._shared.replays.count()

    def run_short_calls(self, on: bool) -> None:
        """Run short calls in 8 bit too (True), or only calls with enough work for 8 bit to pay (False)."""
        usual = LEAST_WORK if self._options["min_features"] is None else 0
        self._set_least_work(0 if on else usual)

    def run_in_graphs_alone(self) -> None:
        """Take all calls for short, so that only layers without 16-bit weights run in 8 bit outside of graphs."""
        if self._options["min_features"] is None:
            self._set_least_work(NEVER)

    def _set_least_work(self, least_work: int) -> None:
        if least_work != self._shared.least_work:
            self._shared.least_work = least_work
            for state in self.states():
                state.find_short()

    def forwards_without_eager_calls(self) -> int:
        """Return the number of forwards in which no layer was called from Python: torch.compile ran them."""
        return self.unseen_forwards + (self._shared.forwards > 0 and not self._shared.was_called)

    def states(self) -> list[LinearState]:
        """Return the states of all swapped layers."""
        return [state for _, state in self._states.values()]

    def state_of(self, module: Any) -> LinearState | None:
        """Return the state of a layer, or None if this swap does not have it."""
        state = self._states.get(id(module), (None, None))[1]
        return state if state is linear_state(module) else None

    def report(self) -> LinearReport:
        """Report what really ran, per layer: format, calls, calls in 16 bit by reason, bytes saved. Syncs."""
        return LinearReport(rows_of(self), notes_of(self))

    def remove(self) -> None:
        """Put the 16-bit layers back, bit for bit. Harmless when repeated.

        Raises: RuntimeError if 16-bit weights were dropped. Nothing is changed then.
        """
        if not self._active:
            return
        for state in self.states():
            if state.dropped:
                raise RuntimeError(DROPPED.format(state.label))
        self._put_back()

    @property
    def dropped(self) -> int:
        """Number of layers whose 16-bit weight was dropped."""
        return sum(state.dropped for state in self.states())

    def serves(self, linears: Linears, layers: tuple[tuple[str, str], ...], name: str = "") -> bool:
        """Return True if these options ask for no other 8-bit layers than this swap has.

        A model that SageConfig loaded serves all options that name its format, or none, and whose rules say what its
        layers are. name: of the model in its pipeline, with which patterns of rules may begin.
        """
        asked = {"linears": linears.format, "layers": layers, "min_features": linears.min_features}
        if self.loaded is None:
            return (linears.format == "none" and not layers) or asked == {x: self._options[x] for x in asked}
        format, least = self.loaded
        if linears.format not in ("none", format) or linears.min_features not in (None, least):
            return False
        return agree_with(layers, self.choices, name)

    def count_anew(self) -> None:
        """Set all counts to zero."""
        self.count_replays()
        self.unseen_forwards = self._shared.forwards = 0
        for state in self.states():
            state.events.zero()

    def _put_back(self) -> None:
        self._active = self._owner.is_there = False
        for hook in self._hooks:
            hook.remove()
        for block in self._blocks.values():
            if is_enclosed(block):
                give_back_block(block)
        for module in self._norms.values():
            if is_swapped(module):
                give_back_norm(module)
        had = {key: module for key, (module, _) in self._states.items() if self.state_of(module) is not None}
        for module in had.values():
            self._leave(module)
        self._rotations.remove()
        self._norms, self._blocks, self._states, self.choices = {}, {}, {}, []
        take_out_leftovers(self.model, attention=False)
        for swap in self._lenders:
            if swap._active:
                swap._swap_chosen(had)

    def __enter__(self) -> LinearSwap:
        return self

    def __exit__(self, *exception: object) -> None:
        self.remove()

    def __repr__(self) -> str:
        state = f"{len(self._states)} layers" if self._active else "removed"
        return f"<sage_processors.LinearSwap: {self._options['linears']}, {state}>"


def swap_of(model: nn.Module) -> LinearSwap | None:
    """Return the live swap of a model, or None."""
    for hook in model._forward_pre_hooks.values():
        swap: LinearSwap | None = hook.swap if isinstance(hook, PrepareHook) else None
        if swap is not None and swap._active:
            return swap
    return None
