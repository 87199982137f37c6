"""Perplexity of the small language model with channel outliers that leave its function as it is."""

from __future__ import annotations

import torch

import sage_processors as sp
from sage_processors.evaluation.held_out_text import heldout_windows, load
from sage_processors.evaluation.language import perplexity


EXPONENTS, PAIRS = (3, 6, 9), 4


def plant(model) -> None:
    """K times 2^3, 2^6 or 2^9 in four random rotary pairs of every key head, Q of its heads divided by it: exact."""
    generator = torch.Generator().manual_seed(0)
    config = model.config
    dim, group = config.head_dim, config.num_attention_heads // config.num_key_value_heads
    for layer in model.model.layers:
        keys = layer.self_attn.k_proj.weight.data.unflatten(0, (-1, dim))
        queries = layer.self_attn.q_proj.weight.data.unflatten(0, (-1, group, dim))
        for head in range(len(keys)):
            for channel in torch.randperm(dim // 2, generator=generator)[:PAIRS].tolist():
                pair = [channel, channel + dim // 2]
                factor = 2.0 ** EXPONENTS[int(torch.randint(len(EXPONENTS), (), generator=generator))]
                keys[head, pair] *= factor
                queries[head, :, pair] /= factor


def test_outliers_of_channels_leave_perplexity_within_a_thousandth():
    model, tokenizer = load()
    windows = heldout_windows(tokenizer, 192)[:6]
    exact = perplexity(model, windows).value
    plant(model)
    assert perplexity(model, windows).value == exact  # powers of two: the function is the same to the bit
    sp.register_transformers("sage_planted", min_tokens=0)
    model.set_attn_implementation("sage_planted")
    assert abs(perplexity(model, windows).value / exact - 1) < 1e-3
    cached = perplexity(model, windows, cache=lambda: sp.Int8KVCache(model.config), chunk=32)
    assert abs(cached.value / exact - 1) < 1e-3
    assert sp.attention_report(model).calls > 0
