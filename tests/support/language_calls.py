"""What tests of transformers models share: names without a least length, exact attention, single calls."""

from __future__ import annotations

import torch
from transformers.modeling_utils import AttentionInterface

import sage_kernels
import sage_processors as sp
from sage_kernels.testing import exact_attention
from tests.support.tiny_language_models import MODELS, result


ANY_LENGTH = sp.register_transformers("sage_any_length", min_tokens=1)[0]  # tiny models have few tokens
STRICT = sp.register_transformers("sage_strict_any_length", min_tokens=1, on_unsupported="raise")[0]
SAME = 1e-5  # relative L2: fp32 sums in another order, through two layers


def visible(seq_q, seq_kv, causal, window):
    """The mask that `causal` and `window` of the op stand for, written down once more."""
    if not causal and window is None:
        return None
    row = torch.arange(seq_q)[:, None] + (seq_kv - seq_q if causal == "bottom_right" else 0)
    key = torch.arange(seq_kv)
    seen = key <= row if causal else torch.ones(seq_q, seq_kv, dtype=torch.bool)
    return seen if window is None else seen & ((row - key).abs() < window)


def exact_op(q, k, v, *, recipe, scaling, smooth_k, rotation, scale, attn_mask, causal, window, softcap, sinks):
    """Exact attention with the interface of sage_attention."""
    assert (recipe, scaling, smooth_k, rotation) == (sage_kernels.DEFAULT_RECIPE, "per_token", True, "none")
    mask = attn_mask if attn_mask is not None else visible(q.shape[1], k.shape[1], causal, window)
    return exact_attention(q, k, v, scale, mask=mask, softcap=softcap, sinks=sinks)[0].to(q.dtype).contiguous()


def forward(model, inputs):
    with torch.no_grad():
        return result(model(**inputs))


def tiny(name="llama", implementation=ANY_LENGTH):
    """(model, inputs) with our attention."""
    model, inputs = MODELS[name]()
    model.set_attn_implementation(implementation)
    return model, inputs


def llama_attention():
    """(attention function, module, query, key, value): one call outside of a model, that needs no gradient."""
    model, _ = MODELS["llama"]()
    torch.manual_seed(5)
    query, key, value = torch.randn(2, 4, 9, 16), torch.randn(2, 2, 9, 16), torch.randn(2, 2, 9, 16)
    return AttentionInterface._global_mapping[ANY_LENGTH], model.model.layers[0].self_attn, query, key, value
