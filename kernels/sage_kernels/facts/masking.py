"""Masks, bands, soft caps and sinks of attention, in the form that reference and launchers share."""

from __future__ import annotations

from typing import NamedTuple

import torch

from .numerics import LOG2_E


UNLIMITED = -1
# A key with a float bias this low or lower has no part in scales: fp32 loses its score beside the bias.
FAINT = -1e30


class Masking(NamedTuple):
    """All that happens between Q·Kᵀ and the softmax.

    Attributes:
        mask: None, or bool (True: visible) or float (added to the scores), [B or 1, H or 1, S_q or 1, S_kv] in the
            strides it came with.
        left, right: a row at key position p sees keys p - left to p + right; UNLIMITED: no bound on that side.
        offset: position of query row 0 on the key axis.
        softcap: scores become softcap · tanh(score / softcap); 0: off.
        sinks: None, or fp32 [H]: a logit per head that takes part in the softmax and has no value.
    """

    mask: torch.Tensor | None = None
    left: int = UNLIMITED
    right: int = UNLIMITED
    offset: int = 0
    softcap: float = 0.0
    sinks: torch.Tensor | None = None

    @property
    def by_key(self) -> bool:
        """True if the mask has one vector of keys per sample: it hides the same keys from all rows and heads."""
        return self.mask is not None and self.mask.shape[1] == 1 and self.mask.shape[2] == 1

    @property
    def by_row(self) -> bool:
        """True if more than a band or a mask of keys comes between the scores and the softmax."""
        return (self.mask is not None and not self.by_key) or self.softcap > 0 or self.sinks is not None

    @property
    def may_be_centered(self) -> bool:
        """True if nothing but a softmax over the keys reads the scores: a constant in a row changes no result."""
        return self.softcap == 0 and self.sinks is None

    @property
    def by_mask(self) -> bool:
        """True if scores meet nothing but a mask that differs by row or head before the softmax."""
        return self.mask is not None and not self.by_key and self.may_be_centered


NO_MASKING = Masking()


def canonical_mask(mask: torch.Tensor | None, seq_kv: int) -> torch.Tensor | None:
    """View a mask that broadcasts to [B, H, S_q, S_kv] as 4-D, broadcast dimensions of size 1.

    The dimension of keys is expanded to S_kv. Nothing is copied, and dimensions that `expand` made are folded back.
    """
    if mask is None:
        return None
    mask = mask[(None,) * (4 - mask.dim())]
    for dim in range(3):
        if mask.stride(dim) == 0:
            mask = mask.narrow(dim, 0, min(1, mask.shape[dim]))
    return mask.expand(-1, -1, -1, seq_kv)


def band(causal: str, window: int | None, seq_q: int, seq_kv: int) -> tuple[int, int, int]:
    """Return left, right and offset of a Masking.

    causal: "", "top_left" or "bottom_right"; window: own key included.
    """
    offset = seq_kv - seq_q if causal == "bottom_right" else 0
    # at most all rows and keys: some kernels have int32 positions
    left = UNLIMITED if window is None else min(window - 1, seq_q + seq_kv)
    return left, 0 if causal else left, offset


def make_masking(attn_mask, causal, window, softcap, sinks, seq_q: int, seq_kv: int) -> tuple[Masking, slice]:
    """Return the Masking of a checked call of `sage_attention`, and the keys that any row can see.

    Keys outside of the slice need not be touched; the Masking is one of the keys inside.
    """
    causal = ("top_left" if causal else "") if isinstance(causal, bool) else causal
    masking = Masking(
        canonical_mask(attn_mask, seq_kv),
        *band(causal, window, seq_q, seq_kv),
        float(softcap),
        None if sinks is None else sinks.float().contiguous(),
    )
    if masking.left == masking.right == UNLIMITED:
        return masking, slice(0, seq_kv)
    if masking.mask is not None:  # a band beside a mask becomes part of it
        seen = visible(masking, torch.arange(seq_q, device=masking.mask.device), seq_kv)
        hidden = False if masking.mask.dtype == torch.bool else -torch.inf
        mask = masking.mask if seen is None else torch.where(seen, masking.mask, hidden)
        return masking._replace(mask=mask, left=UNLIMITED, right=UNLIMITED, offset=0), slice(0, seq_kv)
    first = 0 if masking.left == UNLIMITED else min(max(0, masking.offset - masking.left), seq_kv)
    last = seq_kv if masking.right == UNLIMITED else max(min(seq_kv, seq_q + masking.offset + masking.right), 0)
    return masking._replace(offset=masking.offset - first), slice(first, last)


def packed_masking(causal: bool, window: int | None, softcap, sinks, total_q: int, total_k: int) -> Masking:
    """Return the Masking of packed sequences, without an offset: `of_sequence` adds that of a sequence."""
    left = UNLIMITED if window is None else min(window - 1, total_q + total_k)
    right = 0 if causal else left
    return Masking(None, left, right, 0, float(softcap), None if sinks is None else sinks.float().contiguous())


def of_sequence(masking: Masking, seq_q: int, seq_kv: int) -> tuple[Masking, slice]:
    """Return the Masking of one packed sequence, and the slice of its keys that any of its rows sees.

    The last row is at the last key, with a window to both sides too.
    """
    if masking.left == masking.right == UNLIMITED:
        return masking, slice(0, seq_kv)
    offset = seq_kv - seq_q
    hidden = 0 if masking.left == UNLIMITED else min(max(offset - masking.left, 0), seq_kv)
    return masking._replace(offset=offset - hidden), slice(hidden, seq_kv)


def log2_bias(mask: torch.Tensor) -> torch.Tensor:
    """Convert a mask to an fp32 bias on base-2 scores: 0 and -inf for bool. A finite bias stays finite."""
    if mask.dtype == torch.bool:
        return torch.zeros(mask.shape, dtype=torch.float32, device=mask.device).masked_fill_(~mask, -torch.inf)
    bias = mask.float()
    return (bias * LOG2_E).clamp_min(torch.finfo(torch.float32).min).masked_fill(bias == -torch.inf, -torch.inf)


def key_reach(masking: Masking, batch: int, heads: int, kv_heads: int, seq_q: int) -> torch.Tensor | None:
    """Largest bias that any row adds to each key, base 2: [B or 1, H_kv or 1, S_kv]. None without a mask.

    -inf: no row of these heads sees the key, so its K and V must not matter, whatever they hold. The band of a causal
    mask is not considered.
    """
    if masking.mask is None:
        return None
    reach = log2_bias(masking.mask).amax(2)
    return reach if reach.shape[1] == 1 else reach.unflatten(1, (kv_heads, -1)).amax(2)


def visible(masking: Masking, rows: torch.Tensor, seq_kv: int) -> torch.Tensor | None:
    """Band of query rows [R] as bool [R, S_kv]; None if it hides nothing."""
    if masking.left == masking.right == UNLIMITED:
        return None
    distance = torch.arange(seq_kv, device=rows.device)[None, :] - (rows[:, None] + masking.offset)
    seen = torch.ones_like(distance, dtype=torch.bool)
    if masking.left != UNLIMITED:
        seen &= distance >= -masking.left
    if masking.right != UNLIMITED:
        seen &= distance <= masking.right
    return seen


def decode_band(causal: bool, window: int | None) -> tuple[int, int]:
    """Return left and right of the Masking of a decode call."""
    return UNLIMITED if window is None else window - 1, 0 if causal else UNLIMITED
