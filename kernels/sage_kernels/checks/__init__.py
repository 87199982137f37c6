"""Input checks of the ops, and the only place that raises on inputs: which argument, what it got, what is expected.

May import torch and the ground floor (recipe, numerics, state, compat); no op, no kernel.
"""

from .attention import REASONS, unsupported
from .tensors import DTYPES, MAX_HEAD_DIM


__all__ = ["DTYPES", "MAX_HEAD_DIM", "REASONS", "unsupported"]
