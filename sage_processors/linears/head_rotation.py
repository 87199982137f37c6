"""Rotary embeddings of a language model's queries and keys in one pass.

The attention modules of transformers call `apply_rotary_pos_emb` of their file: about ten operations, each a pass over
Q or K. If that function is the usual one, the modules get another class. Its forward is their own code, in which this
name is a function that does all of it in one pass. Compiled code calls the model's own function, as the compiler fuses
it. So do modules whose class or file was patched later.
"""

from __future__ import annotations

import dis
import functools
import types
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from sage_kernels import qk_norm_rope
from sage_kernels.checks import DTYPES, MAX_HEAD_DIM
from sage_kernels.compat import are_ordinary, function_modes, is_traced

from ..patching.block_state import block_state, forget
from ..patching.derived import Derived, derived, give_back_class, put_class
from ..patching.other_globals import innermost, with_global
from ..patching.patched import Owner, Watch
from ..postponed.tensor import is_dual
from ..torch_modes import is_autocast


FUNCTION = "apply_rotary_pos_emb"


def _tried(function: Callable[..., Any], given: list[torch.Tensor]) -> tuple[Any, ...]:
    """Return the function's results as a tuple, or () if it does not take these arguments."""
    try:
        with torch.no_grad():
            turned = function(*given)
    except (TypeError, ValueError, RuntimeError, IndexError, AttributeError):
        return ()
    return turned if isinstance(turned, tuple) else ()


@functools.cache
def turns_halves(function: Callable[..., Any]) -> bool:
    """Return True if function(q, k, cos, sin) is the usual rotary embedding, found by calling it.

    The usual one rotates channels i and i + D / 2 of q and k [B, H, S, D] by cos and sin [B, S, D]. Hundreds of files
    have a function of this name, and some of them do something else.
    """
    generator = torch.Generator("cpu").manual_seed(0)
    shapes = ((2, 2, 3, 8), (2, 1, 3, 8), (2, 3, 8), (2, 3, 8))
    given = [torch.randn(shape, generator=generator, device="cpu", dtype=torch.float32) for shape in shapes]
    turned = _tried(function, [x.clone() for x in given])
    cos, sin = (x[:, None] for x in given[2:])
    expected = [x * cos + torch.cat((-x[..., 4:], x[..., :4]), -1) * sin for x in given[:2]]
    return [getattr(x, "shape", None) for x in turned] == [x.shape for x in expected] and all(
        torch.allclose(x, y, rtol=1e-5, atol=1e-6) for x, y in zip(turned, expected, strict=True)
    )


@functools.cache
def keeps_dtype(function: Callable[..., Any]) -> bool:
    """Return True if the function returns q's dtype for angles of another dtype.

    Else it returns the dtype that PyTorch promotes both to.
    """
    q, cos = (torch.zeros(shape, device="cpu", dtype=torch.bfloat16) for shape in ((1, 1, 1, 8), (1, 1, 8)))
    turned = _tried(function, [q, q, cos.float(), cos.float()])
    return bool(turned) and all(x.dtype == q.dtype for x in turned)


def _is_ordinary(x: Any) -> bool:
    wants_gradient = type(x) is torch.Tensor and x.requires_grad and torch.is_grad_enabled()
    return type(x) is torch.Tensor and x.dtype in DTYPES and not wants_gradient and not is_dual(x)


def _can_turn(function: Callable[..., Any], q: Any, k: Any, cos: Any, sin: Any) -> bool:
    """Return True if this call can run in one pass: nothing traces it, and nobody needs a gradient."""
    given = (q, k, cos, sin)
    if function_modes() or not all(map(_is_ordinary, given)):
        return False
    if is_traced() or not are_ordinary(given) or is_autocast(q.device):
        return False
    if q.dim() != 4 or k.dim() != 4 or cos.dim() != 3 or q.dtype != k.dtype or cos.dtype != sin.dtype:
        return False
    if cos.dtype != q.dtype and not keeps_dtype(function):
        return False
    batch, _, tokens, channels = q.shape
    return bool(
        (k.shape[0], *k.shape[2:]) == (batch, tokens, channels)
        and cos.shape == sin.shape
        and cos.shape in ((1, tokens, channels), (batch, tokens, channels))
        and 0 < channels <= MAX_HEAD_DIM
        and channels % 2 == 0
        and q.stride(3) == k.stride(3) == 1
        and q.numel() > 0
        and k.device == cos.device == sin.device == q.device
    )


def _as_one_sample(x: torch.Tensor) -> torch.Tensor:
    """View [B, S, H, D] as [1, B · S, H, D]."""
    return x.flatten(0, 1).unsqueeze(0)


