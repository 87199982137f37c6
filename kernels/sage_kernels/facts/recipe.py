"""The table of named attention recipes: the number format of each matmul."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


SCALINGS = ("per_block", "per_token", "per_head")
ROTATIONS = ("none", "hadamard")

# Symmetric range [-127, 127]: without -128, |q·k| <= D · 127^2 < 2^22 for D <= 256.
INT8_MAX = 127
# The floor is on amax, not on the scale: a group of zeros becomes zeros with a finite scale, never 0/0.
AMAX_FLOOR = 1e-30
# Channels this much smaller than the head's largest are balanced as if they were this large: keeps b in fp32's range.
CHANNEL_FLOOR = 2.0**-24

# Fractions, in units of 2^-23: a sampled balance within 2^(1/4) of a power of two is rounded to it, down or up.
BALANCE_NEAR_BELOW, BALANCE_NEAR_ABOVE = 1_587_183, 5_719_294
# A tile of keys whose largest code under the planned scale is below this share of 127 takes its own, smaller scale.
SHRINK_LIMIT = 0.875
# A plan's centre and balance serve a call while their squared error, on a sample of FIT_SAMPLES tokens, is at most
# FIT_LIMIT times that of the best ones. The best ones follow the sample's noise, so a plan of other inputs of the same
# kind must stay below the limit; one with keys five times as large, or channels eight times as large, must not.
# STEADY_FIT_LIMIT is for heads whose latest step was as its plan expected. Of a head with a few tokens far from all
# others the sample shows little: there the sample's own centre and balance are worse than a plan beyond FIT_LIMIT.
FIT_SAMPLES, FIT_LIMIT, STEADY_FIT_LIMIT = 16, 2.6, 8.0

# Ranges of codes that are tried for a weight's row, as shares of its largest element
SHRINKS = (1.0, 0.975, 0.95, 0.925, 0.9, 0.875, 0.85)

# e4m3: 4 significant bits from 2^-6 on, steps of 2^-9 below, nothing above 448 but NaN.
E4M3_MAX = 448.0
# Q and K in e4m3 have 128 where INT8 has 127. A floating-point format is as precise there as at 448, and the largest
# element of a group, which weighs most, is then a power of two and not rounded at all.
E4M3_OF_INT8 = 128.0 / INT8_MAX
# The largest known value of a channel of V becomes this code. A floating-point format is as precise there as at 448,
# and the V of a later step may grow by 7 times without being clipped.
V_CODE = 64.0
# A channel of V with a smaller amax is treated as zeros: its inverse scale stays in fp32's range.
V_AMAX_FLOOR = 2.0**-118
# P is 2^(score - reference). With a running max the row's largest P is 2^8 = 256, the power of two below 448.
P_EXPONENT = 8.0
# Beyond this score fp32 would round the exponent away, so there the largest P is 1.
P_EXPONENT_LIMIT = 2.0**18
# With the row's largest score of the step before as the softmax reference, an equal score has P = 2^4. A row fits if
# the exponent of its largest P lies between LOWEST and HIGHEST: e4m3 ends at 448 = 2^8.8, and the exponential has an
# error. See kernels/README.md.
LAGGED_EXPONENT, LAGGED_LOWEST, LAGGED_HIGHEST = 4.0, 0.0, 8.75


# P in INT8 is a whole number from 0 to 255, stored less 128. Before it is rounded down, an offset between 0 and 1 is
# added, a different sixteenth for each of eight keys: many keys of one small weight would else all be rounded alike,
# and now their sum is right. The row's largest P in a tile of keys is 254.5: its exponent and the stored offset.
P_CODE_EXPONENT, P_CODE_OFFSET = 7.991521846075695, 128
# Beyond this score fp32's rounding of the score alone could lift P above 255, so there the largest P is 1.
P_CODE_LIMIT = 2.0**14
# fp32 numbers from 2^15 to 2^16 have 8 bits behind the point: adding this puts P's code into the second byte.
P_CODE_MAGIC = 1.5 * 2.0**15 + P_CODE_OFFSET
# A tile's softmax reference may lie this far below the highest one so far: sums of 2^31 keys stay below 2^127.
P_CODE_FALL = 64.0
# INT-FlashAttention: P is a whole number from 0 to 127. The row's largest P so far is 127: its exponent.
P_SIGNED_EXPONENT = 6.988684686772166


# Gated activations of linear layers, value · f(gate) of pairs of columns, and their f
GATED = {"geglu": "gelu", "geglu_tanh": "gelu_tanh", "swiglu": "silu"}


@dataclass(frozen=True)
class Recipe:
    """Number formats of one attention recipe.

    Attributes:
        name: the string users write, the test id, the benchmark row.
        qk: format of Q and K in the score matmul: "int8" or "fp8_e4m3", which has the scales and plans of INT8.
        pv: format of P and V in the output matmul; "16bit" is the input's own fp16 or bf16 (bf16 for fp32 inputs).
            "fp8_e4m3" needs a GPU with FP8 matrix units: compute capability 8.9 or newer. "int8" runs on every GPU.
            "int8_tensor" is INT8 as INT-FlashAttention has it: one scale for a head's V, and P relative to the
            largest score so far.
        hopper: Hopper's own kernel has it; False: the general kernel runs there.
        packed: packed sequences have it (`sage_attention_varlen`).
        plain: no centre, balance or plan for Q and K, and one scale per token.
        sums_codes: weights are divided by the sum of the rounded P, not of P itself.
        study: for comparison only. Not timed, so `is_short` takes every call for a short one.
    """

    name: str
    qk: str
    pv: str
    hopper: bool = True
    packed: bool = True
    plain: bool = False
    sums_codes: bool = False
    study: bool = False

    @property
    def scalings(self) -> tuple[str, ...]:
        """The entries of SCALINGS that it has."""
        return ("per_token",) if self.plain else SCALINGS

    @property
    def keeps_rows(self) -> bool:
        """True if rows keep their largest score for the next call, as the softmax reference.

        Not with scores in FP8: Triton 3.7 can't compile that loop for compute capability 10.
        """
        return (self.qk, self.pv) == ("int8", "fp8_e4m3")


RECIPES = {
    r.name: r
    for r in (
        Recipe("qk_int8_pv_bf16", qk="int8", pv="16bit"),
        Recipe("qk_int8_pv_fp8", qk="int8", pv="fp8_e4m3"),
        Recipe("qk_int8_pv_int8", qk="int8", pv="int8", packed=False),
        Recipe("qk_fp8_pv_fp8", qk="fp8_e4m3", pv="fp8_e4m3", packed=False, study=True),
        Recipe("int_flash_half", qk="int8", pv="16bit", packed=False, plain=True, study=True),
        Recipe(
            "int_flash_full",
            qk="int8",
            pv="int8_tensor",
            hopper=False,
            packed=False,
            plain=True,
            sums_codes=True,
            study=True,
        ),
        Recipe(
            "int_flash_full_fp32_sum", qk="int8", pv="int8_tensor", hopper=False, packed=False, plain=True, study=True
        ),
    )
}
DEFAULT_RECIPE, FP8_RECIPE, INT8_RECIPE = "qk_int8_pv_bf16", "qk_int8_pv_fp8", "qk_int8_pv_int8"


# Attention in two precisions, chosen for each block of BLOCK query rows by BLOCK keys. Its options are a Mixed, its op
# is `mixed_attention`.
MIXED_RECIPE = "mixed"
BLOCK = 64
BASES = ("int8", "int4", "mxfp4", "nvfp4")
SELECTORS = ("block_mean", "quest", "local")
ACTIONS = ("promote", "skip")
# The largest number of e2m1, and the channels of a group that shares a scale in the two FP4 formats.
E2M1_MAX = 6.0
FP4_GROUPS = {"mxfp4": 32, "nvfp4": 16}
INT4_MAX = 7
# Scales of groups in MXFP4 are at least this share of the token's: codes times scale then fit fp16 exactly.
MXFP4_LOWEST = 2.0**-20


@dataclass(frozen=True)
class Mixed:
    """Options of the recipe "mixed": a cheap format for most blocks, an action for a few of them.

    Attributes:
        base: format of Q and K in the score matmul of ordinary blocks: "int8" or "int4" with a scale per token,
            "mxfp4" (groups of 32 channels) or "nvfp4" (of 16). INT4 runs on INT8 matrix units. FP4 runs on 16-bit ones
            except on NVIDIA Blackwell: the same numbers, without the speed.
        selector: how blocks are ranked, for each block of query rows separately. "block_mean": mean query times mean
            key. "quest": the largest score that the mean query can have with a key between the block's minima and
            maxima. "local": nearness to the diagonal.
        budget: share of the blocks that are acted on, 0 to 1; in causal attention, of the visible ones.
        action: "promote": the highest blocks run in 16 bit. "skip": the lowest are left out, but never the block that
            holds a causal row's own key.
        keep_blocks: sage_processors keeps the blocks that a layer's latest call acted on, for handle.report().
    Raises: TypeError or ValueError for an option of wrong type or value.
    Source: ThriftAttention (arXiv:2605.23081) for promotion, Quest (arXiv:2406.10774) for the bound.
    """

    base: str = "int8"
    selector: str = "block_mean"
    budget: float = 0.05
    action: str = "promote"
    keep_blocks: bool = False

    def __post_init__(self) -> None:
        for name, allowed in (("base", BASES), ("selector", SELECTORS), ("action", ACTIONS)):
            value = getattr(self, name)
            if not isinstance(value, str):
                raise TypeError(f"{name}: got {type(value).__name__}, expected one of {list(allowed)}")
            if value not in allowed:
                raise ValueError(f"{name}: got {value!r}, expected one of {list(allowed)}")
        if isinstance(self.budget, bool) or not isinstance(self.budget, (int, float)):
            raise TypeError(f"budget: got {type(self.budget).__name__}, expected a share from 0 to 1")
        if not 0 <= self.budget <= 1:  # False for NaN too
            raise ValueError(f"budget: got {self.budget}, expected a share from 0 to 1")
        if not isinstance(self.keep_blocks, bool):
            raise TypeError(f"keep_blocks: got {type(self.keep_blocks).__name__}, expected a bool")

    @classmethod
    def of(cls, value: Any) -> Mixed | None:
        """Convert a dict of options to a Mixed; keep a Mixed or None; else raise TypeError."""
        if value is None or isinstance(value, cls):
            return value
        if not isinstance(value, dict):
            raise TypeError(
                f"mixed: got {type(value).__name__}, expected a sage_kernels.Mixed, a dict of its options or None"
            )
        unknown = sorted(set(map(str, value)) - set(cls.__dataclass_fields__))
        if unknown:
            raise TypeError(
                f"mixed: got unknown options {unknown}, expected some of {sorted(cls.__dataclass_fields__)}"
            )
        return cls(**value)
