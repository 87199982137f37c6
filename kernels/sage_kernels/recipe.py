"""The one table of named recipes: which number format each matmul of attention runs in."""

from __future__ import annotations

from dataclasses import dataclass


SCALINGS = ("per_block", "per_token", "per_head")
ROTATIONS = ("none", "hadamard")

# Symmetric range [-127, 127]: without -128, |q·k| <= D · 127^2 < 2^22 for D <= 256.
INT8_MAX = 127
# The floor is on amax, not on the scale: a group of zeros becomes zeros with a finite scale, never 0/0.
AMAX_FLOOR = 1e-30
# Channels this much smaller than the head's largest are balanced as if they were this large: keeps b in fp32's range.
CHANNEL_FLOOR = 2.0**-24


@dataclass(frozen=True)
class Recipe:
    """Number formats of one attention recipe.

    Attributes:
        name: the string users write, the test id, the benchmark row.
        qk: format of Q and K in the score matmul.
        pv: format of P and V in the output matmul; "16bit" is the input's own fp16 or bf16 (bf16 for fp32 inputs).
    """

    name: str
    qk: str
    pv: str


RECIPES = {r.name: r for r in (Recipe("qk_int8_pv_bf16", qk="int8", pv="16bit"),)}
DEFAULT_RECIPE = "qk_int8_pv_bf16"
