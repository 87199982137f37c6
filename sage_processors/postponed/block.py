"""Blocks of a model that postpone results in their forward: the same objects, with another class."""

from __future__ import annotations

import functools
from typing import Any

import torch

from ..patching.block_state import block_state
from ..patching.derived import Derived, derived
from ..patching.patched import Owner
from .casts import with_castable_input
from .enclosure import Enclosure
from .joins import with_parts
from .region import current, opened
from .tensor import ordinary


class _EnclosedBlock(Derived):
    """Mixin of the class of an enclosed block."""


class _DisguisedBlock(_EnclosedBlock):
    """Mixin whose `__class__` is the block's own class, since diffusers looks blocks up by it."""

    @property
    def __class__(self):
        return type(self)._sage_base

    @__class__.setter
    def __class__(self, kind):
        object.__dict__["__class__"].__set__(self, kind)


@functools.cache
def block_class(base: Any) -> Any:
    """Return the subclass of a block's class whose forward may postpone results.

    Its forward calls the one of the base class, which is looked up at each call. It returns ordinary tensors.
    """

    @functools.wraps(base.forward)
    def forward(self, *args, **kwargs):
        # Dynamo can trace super(), but not `base.forward` of a class that diffusers allows in its graphs
        own = super(made, self).forward
        state = None if torch.compiler.is_compiling() else self.__dict__.get("_sage")
        enclosure = None if state is None else state.enclosure
        if enclosure is None or current() is not None or not enclosure.is_closed(self, args, kwargs):
            return own(*args, **kwargs)
        with opened() as region:
            if enclosure.has_casts:
                args = with_castable_input(args, tuple(kwargs.values()))
            parts = with_parts(args, kwargs) if enclosure.may_join and not enclosure.has_casts else None
            args, kwargs = parts or (args, kwargs)
            result = ordinary(own(*args, **kwargs))
            enclosure.has_casts = region.has_casts
            enclosure.may_join = enclosure.may_join and (parts is None or region.has_joins)
            return result

    # transformers looks blocks up by their class's name, and Dynamo guards on `x.__class__` being type(x) where code
    # reads it, as the wrappers of transformers' deprecated arguments do
    has_name = base.__module__.startswith("transformers.")
    made = derived(_EnclosedBlock if has_name else _DisguisedBlock, base, forward, block_class)
    if has_name:
        made.__name__, made.__qualname__ = base.__name__, base.__qualname__
    return made


def enclose(module: Any, owner: Owner) -> None:
    """Let layers inside of this block postpone their results. Its class has to be that of `block_class`.

    Args: owner: of the swap that will undo this.
    """
    enclosure = Enclosure()
    enclosure.owner = owner
    block_state(module).enclosure = enclosure


def is_enclosed(module: Any) -> bool:
    """Return True if the module has a class of `block_class`."""
    return issubclass(type(module), _EnclosedBlock)
