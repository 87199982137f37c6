"""One call of a transformers attention function, and the model's own attention to fall back to."""

from __future__ import annotations

import functools
import inspect
import sys
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch.autograd import forward_ad
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from .masks import UNLIMITED, BandMask, plain_mask


# Arguments of an attention function that do not change its result, because the mask, the cache or the rotary embedding
# has used them already.
HARMLESS = frozenset(
    (
        "position_ids",
        "cache_position",
        "position_embeddings",
        "use_cache",
        "past_key_values",
        "cache",  # name of past_key_values in newer versions of transformers; visible.py refuses a paged one
        "output_hidden_states",
        "output_router_logits",
        "return_dict",
        "num_items_in_batch",
        "logits_to_keep",
        "labels",
        "shift_labels",
        "token_type_ids",
        "mm_token_type_ids",
        "deterministic",  # all our kernels are
        "seq_idx",  # of convolutions and linear attention
        "cu_seq_lens_q",  # of packed sequences: see visible.py
        "cu_seq_lens_k",
        "max_length_q",
        "max_length_k",
    )
)


class Sequences(NamedTuple):
    """Sequences packed into one row of a batch.

    Attributes:
        q_ends, k_ends: int32 [sequences + 1], 0 and the end of each sequence, among queries and among keys.
        longest_q, longest_k: tokens of the longest sequence; 0 if unknown.
    """

    q_ends: torch.Tensor
    k_ends: torch.Tensor
    longest_q: int
    longest_k: int


@dataclass
class Call:
    """Arguments of a transformers attention function beside query, key and value.

    Attributes:
        module: the attention layer.
        mask: None, BandMask, bool or float [B or 1, H or 1, S_q, S_kv]. Where there is a mask, it alone says which
            keys a sliding window hides.
        dropout: probability.
        scaling: softmax scale; None is head_dim ** -0.5.
        is_causal: row i sees keys up to i, if mask is None and there is more than one row.
        position_bias: None or float [B or 1, H, S_q, S_kv], added to the scores.
        softcap: None or a number.
        sinks: None or [H], logits of attention sinks.
        sliding_window: None or a number of tokens.
        weights: True if the attention weights are asked for.
        others: {name: value} of all other arguments that are not None.
        sequences: sequences packed into the row. The mask is then None or a BandMask, and does not separate them.
    """

    module: torch.nn.Module
    mask: torch.Tensor | None
    dropout: float
    scaling: float | None
    is_causal: bool
    position_bias: torch.Tensor | None
    softcap: float | None
    sinks: torch.Tensor | None
    sliding_window: int | None
    weights: bool
    others: dict
    sequences: Sequences | None = None

    @property
    def unknown(self) -> list[str]:
        """Names of arguments that may change the result in a way unknown to this package."""
        return [name for name in self.others if name not in HARMLESS]

    @property
    def label(self) -> str:
        """Name of the layer for messages: its class and its number, if it has one."""
        index = getattr(self.module, "layer_idx", None)
        return type(self.module).__name__ + ("" if index is None else f" {index}")


def masking(call: Call, seq_q: int, seq_kv: int):
    """Return (attn_mask, causal, window, seen) for sage_attention on the first `seen` keys.

    No row sees a later key.
    """
    mask = call.mask
    causal = mask is None and call.is_causal and seq_q > 1
    if call.position_bias is not None:
        seen = min(seq_q, seq_kv) if causal else seq_kv  # as transformers does: cut off a static cache's empty slots
        return _bias_mask(call, seq_q, seen, causal), False, None, seen
    if not isinstance(mask, BandMask):
        return mask, "top_left" if causal else False, None, seq_kv
    if mask.shape[2] != seq_q or mask.shape[3] != seq_kv:
        return plain_mask(mask), False, None, seq_kv
    window = None if mask.left == UNLIMITED else mask.left + 1
    if mask.right == 0 and mask.offset + seq_q <= seq_kv:
        causal = seq_q > 1 or window is not None  # a single row sees all keys up to its own anyway
        return None, "bottom_right" if causal else False, window, mask.offset + seq_q
    if mask.right == mask.left and mask.offset == 0 and seq_q == seq_kv:
        return None, False, window, seq_kv
    return plain_mask(mask), False, None, seq_kv


