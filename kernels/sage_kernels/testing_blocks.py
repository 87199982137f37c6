"""Inputs whose softmax gathers in few query-key blocks, or does not: what mixed attention is held to."""

from __future__ import annotations

import torch


BLOCK_FAMILIES = ("iid", "clustered", "heavy_tailed", "clustered_biased", "needle")
# Tokens of a cluster: 1.5 blocks, so that clusters and blocks do not share their borders.
_CLUSTER = 96


def make_blocks(
    family: str, batch: int, seq: int, heads: int, kv_heads: int, head_dim: int, *, dtype=torch.float32, seed: int = 0
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Random q [B, S, H, D], k, v [B, S, H_kv, D] of one of BLOCK_FAMILIES.

    "iid": N(0, 1). "clustered": runs of 96 keys share a direction, and runs of 96 queries look for that of one of
    them; "heavy_tailed": with a strength of its own, lognormal, for each run of queries.
    "clustered_biased": "clustered" with one vector added to all keys of a head. "needle": each query
    looks for a key of its own, somewhere.
    """
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float32, device="cpu")

    q, k = normal(batch, seq, heads, head_dim), normal(batch, seq, kv_heads, head_dim)
    v = normal(batch, seq, kv_heads, head_dim)
    group, runs = heads // kv_heads, -(-seq // _CLUSTER)
    of_token = torch.arange(seq, device="cpu") // _CLUSTER
    if family in ("clustered", "heavy_tailed", "clustered_biased"):
        directions = normal(batch, runs, kv_heads, head_dim)
        wanted = torch.randint(runs, (runs,), generator=generator, device="cpu")
        strength = torch.full((runs,), 0.7, dtype=torch.float32, device="cpu")
        if family == "heavy_tailed":
            strength = 1.1 * torch.exp(0.5 * normal(runs))
        k = k + 0.6 * directions[:, of_token]
        looked_for = strength[:, None, None] * directions[:, wanted]
        q = q + looked_for.repeat_interleave(group, 2)[:, of_token]
        if family == "clustered_biased":
            fixed = torch.Generator().manual_seed(0)
            k = k + 3 * torch.randn(1, 1, kv_heads, head_dim, generator=fixed, dtype=torch.float32, device="cpu")
    elif family == "needle":
        needles = torch.randint(seq, (seq,), generator=generator, device="cpu")
        q = 0.7 * q + 0.8 * k[:, needles].repeat_interleave(group, 2)
    elif family != "iid":
        raise ValueError(f"family: got {family!r}, expected one of {BLOCK_FAMILIES}")
    return q.to(dtype), k.to(dtype), v.to(dtype)
