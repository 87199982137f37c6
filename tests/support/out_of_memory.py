"""Errors at allocations, on a device that never runs out of memory by itself."""

from __future__ import annotations

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from sage_kernels.ops import decode


class OutOfMemory(TorchDispatchMode):
    """Raises at the n-th allocation, also inside of our op that writes to a cache.

    Attributes: left: allocations until then; at most 0 afterwards.
    """

    def __init__(self, n: int):
        super().__init__()
        self.left = n

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func is torch.ops.sage_kernels.append_kv.default:  # its own allocations, too
            with self:
                return decode._append(*args)
        given = {x.untyped_storage()._cdata for x in tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor)}
        result = func(*args, **(kwargs or {}))
        made = [x for x in tree_leaves(result) if isinstance(x, torch.Tensor)]
        if any(x.untyped_storage()._cdata not in given for x in made):
            self.left -= 1
            if self.left == 0:
                raise torch.OutOfMemoryError("injected")
        return result
