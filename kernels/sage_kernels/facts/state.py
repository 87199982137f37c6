"""State of timestep scaling: tensors that hold planned scales and record a step's statistics.

One row per (attention call site, key/value head); all sites of a handle share the same tensors, so one vectorised
update serves a whole model. The kernels read `plan` and `plan_scale`, and write `stats` and `counts` with
order-independent atomics only (max, min, integer add): results stay bitwise repeatable.
planning/state.py turns the statistics into the next plan; the kernels have no part in that.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from .masking import Masking
from .numerics import padded_head_dim


# plan[row, i, channel], fp32: centre c, b / s, 1 / b and the scale of V (0 in all channels: no plan for V)
PLAN_CENTER, PLAN_K_WEIGHT, PLAN_Q_WEIGHT, PLAN_V_SCALE = range(4)
PLAN_FIELDS = 4
# stats[row, i, channel], fp32; V's is recorded by recipes that quantise V
STAT_Q_AMAX, STAT_K_MAX, STAT_K_MIN, STAT_V_AMAX = range(4)
STAT_FIELDS = 4
# counts[row, i], int32
COUNT_CALLS, COUNT_DYNAMIC, COUNT_OUTSIDE, COUNT_KEYS = range(4)
COUNT_CLIPPED, COUNT_TRIED, COUNT_REDONE = range(4, 7)
COUNT_BELOW, COUNT_MISFIT = range(7, 9)
COUNT_KEY_MAX, COUNT_KEY_MIN, COUNT_PLAN_KEY_A, COUNT_PLAN_KEY_B = range(9, 13)
COUNT_STEADY = 13
COUNT_FIELDS = 14

KEY_NONE = 0  # no call has this shape key
_INT32_MAX = 2**31 - 1
_ROTATION_KEYS = {"none": 0, "hadamard": 15_485_863}


class HeadState(NamedTuple):
    """Tensors of the shared state, as one attention call site sees them: a row for each head.

    With R rows, those of the heads of all sites.

    Attributes:
        plan: fp32 [R, 4, D_max]: per row and channel the centre c, the K weight b/s, the Q weight 1/b and,
            for recipes that quantise V, its scale.
        plan_scale: fp32 [R]: the INT8 scale s of K; 0 marks a head without a plan, with scales of the call itself.
        stats: fp32 [R, 4, D_max], written: per-channel max |q|, max k, min k and max |v| of this step.
        counts: int32 [R, 14], written: calls, calls without a plan, elements of K outside the planned range, elements
            of K, elements of V clipped at 7 times the planned range, query tiles that ran with a softmax reference
            kept from the step before, those of them that were done again, elements of K in tiles that took a smaller
            scale than planned, elements of K in heads whose planned centre and balance did not fit, shape keys, and 1
            for a head whose latest step was as its plan expected.
        row: int32 0-d tensor: first row of this site; its key/value head h uses row + h.
        row_max: fp32 [B, H, S_q], read and written: max score per query row (log2), K centred on this call's midrange
            (the middle of each channel's range in `stats`). Recipes with 8-bit P derive the softmax reference of the
            next call of this shape from it. A row that it does not fit, or that is -inf or NaN in it, costs time but
            changes no result. Empty ([0], not None, so that every field is a tensor): the kernel uses a running max.
        row_max_next: like row_max, but only written: by a call that has none to read yet. Empty beside row_max.
    """

    plan: torch.Tensor
    plan_scale: torch.Tensor
    stats: torch.Tensor
    counts: torch.Tensor
    row: torch.Tensor
    row_max: torch.Tensor
    row_max_next: torch.Tensor

    def keeping(self, rows: torch.Tensor, known: bool) -> HeadState:
        """Return this state with `rows`, fp32 [B, H, S_q], as the only place for the rows' largest scores.

        known: a call of this shape left its scores there, and this call takes them as its softmax reference.
        """
        nothing = self.row_max_next if self.row_max.numel() else self.row_max
        row_max, row_max_next = (rows, nothing) if known else (nothing, rows)
        return self._replace(row_max=row_max, row_max_next=row_max_next)


def shape_key(batch: int, seq_q: int, seq_kv: int, rotation: str = "none") -> int:
    """Hash the shape of a call (resolution, prompt length, batch) and its rotation to a positive int32.

    A plan holds for calls of its own key: a rotated call has other channels.
    """
    key = batch * 73_856_093 ^ seq_q * 19_349_663 ^ seq_kv * 83_492_791 ^ _ROTATION_KEYS[rotation]
    return key % (_INT32_MAX - 1) + 1


def reads_row_max(state: HeadState | None, masking: Masking) -> bool:
    """Return True if a call with 8-bit P takes its softmax reference from `state.row_max` and updates it.

    Not where more than a band or a mask of keys is between scores and softmax: such a loop has no registers to spare.
    """
    return state is not None and state.row_max.numel() > 0 and not masking.by_row


def keeps_row_max(state: HeadState | None, masking: Masking) -> bool:
    """Return True if a call with 8-bit P leaves its rows' largest scores in row_max or row_max_next."""
    kept = state is not None and (state.row_max.numel() > 0 or state.row_max_next.numel() > 0)
    return kept and not masking.by_row


def clear_step(stats: torch.Tensor, counts: torch.Tensor) -> None:
    """Clear `stats` and the per-step part of `counts` for the next step (the plan keys stay)."""
    stats[:, STAT_Q_AMAX].zero_()
    stats[:, STAT_K_MAX].fill_(-torch.inf)
    stats[:, STAT_K_MIN].fill_(torch.inf)
    stats[:, STAT_V_AMAX].zero_()
    counts[:, :COUNT_KEY_MAX].zero_()
    counts[:, COUNT_KEY_MAX].fill_(KEY_NONE)
    counts[:, COUNT_KEY_MIN].fill_(_INT32_MAX)


def new_head_state(rows: int, head_dim: int, device: torch.device | str) -> HeadState:
    """Make an empty state of `rows` heads: nothing planned, nothing recorded."""
    channels = padded_head_dim(head_dim)
    state = HeadState(
        plan=torch.zeros(rows, PLAN_FIELDS, channels, dtype=torch.float32, device=device),
        plan_scale=torch.zeros(rows, dtype=torch.float32, device=device),
        stats=torch.empty(rows, STAT_FIELDS, channels, dtype=torch.float32, device=device),
        counts=torch.zeros(rows, COUNT_FIELDS, dtype=torch.int32, device=device),
        row=torch.zeros((), dtype=torch.int32, device=device),
        row_max=torch.zeros(0, dtype=torch.float32, device=device),
        row_max_next=torch.zeros(0, dtype=torch.float32, device=device),
    )
    clear_step(state.stats, state.counts)
    return state


def fractions(counts: torch.Tensor) -> dict[str, float | int]:
    """Convert the counts [H_kv, COUNT_KEY_MAX] of a site's heads, on the CPU, to the numbers of a report.

    They are explained at `ScaleState.summary`.
    """
    part = counts.double()
    elements = part[:, COUNT_KEYS].sum().clamp_min(1)
    return {
        "calls": int(part[:, COUNT_CALLS].max()),
        # of the heads that were called: under context parallelism the others are on another device
        "dynamic_calls": float(part[:, COUNT_DYNAMIC].sum() / (part[:, COUNT_CALLS] > 0).sum().clamp_min(1)),
        "outside": float(part[:, COUNT_OUTSIDE].sum() / elements),
        "below": float(part[:, COUNT_BELOW].sum() / elements),
        "misfit": float(part[:, COUNT_MISFIT].sum() / elements),
        "clipped": float(part[:, COUNT_CLIPPED].sum() / elements),
        "lagged": int(part[:, COUNT_TRIED].sum()),
        "redone": float(part[:, COUNT_REDONE].sum() / part[:, COUNT_TRIED].sum().clamp_min(1)),
    }
