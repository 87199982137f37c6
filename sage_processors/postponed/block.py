"""Blocks of a model that postpone results in their forward: the same objects, with another class."""

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
    """Mixin of the class of an enclosed block.

    `__class__` is the block's own class, since libraries look blocks up by it.
    """

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
    """Make an empty block of that class, for copy and pickle."""
    return object.__new__(block_class(base))


@functools.cache
def block_class(base: Any) -> type:
    """Return the subclass of a block's class whose forward may postpone results.

    Its forward calls the one of the base class, which is looked up at each call. It returns ordinary tensors.
    """

    @functools.wraps(base.forward)
    def forward(self, *args, **kwargs):
        # Dynamo can trace super(), but not `base.forward` of a class that diffusers allows in its graphs
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
    """Let layers inside of this block postpone their results. Its class has to be that of `block_class`."""
    object.__setattr__(module, "_sage_enclosure", Enclosure())


def is_enclosed(module: Any) -> bool:
    """Return True if the module has a class of `block_class`."""
    return issubclass(type(module), _EnclosedBlock)
