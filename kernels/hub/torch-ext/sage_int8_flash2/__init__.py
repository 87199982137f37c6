"""INT8 attention as a kernel of the Hugging Face Hub, with functions that keep nothing between calls.

kernels/hub/make.py writes `sage_kernels/` beside this file: the files of that package that attention needs. This file
and flash.py may import torch and these files.
"""

from .flash import flash_attn_func, flash_attn_varlen_func, flash_attn_with_kvcache
from .sage_kernels.facts.state import HeadState, new_head_state
from .sage_kernels.ops.attention import sage_attention
from .sage_kernels.ops.varlen import sage_attention_varlen


__all__ = [
    "HeadState",
    "flash_attn_func",
    "flash_attn_varlen_func",
    "flash_attn_with_kvcache",
    "new_head_state",
    "sage_attention",
    "sage_attention_varlen",
]
