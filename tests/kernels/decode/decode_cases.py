"""What the tests of the INT8 cache's attention share: the op on each of its implementations, inputs, filled caches."""

from __future__ import annotations

import torch

import sage_kernels.reference
from sage_kernels import sage_decode_attention
from sage_kernels.facts.masking import Masking, canonical_mask, decode_band
from sage_kernels.reference import ref_append_kv, ref_decode_attention
from sage_kernels.testing import FP32_ROUNDING, exact_attention, make_qkv, relative_l2


SPARE = 5  # slots beyond the last token, of which nobody may see anything
DTYPES = {"reference": (torch.float16, torch.bfloat16, torch.float32), "interpreter": (torch.float16, torch.float32)}


class Decode:
    """`sage_decode_attention`, all of it, on one implementation; tensors go to its device, results come back."""

    def __init__(self, tier, patch):
        self.tier, self.patch = tier, patch
        self.device = torch.device("cuda" if tier == "cuda" else "cpu")
        self.dtypes = DTYPES.get(tier, DTYPES["reference"])
        self.splits = None
        if tier == "interpreter":
            from sage_kernels._triton.decode.launch import launch_decode_attention

            def launch(*args, **options):
                return launch_decode_attention(*args, **options, return_lse=True, splits=self.splits)

            patch.setattr(sage_kernels.reference, "ref_decode_attention", launch)
        elif tier == "cuda":
            from sage_kernels._triton.decode import launch as attention_decode

            choose = attention_decode.choose_splits
            patch.setattr(attention_decode, "choose_splits", lambda *shape: self.splits or choose(*shape))

    def __call__(self, q, cache, **options):
        """out, lse on the CPU."""
        options = {n: x.to(self.device) if isinstance(x, torch.Tensor) else x for n, x in options.items()}
        cache = [None if x is None else x.to(self.device) for x in cache]
        out, lse = sage_decode_attention(q.to(self.device), *cache, return_lse=True, **options)
        assert out.dtype == q.dtype and out.is_contiguous() and out.shape == q.shape
        return out.cpu(), lse.cpu()

    def check(self, q, cache, *, lengths=None, ring=False, scale=None, attn_mask=None, causal=False, window=None,
              softcap=0.0, sinks=None, k_balance=None):  # fmt: skip
        """As a call, held against the reference: twice its rounding floor at most, per head and in the worst row."""
        out, lse = self(
            q, cache, lengths=lengths, ring=ring, scale=scale, attn_mask=attn_mask, causal=causal, window=window,
            softcap=softcap, sinks=sinks, k_balance=k_balance,
        )  # fmt: skip
        masking = Masking(
            canonical_mask(attn_mask, cache[0].shape[2]), *decode_band(bool(causal), window), softcap=softcap,
            sinks=None if sinks is None else sinks.float(),
        )  # fmt: skip
        options = {"ring": ring, "masking": masking, "scale": q.shape[3] ** -0.5 if scale is None else scale}
        options["k_balance"] = k_balance
        rounded, _ = ref_decode_attention(q, *cache, lengths, **options)
        unrounded, ref_lse = ref_decode_attention(q.float(), *cache, lengths, **options, round_p=False)
        for name, dim in (("head", (1, 3)), ("row", 3)):
            floor = relative_l2(rounded, unrounded, dim).max()
            error = relative_l2(out, unrounded, dim).max()
            assert error <= 2 * floor + 64 * FP32_ROUNDING, f"worst {name}: {error:.2e}, floor {floor:.2e}"
        worst = torch.where(lse == ref_lse, 0.0, (lse - ref_lse).abs()).max()
        assert worst <= 2e-3, f"lse: {worst:.2e}"
        return out, lse


def inputs(batch, seq_q, seq_kv, heads, kv_heads, head_dim, *, family="biased_keys", dtype=torch.float16, seed=0):
    """q [B, S_q, H, D], k and v [B, H_kv, S, D]; V is a hundred times smaller than K: no scale fits the other."""
    q, k, v = make_qkv(family, batch, seq_q, seq_kv, heads, kv_heads, head_dim, seed=seed)
    return q.to(dtype), k.to(dtype).transpose(1, 2), (v / 100).to(dtype).transpose(1, 2)


def filled(k, v, *, capacity=None, ring=False, mean=True, k_balance=None):
    """A cache of these tokens as the reference writes it, its other slots poisoned: codes 77, scales NaN."""
    batch, heads, number, head_dim = k.shape
    capacity = capacity or number + SPARE
    cache = []
    for _ in range(2):
        cache.append(torch.full((batch, heads, capacity, head_dim), 77, dtype=torch.int8))
        cache.append(torch.full((batch, heads, capacity), torch.nan, dtype=torch.bfloat16))
    k_mean = k.float().mean(2) if mean else None
    kept = slice(max(number - capacity, 0), None) if ring else slice(None)
    where = {"position": kept.start or 0, "ring": ring}
    ref_append_kv(k[:, :, kept], v[:, :, kept], k_mean, *cache, **where, k_balance=k_balance)
    return [*cache, k_mean]


def length(k):
    return torch.tensor(k.shape[2])


def exact(q, k, v, **options):
    return exact_attention(q, k.transpose(1, 2), v.transpose(1, 2), **options)


def arguments(**changes):
    """Of a call of sage_decode_attention over 20 tokens in 25 slots."""
    q, k, v = inputs(2, 1, 20, 4, 2, 64)
    names = ("k_codes", "k_scale", "v_codes", "v_scale", "k_mean")
    return {"q": q, **dict(zip(names, filled(k, v), strict=True)), "lengths": length(k)} | changes
