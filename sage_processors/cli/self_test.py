"""Self-test of the command `doctor`: all recipes and scalings on small inputs, against fp64.

Includes each base format of mixed precision. Needs only torch.
"""

from __future__ import annotations

import logging
import math
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as functional
from torch.nn.attention import SDPBackend, sdpa_kernel

from sage_kernels import DEFAULT_RECIPE, RECIPES, Mixed, mixed_attention, sage_attention
from sage_kernels.facts.base_formats import base_codes
from sage_kernels.facts.numerics import pv_dtype
from sage_kernels.facts.recipe import BASES, INT8_MAX, MIXED_RECIPE, P_CODE_EXPONENT, P_SIGNED_EXPONENT
from sage_kernels.ops.warm_up import LONG, SHORT, CallKind, compile_ahead
from sage_kernels.planning.state import ScaleState, Site
from sage_kernels.testing import make_qkv, relative_l2


logger = logging.getLogger("sage_processors")
LARGEST_TILE = 128  # keys in a tile, with P in INT8
CREST = 5  # the largest of some thousand normally distributed numbers, in standard deviations


@dataclass(frozen=True)
class Case:
    """One shape of the self-test.

    Attributes:
        mask: None, "bool" (padding that differs in the batch) or "bias".
        same_values: V is 1 everywhere, and so the output must be. This shows a matrix unit that truncates
            numbers added to a long sum.
    """

    name: str
    seq_q: int
    seq_kv: int
    heads: int
    kv_heads: int
    head_dim: int
    mask: str | None = None
    causal: str = ""
    same_values: bool = False


CASES = (
    Case("self attention", 384, 384, 2, 2, 64),
    Case("cross attention, grouped heads", 200, 500, 4, 2, 128),
    Case("wide heads", 130, 300, 2, 2, 160),
    Case("padding mask", 200, 300, 2, 2, 64, mask="bool"),
    Case("additive bias", 200, 300, 2, 2, 64, mask="bias"),
    Case("causal", 200, 300, 2, 2, 128, causal="bottom_right"),
    Case("many keys of one value", 16, 16384, 2, 1, 64, same_values=True),
)


@dataclass
class Outcome:
    """Result of one case in one recipe and scaling.

    Attributes:
        sqnr_db: SQNR of the worst head. least_db: the least SQNR that passes.
        error: the error raised, or "".
        skipped: why this machine can't run the recipe, or "". A skipped case counts as passed.
    """

    recipe: str
    scaling: str
    case: str
    sqnr_db: float | None = None
    least_db: float | None = None
    error: str = ""
    skipped: str = ""
    passed: bool = field(init=False)

    def __post_init__(self):
        is_right = self.sqnr_db is not None and self.least_db is not None and self.sqnr_db >= self.least_db
        self.passed = bool(self.skipped) or (not self.error and is_right)


def summary(error: Exception) -> str:
    """Return the type of an error and the first line of its message."""
    return f"{type(error).__name__}: {str(error).strip().splitlines()[0] if str(error).strip() else ''}"


# --- self-test ---


def self_test(device: torch.device) -> list[Outcome]:
    """Compare every recipe, scaling and case on `device` with attention in fp64 (SDPA's MATH back end)."""
    if device.type == "cuda":
        _compile_ahead(device)
    outcomes = []
    for case in CASES:
        q, k, v = make_qkv(
            "biased_keys", 2, case.seq_q, case.seq_kv, case.heads, case.kv_heads, case.head_dim,
            dtype=torch.bfloat16, device=device,
        )  # fmt: skip
        if case.same_values:
            v = torch.ones_like(v)
        mask = _mask(case, device)
        exact = _exact(q, k, v, mask if mask is not None else _causal_mask(case, device))
        for recipe in RECIPES:
            skipped = recipe_problem(recipe, device)
            for scaling in scalings_of(recipe):
                named: dict[str, Any] = {"recipe": recipe, "scaling": scaling, "case": case.name}
                if skipped:
                    outcomes.append(Outcome(**named, skipped=skipped))
                    continue
                try:
                    out = _run(q, k, v, recipe, scaling, attn_mask=mask, causal=case.causal or False)
                    error = relative_l2(out, exact, (1, 3)).max().item()
                    if not math.isfinite(error):
                        raise ArithmeticError("the output is not finite")
                    worst = -20 * math.log10(max(error, 1e-30))
                    outcomes.append(Outcome(**named, sqnr_db=worst, least_db=least_sqnr_db(q, k, scaling, recipe)))
                except Exception as error:  # an error in one case must not hide the others
                    outcomes.append(Outcome(**named, error=summary(error)))
        if mask is None and not case.same_values:
            outcomes += [_mixed_outcome(q, k, v, exact, case, base) for base in BASES]
    return outcomes