def _bias_mask(call: Call, seq_q: int, seen: int, causal: bool) -> torch.Tensor:
    """Return position bias and mask as one float mask, with -inf at hidden keys."""
    bias: Any = call.position_bias
    mask = plain_mask(call.mask)
    if causal:
        bias, mask = bias[..., :seen], causal_mask(seq_q, seen, bias.device)
    if mask is None:
        return bias
    return torch.where(mask, bias, -torch.inf) if mask.dtype == torch.bool else bias + mask


def causal_mask(seq_q: int, seq_kv: int, device) -> torch.Tensor:
    """Return a bool mask [1, 1, S_q, S_kv] in which row i sees keys up to i."""
    rows, keys = torch.arange(seq_q, device=device), torch.arange(seq_kv, device=device)
    return (keys <= rows[:, None])[None, None]


def stock_attention(call: Call, query, key, value):
    """Run the model's own attention: SDPA, or the eager function for arguments that SDPA would ignore.

    Both are looked up at every call, as in the model's own code, because tools replace them.
    """
    # SDPA reads a scale as a number, which would end the gradients through a tensor
    by_eager = call.weights or call.softcap or call.sinks is not None or call.unknown
    if not (by_eager or isinstance(call.scaling, torch.Tensor)):
        return ALL_ATTENTION_FUNCTIONS["sdpa"](
            call.module, query, key, value, plain_mask(call.mask), dropout=call.dropout, scaling=call.scaling,
            is_causal=call.is_causal, position_bias=call.position_bias,
        )  # fmt: skip
    eager = _eager_function(call)
    mask, bias = plain_mask(call.mask), call.position_bias
    if mask is None and call.is_causal and query.shape[2] > 1:  # eager functions apply the mask and nothing else
        seen = min(query.shape[2], key.shape[2])
        key, value, mask = key[:, :, :seen], value[:, :, :seen], causal_mask(query.shape[2], seen, query.device)
        bias = None if bias is None else bias[..., :seen]
    if mask is not None and mask.dtype == torch.bool:
        mask = torch.zeros((), dtype=query.dtype, device=query.device).where(mask, torch.finfo(query.dtype).min)
    named = {"position_bias": bias, "softcap": call.softcap, "s_aux": call.sinks}
    named |= {"sliding_window": call.sliding_window, "output_attentions": call.weights or None} | call.others
    arguments = {name: argument for name, argument in named.items() if argument is not None}
    scaling = query.shape[-1] ** -0.5 if call.scaling is None else call.scaling
    return eager(call.module, query, key, value, mask, scaling=scaling, dropout=call.dropout, **arguments)


def _eager_function(call: Call):
    """Return the eager function that the module's forward names.

    Raises: NotImplementedError if there is none, or if it would drop an argument.
    """
    eager, named_by_forward = (_traced_eager_of if torch.compiler.is_compiling() else _eager_of)(type(call.module))
    if eager is None:
        raise NotImplementedError(
            f"{call.label}: got {', '.join(call.unknown) or 'softcap, sinks or output_attentions'}, expected a class "
            "with an eager_attention_forward in its module; use set_attn_implementation('sdpa')"
        )
    taken, reads_sinks = _arguments_of(eager)
    if not taken:  # (*args, **kwargs) hands everything on
        return eager
    given = {"position_bias": call.position_bias, "softcap": call.softcap or None, "s_aux": call.sinks}
    dropped = [name for name, x in given.items() if x is not None and name not in taken]
    if reads_sinks:  # from the module
        dropped = [name for name in dropped if name != "s_aux"]
    # arguments that forward itself adds for implementations unknown to it; the eager function learns them elsewhere,
    # such as from the mask
    dropped += [name for name in call.unknown if name in named_by_forward and name not in taken]
    if dropped:
        raise NotImplementedError(
            f"{call.label}: got {', '.join(dropped)}, which {getattr(eager, '__name__', eager)} does not take and "
            "would drop, expected arguments that it takes; use set_attn_implementation('sdpa') or 'eager'"
        )
    return eager


