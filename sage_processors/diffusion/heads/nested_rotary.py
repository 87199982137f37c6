"""Rotary embeddings that a processor defines inside of its `__call__`, as Wan's and Z-Image's do.

Such a function has no name in a module, where rotary.py would find it. It is a constant of the processor's code. It is
known by its parameters and by what it computes, and the rebound code defines one in its place that may postpone.
"""

from __future__ import annotations

import functools
import types
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from ...postponed.tensor import Operand, can_wait
from .postponed_heads import Angles, HeadSource
from .rotary import postponed


NESTED = "nested"  # the name of such a function in `Binding.rotary`
_NAME = "apply_rotary_emb"


class _Form(NamedTuple):
    """One kind of such a function.

    Attributes:
        trial: function of (a generator, tokens, channels) that returns angles to try it with.
        tables: function of (angles, tokens, channels) that returns cos and sin [S, D / 2], views of the angles; None
            for angles of another form.
    """

    trial: Callable[[torch.Generator, int, int], tuple[torch.Tensor, ...]]
    tables: Callable[[tuple[Any, ...], int, int], tuple[torch.Tensor, torch.Tensor] | None]


def _are(tensors: tuple[Any, ...], dtype: torch.dtype, shape: tuple[int, ...]) -> bool:
    return all(isinstance(x, torch.Tensor) and x.dtype == dtype and tuple(x.shape) == shape for x in tensors)


def _of_two(angles: tuple[Any, ...], tokens: int, channels: int) -> tuple[torch.Tensor, torch.Tensor] | None:
    """Read cos of even channels, and sin of odd ones, from two tables [1, S, 1, D]."""
    if not _are(angles, torch.float32, (1, tokens, 1, channels)):
        return None
    cos, sin = angles
    return cos[0, :, 0, 0::2], sin[0, :, 0, 1::2]


def _of_complex(angles: tuple[Any, ...], tokens: int, channels: int) -> tuple[torch.Tensor, torch.Tensor] | None:
    """Read cos and sin from complex numbers [1, S, D / 2]."""
    if not _are(angles, torch.complex64, (1, tokens, channels // 2)):
        return None
    cos, sin = torch.view_as_real(angles[0][0]).unbind(-1)
    return cos, sin


def _random(generator: torch.Generator, *shape: int) -> torch.Tensor:
    """Draw normal numbers without touching PyTorch's own generator, from which a picture's noise may come."""
    return torch.randn(shape, generator=generator, dtype=torch.float32, device="cpu")


def _two(generator: torch.Generator, tokens: int, channels: int) -> tuple[torch.Tensor, ...]:
    cos, sin = _random(generator, 2, 1, tokens, 1, channels)
    return cos, sin


def _complex(generator: torch.Generator, tokens: int, channels: int) -> tuple[torch.Tensor, ...]:
    return (torch.view_as_complex(_random(generator, 1, tokens, channels // 2, 2)),)


# names of its parameters → its form
_FORMS = {
    ("hidden_states", "freqs_cos", "freqs_sin"): _Form(_two, _of_two),
    ("x_in", "freqs_cis"): _Form(_complex, _of_complex),
}


def _turned_by_stand_in(x, *angles):
    raise NotImplementedError  # the rebound code's globals have the stand-in under this name


def _in_two(x, first, second):
    return _turned_by_stand_in(x, first, second)


def _in_one(x, first):
    return _turned_by_stand_in(x, first)


def _code_for(parameters: tuple[str, ...]) -> types.CodeType:
    """Return code that passes its arguments on to the stand-in, with these names."""
    plain = _in_two.__code__ if len(parameters) == 3 else _in_one.__code__
    return plain.replace(co_name=_NAME, co_varnames=parameters)


def replaced(
    code: types.CodeType, scope: dict[str, Any], processor_of: Callable[[], Any]
) -> tuple[types.CodeType, dict[str, Any]]:
    """Replace the rotary embedding that is defined in a processor's code.

    Args: scope: the code's globals. processor_of: function without arguments that returns the running processor.
    Returns: the new code and the globals it needs; the code as it is, and {}, if it defines none of a known form.
    """
    for i, constant in enumerate(code.co_consts):
        form = _form_of(constant)
        if form is None:
            continue
        function = types.FunctionType(constant, scope)
        if _is_right(function, form):
            consts = list(code.co_consts)
            consts[i] = _code_for(constant.co_varnames[: constant.co_argcount])
            new = {"_turned_by_stand_in": _stand_in(function, form, processor_of)}
            return code.replace(co_consts=tuple(consts)), new
    return code, {}


def _form_of(constant: Any) -> _Form | None:
    if not isinstance(constant, types.CodeType) or constant.co_name != _NAME or constant.co_freevars:
        return None
    if constant.co_kwonlyargcount or constant.co_flags & 0x0C:  # *args, **kwargs
        return None
    return _FORMS.get(constant.co_varnames[: constant.co_argcount])


def _is_right(function: types.FunctionType, form: _Form) -> bool:
    """True if the function rotates channels 2i and 2i + 1 by its angles, tried on random numbers."""
    generator = torch.Generator("cpu").manual_seed(0)
    with torch.inference_mode(False), torch.no_grad(), torch.device("cpu"):
        x, angles = _random(generator, 2, 3, 2, 8), form.trial(generator, 3, 8)
        kept = [t.clone() for t in (x, *angles)]
        try:
            got = function(x, *angles)
            low = function(x.bfloat16(), *angles)
        except Exception:  # a later version of it may take other arguments
            return False
        if not all(torch.equal(a, b) for a, b in zip(kept, (x, *angles), strict=True)):
            return False
        tables = form.tables(angles, 3, 8)
        if tables is None or not isinstance(got, torch.Tensor) or got.dtype != x.dtype or low.dtype != torch.bfloat16:
            return False
        cos, sin = (table[:, None] for table in tables)
        a, b = x[..., 0::2], x[..., 1::2]
        expected = torch.stack([a * cos - b * sin, a * sin + b * cos], -1).flatten(-2)
        return got.shape == expected.shape and torch.allclose(got, expected, rtol=1e-5, atol=1e-6)


def _stand_in(function: types.FunctionType, form: _Form, processor_of: Callable[[], Any]) -> Callable[..., Any]:
    """Return a replacement of the function that postpones its result if possible."""

    def stand_in(x, *angles):
        if not torch.compiler.is_compiling():
            find = functools.partial(_angles, form, angles)
            turned = postponed(processor_of(), x, find, lambda given: function(given, *angles))
            if turned is not None:
                return turned
        return function(x, *angles)

    return stand_in


def _angles(form: _Form, given: tuple[Any, ...], x: Any, source: HeadSource) -> Angles | None:
    """Return the angles of a call for x [B, S, H, D]; None if their form is not the known one."""
    if not all(map(can_wait, given)):
        return None
    if source.angles is not None and source.angles.are_of(given, True):
        return source.angles
    if any([t.device != x.device or t.is_neg() or t.is_conj() for t in given]):
        return None
    tables = form.tables(given, x.shape[1], x.shape[3])
    if tables is None:
        return None
    source.angles = Angles(*tables, True, tuple(map(Operand, given)))
    return source.angles
