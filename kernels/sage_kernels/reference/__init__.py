"""The specification in plain PyTorch, rounding where the kernels round: test oracle and CPU path.

May import torch and facts; never `_triton`, which never imports this.
"""

from .attention import ref_attention
from .decode import ref_append_kv, ref_decode_attention, ref_quantize_queries, ref_quantize_tokens
from .mixed import ref_mixed_attention
from .quantize import ref_quantize, ref_rotate
from .varlen import ref_attention_varlen


__all__ = [
    "ref_append_kv",
    "ref_attention",
    "ref_attention_varlen",
    "ref_decode_attention",
    "ref_mixed_attention",
    "ref_quantize",
    "ref_quantize_queries",
    "ref_quantize_tokens",
    "ref_rotate",
]
