"""Undoes the swap in copies of a swapped model, or of a part of one, which no LinearSwap owns.

`copy.deepcopy` copies a swapped model with all that makes it run in 8 bit, and peft copies single layers and norms
(LN tuning, `modules_to_save`).
"""

from __future__ import annotations

from typing import Any

from torch import nn

from ..patching.block_state import forget
from ..patching.derived import give_back_class
from ..patching.patched import is_left
from ..postponed.block import is_enclosed
from .head_rotation import give_back_rotation, is_rotating
from .modules import is_swapped
from .postponed.norm_layers import NormState
from .weights.linear_state import LinearState


_HOOKS = {
    "_forward_pre_hooks": ("_forward_pre_hooks_with_kwargs",),
    "_forward_hooks": ("_forward_hooks_with_kwargs", "_forward_hooks_always_called"),
}


def take_out_leftovers(model: nn.Module, *, attention: bool) -> None:
    """Give all modules without an owner their own classes back, and remove hooks without an owner.

    Layers without their 16-bit weights stay as they are. attention: also undo INT8 attention's norms and hooks.
    """
    for module in list(model.modules()):
        own = module.__dict__
        state = own.get("_sage")
        if is_enclosed(module) and is_left(getattr(getattr(state, "enclosure", None), "owner", None)):
            give_back_block(module)
        if is_rotating(module) and is_left(getattr(state, "rotations", None)):
            give_back_rotation(module)
        if isinstance(state, NormState) and is_left(state.owner) and (attention or not state.is_of_attention):
            give_back_norm(module)
        if isinstance(state, LinearState) and is_left(state.shared.owner) and not state.dropped:
            give_back_layer(module)
        _remove_hooks(module, attention)


def _remove_hooks(module: nn.Module, attention: bool) -> None:
    for name, others in _HOOKS.items():
        hooks = getattr(module, name)
        for key, hook in list(hooks.items()):
            hook = getattr(hook, "__self__", hook)
            if getattr(hook, "is_leftover", False) and (attention or not getattr(hook, "is_of_attention", False)):
                del hooks[key]
                for other in others:
                    getattr(module, other).pop(key, None)


def give_back_block(block: Any) -> None:
    """Give a block its own class back: nothing is postponed in it any more."""
    give_back_class(block)
    forget(block, "enclosure")


def give_back_norm(norm: Any) -> None:
    """Give a norm its own class back: its results are no longer postponed."""
    if is_swapped(norm):
        give_back_class(norm)
    del norm._sage


def give_back_layer(layer: Any) -> None:
    """Give a linear layer its own class back: it runs in 16 bit."""
    state = layer._sage
    state.leave_storage()
    state.storage.clear()
    give_back_class(layer)
    del layer._sage