def _turned(q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> tuple[torch.Tensor, ...]:
    batch, _, tokens, _ = q.shape
    heads = [q.transpose(1, 2), k.transpose(1, 2)]
    by_sample = cos.shape[0] > 1  # then all samples are seen as one, with one table of angles
    if by_sample:
        heads = [_as_one_sample(x) for x in heads]
        cos, sin = cos.flatten(0, 1), sin.flatten(0, 1)
    else:
        cos, sin = cos[0], sin[0]
    made = qk_norm_rope([heads[0]], [heads[1]], norm=False, cos=[cos], sin=[sin], pairs=False)
    return tuple((x.unflatten(1, (batch, tokens))[0] if by_sample else x).transpose(1, 2) for x in made)


def in_one_pass(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that does the same as `function` in one pass.

    It rounds once, while `function` rounds after each operation. Calls that it can't do go to `function`.
    """

    def apply_rotary_pos_emb(q: Any, k: Any, cos: Any, sin: Any, *args: Any, **kwargs: Any) -> Any:
        if not (args or kwargs) and _can_turn(function, q, k, cos, sin):
            return _turned(q, k, cos, sin)
        return function(q, k, cos, sin, *args, **kwargs)

    return apply_rotary_pos_emb


class _Rotating(Derived):
    """Mixin of the classes of attention modules that rotate queries and keys in one pass."""


def _read_by(function: Any) -> dict[str, Any]:
    """Return {name: value} of the globals that a function reads; the value is None for Python's builtins."""
    read = (x.argval for x in dis.get_instructions(function.__code__) if x.opname == "LOAD_GLOBAL")
    return {name: function.__globals__.get(name) for name in read}


def _is_of_the_library(function: types.FunctionType, scope: dict[str, Any]) -> bool:
    """Return True if a function and those it calls are from transformers or from the module's file.

    scope: globals of that file. A function that somebody put there instead may do more than rotate, such as keep or
    count its arguments.
    """
    called = [x for x in _read_by(function).values() if isinstance(x, types.FunctionType)]
    homes = [each.__globals__ for each in (function, *called)]
    return all(own is scope or str(own.get("__name__")).partition(".")[0] == "transformers" for own in homes)


def rotating_class(base: Any) -> Any:
    """Return the subclass that rotates in one pass; None if the class does not call the usual function."""
    code_of = innermost(base.forward)
    code, scope = getattr(code_of, "__code__", None), getattr(code_of, "__globals__", {})
    function = scope.get(FUNCTION) if code is not None and FUNCTION in code.co_names else None
    if not isinstance(function, types.FunctionType) or issubclass(base, _Rotating):
        return None
    is_usual = _is_of_the_library(function, scope) and turns_halves(function)
    return _class_with(base, base.forward, function) if is_usual else None


@functools.cache
def _class_with(base: Any, known: Any, function: Any) -> Any:
    own = with_global(known, FUNCTION, in_one_pass(function))
    if own is None:
        return None
    watch = Watch([innermost(known), function], [(base, "forward")])

    @functools.wraps(known)
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        # `own` has a copy of the globals, so it would ignore later patches of the class or its file.
        # Gradient checkpointing runs a forward without gradients, then with them: both have to round alike.
        stock = self.training or torch.compiler.is_compiling() or watch.changed()
        return (base.forward if stock else own)(self, *args, **kwargs)

    return derived(_Rotating, base, forward, rotating_class)


def is_rotating(module: Any) -> bool:
    """Return True for an attention module that rotates queries and keys in one pass."""
    return isinstance(module, _Rotating)


def give_back_rotation(module: Any) -> None:
    """Give an attention module its own class back."""
    give_back_class(module)
    forget(module, "rotations")


class HeadRotations:
    """The attention modules of one model that rotate in one pass: the same objects, with another class."""

    def __init__(self) -> None:
        self._swapped: dict[int, nn.Module] = {}
        self._owner = Owner()

    def put(self, model: nn.Module, in_8_bit: bool) -> None:
        """Give every attention module of the model the class that rotates in one pass, if there is one.

        in_8_bit: a layer of the model runs in 8 bit. If none does, the modules get their own classes back.
        """
        for module in model.modules():
            cls = rotating_class(type(module)) if in_8_bit and not isinstance(module, _Rotating) else None
            if cls is not None:
                put_class(module, cls)
                block_state(module).rotations = self._owner
                self._swapped[id(module)] = module
        if not in_8_bit:
            self.remove()

    def remove(self) -> None:
        """Give the modules their own classes back."""
        for module in self._swapped.values():
            if is_rotating(module):
                give_back_rotation(module)
        self._swapped.clear()
