"""Rotary embedding inside of a Sage class: it waits for attention where it can, else it is diffusers' own function.

The functions of diffusers that are known here are called with [B, S, H, D]. What they compute in several passes over
Q and K, norms of the heads included, is then one (postponed_heads.py).
"""

from __future__ import annotations

import functools
import importlib
import types
from typing import Any

import torch

from sage_kernels.checks import DTYPES, MAX_HEAD_DIM
from sage_kernels.compat import function_modes

from ...autocast import is_autocast
from ...postponed.region import current
from ...postponed.tensor import CAN_WAIT, Operand, can_wait
from .postponed_heads import Angles, HeadSource, Part, PostponedHeads


# function → (its module, parameters after x and the angles, with their defaults)
KNOWN = {
    "apply_rotary_emb": (
        "diffusers.models.embeddings",
        {"use_real": True, "use_real_unbind_dim": -1, "sequence_dim": 2},
    ),
    "apply_rotary_emb_qwen": (
        "diffusers.models.transformers.transformer_qwenimage",
        {"use_real": True, "use_real_unbind_dim": -1},
    ),
}


# How compiled code sees a call of such a function: one op, which is the function's own code unless head_fusion.py has
# found norms, parts and attention around it. freqs: cos and sin, or the complex numbers; options: as of KNOWN.
_library = torch.library.Library("sage_processors", "FRAGMENT")
_library.define("rotary(Tensor x, Tensor[] freqs, str function, bool use_real, int unbind_dim) -> Tensor")


def _in_own_code(x, freqs, function, use_real, unbind_dim):
    own = getattr(importlib.import_module(KNOWN[function][0]), function)
    options = {"use_real": use_real, "use_real_unbind_dim": unbind_dim}
    if "sequence_dim" in KNOWN[function][1]:
        options["sequence_dim"] = 1
    return own(x, tuple(freqs) if use_real else freqs[0], **options)


_library.impl("rotary", _in_own_code, "CompositeImplicitAutograd")


def is_rotary(function) -> bool:
    """Whether it is a rotary embedding of diffusers that can wait for attention."""
    return (
        isinstance(function, types.FunctionType)
        and KNOWN.get(function.__name__, (None,))[0] == function.__module__
        and not hasattr(function, "__wrapped__")
    )


def usual_angles(name: str) -> tuple[bool, bool]:
    """How most models call the rotary embedding of this name: whether with complex numbers, and whether channels 2i
    and 2i + 1 turn together."""
    return "sequence_dim" not in KNOWN[name][1], True


def rotary(function, processor_of):
    """What stands in for `function` inside of a Sage class. processor_of: () -> the processor that runs."""
    defaults = KNOWN[function.__name__][1]
    names = tuple(defaults)

    def stand_in(x, freqs_cis, *args, **kwargs):
        is_known = len(args) <= len(names) and all(name in defaults for name in kwargs)
        options = defaults | dict(zip(names, args, strict=False)) | kwargs
        if is_known and torch.compiler.is_compiling():
            given = _freqs_of(freqs_cis, options, x)
            if given is not None:
                op = torch.ops.sage_processors.rotary
                return op(x, given, function.__name__, options["use_real"], options["use_real_unbind_dim"])
        elif is_known:
            turned = _waits(processor_of(), x, freqs_cis, options, function)
            if turned is not None:
                return turned
        return function(x, freqs_cis, *args, **kwargs)

    return stand_in


def _waits(processor, x, freqs, options, function) -> PostponedHeads | None:
    if processor is None or processor._sage_config is None or not CAN_WAIT or current() is None:
        return None
    is_postponed = type(x) is PostponedHeads
    if not is_postponed and (type(x) is not torch.Tensor or not can_wait(x)):
        return None
    if x.dim() != 4 or x.dtype not in DTYPES or x.shape[3] % 2 or x.shape[3] > MAX_HEAD_DIM or x.numel() == 0:
        return None
    if is_autocast(x.device) or function_modes():
        return None
    source = processor._sage_waiting
    if not source.is_postponed:
        return None
    angles = _angles(freqs, options, x, source)
    if angles is None:
        return None
    if is_postponed:
        return x.turned(angles, lambda: function(x.value(), freqs, **options))
    if x.stride(3) != 1:
        return None
    part = Part(Operand(x), None, angles)
    own = functools.partial(function, x, freqs, **options)
    return PostponedHeads(x.shape, x.dtype, x.device, (part,), None, (source,), own)


def _freqs_of(freqs: Any, options: dict, x) -> tuple[torch.Tensor, ...] | None:
    """Cos and sin, or complex numbers, of a known call; None for a form that isn't."""
    if x.dim() != 4:
        return None
    tokens, width = x.shape[1], x.shape[3]
    if options["use_real"]:  # cos and sin, fp32 [S, D]
        given = tuple(freqs) if type(freqs) in (tuple, list) else ()
        shape, dtype, is_known = (tokens, width), torch.float32, options.get("sequence_dim") == 1 and len(given) == 2
    else:  # [S, D / 2] complex numbers, one a pair of neighbours
        given = (freqs,)
        shape, dtype, is_known = (tokens, width // 2), torch.complex64, "sequence_dim" not in options
    is_known = is_known and options["use_real_unbind_dim"] in (-1, -2)
    is_known = is_known and all(isinstance(t, torch.Tensor) for t in given)
    return given if is_known and all(t.dtype == dtype and t.shape == shape for t in given) else None


def _angles(freqs: Any, options: dict, x, source: HeadSource) -> Angles | None:
    """Of a known call; None for a form that isn't."""
    given = _freqs_of(freqs, options, x)
    if given is None or not all(map(can_wait, given)):
        return None
    pairs = not options["use_real"] or options["use_real_unbind_dim"] == -1
    if source.angles is not None and source.angles.are_of(given, pairs):
        return source.angles
    if any(t.device != x.device or t.is_neg() or t.is_conj() for t in given):
        return None
    cos, sin = given if options["use_real"] else torch.view_as_real(freqs).unbind(-1)
    source.angles = Angles(cos, sin, pairs, tuple(map(Operand, given)))
    return source.angles
