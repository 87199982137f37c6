"""Undoes the swap in copies of a swapped model, or of a part of one, which no LinearSwap owns.

`copy.deepcopy` copies a swapped model with all that makes it run in 8 bit, and peft copies single layers and norms
(LN tuning, `modules_to_save`).
"""

from __future__ import annotations

from typing import Any

from torch import nn

from ..patching.patched import is_left
from ..postponed.block import is_enclosed
from .head_rotation import give_back_rotation, is_rotating
from .modules import is_swapped, put_class


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
        if is_enclosed(module) and is_left(own["_sage_enclosure"].owner):
            give_back_block(module)
        if is_rotating(module) and is_left(own.get("_sage_rotations")):
            give_back_rotation(module)
        norm, linear = own.get("_sage_norm"), own.get("_sage_linear")
        if norm is not None and is_left(norm.owner) and (attention or not norm.is_of_attention):
            give_back_norm(module)
        if linear is not None and is_left(linear.shared.owner) and not linear.dropped:
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
    put_class(block, type(block)._sage_base)
    del block._sage_enclosure


def give_back_norm(norm: Any) -> None:
    """Give a norm its own class back: its results are no longer postponed."""
    if is_swapped(norm):
        put_class(norm, type(norm)._sage_base)
    del norm._sage_norm


def give_back_layer(layer: Any) -> None:
    """Give a linear layer its own class back: it runs in 16 bit."""
    state = layer._sage_linear
    state.leave_storage()
    state.storage.clear()
    put_class(layer, type(layer)._sage_base)
    del layer._sage_linear
