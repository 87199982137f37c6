"""INT8 attention as a kernel of the Hugging Face Hub: functions of tensors, nothing is kept between calls.

`sage_kernels/` beside this file is written by kernels/hub/make.py; it is the package of that name, as far as attention
goes. This file and flash.py import torch and what lies beside them.
"""

from .flash import flash_attn_func, flash_attn_varlen_func
from .sage_kernels.facts.state import HeadState, new_head_state
from .sage_kernels.ops.attention import sage_attention
from .sage_kernels.ops.varlen import sage_attention_varlen


__all__ = [
    "HeadState",
    "flash_attn_func",
    "flash_attn_varlen_func",
    "new_head_state",
    "sage_attention",
    "sage_attention_varlen",
]
