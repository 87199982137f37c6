"""Norm modules that may postpone their output. A module's formula is found by calling it."""

from __future__ import annotations

import copy
import sys

import torch
from torch import nn

from sage_kernels.compat import is_any_autocast

from ...patching.patched import Owner
from ...postponed.patterns import FLOATS
from ...postponed.tensor import CAN_WAIT, Operand, Postponed, can_wait
from ...torch_modes import counts_writes, is_autocast
from .norm import NormCall, PostponedNorm


_TRIED_WIDTH = 8  # with which the formula of a norm of any width is found
_HOOKS = {"_diffusers_hook", "_hf_hook"}  # of modules for which diffusers or accelerate move weights around a forward
ANY_WIDTH = 0  # of a norm without parameters that normalises whatever it is given, as Mochi's do
_EPS_NAMES = ("eps", "variance_epsilon", "epsilon")


def _eps_of(module, dtype: torch.dtype) -> float | None:
    for name in _EPS_NAMES:
        if name in module.__dict__:
            value = module.__dict__[name]
            return torch.finfo(dtype).eps if value is None else value
    return None


def norm_width(module) -> int | None:
    """Return the number of features a norm module normalises, or ANY_WIDTH; None for other modules."""
    weight = module._parameters.get("weight")
    if weight is not None:
        return len(weight) if weight.dim() == 1 else None
    for name in ("normalized_shape", "dim"):
        value = module.__dict__.get(name)
        if isinstance(value, (tuple, list)) and len(value) == 1:
            value = value[0]
        if isinstance(value, int):
            return value if value or not any(p is not None for p in module._parameters.values()) else None
    return None


class NormState:
    """State of one norm module in front of 8-bit linear layers.

    Attributes:
        label: the module's name. behind: a name pattern of the layers behind it, for messages.
        kind: "layer" or "rms". plus_one: the norm multiplies by 1 + its weight parameter.
        is_postponed: results may be postponed.
        is_proven: a result was postponed, and its input was not written to before it was used.
        at_once_up_to: results of this many numbers or fewer are not postponed, as a layer in 16 bit reads them first.
        waits_from: results of this many numbers or more are read by a layer in 8 bit first.
        dtypes: {(dtype of the input, of the weight): dtype of the result}, as seen.
        owner: owner.Owner of the swap that will undo this; None, or an owner that is gone, in a copy.
        is_of_attention: the norm is one of attention heads, postponed until attention (diffusion/heads).
        copies_weights: a postponed result takes a copy of the weights, where hooks move them away before it is used.
    """

    copies_weights = is_of_attention = False
    owner: Owner | None = None

    def __init__(self, label: str, kind: str, plus_one: bool):
        self.label, self.kind, self.plus_one = label, kind, plus_one
        self.behind = f"{label.rpartition('.')[0]}.*" if "." in label else "*"
        self.is_postponed, self.is_proven = True, False
        self.dtypes: dict = {}
        self.at_once_up_to, self.waits_from = 0, sys.maxsize

    def is_read_in_16_bit(self, size: int) -> None:
        """Note that a layer in 16 bit was the first to read a result of `size` numbers."""
        if size < self.waits_from:
            self.at_once_up_to = max(self.at_once_up_to, size)

    def is_read_in_8_bit(self, size: int) -> None:
        """Note that a layer in 8 bit was the first to read a result of `size` numbers."""
        if size < self.waits_from:
            self.waits_from = size
            self.at_once_up_to = min(self.at_once_up_to, self.waits_from - 1)

    def postpone(self, module, x, own_forward, given: torch.dtype | None = None) -> torch.Tensor | None:
        """Return the postponed result of calling the norm module with x, or None if it can't be postponed.

        own_forward: (module, x) -> the result in 16 bit. given: the dtype that x is cast to before the call, if any.
        """
        forward = own_forward if given is None else lambda module, x: own_forward(module, x.to(given))
        given = given or x.dtype
        if x.numel() <= self.at_once_up_to or not (self.is_postponed and CAN_WAIT):
            return None
        if module.training or not can_wait(x) or given not in FLOATS or not 2 <= x.dim() <= 4:
            return None
        if is_any_autocast() and is_autocast(x.device):
            return None
        parameters = module._parameters
        weight, bias = parameters.get("weight"), parameters.get("bias")
        own = [p for p in (weight, bias) if p is not None]
        # with offloading by leaf module, hooks move the weights away before the result is used
        leave = bool(own) and not module.__dict__.keys().isdisjoint(_HOOKS)
        if leave and not self.copies_weights:
            return None
        for p in own:
            if p.requires_grad and torch.is_grad_enabled():
                return None
            if p.is_meta or p.device != x.device or not counts_writes(p):
                return None
        key = given, None if weight is None else weight.dtype
        dtype = self.dtypes.get(key)
        stored = weight if weight is None or not self.plus_one else 1.0 + weight.detach().float()
        vectors = {"weight": stored, "bias": bias, "eps": _eps_of(module, given)}
        if dtype is None:  # called once to learn the dtype of the result
            dtype = self.dtypes[key] = forward(module, x).dtype
        if dtype not in FLOATS:
            return None
        if not leave:
            return self._waiting(x, dtype, lambda: forward(module, x), vectors, [Operand(p) for p in own])
        made = forward(module, x)
        waiting = self._waiting(x, dtype, lambda: made, {k: _copied(vector) for k, vector in vectors.items()}, [])
        return made if waiting is None else waiting

    def _waiting(self, x, dtype, forward, vectors, parameters) -> torch.Tensor | None:
        """Make the postponed result. parameters: Operands of weight and bias, unless `vectors` has copies."""
        if not x.is_contiguous():
            return None
        return PostponedNorm(x.shape, dtype, x.device, NormCall(self, x, forward, vectors, parameters))


