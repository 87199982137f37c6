"""Tensors for postponed results: their consumer computes them, other code gets ordinary tensors."""

from __future__ import annotations

import dataclasses
import operator
import weakref
from typing import Any

import torch

from sage_kernels.compat import has_tangent, is_differentiating_forward, make_wrapper_subclass

from .region import in_thread


CAN_WAIT = make_wrapper_subclass is not None  # else nothing is postponed


class Postponed(torch.Tensor):
    """A result that is computed when it is used: its shape, dtype and device, and how to compute it.

    It is made only while a region is open (region.py), from contiguous operands. A function that does not know this
    class gets the ordinary tensor instead and may write to it. So all postponed results that read this one are
    computed before that, and this one can't be computed in a consumer's kernel any more.
    """

    _shape: torch.Size
    _dtype: torch.dtype
    _device: torch.device
    _ordinary: torch.Tensor = None  # type: ignore[assignment]  # the numbers, once computed
    _is_out = False  # the ordinary tensor was handed out

    @staticmethod
    def __new__(cls, shape: torch.Size, dtype: torch.dtype, device: torch.device, *_: Any, **__: Any) -> Any:
        self = make_wrapper_subclass(cls, shape, dtype=dtype, device=device)
        self._shape, self._dtype, self._device = shape, dtype, device
        region = in_thread.region
        if region is not None:
            region.waiting.append(weakref.ref(self))
        return self

    def _compute(self) -> torch.Tensor:
        raise NotImplementedError

    def value(self) -> torch.Tensor:
        """Return the ordinary tensor for reading only: the caller must not pass it on. Computed once."""
        if self._ordinary is None:
            self._ordinary = self._compute()
        return self._ordinary

    def tensor(self) -> torch.Tensor:
        """Return the ordinary tensor for any use: whoever gets it may write to it."""
        if not self._is_out:
            self._settle()
            self._is_out = True
        return self._ordinary

    def _settle(self) -> None:
        """Compute this result now, and what was derived from it and is still postponed.

        What is computed may be a view of this one's numbers, from which other results are derived in turn.
        """
        self.value()
        region = in_thread.region
        if region is None:
            return
        settled = [self]
        for source in settled:  # grows
            for reference in region.waiting:
                tensor = reference()
                if tensor is None or not tensor._reads(source) or any([tensor is x for x in settled]):
                    continue
                tensor.value()
                settled.append(tensor)

    def _reads(self, other: Postponed) -> bool:
        """Return True if this result is computed from the numbers of the other one."""
        return False

    # Known without the numbers. The default way, through __torch_function__, would take microseconds for each.
    shape = property(operator.attrgetter("_shape"))
    dtype = property(operator.attrgetter("_dtype"))
    device = property(operator.attrgetter("_device"))
    ndim = property(lambda self: len(self._shape))
    is_cuda = property(lambda self: self._device.type == "cuda")
    is_meta = property(lambda self: False)
    is_sparse = property(lambda self: False)
    is_quantized = property(lambda self: False)
    is_nested = property(lambda self: False)
    layout = property(lambda self: torch.strided)
    requires_grad = property(lambda self: False, lambda self, value: self.tensor().requires_grad_(value))

    def size(self, dim: Any = None) -> Any:
        return self._shape if dim is None else self._shape[dim]

    def dim(self) -> int:
        return len(self._shape)

    def numel(self) -> int:
        return self._shape.numel()

    def is_floating_point(self) -> bool:
        return True

    def is_inference(self) -> bool:
        return False

    def _cast(self, dtype: torch.dtype) -> torch.Tensor:
        """Return this result in another dtype. Subclasses override it if they can postpone the cast."""
        return self.tensor().to(dtype)

    def to(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        if len(args) == 1 and not kwargs:
            wanted = args[0].dtype if isinstance(args[0], torch.Tensor) else args[0]
            same_place = not isinstance(args[0], torch.Tensor) or args[0].device == self._device
            if isinstance(wanted, torch.dtype) and same_place:
                return self if wanted == self._dtype else self._cast(wanted)
        if not args and set(kwargs) == {"dtype"} and isinstance(kwargs["dtype"], torch.dtype):
            return self.to(kwargs["dtype"])
        return self.tensor().to(*ordinary_in(args), **ordinary_in(kwargs))

    def type_as(self, other: Any) -> torch.Tensor:
        same_place = isinstance(other, torch.Tensor) and other.device == self._device
        return self.to(other.dtype) if same_place else self.tensor().type_as(ordinary_in(other))

    def float(self) -> torch.Tensor:
        return self.to(torch.float32)

    def half(self) -> torch.Tensor:
        return self.to(torch.float16)

    def bfloat16(self) -> torch.Tensor:
        return self.to(torch.bfloat16)

    # Methods that PyTorch or Python call without __torch_function__

    def __format__(self, spec: Any) -> str:
        return format(self.tensor(), spec)

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return repr(self.value())

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.tensor().__reduce_ex__(protocol)

    def __deepcopy__(self, memo: Any) -> Any:
        return self.tensor().__deepcopy__(memo)

    def __dlpack__(self, *args: Any, **kwargs: Any) -> Any:
        return self.tensor().__dlpack__(*args, **kwargs)

    def as_subclass(self, cls: Any) -> Any:
        return self.tensor().as_subclass(cls)

    @classmethod
    def _knows(cls, func: Any) -> Any:
        """Return a function (args, kwargs) that does `func` on a postponed result, or None if there is none.

        The function returns another postponed result. It returns None for arguments that need the ordinary tensor.
        """
        return None

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        known = cls._knows(func)
        if known is not None:
            result = known(args, kwargs)
            if result is not None:
                return result
        return func(*ordinary_in(args), **ordinary_in(kwargs))

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """Run an operation on ordinary tensors. Only calls from C++ get here, which skip __torch_function__."""
        return func(*ordinary_in(args), **ordinary_in(kwargs or {}))


class Contiguous(Postponed):
    """A postponed result that is contiguous: of a matmul, or of a norm of contiguous input."""

    def contiguous(self, memory_format: torch.memory_format = torch.contiguous_format) -> torch.Tensor:
        usual = memory_format in (torch.contiguous_format, torch.preserve_format)
        return self if usual else self.tensor().contiguous(memory_format=memory_format)

    def is_contiguous(self, memory_format: torch.memory_format = torch.contiguous_format) -> bool:
        return memory_format is torch.contiguous_format or self.tensor().is_contiguous(memory_format=memory_format)


def ordinary_in(value: Any) -> Any:
    """Return arguments of a call with ordinary tensors in place of postponed results.

    Plain lists, tuples and dicts are copied. All other objects are returned as they are.
    """
    kind = type(value)
    if kind is torch.Tensor:  # asked first, as isinstance takes longer
        return value
    if isinstance(value, Postponed):
        return value.tensor()
    if kind is tuple or kind is list:
        return kind([ordinary_in(x) for x in value])
    return {name: ordinary_in(x) for name, x in value.items()} if kind is dict else value


def ordinary(value: Any) -> Any:
    """Return the result of a block with ordinary tensors in place of postponed results.

    Lists, dicts and dataclass instances are changed in place. Tuples are copied, if they hold a postponed result.
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
                object.__setattr__(value, field.name, new)  # frozen dataclasses too: the numbers are the same
    return value


def version_of(x: torch.Tensor) -> int | None:
    """Return how often a tensor's memory was written to; None for inference tensors, which don't count."""
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
        """True if the tensor was written to since this operand was made."""
        return self.tensor._version != self.version


def can_wait(x: Any) -> bool:
    """Return True if x may be an operand: an ordinary tensor that counts writes and needs no gradient."""
    return (
        type(x) in (torch.Tensor, torch.nn.Parameter)
        and not x.is_inference()
        and not (x.requires_grad and torch.is_grad_enabled())
    )


def is_dual(x: torch.Tensor) -> bool:
    """Return True if forward-mode differentiation follows x. Under inference_mode it follows nothing."""
    return is_differentiating_forward() and not torch.is_inference_mode_enabled() and has_tangent(x)
