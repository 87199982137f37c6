"""Shapes of attention calls for the benchmarks: squares, and those of real models."""

from __future__ import annotations

from typing import NamedTuple


class Case(NamedTuple):
    """Shapes of one attention call.

    Attributes:
        causal: bottom-right aligned.
        hidden_keys: number of keys at the end of every sample that are padding, hidden by a mask [B, 1, 1, S_kv].
        rep: milliseconds for which a provider is timed.
        host_time: also record the time until a call of ours returns.
    """

    name: str
    batch: int
    seq_q: int
    seq_kv: int
    heads: int
    kv_heads: int
    head_dim: int
    causal: bool = False
    hidden_keys: int = 0
    rep: int = 300
    host_time: bool = False


def square(head_dim: int, seq: int, batch: int = 2, heads: int = 32, causal=False, hidden_keys=0) -> Case:
    kind = "causal" if causal else f"padded{hidden_keys}" if hidden_keys else "full"
    few = "" if batch * heads == 64 else f"_BH{batch * heads}"
    return Case(f"D{head_dim}_N{seq}_{kind}{few}", batch, seq, seq, heads, heads, head_dim, causal, hidden_keys)


def short(head_dim: int, seq: int, heads: int, causal=False, group: int = 1) -> Case:
    """Return a case of one sample at a length at which INT8 may not pay.

    group: query heads that share a key/value head.
    """
    kind = ("causal" if causal else "full") + (f"_gqa{group}" if group > 1 else "")
    return Case(
        f"D{head_dim}_N{seq}_{kind}_BH{heads}", 1, seq, seq, heads, heads // group, head_dim, causal, rep=100,
        host_time=True,
    )  # fmt: skip


HEADLINE = [square(128, 8192)]
LENGTHS = (512, 1024, 2048, 4096, 8192, 16384, 32768, 65536)
SQUARES = [
    *(square(d, n) for d in (64, 128) for n in LENGTHS),
    *(square(d, n, batch=1, heads=16) for d in (64, 128) for n in LENGTHS),
]
WIDTHS = [square(d, n) for d in (40, 80, 96, 256) for n in (4096, 16384)]
GROUPED = [
    Case(f"D128_N{n}_{kind}_gqa4", 2, n, n, 32, 8, 128, kind == "causal")
    for n in (4096, 16384)
    for kind in ("full", "causal")
]
MODELS = [
    Case("flux_1024", 1, 4608, 4608, 24, 24, 128),
    Case("flux_2048", 1, 16896, 16896, 24, 24, 128),
    Case("wan21_1_3b_480p81_self", 1, 32760, 32760, 12, 12, 128),
    Case("wan21_1_3b_480p81_cross", 1, 32760, 512, 12, 12, 128),
    Case("sdxl_1024", 2, 4096, 4096, 10, 10, 64),
    Case("sd15_512", 2, 4096, 4096, 8, 8, 40),
    Case("cogvideox_49", 1, 17776, 17776, 30, 30, 64),
    Case("qwen_image_1328", 1, 7145, 7145, 24, 24, 128),  # 83² patches and 256 text tokens
    Case("llama3_8b_prefill", 1, 8192, 8192, 32, 8, 128, causal=True),
]
# each masked case follows the same one without a mask: their ratio is the mask's cost
MASKED = [square(128, n, **mask) for n in (8192, 16384) for mask in ({}, {"hidden_keys": 100}, {"causal": True})]
# full, causal, and causal with four query heads to a key/value head, as language models have
CROSSOVER = [
    short(d, n, heads, causal, group)
    for d in (64, 128)
    for causal, group in ((False, 1), (True, 1), (True, 4))
    for heads in (16, 64)
    for n in (128, 256, 512, 1024, 2048)
]
RIVALS = [
    *(square(128, n, causal=causal) for n in (4096, 16384, 32768) for causal in (False, True)), square(64, 16384),
]  # fmt: skip
SETS = {
    "crossover": CROSSOVER,
    "headline": HEADLINE,
    "squares": SQUARES,
    "widths": WIDTHS,
    "grouped": GROUPED,
    "models": MODELS,
    "masked": MASKED,
    "rivals": RIVALS,
    "all": [*SQUARES, *WIDTHS, *GROUPED, *MODELS, *MASKED],
}