def scalings_of(recipe: str) -> tuple[str, ...]:
    """Return the scalings with which the self-test runs a recipe."""
    return (*RECIPES[recipe].scalings, *(() if RECIPES[recipe].plain else ("timestep",)))


def kinds_of_calls(device: torch.device) -> list[CallKind]:
    """Return the kinds of calls that `self_test` makes on a GPU, in its order, for `compile_ahead`.

    Leaves out masks that differ from row to row.
    """
    kinds = []
    for case in CASES:
        for recipe in RECIPES:
            if case.mask == "bias" or recipe_problem(recipe, device):
                continue
            for scaling in scalings_of(recipe):
                kinds.append(
                    CallKind(
                        torch.bfloat16,
                        case.head_dim,
                        recipe,
                        "planned" if scaling == "timestep" else scaling,
                        causal=case.causal,
                        by_key=torch.bool if case.mask == "bool" else None,
                        tokens=(LONG if case.seq_kv >= LONG else SHORT,),
                    )  # fmt: skip
                )
    return list(dict.fromkeys(kinds))


def _compile_ahead(device: torch.device) -> None:
    """Start compiling the kernels in parallel, because one after the other they take minutes."""
    try:
        compile_ahead(kinds_of_calls(device), device)
    except Exception as error:  # the case that makes such a call reports the problem
        logger.debug("kernels are compiled when they are called for: %s", error)


def _mixed_outcome(q, k, v, exact, case: Case, base: str) -> Outcome:
    """Return the outcome of mixed precision with the base format `base`, listed in place of the scaling."""
    named: dict[str, Any] = {"recipe": MIXED_RECIPE, "scaling": base, "case": case.name}
    try:
        out = mixed_attention(q, k, v, options=Mixed(base), causal=case.causal or False)
        error = relative_l2(out, exact, (1, 3)).max().item()
        if not math.isfinite(error):
            raise ArithmeticError("the output is not finite")
        return Outcome(**named, sqnr_db=-20 * math.log10(max(error, 1e-30)), least_db=least_mixed_db(q, k, base))
    except Exception as error:
        return Outcome(**named, error=summary(error))


def least_mixed_db(q: torch.Tensor, k: torch.Tensor, base: str) -> float:
    """Return the least SQNR (dB) that passes for mixed precision with all blocks in the format `base`.

    Like `least_sqnr_db`, but with the measured rounding errors of Q and K. Promoted blocks have smaller ones.
    """
    repeat = q.shape[2] // k.shape[2]
    k = (k - k.double().mean(1, keepdim=True)).repeat_interleave(repeat, 2)
    variance = torch.zeros((), dtype=torch.float64, device=q.device)
    for rounded, other in ((q.double(), k), (k, q.double())):
        codes, scale = base_codes(rounded.float(), base)
        variance = variance + (codes * scale - rounded).square().mean((1, 3)) * other.square().mean((1, 3))
    variance = variance + 2 * (torch.finfo(pv_dtype(q.dtype)).eps / 2) ** 2
    return -10 * math.log10(4 * variance.max().item())


def recipe_problem(recipe: str, device: torch.device) -> str:
    """Return the reason why `device` can't run a recipe that other devices can; "" if it can."""
    if device.type != "cuda" or RECIPES[recipe].pv != "fp8_e4m3":
        return ""
    major, minor = torch.cuda.get_device_capability(device)
    if torch.version.hip is None and (major, minor) >= (8, 9):
        return ""
    return f"P and V in FP8 need an NVIDIA GPU of compute capability 8.9 or newer; this one has {major}.{minor}"


def _run(q, k, v, recipe, scaling, **masking):
    if scaling != "timestep":
        return sage_attention(q, k, v, recipe=recipe, scaling=scaling, **masking)
    state = ScaleState([Site("doctor", k.shape[2], k.shape[3])], device=q.device)
    sage_attention(q, k, v, recipe=recipe, state=state.head_state(0), **masking)
    state.advance(1.0, 0.5)
    out = sage_attention(q, k, v, recipe=recipe, state=state.head_state(0), **masking)
    dynamic = state.summary()[0]["dynamic_calls"]
    if dynamic != 1:
        raise RuntimeError(f"calls without planned scales: got {dynamic:g} of 2, expected only the first")
    return out


