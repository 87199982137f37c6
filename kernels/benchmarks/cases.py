"""The shapes that benchmarks run: square ones, and those of real models."""

from __future__ import annotations

from typing import NamedTuple


class Case(NamedTuple):
    """One attention call: B samples, S_q x S_kv tokens, H query and H_kv key/value heads of D channels, no mask."""

    name: str
    batch: int
    seq_q: int
    seq_kv: int
    heads: int
    kv_heads: int
    head_dim: int


def square(head_dim: int, seq: int, batch: int = 2, heads: int = 32) -> Case:
    return Case(f"D{head_dim}_N{seq}_full", batch, seq, seq, heads, heads, head_dim)


HEADLINE = [square(128, 8192)]
SQUARES = [square(d, n) for d in (64, 128) for n in (1024, 2048, 4096, 8192, 16384)]
MODELS = [
    Case("flux_1024", 1, 4608, 4608, 24, 24, 128),
    Case("wan21_1_3b_480p81_self", 1, 32760, 32760, 12, 12, 128),
    Case("wan21_1_3b_480p81_cross", 1, 32760, 512, 12, 12, 128),
    Case("sdxl_1024", 2, 4096, 4096, 10, 10, 64),
    Case("cogvideox_49", 1, 17776, 17776, 30, 30, 64),
]
SETS = {"headline": HEADLINE, "squares": SQUARES, "models": MODELS, "all": [*SQUARES, *MODELS]}
