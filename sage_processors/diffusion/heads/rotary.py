"""Rotary embedding of diffusers, postponed until attention if possible.

The functions of diffusers that are known here are called with [B, S, H, D]. They make several passes over Q and K.
Postponed (postponed_heads.py), these and the norms of the heads become one pass. Calls of another form run diffusers'
own function.
"""

from __future__ import annotations

import functools
import importlib
import types
from typing import Any

import torch

from sage_kernels.checks import DTYPES, MAX_HEAD_DIM
from sage_kernels.compat import function_modes, is_any_autocast

from ...postponed.region import current
from ...postponed.tensor import CAN_WAIT, Operand, can_wait
from ...torch_modes import is_autocast
from .postponed_heads import Angles, HeadSource, PostponedHeads, Segment


# function -> (its module, {parameter after x and the angles: default})
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


# Compiled code calls such a function as one op, so that head_fusion.py can find it in the graph. What is not fused
# runs the function's own code. freqs: (cos, sin), or the complex numbers alone; the options are those of KNOWN.
_library = torch.library.Library("sage_processors", "FRAGMENT")
_library.define("rotary(Tensor x, Tensor[] freqs, str function, bool use_real, int unbind_dim) -> Tensor")


def _own_function(x, freqs, function, use_real, unbind_dim):
    own = getattr(importlib.import_module(KNOWN[function][0]), function)
    options = {"use_real": use_real, "use_real_unbind_dim": unbind_dim}
    if "sequence_dim" in KNOWN[function][1]:
        options["sequence_dim"] = 1
    return own(x, tuple(freqs) if use_real else freqs[0], **options)


_library.impl("rotary", _own_function, "CompositeImplicitAutograd")


def is_rotary(function) -> bool:
    """True for an undecorated rotary embedding function of diffusers that can be postponed."""
    return (
        isinstance(function, types.FunctionType)
        and KNOWN.get(function.__name__, (None,))[0] == function.__module__
        and not hasattr(function, "__wrapped__")
    )


def has_norms_alone(function: types.FunctionType) -> bool:
    """True for the code of a processor that normalises queries and keys, and rotates nothing."""
    code = function.__code__
    names = {*code.co_names, *code.co_varnames}
    return names >= {"norm_q", "norm_k"} and not any("rot" in name for name in names)


def usual_angles(name: str) -> tuple[bool, bool]:
    """Return the form of angles that most models pass to the rotary embedding function of this name.

    Returns: (True for complex numbers, or tables that lie in memory as they do; True if channels 2i and 2i + 1 rotate
    together).
    """
    return name not in KNOWN or "sequence_dim" not in KNOWN[name][1], True


def rotary(function, processor_of):
    """Return a replacement of a rotary embedding function that postpones its result if possible.

    Args: function: one for which `is_rotary` is True. processor_of: function without arguments that returns the
        running attention processor.
    """
    defaults = KNOWN[function.__name__][1]
    names = tuple(defaults)

    def stand_in(x, freqs_cis, *args, **kwargs):
        is_known = len(args) <= len(names) and defaults.keys() >= kwargs.keys()
        options = defaults | dict(zip(names, args, strict=False)) | kwargs
        if is_known and torch.compiler.is_compiling():
            given = _freqs_of(freqs_cis, options, x)
            if given is not None:
                op = torch.ops.sage_processors.rotary
                return op(x, given, function.__name__, options["use_real"], options["use_real_unbind_dim"])
        elif is_known:
            find = functools.partial(_angles, freqs_cis, options)
            turned = postponed(processor_of(), x, find, lambda given: function(given, freqs_cis, **options))
            if turned is not None:
                return turned
        return function(x, freqs_cis, *args, **kwargs)

    return stand_in


def postponed(processor, x, angles_of, own) -> PostponedHeads | None:
    """Return the postponed result of rotating x [B, S, H, D], or None if it can't be postponed.

    Args: angles_of: function of (x, its HeadSource) that returns the Angles, or None for unknown ones. own: function
        that rotates an ordinary tensor in the model's own way.
    """
    if processor is None or processor._sage.config is None or not CAN_WAIT or current() is None:
        return None
    is_postponed = type(x) is PostponedHeads
    if not is_postponed and (type(x) is not torch.Tensor or not can_wait(x)):
        return None
    shape = x.shape
    if len(shape) != 4 or x.dtype not in DTYPES or shape[3] % 2 or shape[3] > MAX_HEAD_DIM or 0 in shape:
        return None
    if (is_any_autocast() and is_autocast(x.device)) or function_modes():
        return None
    source = processor._sage.waiting
    if not source.is_postponed:
        return None
    angles = angles_of(x, source)
    if angles is None:
        return None
    if is_postponed:
        return x.turned(angles, lambda: own(x.value()))
    if x.stride(3) != 1:
        return None
    segment = Segment(Operand(x), None, angles)
    return PostponedHeads(shape, x.dtype, x.device, (segment,), None, (source,), functools.partial(own, x))


def _freqs_of(freqs: Any, options: dict, x) -> tuple[torch.Tensor, ...] | None:
    """Return (cos, sin) or (complex numbers,) of a call; None if their form is not a known one."""
    if x.dim() != 4:
        return None
    tokens, width = x.shape[1], x.shape[3]
    if options["use_real"]:  # cos and sin, fp32 [S, D]
        given = tuple(freqs) if type(freqs) in (tuple, list) else ()
        shape, dtype, is_known = (tokens, width), torch.float32, options.get("sequence_dim") == 1 and len(given) == 2
    else:  # [S, D / 2] complex numbers, one for each pair of neighbouring channels
        given = (freqs,)
        shape, dtype, is_known = (tokens, width // 2), torch.complex64, "sequence_dim" not in options
    is_known = is_known and options["use_real_unbind_dim"] in (-1, -2)
    if not is_known:
        return None
    for t in given:
        if not isinstance(t, torch.Tensor) or t.dtype != dtype or t.shape != shape:
            return None
    return given


def _angles(freqs: Any, options: dict, x, source: HeadSource) -> Angles | None:
    """Return the angles of a call; None if their form is not a known one."""
    given = _freqs_of(freqs, options, x)
    if given is None or not all(map(can_wait, given)):
        return None
    pairs = not options["use_real"] or options["use_real_unbind_dim"] == -1
    if source.angles is not None and source.angles.are_of(given, pairs):
        return source.angles
    if any([t.device != x.device or t.is_neg() or t.is_conj() for t in given]):
        return None
    cos, sin = given if options["use_real"] else torch.view_as_real(freqs).unbind(-1)
    source.angles = Angles(cos, sin, pairs, tuple(map(Operand, given)))
    return source.angles