def least_sqnr_db(q: torch.Tensor, k: torch.Tensor, scaling: str, recipe: str = DEFAULT_RECIPE) -> float:
    """Return the least SQNR (dB) that attention has if it rounds correctly.

    Args: q [B, S_q, H, D], k [B, S_kv, H_kv, D].

    Rounding to steps of s is noise of variance s² / 12. A score q·k / √D then has an error of variance
    (mean s_q² · mean k² + mean s_k² · mean q²) / 12, and so has the logarithm of its weight. For values without
    structure, this is the relative error variance of the output. Further errors are added to it:

    * P and the output in 16 bit.
    * P and V in e4m3: the step is 2^-3 of the power of two below a number. The variance is 2^-6 / 12 of that power's
      square, on average half as much of the number's own square.
    * P in INT8: the step is 1/254.5 of the largest P in a tile of keys, whose square is at most the sum of all P's
      squares. The same again is added for P's offset before it is rounded down.
    * V in INT8: the step is 1/127 of a channel's largest value, which is CREST times its mean size.
    * P and V as in INT-FlashAttention: P's step is 1/127 of the largest P of all keys. V's step is 1/127 of the head's
      largest value.

    Q and K in e4m3 have the errors of P and V in e4m3, for any scale.

    The scale of Q and K is that of a whole head, the coarsest for a block, or of each token for "per_token". As
    everywhere in this project (`sage_kernels.testing`), a kernel's error may be twice the theoretical one.
    """
    repeat = q.shape[2] // k.shape[2]
    own = RECIPES[recipe]
    k = (k.double() if own.plain else k - k.double().mean(1, keepdim=True)).repeat_interleave(repeat, 2)
    group = 3 if scaling == "per_token" else (1, 3)
    of_e4m3 = 0.5 * torch.finfo(torch.float8_e4m3fn).eps ** 2 / 12
    variance = torch.zeros((), dtype=torch.float64, device=q.device)
    for rounded, other in ((q.double(), k), (k, q.double())):
        step = rounded.abs().amax(group, keepdim=True) / INT8_MAX
        noise = step.square().mean((1, 3)) / 12
        if own.qk == "fp8_e4m3":
            noise = of_e4m3 * rounded.square().mean((1, 3))
        variance = variance + noise * other.square().mean((1, 3))
    variance = variance + 2 * (torch.finfo(pv_dtype(q.dtype)).eps / 2) ** 2
    if own.pv == "fp8_e4m3":
        variance = variance + 2 * of_e4m3
    if own.pv == "int8":
        variance = variance + (2 * LARGEST_TILE / 4**P_CODE_EXPONENT + CREST**2 / INT8_MAX**2) / 12
    if own.pv == "int8_tensor":
        variance = variance + (k.shape[1] / 4**P_SIGNED_EXPONENT + CREST**2 / INT8_MAX**2) / 12
    return -10 * math.log10(4 * variance.max().item())


def _mask(case: Case, device):
    if case.mask == "bool":
        lengths = torch.tensor([case.seq_kv, case.seq_kv - 77], dtype=torch.int64, device=device)
        return (torch.arange(case.seq_kv, device=device) < lengths[:, None])[:, None, None]
    if case.mask == "bias":
        generator = torch.Generator("cpu").manual_seed(1)
        bias = torch.randn(
            1, case.heads, case.seq_q, case.seq_kv, generator=generator, dtype=torch.float32, device="cpu"
        )
        return bias.to(device, torch.bfloat16)
    return None


def _causal_mask(case: Case, device):
    if not case.causal:
        return None
    shift = case.seq_kv - case.seq_q if case.causal == "bottom_right" else 0
    return torch.ones(case.seq_q, case.seq_kv, dtype=torch.bool, device=device).tril(shift)


def _exact(q, k, v, mask):
    """Return attention in fp64, [B, S, H, D] in and out."""
    q, k, v = (x.double().transpose(1, 2) for x in (q, k, v))
    if mask is not None and mask.dtype != torch.bool:
        mask = mask.double()
    with sdpa_kernel(SDPBackend.MATH):
        out = functional.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=q.shape[1] != k.shape[1])
    return out.transpose(1, 2)