@functools.lru_cache(maxsize=512)
def _arguments_by_function(eager: Any) -> tuple[tuple[str, ...], bool]:
    parameters = inspect.signature(eager).parameters.values()
    taken = tuple(x.name for x in parameters if x.kind not in (x.VAR_POSITIONAL, x.VAR_KEYWORD))
    return taken, "sinks" in getattr(getattr(inspect.unwrap(eager), "__code__", None), "co_names", ())


@torch.compiler.assume_constant_result
def _arguments_of(eager: Any) -> tuple[tuple[str, ...], bool]:
    """Return the argument names of an eager function below its decorators; True if it reads module.sinks."""
    return _arguments_by_function(eager)


def _eager_of(kind: Any) -> tuple[Any, tuple[str, ...]]:
    """Return the eager function named in the forward of a module class, and the strings in that forward.

    The function is None if there is none. The strings are () if forward does not compare names of implementations.
    """
    space, name, strings = _named_by(kind)
    return space.get(name), strings


def _named_by(kind: Any) -> tuple[dict[str, Any], str, tuple[str, ...]]:
    """Return the namespace and name of a module class's eager function, and strings as in `_eager_of`."""
    for base in kind.__mro__:
        if "forward" in vars(base) and (found := _named_in(vars(base)["forward"])) is not None:
            return found
    return vars(sys.modules[kind.__module__]), "eager_attention_forward", ()


@functools.lru_cache(maxsize=512)
def _named_in(forward: Any) -> tuple[dict[str, Any], str, tuple[str, ...]] | None:
    forward = inspect.unwrap(forward)
    code: Any = getattr(forward, "__code__", None)
    for name in () if code is None else code.co_names:
        if name.endswith("eager_attention_forward") and name in forward.__globals__:
            strings = _strings(code.co_consts)
            return forward.__globals__, name, tuple(sorted(strings)) if {"eager", "sdpa"} & strings else ()
    return None


@torch.compiler.assume_constant_result
def _names_of(kind: Any) -> tuple[str, str, tuple[str, ...]]:
    """Return the names of a module class's eager function and its module, and strings as in `_eager_of`.

    The module is "" if there is no such function. These are constants for Dynamo. Otherwise it would trace the search,
    and give up if a class is written to meanwhile.
    """
    space, name, strings = _named_by(kind)
    module = space.get("__name__", "")
    found = getattr(sys.modules.get(module), name, None)
    return module if found is not None and found is space.get(name) else "", name, strings


def _traced_eager_of(kind: Any) -> tuple[Any, tuple[str, ...]]:
    """Do the same as `_eager_of` while Dynamo traces.

    Reads the function from its module, so that Dynamo compiles again when another function takes its place.
    """
    module, name, strings = _names_of(kind)
    return getattr(sys.modules[module], name) if module else None, strings


def _strings(constants) -> frozenset[str]:
    inner = (_strings(x) for x in constants if isinstance(x, tuple))
    return frozenset(x for x in constants if isinstance(x, str)).union(*inner)


def differentiates_only(call: Call, *tensors) -> bool:
    """True if nothing but these tensors needs a gradient, and nothing has a forward-mode tangent."""
    others = (call.mask, call.position_bias, call.sinks, call.scaling, call.softcap)
    given = [x for x in others if isinstance(x, torch.Tensor)]
    if torch.is_grad_enabled() and any(x.requires_grad for x in given):
        return False
    with torch.no_grad():
        return not needs_gradient(call, *tensors)


def needs_gradient(call: Call, *tensors) -> bool:
    """True if PyTorch differentiates through this call, in backward or forward mode.

    INT8 attention would silently drop such a gradient.
    """
    others = (call.mask, call.position_bias, call.sinks, call.scaling, call.softcap)
    given = (*tensors, *(x for x in others if isinstance(x, torch.Tensor)))
    if torch.is_grad_enabled() and any(x.requires_grad for x in given):
        return True
    if torch.compiler.is_compiling():  # tangents can't be read here, and PyTorch traces none into a compiled call
        return False
    return any(forward_ad.unpack_dual(x).tangent is not None for x in given if not isinstance(x, BandMask))
