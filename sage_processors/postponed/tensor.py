"""A tensor that is computed when it is used: its consumer computes it along, everybody else gets ordinary numbers."""

from __future__ import annotations

import dataclasses
import weakref
from typing import Any

import torch

from sage_kernels.compat import has_tangent, is_differentiating_forward, make_wrapper_subclass

from .region import in_thread


CAN_WAIT = make_wrapper_subclass is not None  # else every result is computed at once


class Postponed(torch.Tensor):
    """Shape, dtype and device of a result, and how to compute it.

    Made inside of a region alone (region.py), from contiguous operands. A function that does not know it gets the
    ordinary tensor, and from then on that is all there is: what was derived from this one is computed first, as the
    function may write to it.
    """

    _ordinary: Any = None  # the numbers, once computed
    _is_out = False  # somebody has them

    @staticmethod
    def __new__(cls, shape, dtype, device, *_, **__):
        return make_wrapper_subclass(cls, shape, dtype=dtype, device=device)

    def __init__(self, shape, dtype, device):
        self._shape, self._dtype, self._device = shape, dtype, device
        region = in_thread.region
        if region is not None:
            region.waiting.append(weakref.ref(self))

    def _compute(self) -> torch.Tensor:
        raise NotImplementedError

    def value(self) -> torch.Tensor:
        """The numbers, computed once, for one who only reads them and gives them to nobody."""
        if self._ordinary is None:
            self._ordinary = self._compute()
        return self._ordinary

    def tensor(self) -> torch.Tensor:
        """The ordinary tensor, to hand out: whoever gets it may write to it."""
        if not self._is_out:
            self._settle()
            self._is_out = True
        return self._ordinary

    def _settle(self) -> None:
        """Compute the numbers of this tensor and, before somebody may write to them, all that reads them."""
        self.value()
        region = in_thread.region
        for reference in () if region is None else region.waiting:
            tensor = reference()
            if tensor is not None and tensor._ordinary is None and tensor._reads(self):
                tensor._settle()

    def _reads(self, other: Postponed) -> bool:
        """True if this tensor is computed from the numbers of the other one."""
        return False

    # asked of a tensor without wanting its numbers; the machinery below would take microseconds for each
    shape = property(lambda self: self._shape)
    dtype = property(lambda self: self._dtype)
    device = property(lambda self: self._device)
    ndim = property(lambda self: len(self._shape))
    is_cuda = property(lambda self: self._device.type == "cuda")
    is_meta = property(lambda self: False)
    is_sparse = property(lambda self: False)
    is_quantized = property(lambda self: False)
    is_nested = property(lambda self: False)
    layout = property(lambda self: torch.strided)
    requires_grad = property(lambda self: False, lambda self, value: self.tensor().requires_grad_(value))

    def size(self, dim=None):
        return self._shape if dim is None else self._shape[dim]

    def dim(self):
        return len(self._shape)

    def numel(self):
        return self._shape.numel()

    def is_floating_point(self):
        return True

    def is_inference(self):
        return False

    def _cast(self, dtype):
        """This tensor in another dtype; a class that can postpone that says how."""
        return self.tensor().to(dtype)

    def to(self, *args, **kwargs):
        if len(args) == 1 and not kwargs:
            wanted = args[0].dtype if isinstance(args[0], torch.Tensor) else args[0]
            same_place = not isinstance(args[0], torch.Tensor) or args[0].device == self._device
            if isinstance(wanted, torch.dtype) and same_place:
                return self if wanted == self._dtype else self._cast(wanted)
        if not args and set(kwargs) == {"dtype"} and isinstance(kwargs["dtype"], torch.dtype):
            return self.to(kwargs["dtype"])
        return self.tensor().to(*ordinary_in(args), **ordinary_in(kwargs))

    def type_as(self, other):
        same_place = isinstance(other, torch.Tensor) and other.device == self._device
        return self.to(other.dtype) if same_place else self.tensor().type_as(ordinary_in(other))

    def float(self):
        return self.to(torch.float32)

    def half(self):
        return self.to(torch.float16)

    def bfloat16(self):
        return self.to(torch.bfloat16)

    # what PyTorch asks of an object without __torch_function__

    def __format__(self, spec):
        return format(self.tensor(), spec)

    def __repr__(self, *, tensor_contents=None):
        return repr(self.value())

    def __reduce_ex__(self, protocol):
        return self.tensor().__reduce_ex__(protocol)

    def __deepcopy__(self, memo):
        return self.tensor().__deepcopy__(memo)

    def __dlpack__(self, *args, **kwargs):
        return self.tensor().__dlpack__(*args, **kwargs)

    def as_subclass(self, cls):
        return self.tensor().as_subclass(cls)

    @classmethod
    def _knows(cls, func):
        """A function (args, kwargs) that runs `func` without the ordinary tensor, or None. It may give up: None."""
        return None

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        known = cls._knows(func)
        if known is not None:
            result = known(args, kwargs)
            if result is not None:
                return result
        return func(*ordinary_in(args), **ordinary_in(kwargs))

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):  # type: ignore[override]
        """Reached from C++ alone, which knows nothing of __torch_function__."""
        return func(*ordinary_in(args), **ordinary_in(kwargs or {}))


def ordinary_in(value):
    """The arguments of a call with ordinary tensors in place of postponed ones, in lists, tuples and dicts too."""
    if isinstance(value, Postponed):
        return value.tensor()
    if type(value) in (tuple, list):
        return type(value)(ordinary_in(x) for x in value)
    return {name: ordinary_in(x) for name, x in value.items()} if type(value) is dict else value


def ordinary(value: Any) -> Any:
    """`value` with ordinary tensors in place of postponed ones.

    The same object where it has none, and where it can be written to; `tensor.ordinary_in` is for arguments: it copies
    plain containers, and leaves all others as they are.
    """
    if isinstance(value, Postponed):
        return value.tensor()
    if isinstance(value, (tuple, list)):
        found = [ordinary(x) for x in value]
        if all(new is old for new, old in zip(found, value, strict=True)):
            return value
        if isinstance(value, list):
            value[:] = found
            return value
        return type(value)(*found) if hasattr(value, "_fields") else type(value)(found)
    if isinstance(value, dict):
        for name, old in list(value.items()):
            new = ordinary(old)
            if new is not old:
                value[name] = new
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        for field in dataclasses.fields(value):
            old = getattr(value, field.name, None)
            new = ordinary(old)
            if new is not old:
                object.__setattr__(value, field.name, new)  # frozen or not: the same numbers
    return value


def version_of(x: torch.Tensor) -> int | None:
    """How often a tensor's memory was written to; None for inference tensors, which don't count."""
    return None if x.is_inference() else x._version


class ChangedInputError(RuntimeError):
    """A tensor was changed in place between an operation and the use of its postponed result."""


class Operand:
    """A tensor that a postponed operation will read, and the number of writes to it so far."""

    __slots__ = ("tensor", "version")

    def __init__(self, tensor: torch.Tensor):
        self.tensor, self.version = tensor, tensor._version

    @property
    def is_changed(self) -> bool:
        return self.tensor._version != self.version


def can_wait(x) -> bool:
    """True for a tensor that may be an operand: an ordinary one that counts writes and needs no gradient."""
    return (
        type(x) in (torch.Tensor, torch.nn.Parameter)
        and not x.is_inference()
        and not (x.requires_grad and torch.is_grad_enabled())
    )


def is_dual(x: torch.Tensor) -> bool:
    """True where forward-mode differentiation goes on for x; under inference_mode it does for nothing."""
    return is_differentiating_forward() and not torch.is_inference_mode_enabled() and has_tangent(x)
