"""Recognises operations that the kernel of a norm or a linear layer can do in the same pass.

Postponed results read this in eager code, the passes over Dynamo's graphs in compiled code. Arguments are tensors in
the first case and graph nodes in the second, so most functions here do not look into them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F


FLOATS = (torch.float16, torch.bfloat16, torch.float32)
CATS = (torch.cat, torch.concat)
CHUNKS = (torch.chunk, torch.Tensor.chunk)
# Activation function → the name in `quantized_linear` of its product with a second value, as in SwiGLU
GATED = {"gelu": "geglu", "gelu_tanh": "geglu_tanh", "silu": "swiglu"}
_GELUS = {"none": "gelu", "tanh": "gelu_tanh"}


def bound(names: dict[str, Any], args: Any, kwargs: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return the arguments of a call by name, or None if it has any that `names` lacks.

    names: {name of an argument: default}, in the order of the function's signature.
    """
    given = dict(zip(names, args, strict=False)) | dict(kwargs)
    return names | given if len(args) <= len(names) and given.keys() <= names.keys() else None


def activation(func: Any, args: Any, kwargs: Mapping[str, Any]) -> str | None:
    """Return the name in `quantized_linear` of an activation function; None for any other call."""
    if func is F.gelu:
        given = bound({"input": None, "approximate": "none"}, args, kwargs)
        return None if given is None else _GELUS.get(str(given["approximate"]))
    if func is F.silu:
        given = bound({"input": None, "inplace": False}, args, kwargs)
        return "silu" if given is not None and given["inplace"] is False else None
    return None


def drops_nothing(args: Any, kwargs: Mapping[str, Any]) -> bool:
    """Return True if F.dropout with these arguments returns its input unchanged."""
    given = bound({"input": None, "p": 0.5, "training": True, "inplace": False}, args, kwargs)
    return given is not None and given["inplace"] is False and (given["p"] == 0 or given["training"] is False)


def joined(args: Any, kwargs: Mapping[str, Any], dims: int) -> tuple[Any, Any] | None:
    """Return the two tensors that torch.cat joins along the last dimension; None for other calls.

    dims: number of dimensions of its result.
    """
    given = bound({"tensors": None, "dim": 0}, args, kwargs)
    if given is None or not isinstance(given["tensors"], (list, tuple)) or len(given["tensors"]) != 2:
        return None
    first, second = given["tensors"]
    return (first, second) if given["dim"] in (-1, dims - 1) else None


def halves(args: Any, kwargs: Mapping[str, Any], dims: int) -> bool:
    """Return True if torch.chunk with these arguments halves the last dimension of a tensor.

    dims: number of dimensions of the tensor.
    """
    given = bound({"input": None, "chunks": None, "dim": 0}, args, kwargs)
    return given is not None and given["chunks"] == 2 and given["dim"] in (-1, dims - 1)


def is_by_token(x: torch.Tensor, shape: torch.Size) -> bool:
    """Return True if x [..., N] is one vector for all tokens, or one for each sample of the batch.

    shape: [B, ..., N], of the tensor that x is multiplied with or added to.
    """
    dims = x.dim()
    if not 1 <= dims <= len(shape) or x.shape[-1] != shape[-1] or x.dtype not in FLOATS:
        return False
    middle = x.shape[:-1] if dims < len(shape) else x.shape[1:-1]
    for size in middle:  # not any(): its generator takes longer
        if size != 1:
            return False
    return dims < len(shape) or dims == 1 or x.shape[0] in (1, shape[0])
