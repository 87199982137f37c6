"""Agreement of processes under context parallelism about a forward: a graph, or eagerly.

NCCL wants a graph with collectives captured by all processes or by none, and then replayed by all or by none:
https://docs.nvidia.com/deeplearning/nccl/user-guide/docs/usage/cudagraph.html. A process that goes its own way (its
model changed, it has no memory left, its replay differed) would leave the others waiting for ever. So each says what
it would do, once in a forward and after each capture, and what not all would do is done by none.
"""

from __future__ import annotations

import functools
import weakref
from typing import Any

import torch.distributed as dist


EAGER, CAPTURE = 0, 1  # wishes; a higher one is the number of a graph to replay


_live: weakref.WeakSet[Any] = weakref.WeakSet()  # models whose graphs have collectives


def forget_before_the_end(graphs: Any) -> None:
    """Have a model's graphs dropped before torch.distributed.destroy_process_group.

    NCCL waits in it until nobody has a graph with its collectives: https://github.com/pytorch/pytorch/issues/115388.
    """
    _live.add(graphs)
    destroy = dist.destroy_process_group
    if getattr(destroy, "is_of_sage", False):
        return

    @functools.wraps(destroy)
    def destroy_process_group(*args: Any, **kwargs: Any) -> Any:
        for live in list(_live):
            live.forget()
        return destroy(*args, **kwargs)

    destroy_process_group.is_of_sage = True  # type: ignore[attr-defined]
    dist.destroy_process_group = destroy_process_group


class Agreement:
    """Decisions of one model. Without context parallelism a process agrees with itself.

    Attributes: compares: whether the graph is compared with an eager call in this forward, which all have to run.
    """

    def __init__(self) -> None:
        self._peers: Any = None
        self._newest, self.is_made, self.compares = CAPTURE, True, False

    def begin(self, peers: Any) -> None:
        """Begin a forward. peers: a Peers; None without context parallelism."""
        self._peers, self.is_made = peers, peers is None

    @property
    def binds(self) -> bool:
        """True if other processes count on what was agreed in this forward."""
        return self._peers is not None and self.is_made

    def wish(self, number: int, compares: bool = False) -> bool:
        """Tell the others what this process would do. Returns True if all would do the same.

        compares: this process would compare it with an eager call.
        """
        self.compares, self.is_made = compares, True
        if self._peers is None:
            return True
        told = self._peers.numbers(2 * number + compares)
        self.compares = any(x % 2 for x in told)
        return {x // 2 for x in told} == {number}

    def number(self, is_captured: bool) -> int:
        """Return the number of a graph that all have just captured; 0 if one of them has not."""
        told = [self._newest + 1 if is_captured else 0]
        if self._peers is not None:
            told = self._peers.numbers(*told)
        self._newest = max(self._newest, *told)
        return self._newest if all(told) else 0
