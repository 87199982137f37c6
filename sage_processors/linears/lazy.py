"""A tensor that is not computed yet: whoever knows it takes a shorter way, everybody else gets ordinary numbers."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from typing import Any

import torch

from sage_kernels.compat import has_tangent, is_differentiating_forward, make_wrapper_subclass


CAN_WAIT = make_wrapper_subclass is not None  # else every result is computed at once


def may_wait_in(model: Any) -> bool:
    """Whether results may wait in a forward of this model: not where something inside of it is compiled by itself."""
    return CAN_WAIT and not ("torch._dynamo" in sys.modules and any(True for _ in _compiled(model._modules.values())))


def _compiled(modules: Iterable[Any]) -> Iterator[Any]:
    """Of these modules and what is inside of them: those that are compiled, but for those inside of such."""
    left = list(modules)
    while left:
        module = left.pop()
        if module is not None:
            parts = module._modules
            if module._compiled_call_impl is not None or "_orig_mod" in parts:
                yield module
            elif parts:
                left.extend(parts.values())


def modules_in_compiled_parts(model: Any) -> set[int]:
    """The ids of the model's modules that are compiled, by themselves or in another one."""
    return {id(module) for part in _compiled([model]) for module in part.modules()}


class Lazy(torch.Tensor):
    """Shape, dtype and device of a result, and how to compute it.

    It is never seen by torch.compile, never takes part in autograd, and has no numbers of its own: any function that
    does not know it gets what `real` returns, an ordinary tensor. Operations in place act on that tensor, which is
    kept, and later uses see it changed.
    """

    @staticmethod
    def __new__(cls, shape, dtype, device, *_, **__):
        return make_wrapper_subclass(cls, shape, dtype=dtype, device=device)

    def __init__(self, shape, dtype, device):
        self._shape, self._dtype, self._device = shape, dtype, device
        self._real: Any = None
        self._real_version: int | None = None

    def _compute(self) -> torch.Tensor:
        raise NotImplementedError

    def real(self) -> torch.Tensor:  # type: ignore[override]
        """The ordinary tensor; computed once."""
        if self._real is None:
            self._real = self._compute()
            self._real_version = version_of(self._real)
        return self._real

    @property
    def is_changed(self) -> bool:
        """Whether the ordinary tensor was handed out and may have been written to: its numbers are what counts."""
        return self._real is not None and (self._real_version is None or version_of(self._real) != self._real_version)

    # what code asks of a tensor without wanting its numbers; the machinery below would take microseconds for each
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
    requires_grad = property(lambda self: False, lambda self, value: self.real().requires_grad_(value))

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

    def contiguous(self, memory_format=torch.contiguous_format):
        return (
            self
            if memory_format in (torch.contiguous_format, torch.preserve_format)
            else self._ordinary(memory_format)
        )

    def _ordinary(self, memory_format):
        return self.real().contiguous(memory_format=memory_format)

    def is_contiguous(self, memory_format=torch.contiguous_format):
        return (
            True
            if memory_format is torch.contiguous_format
            else self.real().is_contiguous(memory_format=memory_format)
        )

    def _cast(self, dtype):
        """This tensor in another dtype; a class that can postpone that says how."""
        return self.real().to(dtype)

    def to(self, *args, **kwargs):
        if len(args) == 1 and not kwargs:
            wanted = args[0].dtype if isinstance(args[0], torch.Tensor) else args[0]
            same_place = not isinstance(args[0], torch.Tensor) or args[0].device == self._device
            if isinstance(wanted, torch.dtype) and same_place:
                return self if wanted == self._dtype else self._cast(wanted)
        if not args and set(kwargs) == {"dtype"} and isinstance(kwargs["dtype"], torch.dtype):
            return self.to(kwargs["dtype"])
        return self.real().to(*real_of(args), **real_of(kwargs))

    def type_as(self, other):
        same_place = isinstance(other, torch.Tensor) and other.device == self._device
        return self.to(other.dtype) if same_place else self.real().type_as(real_of(other))

    def float(self):
        return self.to(torch.float32)

    def half(self):
        return self.to(torch.float16)

    def bfloat16(self):
        return self.to(torch.bfloat16)

    def __format__(self, spec):
        return format(self.real(), spec)

    def __repr__(self, *, tensor_contents=None):
        return repr(self.real())

    def __reduce_ex__(self, protocol):
        return self.real().__reduce_ex__(protocol)

    def __deepcopy__(self, memo):
        return self.real().__deepcopy__(memo)

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
        return func(*real_of(args), **real_of(kwargs))

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):  # type: ignore[override]
        """Reached from C++ alone, which knows nothing of __torch_function__."""
        return func(*real_of(args), **real_of(kwargs or {}))


def real_of(value):
    """`value` with ordinary tensors in place of lazy ones, inside of lists, tuples and dicts too."""
    if isinstance(value, Lazy):
        return value.real()
    if type(value) in (tuple, list):
        return type(value)(real_of(x) for x in value)
    return {name: real_of(x) for name, x in value.items()} if type(value) is dict else value


def version_of(x: torch.Tensor) -> int | None:
    """How often a tensor's memory was written to; None for inference tensors, which don't know."""
    return None if x.is_inference() else x._version


class Operand:
    """A tensor that a postponed operation will read, and whether it still is what it was."""

    __slots__ = ("tensor", "version")

    def __init__(self, tensor: torch.Tensor):
        self.tensor, self.version = tensor, tensor._version

    @property
    def is_changed(self) -> bool:
        return self.tensor._version != self.version


def can_wait(x) -> bool:
    """Whether a tensor may be an operand: an ordinary one whose writes are counted and that needs no derivative."""
    return (
        type(x) in (torch.Tensor, torch.nn.Parameter)
        and not x.is_inference()
        and not (x.requires_grad and torch.is_grad_enabled())
        and not is_dual(x)
    )


def is_dual(x: torch.Tensor) -> bool:
    """Whether forward-mode differentiation goes on for x; under inference_mode it does for nothing."""
    return is_differentiating_forward() and not torch.is_inference_mode_enabled() and has_tangent(x)


def is_by_token(x: torch.Tensor, shape: torch.Size) -> bool:
    """Whether x [..., N] is one vector for all tokens of `shape` [B, ..., N], or one for each batch entry."""
    dims = x.dim()
    if not 1 <= dims <= len(shape) or x.shape[-1] != shape[-1]:
        return False
    middle = x.shape[:-1] if dims < len(shape) else x.shape[1:-1]
    if any(size != 1 for size in middle):
        return False
    return dims < len(shape) or dims == 1 or x.shape[0] in (1, shape[0])