def _copied(vector):
    return vector.detach().clone() if isinstance(vector, torch.Tensor) else vector


def norm_form(module: nn.Module) -> tuple[str, bool] | None:
    """Find the formula of a norm module: ("layer" or "rms", plus_one), or None for any other module.

    plus_one: the norm multiplies by 1 + its weight. A copy of the module with random weights is called on a few
    random rows, and the result is compared with each formula.
    """
    name = type(module).__name__
    if "Norm" not in name or "Ada" in name or module._modules or _eps_of(module, torch.float32) is None:
        return None
    parameters = {key: p for key, p in module._parameters.items() if p is not None}
    if not set(parameters) <= {"weight", "bias"} or any(p.dim() != 1 for p in parameters.values()) or module._buffers:
        return None
    width = norm_width(module)
    if width is None:
        return None
    width = width or _TRIED_WIDTH
    generator = torch.Generator().manual_seed(0)
    with torch.inference_mode(False), torch.no_grad(), torch.device("cpu"):
        sizes = torch.tensor([[1.0], [1e-3], [30.0]], dtype=torch.float32, device="cpu")
        x = torch.randn(3, width, generator=generator, dtype=torch.float32, device="cpu") * sizes + 0.1
        own = {
            key: torch.rand(width, generator=generator, dtype=torch.float32, device="cpu") + 0.5 for key in parameters
        }
        twin = copy.copy(module)
        twin.__dict__ = module.__dict__ | {"_parameters": {k: own.get(k) for k in module._parameters}}
        twin.__dict__ |= {"training": False, "_forward_hooks": {}, "_forward_pre_hooks": {}}
        try:
            got = type(module).forward(twin, x)
        except Exception:  # its forward takes other arguments than one tensor
            return None
    if not isinstance(got, torch.Tensor) or isinstance(got, Postponed) or got.shape != x.shape:
        return None
    eps = _eps_of(module, torch.float32) or 0.0
    for kind in ("layer", "rms"):
        y = x - x.mean(-1, keepdim=True) if kind == "layer" else x
        y = y * torch.rsqrt(y.square().mean(-1, keepdim=True) + eps)
        for plus_one in (False, True):
            expected = y
            if "weight" in own:
                expected = expected * (own["weight"] + plus_one)
            expected = expected + own.get("bias", 0.0)
            if torch.allclose(got.float(), expected, rtol=1e-4, atol=1e-5):
                return kind, plus_one
    return None
