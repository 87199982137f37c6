"""What the tests of packed sequences share: the op on each of its implementations, and sequences to pack."""

from __future__ import annotations

import torch

import sage_kernels
import sage_kernels.reference
from sage_kernels import sage_attention_varlen
from sage_kernels.facts.masking import of_sequence, packed_masking
from sage_kernels.testing import assert_matches_reference


# tokens of the interpreter's tiles: 64. Lengths of 0 and 1, around a tile, of both sides unlike
Q_LENGTHS = (5, 0, 65, 1, 130, 64, 3)
K_LENGTHS = (5, 4, 90, 0, 130, 64, 200)
BEHIND_Q, BEHIND_K = 7, 9  # rows behind the last sequence


def ends(lengths) -> torch.Tensor:
    """cu_seqlens of these lengths."""
    return torch.tensor([0, *lengths]).cumsum(0).int()


def packed_inputs(
    q_lengths=Q_LENGTHS, k_lengths=K_LENGTHS, heads=4, kv_heads=2, head_dim=64, dtype=torch.float16, seed=0
):
    """q, k, v of N(0, 1), with a few rows behind the last sequence, and their cu_seqlens."""
    generator = torch.Generator().manual_seed(seed)
    total_q, total_k = sum(q_lengths) + BEHIND_Q, sum(k_lengths) + BEHIND_K
    q = torch.randn(total_q, heads, head_dim, generator=generator)
    k, v = (torch.randn(total_k, kv_heads, head_dim, generator=generator) for _ in range(2))
    return *(x.to(dtype) for x in (q, k, v)), ends(q_lengths), ends(k_lengths)


def slices(cu_seqlens) -> list[slice]:
    numbers = cu_seqlens.tolist()
    return [slice(a, b) for a, b in zip(numbers, numbers[1:], strict=False)]


class AttendPacked:
    """`sage_attention_varlen`, all of it, on one implementation of its kernels. Tensors go to its device, results come
    back. tier, blocks: as in attention_cases.Attend."""

    def __init__(self, tier: str, patch):
        self.tier = tier
        self.device = torch.device("cuda" if tier == "cuda" else "cpu")
        self.blocks = {}
        if tier == "reference":
            return
        from sage_kernels._triton.attention import launch as launch_attention
        from sage_kernels._triton.sequences import Packed

        choose = launch_attention.device_tile

        def recorded(*args, **kwargs):
            tile = choose(*args, **kwargs)
            assert not (kwargs.get("packed") and tile.keep_first_max)
            self.blocks = {"block_q": tile.scale_rows, "block_k": tile.block_n}
            return tile

        def launch(q, k, v, cu_q, cu_k, **options):
            out, lse = launch_attention.launch_attention_fwd(
                q[None], k[None], v[None], **options, packed=Packed(cu_q, cu_k), state=None
            )
            return out[0], out[0] if lse is None else lse[0]

        patch.setattr(launch_attention, "device_tile", recorded)
        patch.setattr(sage_kernels.ops.varlen, "try_replay", lambda *_: (None, None))
        if tier == "interpreter":
            patch.setattr(sage_kernels.reference, "ref_attention_varlen", launch)

    def __call__(self, q, k, v, cu_q, cu_k, *, return_lse=True, **options):
        """out, lse on the CPU."""
        tensors = [x.to(self.device) for x in (q, k, v, cu_q, cu_k)]
        options = {n: x.to(self.device) if isinstance(x, torch.Tensor) else x for n, x in options.items()}
        result = sage_attention_varlen(*tensors, return_lse=return_lse, **options)
        out, lse = result if return_lse else (result, None)
        assert out.dtype == q.dtype and out.is_contiguous() and out.shape == q.shape
        return out.cpu(), None if lse is None else lse.cpu()

    def check(self, q, k, v, cu_q, cu_k, *, causal=False, window=None, softcap=0.0, sinks=None, **options):
        """As a call; each sequence held against the reference of it alone, and the rest against zeros."""
        masked = {"causal": causal, "window": window, "softcap": softcap, "sinks": sinks}
        out, lse = self(q, k, v, cu_q, cu_k, **masked, **options)
        masking = packed_masking(causal, window, softcap, sinks, len(q), len(k))
        nothing = torch.full(q.shape[1:2], -torch.inf) if sinks is None else sinks.float()
        rest = torch.ones(len(q), dtype=torch.bool)
        for rows, keys in zip(slices(cu_q), slices(cu_k), strict=True):
            seq_q, seq_kv = rows.stop - rows.start, keys.stop - keys.start
            if not seq_q or not seq_kv:
                continue
            its, seen = of_sequence(masking, seq_q, seq_kv)
            inputs = q[None, rows], k[None, keys][:, seen], v[None, keys][:, seen]
            its_lse = None if lse is None else lse[None, rows]
            assert_matches_reference(out[None, rows], its_lse, *inputs, masking=its, **self.blocks, **options)
            rest[rows] = False
        assert (out[rest] == 0).all()
        if lse is not None:
            assert torch.equal(lse[rest], nothing.expand(int(rest.sum()), -1))
        return out, lse
