"""What the cache tests share: token streams, dequantised contents, and decoding a tiny model token by token."""

from __future__ import annotations

import torch
from transformers import DynamicCache

import sage_processors as sp
from sage_processors.language.quantized_kv import QuantizedKV
from tests.support.tiny_language_models import MODELS


HEADS, HEAD_DIM = 3, 16
NAMES = ["llama", "qwen3", "mistral", "gemma2", "gemma3", "gpt_oss", "phi"]
BUFFERS = ("k_codes", "k_scale", "v_codes", "v_scale", "k_mean", "k_balance")


def states(number, batch=2, seed=0, head_dim=HEAD_DIM):
    """New keys (with a bias, 100 times larger) and values [B, H_kv, N, D]."""
    generator = torch.Generator().manual_seed(seed)
    k = torch.randn(batch, HEADS, number, head_dim, generator=generator) + 3
    return k, torch.randn(batch, HEADS, number, head_dim, generator=generator) / 100


def content(stored: QuantizedKV) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys and values that the codes stand for, oldest first, and half a step of each as the error to expect."""
    number = stored.shape[2] if stored.lengths is None else int(stored.lengths)
    slots = torch.arange(max(number - stored.shape[2], 0), number) % stored.shape[2]
    k_scale, v_scale = (x[:, :, slots].double()[..., None] for x in (stored.k_scale, stored.v_scale))
    k_scale = k_scale / stored.k_balance.double()[:, :, None]
    k = stored.k_codes[:, :, slots].double() * k_scale + stored.k_mean.double()[:, :, None]
    return (k, k_scale), (stored.v_codes[:, :, slots].double() * v_scale, v_scale)


def assert_holds(stored: QuantizedKV, keys, values) -> None:
    """The codes are these keys and values [B, H_kv, S, D], to half a step of each token's scale."""
    for (got, step), want in zip(content(stored), (keys, values), strict=True):
        assert got.shape == want.shape
        assert ((got - want).abs() <= step * 0.501 + 1e-5).all()


def cached(model, name=None, **inputs):
    """A tiny model with our attention and its inputs."""
    built, given = MODELS[model]()
    built.set_attn_implementation(name or "sage_int8")
    return built, given | inputs


@torch.no_grad()
def decode_logits(model, cache, ids, prompt: int, attention_mask=None) -> torch.Tensor:
    """Logits [B, steps, V] of the tokens of `ids` after the first `prompt`, given one at a time."""
    step = {}
    if attention_mask is not None:
        step = {"position_ids": (attention_mask.cumsum(-1) - 1).clamp_min(0)}

    def forward(start, stop):
        more = {"attention_mask": attention_mask[:, :stop]} if attention_mask is not None else {}
        more |= {name: x[:, start:stop] for name, x in step.items()}
        return model(ids[:, start:stop], past_key_values=cache, use_cache=True, **more).logits

    forward(0, prompt)
    return torch.cat([forward(i, i + 1) for i in range(prompt, ids.shape[1])], 1)


class Watched(sp.Int8KVCache):
    """A cache that keeps a 16-bit one beside it, does the same to both, and compares what attention gets."""

    def __init__(self, config):
        super().__init__(config)
        self.twin = DynamicCache(config=config)
        self.done = []

    def update(self, key_states, value_states, layer_idx, *args, **kwargs):
        got = super().update(key_states, value_states, layer_idx, *args, **kwargs)
        want = self.twin.update(key_states, value_states, layer_idx)
        if isinstance(got[0], QuantizedKV):
            assert_holds(got[0], *want)
            self.done.append("compared")
        return got

    def reorder_cache(self, beam_idx):
        super().reorder_cache(beam_idx)
        self.twin.reorder_cache(beam_idx)
        if (beam_idx.diff() != 1).any():
            self.done.append("reordered")

    def crop(self, tokens_to_remove):
        super().crop(tokens_to_remove)
        self.twin.crop(tokens_to_remove)
        if tokens_to_remove:
            self.done.append("cropped")

    def activate_past_recording(self):
        super().activate_past_recording()
        self.twin.activate_past_recording()
