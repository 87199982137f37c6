"""Input checks of the ops, before any launch: the only place that raises for wrong inputs.

A message says which argument, what it got, what is expected and, where that helps, a remedy. May import torch, compat
and facts; no op, no kernel.
"""

from .attention import REASONS, unsupported
from .tensors import DTYPES, MAX_HEAD_DIM


__all__ = ["DTYPES", "MAX_HEAD_DIM", "REASONS", "unsupported"]
