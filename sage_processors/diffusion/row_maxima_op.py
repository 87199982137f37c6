"""Attention calls that keep row maxima: where, is found by the tensors of their call site, when they run.

Compiled code must not hang on a tensor that comes and goes, nor on a number that changes from step to step. There the
call is an op, which like any other runs on the host, and asks the RowMaxima that its tensors are known to belong to.
"""

from __future__ import annotations

import weakref

import torch

import sage_kernels
from sage_kernels import HeadState
from sage_kernels.planning.row_maxima import RowMaxima


_library = torch.library.Library("sage_processors", "DEF")
_library.define(
    "attention_keeping(Tensor q, Tensor k, Tensor v, Tensor? attn_mask, str causal, float? scale, str recipe, "
    "str scaling, str rotation, Tensor plan, Tensor plan_scale, Tensor(a!) stats, Tensor(b!) counts, Tensor row, "
    "Tensor row_max, Tensor row_max_next) -> Tensor"
)
_keepers: dict[int, tuple[weakref.ref, int]] = {}  # address of a site's HeadState.row → its RowMaxima, its number


def keep_rows_of(state: HeadState, maxima: RowMaxima, site: int) -> None:
    """From now on calls of `attention_keeping` with this state keep their rows in `maxima`, as calls of `site`."""
    for address in [address for address, (known, _) in _keepers.items() if known() is None]:
        del _keepers[address]
    _keepers[state.row.data_ptr()] = weakref.ref(maxima), site


def attention_keeping(q, k, v, *, attn_mask, causal, recipe, scaling, rotation, scale, state: HeadState):
    """`sage_attention` of these arguments; a softmax reference kept from the step before is found when it runs."""
    if torch.compiler.is_compiling():
        op = torch.ops.sage_processors.attention_keeping
        return op(q, k, v, attn_mask, causal or "", scale, recipe, scaling, rotation, *state)
    known, site = _keepers.get(state.row.data_ptr(), (lambda: None, 0))
    maxima = known()
    kept = None if maxima is None else maxima.of(site, (q.shape[0], q.shape[2], q.shape[1]), q.device)
    return sage_kernels.sage_attention(
        q, k, v, attn_mask=attn_mask, causal=causal, recipe=recipe, scaling=scaling, rotation=rotation, scale=scale,
        state=state if kept is None else state.keeping(*kept),
    )  # fmt: skip


def _run(q, k, v, attn_mask, causal, scale, recipe, scaling, rotation, *state):
    return attention_keeping(
        q, k, v, attn_mask=attn_mask, causal=causal or False, recipe=recipe, scaling=scaling, rotation=rotation,
        scale=scale, state=HeadState(*state),
    )  # fmt: skip


for _device in ("CPU", "CUDA"):
    _library.impl("attention_keeping", _run, _device)
torch.library.register_fake("sage_processors::attention_keeping", lambda q, *_: q.new_empty(q.shape), lib=_library)
