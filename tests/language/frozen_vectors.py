"""Caches whose centre and balance are frozen by their first call: what an Int8KVCache is compared with."""

from __future__ import annotations

import torch

from sage_processors.language.kv_layers import Int8Layer
from sage_processors.language.kv_static_layers import Int8StaticLayer
from sage_processors.language.kv_vectors import ENOUGH, channel_balance


def without(keys, values):
    """The mean of the keys, and no balance."""
    mean = keys.sum(2) / (keys.shape[2] + 1)
    return mean, torch.ones_like(mean)


def of_all(keys, values):
    """Mean and balance by all tokens, whether they say anything of a channel or not."""
    mean, _ = without(keys, values)
    weight = torch.full((keys.shape[0], keys.shape[2]), float(ENOUGH))  # of tokens that are different
    return mean, channel_balance(keys, weight, mean)


def freeze(monkeypatch, choose) -> None:
    """From now on each layer has choose(keys, values) of its first call for good."""

    def first_choice(layer, keys, values):
        layer.frozen = getattr(layer, "frozen", None) or choose(keys, values)
        layer.k_mean, layer.k_balance = layer.frozen

    for kind in (Int8Layer, Int8StaticLayer):
        monkeypatch.setattr(kind, "_choose_vectors", first_choice)
