"""Operations that a kernel does along with a norm or a linear layer, as eager code and as Dynamo's graphs call them.

Both the tensors that wait and the passes over compiled code read this table. Arguments are tensors in one case and
graph nodes in the other, so nothing here looks into them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F


FLOATS = (torch.float16, torch.bfloat16, torch.float32)
CATS = (torch.cat, torch.concat)
CHUNKS = (torch.chunk, torch.Tensor.chunk)
# Activation function → what `quantized_linear` calls the product of one half's activation and the other half
GATED = {"gelu": "geglu", "gelu_tanh": "geglu_tanh", "silu": "swiglu"}
_GELUS = {"none": "gelu", "tanh": "gelu_tanh"}


def bound(names: dict[str, Any], args: Any, kwargs: Mapping[str, Any]) -> dict[str, Any] | None:
    """Arguments of a call by name, with defaults; None for a call with others than `names` has."""
    given = dict(zip(names, args, strict=False)) | dict(kwargs)
    return names | given if len(args) <= len(names) and given.keys() <= names.keys() else None


def activation(func: Any, args: Any, kwargs: Mapping[str, Any]) -> str | None:
    """Name of the activation function that this call is, as `quantized_linear` knows it; None for another call."""
    if func is F.gelu:
        given = bound({"input": None, "approximate": "none"}, args, kwargs)
        return None if given is None else _GELUS.get(str(given["approximate"]))
    if func is F.silu:
        given = bound({"input": None, "inplace": False}, args, kwargs)
        return "silu" if given is not None and given["inplace"] is False else None
    return None


def drops_nothing(args: Any, kwargs: Mapping[str, Any]) -> bool:
    """True for arguments of F.dropout with which it returns its input."""
    given = bound({"input": None, "p": 0.5, "training": True, "inplace": False}, args, kwargs)
    return given is not None and given["inplace"] is False and (given["p"] == 0 or given["training"] is False)


def joined(args: Any, kwargs: Mapping[str, Any], dims: int) -> tuple[Any, Any] | None:
    """The two tensors whose columns torch.cat puts beside each other; None for another call of it.

    dims: number of dimensions of its result.
    """
    given = bound({"tensors": None, "dim": 0}, args, kwargs)
    if given is None or not isinstance(given["tensors"], (list, tuple)) or len(given["tensors"]) != 2:
        return None
    first, second = given["tensors"]
    return (first, second) if given["dim"] in (-1, dims - 1) else None


def halves(args: Any, kwargs: Mapping[str, Any], dims: int) -> bool:
    """True for arguments of torch.chunk that split a tensor of `dims` dimensions into two halves of its columns."""
    given = bound({"input": None, "chunks": None, "dim": 0}, args, kwargs)
    return given is not None and given["chunks"] == 2 and given["dim"] in (-1, dims - 1)


def is_by_token(x: torch.Tensor, shape: torch.Size) -> bool:
    """True if x [..., N] is one vector for all tokens of `shape` [B, ..., N], or one for each batch entry."""
    dims = x.dim()
    if not 1 <= dims <= len(shape) or x.shape[-1] != shape[-1] or x.dtype not in FLOATS:
        return False
    middle = x.shape[:-1] if dims < len(shape) else x.shape[1:-1]
    if any(size != 1 for size in middle):
        return False
    return dims < len(shape) or dims == 1 or x.shape[0] in (1, shape[0])
