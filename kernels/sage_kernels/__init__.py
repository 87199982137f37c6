"""INT8 attention kernels and their reference, for torch alone: nothing here knows Hugging Face.

Rooms, each may import those behind it: planning (from statistics to plans), ops (the public functions), checks, then
`_triton` (kernels, imported when a GPU is there) or `reference` (plain PyTorch), and facts. compat has the private
names of PyTorch.
"""

from .checks.attention import REASONS, unsupported
from .facts.recipe import DEFAULT_RECIPE, RECIPES, ROTATIONS, SCALINGS, Mixed, Recipe
from .facts.skipping import SkipState
from .facts.state import HeadState, new_head_state
from .ops.attention import sage_attention
from .ops.backward import has_fused_backward
from .ops.decode import append_kv, sage_decode_attention
from .ops.heads import qk_norm_rope
from .ops.linear import QuantizedRows, quantize_activation, quantize_weight, quantized_linear, weight_only_linear
from .ops.linear_dynamic import dynamic_linear
from .ops.mixed import mixed_attention
from .ops.skip_state import new_skip_state
from .ops.training import differentiable_attention
from .ops.varlen import sage_attention_varlen


__all__ = [
    "DEFAULT_RECIPE",
    "REASONS",
    "RECIPES",
    "ROTATIONS",
    "SCALINGS",
    "HeadState",
    "Mixed",
    "QuantizedRows",
    "Recipe",
    "SkipState",
    "append_kv",
    "differentiable_attention",
    "dynamic_linear",
    "has_fused_backward",
    "mixed_attention",
    "new_head_state",
    "new_skip_state",
    "qk_norm_rope",
    "quantize_activation",
    "quantize_weight",
    "quantized_linear",
    "sage_attention",
    "sage_attention_varlen",
    "sage_decode_attention",
    "unsupported",
    "weight_only_linear",
]
