"""The one table of named recipes: which number format each matmul of attention runs in."""

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

# Fractions, in units of 2^-23: a sampled balance is taken for the power of two below or above where it is within
# 2^(1/4) of it.
BALANCE_NEAR_BELOW, BALANCE_NEAR_ABOVE = 1_587_183, 5_719_294
# A tile of keys whose largest code under the planned scale is below this share of 127 takes its own, smaller scale.
SHRINK_LIMIT = 0.875
# A plan's center and balance serve a call while the squared error they leave, as a sample of so many tokens has it,
# is at most this many times that of the best ones, which follow the sample's noise: a plan of other inputs of the same
# kind is to stay below it, one of keys five times as large or of channels eight times as large above.
FIT_SAMPLES, FIT_LIMIT = 16, 2.6

# e4m3: 4 significant bits from 2^-6 on, steps of 2^-9 below, nothing above 448 but NaN.
E4M3_MAX = 448.0
# What is 127 in INT8 is 128 with Q and K in e4m3: a floating-point format is as precise here as at 448, and the
# largest element of those that share a scale, which weighs most, is a power of two and not rounded at all.
E4M3_OF_INT8 = 128.0 / INT8_MAX
# The largest value known of a channel of V becomes this code. A floating-point format is as precise here as at 448,
# and a step whose V grew by less than 7 times is not clipped.
V_CODE = 64.0
# A channel of V whose amax is below this is all zeros to us: its inverse scale stays in fp32's range.
V_AMAX_FLOOR = 2.0**-118
# P is 2^(score - reference): the row's largest is 2^8 = 256 with a running max, the power of two below 448 ...
P_EXPONENT = 8.0
# ... which scores beyond this would lose to fp32's rounding, so there the largest P is 1.
P_EXPONENT_LIMIT = 2.0**18
# Against the row's largest score of the step before, P of such a score is 2^4: what e4m3 has above (448 = 2^8.8, less
# what the exponential is off by) and below, in exponents of the largest P of a row. See kernels/README.md.
LAGGED_EXPONENT, LAGGED_LOWEST, LAGGED_HIGHEST = 4.0, 0.0, 8.75


# P in INT8 is a whole number from 0 to 255, stored less 128. It is rounded down after something between 0 and 1 was
# added, another sixteenth for each of eight keys: many keys of one small weight, which would all be rounded alike, are
# right together. The row's largest of a tile of keys is 254.5, as an exponent ...
P_CODE_EXPONENT, P_CODE_OFFSET = 7.991521846075695, 128
# ... unless it is larger than this, where fp32's rounding of a score alone could lift it above 255: then it is 1.
P_CODE_LIMIT = 2.0**14
# fp32 numbers from 2^15 to 2^16 have 8 bits behind the point: a sum with this has P's code in its second byte.
P_CODE_MAGIC = 1.5 * 2.0**15 + P_CODE_OFFSET
# How far the softmax's reference may lie below the highest one so far: sums of 2^31 keys then stay below 2^127.
P_CODE_FALL = 64.0
# INT-FlashAttention: P is a whole number from 0 to 127, the row's largest so far is 127: as an exponent.
P_SIGNED_EXPONENT = 6.988684686772166


# Activation functions of linear layers that take pairs of columns, value · f(gate), and f
GATED = {"geglu": "gelu", "geglu_tanh": "gelu_tanh", "swiglu": "silu"}


@dataclass(frozen=True)
class Recipe:
    """Number formats of one attention recipe.

    Attributes:
        name: the string users write, the test id, the benchmark row.
        qk: format of Q and K in the score matmul: "int8" or "fp8_e4m3", whose scales and plans are those of INT8.
        pv: format of P and V in the output matmul; "16bit" is the input's own fp16 or bf16 (bf16 for fp32 inputs).
            "fp8_e4m3" needs a GPU with FP8 matrix units: compute capability 8.9 or newer. "int8" runs on every GPU.
            "int8_tensor" is INT8 as INT-FlashAttention has it: one scale for a head's V, P against the largest score
            so far.
        hopper: whether Hopper's own kernel has it; without, the general one runs there.
        packed: whether packed sequences have it (`sage_attention_varlen`).
        plain: Q and K are rounded as they are, with a scale a token: no center, balance or plan.
        sums_codes: weights are divided by the sum of P as it was rounded, not as it was.
        study: for comparing; nobody has timed it, so no call is found long enough for it by itself.
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
        """Those of SCALINGS that it has."""
        return ("per_token",) if self.plain else SCALINGS

    @property
    def keeps_rows(self) -> bool:
        """Whether rows keep their largest score for the next call, as the softmax's reference.

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


# Attention in two precisions, chosen for each block of BLOCK query rows by BLOCK keys: its options are a Mixed, its op
# is `mixed_attention`.
MIXED_RECIPE = "mixed"
BLOCK = 64
BASES = ("int8", "int4", "mxfp4", "nvfp4")
SELECTORS = ("block_mean", "quest", "local")
ACTIONS = ("promote", "skip")
# The largest number of e2m1, and channels that share a scale in the two FP4 formats.
E2M1_MAX = 6.0
FP4_GROUPS = {"mxfp4": 32, "nvfp4": 16}
INT4_MAX = 7
# Scales of groups in MXFP4 are at most so much smaller than the token's: codes times scale then fit fp16 exactly.
MXFP4_LOWEST = 2.0**-20


@dataclass(frozen=True)
class Mixed:
    """Options of the recipe "mixed": a cheap format for most query-key blocks, something else for a few of them.

    Attributes:
        base: format of Q and K in the score matmul of ordinary blocks: "int8" or "int4", a scale per token; "mxfp4"
            (groups of 32 channels) or "nvfp4" (of 16). INT4 runs on INT8 matrix units, and FP4 on 16-bit ones but on
            NVIDIA Blackwell: the same numbers, without the speed.
        selector: how blocks are ranked, for each block of query rows by itself. "block_mean": mean query times mean
            key. "quest": the largest score that the mean query can have with a key between the block's minima and
            maxima. "local": nearness to the diagonal.
        budget: share of the blocks that are acted on, 0 to 1; in causal attention, of the visible ones.
        action: "promote": the highest blocks run in 16 bit. "skip": the lowest are left out, but for the one that
            holds a causal row's own key.
        keep_blocks: have sage_processors keep which blocks a layer's latest call acted on, for handle.report().
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
        if not 0 <= self.budget <= 1:  # not so for NaN either
            raise ValueError(f"budget: got {self.budget}, expected a share from 0 to 1")
        if not isinstance(self.keep_blocks, bool):
            raise TypeError(f"keep_blocks: got {type(self.keep_blocks).__name__}, expected a bool")

    @classmethod
    def of(cls, value: Any) -> Mixed | None:
        """A Mixed as it is, a dict of its options as one, None as None; TypeError for anything else."""
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
