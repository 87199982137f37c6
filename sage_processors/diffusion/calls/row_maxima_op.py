"""Attention calls that keep row maxima or key tile lists from one denoising step to the next.

Compiled code must not depend on a tensor that comes and goes, nor on a number that changes from step to step. So there
the call is an op of its own. Its implementation runs on the host in every call. It looks up the RowMaxima and the
SkipLists by the address of a tensor of the call site's state.
"""

from __future__ import annotations

import weakref
from typing import NamedTuple

import torch

import sage_kernels
from sage_kernels import HeadState
from sage_kernels.planning.row_maxima import RowMaxima
from sage_kernels.planning.skip_lists import SkipLists


_library = torch.library.Library("sage_processors", "DEF")
_library.define(
    "attention_keeping(Tensor q, Tensor k, Tensor v, Tensor? attn_mask, str causal, float? scale, str recipe, "
    "str scaling, str rotation, Tensor plan, Tensor plan_scale, Tensor(a!) stats, Tensor(b!) counts, Tensor row, "
    "Tensor row_max, Tensor row_max_next) -> Tensor"
)


class _Keeper(NamedTuple):
    """Weak references to the row maxima and skip lists of one call site; None for what it doesn't keep.

    Attributes: site: index of the call site in both.
    """

    maxima: weakref.ref | None
    lists: weakref.ref | None
    site: int

    @property
    def is_gone(self) -> bool:
        """True if neither of the two objects exists any more."""
        return all(reference is None or reference() is None for reference in self[:2])


_NOBODY = _Keeper(None, None, 0)
_keepers: dict[int, _Keeper] = {}  # address of a call site's HeadState.row -> its _Keeper


def keep_rows_of(state: HeadState, maxima: RowMaxima | None, site: int, lists: SkipLists | None = None) -> None:
    """Register where later calls of `attention_keeping` with this state keep their row maxima.

    Args: maxima: None keeps none. site: index of the call site in `maxima` and `lists`. lists: the key tiles to visit;
        None visits all.
    """
    for address in [address for address, keeper in _keepers.items() if keeper.is_gone]:
        del _keepers[address]
    of_maxima, of_lists = (None if x is None else weakref.ref(x) for x in (maxima, lists))
    _keepers[state.row.data_ptr()] = _Keeper(of_maxima, of_lists, site)


def attention_keeping(q, k, v, *, attn_mask, causal, recipe, scaling, rotation, scale, state: HeadState):
    """Run `sage_attention` with the row maxima and skip lists that are registered for its state."""
    if torch.compiler.is_compiling():
        op = torch.ops.sage_processors.attention_keeping
        return op(q, k, v, attn_mask, causal or "", scale, recipe, scaling, rotation, *state)
    keeper = _keepers.get(state.row.data_ptr(), _NOBODY)
    maxima, lists = (None if reference is None else reference() for reference in keeper[:2])
    kept = None if maxima is None else maxima.of(keeper.site, (q.shape[0], q.shape[2], q.shape[1]), q.device)
    skip = None
    if lists is not None:
        if attn_mask is None and not causal:
            skip = lists.of(keeper.site, q, k, recipe)
        else:
            lists.leave_out(keeper.site, "masked")
    return sage_kernels.sage_attention(
        q, k, v, attn_mask=attn_mask, causal=causal, recipe=recipe, scaling=scaling, rotation=rotation, scale=scale,
        state=state if kept is None else state.keeping(*kept), skip=skip,
    )  # fmt: skip


def _run(q, k, v, attn_mask, causal, scale, recipe, scaling, rotation, *state):
    return attention_keeping(
        q, k, v, attn_mask=attn_mask, causal=causal or False, recipe=recipe, scaling=scaling, rotation=rotation,
        scale=scale, state=HeadState(*state),
    )  # fmt: skip


for _device in ("CPU", "CUDA"):
    _library.impl("attention_keeping", _run, _device)
torch.library.register_fake("sage_processors::attention_keeping", lambda q, *_: q.new_empty(q.shape), lib=_library)
