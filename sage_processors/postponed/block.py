"""Gives a block of a model a class in whose forward results may wait; the object stays the same."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from .enclosure import Enclosure
from .region import current, opened
from .tensor import ordinary


if TYPE_CHECKING:
    _Beside = nn.Module
else:
    _Beside = object


class _EnclosedBlock(_Beside):
    """Mixin of an enclosed block's class. `__class__` is the base, as libraries look blocks up by class."""

    _sage_base: type

    @property
    def __class__(self):
        return type(self)._sage_base

    @__class__.setter
    def __class__(self, kind):
        object.__dict__["__class__"].__set__(self, kind)

    def __reduce_ex__(self, protocol):
        return _rebuild, (type(self)._sage_base,), self.__dict__


def _rebuild(base: type) -> Any:
    """For copy and pickle."""
    return object.__new__(block_class(base))


@functools.cache
def block_class(base: Any) -> type:
    """The subclass of a block's class in whose forward results may wait for their consumer.

    Its forward is its base's, as that is when it is called. What it returns are ordinary tensors.
    """

    @functools.wraps(base.forward)
    def forward(self, *args, **kwargs):
        # Dynamo takes super(), but no function of a class that diffusers lets into its graphs
        own = super(made, self).forward
        enclosure = None if torch.compiler.is_compiling() else self.__dict__.get("_sage_enclosure")
        if enclosure is None or current() is not None or not enclosure.is_closed(self, args, kwargs):
            return own(*args, **kwargs)
        with opened():
            return ordinary(own(*args, **kwargs))

    members = {"forward": forward, "_sage_base": base, "__doc__": base.__doc__, "__module__": __name__}
    made: Any = type("Sage" + base.__name__, (_EnclosedBlock, base), members)
    return made


def enclose(module: Any) -> None:
    """Let results wait inside of a block."""
    object.__setattr__(module, "_sage_enclosure", Enclosure())


def is_enclosed(module: Any) -> bool:
    """True for a module that `block_class` made the class of."""
    return issubclass(type(module), _EnclosedBlock)
