"""Make INT8 attention harder without changing the model's function: outliers in Q and K, biased keys."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def inject_outliers(model: torch.nn.Module, a: float = 64.0, pairs: int = 2) -> Iterator[list[str]]:
    """Plant channel outliers in Q and their inverse in K, in every attention module of a model.

    Q·Kᵀ stays the same, but INT8 gets harder. `pairs` channel pairs (2j, 2j+1) of every head, evenly spread, are
    multiplied by `a` in Q and divided by `a` in K. This changes the weight of the Q and K norms if there are any, else
    rows of the projections. A pair shares its factor, so it commutes with interleaved rotary embeddings. `a` is a
    power of two: stock pictures in fp32 and bf16 stay bit identical (in fp16 down to its subnormals).

    Args:
        model: a denoiser (UNet or transformer), not in use by another thread; weights are changed in place.
        a: power of two >= 1, no unit. pairs: >= 1, at most half the head_dim.
    Yields: names of the changed attention modules. Weights are restored bit for bit on leaving.
    Raises: ValueError (a, pairs, or no attention to change).
    """
    if not (math.isfinite(a) and a >= 1 and math.frexp(a)[0] == 0.5):
        raise ValueError(f"a: got {a}, expected a power of two >= 1, so that multiplying is exact")
    if pairs < 1:
        raise ValueError(f"pairs: got {pairs}, expected at least 1")
    names, factors = [], {}
    for name, module in model.named_modules():
        found = list(_scalable(module))
        if found:
            names.append(name)
        for parameter, head_dim, is_query in found:
            if 2 * pairs > head_dim:
                raise ValueError(f"pairs: got {pairs}, expected at most {head_dim // 2}, half the head dim of {name}")
            factors[parameter] = (head_dim, a if is_query else 1.0 / a)
    if not names:
        raise ValueError(
            f"model: found no attention with to_q and to_k in {type(model).__name__}, expected a denoiser"
        )
    before = {parameter: parameter.detach().clone() for parameter in factors}
    try:
        with torch.no_grad():
            for parameter, (head_dim, factor) in factors.items():
                parameter[_outlier_channels(parameter.shape[0], head_dim, pairs)] *= factor
        yield names
    finally:
        with torch.no_grad():
            for parameter, values in before.items():
                parameter.copy_(values)


@contextmanager
def bias_keys(factor: float = 30.0) -> Iterator[dict]:
    """Add one vector per head to every key of every INT8 call, after the rotary embedding.

    Softmax stays the same, but INT8 gets harder. The constant of a channel is a multiple, from -factor to factor
    evenly over the channels, of the channel's standard deviation over the tokens of the layer's first call. It stays
    the same in later calls. Calls that run in 16 bit are not changed. For fp32 models: in 16 bit, adding a large
    constant rounds K itself.

    Args: factor: largest constant in standard deviations, finite and >= 0.
    Yields: {(layer, n-th attention call in it): constants fp32 [H_kv, D]}, filled as layers run. All handles of this
        process are affected meanwhile.
    Raises: ValueError (factor).
    """
    from ..diffusion.calls import processors

    if not (math.isfinite(factor) and factor >= 0):
        raise ValueError(f"factor: got {factor}, expected a finite number >= 0")
    attend, constants = processors._attend, {}

    def biased(query, key, value, attn_mask, is_causal, scale, processor, index, *others):
        place = (processor._sage_layer, index)
        if place not in constants:
            ramp = torch.linspace(-factor, factor, key.shape[3], dtype=torch.float32, device=key.device)
            constants[place] = key.float().std((0, 1)) * ramp
        key = key + constants[place].to(key.dtype)
        return attend(query, key, value, attn_mask, is_causal, scale, processor, index, *others)

    processors._attend = biased
    try:
        yield constants
    finally:
        processors._attend = attend


def _outlier_channels(channels: int, head_dim: int, pairs: int) -> list[int]:
    """Return both channels of `pairs` evenly spread pairs in each head. channels: of all heads."""
    first = [2 * (i * (head_dim // 2) // pairs) for i in range(pairs)]
    return [head + c + i for head in range(0, channels, head_dim) for c in first for i in (0, 1)]


def _scalable(module) -> Iterator[tuple[torch.nn.Parameter, int, bool]]:
    """Yield (parameter, head_dim, belongs to Q) for the parameters of an attention module to scale.

    A parameter's first dimension is heads · head_dim.
    """
    to_q, to_k, heads = (getattr(module, name, None) for name in ("to_q", "to_k", "heads"))
    if not (isinstance(to_q, torch.nn.Linear) and isinstance(to_k, torch.nn.Linear) and isinstance(heads, int)):
        return
    head_dim = to_q.out_features // heads
    targets = []
    for norm_name, layer_name, is_query in (
        ("norm_q", "to_q", True),
        ("norm_k", "to_k", False),
        ("norm_added_q", "add_q_proj", True),
        ("norm_added_k", "add_k_proj", False),
    ):
        norm, layer = getattr(module, norm_name, None), getattr(module, layer_name, None)
        if norm is not None and getattr(norm, "weight", None) is None:
            return  # a norm without weight would undo a factor in the projection before it
        targets.append((layer if norm is None else norm, is_query))
    for target, is_query in targets:
        for parameter in (getattr(target, "weight", None), getattr(target, "bias", None)):
            if parameter is not None:
                yield parameter, head_dim, is_query
