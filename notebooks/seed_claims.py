"""Claims of five texts on quantised attention, with corrections and measurements on a CPU.

The notebook seed_tables.py shows them. The texts are a quick reference to quantised attention for diffusion models,
the LiteAttention blog, INT-FlashAttention (arXiv:2409.16997), a lesson on mixed precision, and ThriftAttention
(arXiv:2605.23081). The notebook measures the claims of INT-FlashAttention and ThriftAttention, by rows of results.csv.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch

from sage_kernels import sage_attention
from sage_kernels.reference import ref_quantize
from sage_kernels.testing import exact_attention, make_qkv, relative_l1, relative_l2


QUICK, LITE, FLASH, LESSON, THRIFT = (
    "Quick reference", "LiteAttention", "INT-FlashAttention", "Lesson on mixed precision", "ThriftAttention",
)  # fmt: skip
MAGIC_CLASSIC, MAGIC_BLOG = 2**23 + 2**22, 2**23 + 2**22 - 1


class Claim(NamedTuple):
    """A claim of a text. correct: the right statement. measured: here, or from rows of results.csv."""

    text: str
    claim: str
    correct: str
    measured: str


def _normal(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def _codes(x: torch.Tensor, largest: float | None = None) -> tuple[torch.Tensor, float]:
    """Return INT8 codes with one scale, and the scale. Clips beyond `largest` (None: the largest |x|)."""
    scale = float(x.abs().max() if largest is None else largest) / 127
    return torch.round(x / scale).clamp(-127, 127), scale


def _percent(x: torch.Tensor | float) -> str:
    return f"{100 * float(x):.3g} %"


# --- the quick reference ---


def dividing_by_scales() -> str:
    q, k = _normal(256, 64), _normal(256, 64, seed=1)
    (q_8, q_scale), (k_8, k_scale) = _codes(q), _codes(k)
    exact, whole = q @ k.T / 8, q_8 @ k_8.T / 8
    right, wrong = whole * (q_scale * k_scale), whole / (q_scale * k_scale)
    times = wrong.abs().sum() / exact.abs().sum()
    return f"multiplied: {_percent(relative_l2(right, exact))} off; divided: {times:.0f} times too large"


def rounding_error() -> str:
    x = _normal(1 << 16)
    found = []
    for largest in (3.0, None):
        codes, scale = _codes(x, largest)
        inside = x.abs() <= 127.5 * scale
        found.append(_percent((codes * scale - x)[inside].square().mean().sqrt()))
    return f"steps of 3σ/127, of what is not clipped: {found[0]}; of the largest of {len(x)}: {found[1]}"


def largest_sum() -> str:
    return f"D = 64: {64 * 127**2:,}; with -128: {64 * 128**2:,}"


def error_by_channels() -> str:
    found = []
    for channels in (16, 64, 256):
        q, k = _normal(512, channels), _normal(512, channels, seed=1)
        (q_8, q_scale), (k_8, k_scale) = _codes(q), _codes(k)
        found.append(f"{channels}: {_percent(relative_l2(q_8 @ k_8.T * (q_scale * k_scale), q @ k.T))}")
    return "by channels, " + ", ".join(found)


def error_of_weights() -> str:
    logits = _normal(256, 1024).double()
    p = logits.softmax(-1)
    off = (logits + 0.02 * _normal(256, 1024, seed=1)).softmax(-1)
    return f"logits off by 0.02: weights off by {_percent(((off - p) / p).abs().mean())} on average"


def exponentials() -> str:
    x = torch.tensor([88.0, 89.0])
    return f"fp32: exp(88) = {x.exp()[0]:.2g}, exp(89) = {x.exp()[1]:g}"


def int32_to_fp32() -> str:
    x = torch.tensor([2**22, 2**24 + 1])
    return ", ".join(f"{a:,} → {int(b):,}" for a, b in zip(x.tolist(), x.float().tolist(), strict=True))


def fp16_exponentials() -> str:
    return ", ".join(f"exp({x}) = {float(torch.tensor(float(x)).exp().half()):.2g}" for x in (-9, -16, -18))


def zeros() -> str:
    codes, scale = ref_quantize(torch.zeros(1, 1, 4, 64), 1)
    return f"codes {sorted(set(codes.flatten().tolist()))}, scale {float(scale.max()):.1g}, no NaN"


def floor_of_scales() -> str:
    x = 1e-7 * _normal(1, 1, 256, 64)
    codes, scale = ref_quantize(x, 1)
    kept = relative_l2(codes * scale, x)
    floored = torch.round(x / (x.abs().amax() / 127).clamp_min(1e-6)) * 1e-6
    lost = relative_l2(floored, x)
    return f"of 1e-7 · N(0, 1): {_percent(kept)} off with the floor on amax, {_percent(lost)} on scales"


def memory() -> str:
    return f"Q, K, V, O: {(1 + 1 + 2 + 2) / 8}; Q, K, V: {4 / 6:.3f}; Q and K alone: {2 / 4}"


def bound_of_speed() -> str:
    return f"1 / (0.5 · 0.5 + 0.5) = {1 / 0.75:.2f}"


def sigma_formulas() -> str:
    """Measure scales that follow σ, at a σ of a tenth of the reference, on features of constant size."""
    q, k, v = make_qkv("normal", 1, 128, 512, 1, 1, 64)
    exact, _ = exact_attention(q, k, v)
    found = {}
    for name, factor in (("fixed", 1.0), ("printed, σ_ref/σ", 10.0), ("corrected, σ/σ_ref", 0.1)):
        (q_8, q_scale), (k_8, k_scale) = (_codes(x, 4.5 * factor) for x in (q, k))
        out, _ = exact_attention(q_8 * q_scale, k_8 * k_scale, v)
        found[name] = _percent(relative_l1(out, exact))
    return ", ".join(f"{name}: {error}" for name, error in found.items())


# --- LiteAttention ---


def after_a_norm() -> str:
    """Measure features after a norm with one large value in its learned gain, as in trained models."""
    gain = torch.ones(64)
    gain[7] = 8.0
    x = torch.nn.functional.layer_norm(_normal(4096, 64), (64,))
    return f"largest of 4,096 tokens: {x.abs().max():.1f} before a gain, {(x * gain).abs().max():.1f} with one of 8"


def magic_ranges() -> str:
    found = []
    for name, magic in (("2²³ + 2²² - 1", MAGIC_BLOG), ("2²³ + 2²²", MAGIC_CLASSIC)):
        s = torch.arange(-(2**22) - 8, 2**22 + 9, dtype=torch.int32)
        bits = torch.tensor([float(magic)]).view(torch.int32)
        exact = (s + bits).view(torch.float32) - float(magic) == s.float()
        right = s[exact]
        found.append(f"{name}: {int(right.min()):,} to {int(right.max()):,}")
    return "exact, tried one by one, with " + "; ".join(found)


def folded_scale() -> str:
    found = []
    for factor in (math.log2(math.e), 1.6e-4):
        c = torch.tensor(factor, dtype=torch.float32).double()
        top = torch.arange(1000, 60_000, 7, dtype=torch.int32)
        s = top - 1000
        shifted = (s + torch.tensor([float(MAGIC_BLOG)]).view(torch.int32)).view(torch.float32).double()
        scaled = (top.double() * c).float().double()
        folded = (shifted * c - (scaled + float(MAGIC_BLOG) * c).float().double()).float()  # one FMA
        found.append(f"{factor:.2g}: {float((folded - (s - top).double() * c).abs().max()):.2g}")
    return "exponent off by, at a factor of " + ", ".join(found)


def integer_maximum() -> str:
    codes = torch.randint(-200_000, 200_000, (4096, 64), generator=torch.Generator().manual_seed(0))
    scales = 0.1 + 2 * torch.rand(4096, 64, generator=torch.Generator().manual_seed(1))
    wrong = (codes.argmax(1) != (codes * scales).argmax(1)).double().mean()
    return f"scales from 0.1 to 2.1 by token: another key is the largest in {_percent(wrong)} of the rows"


# --- the lesson ---


def linear_layer() -> str:
    x, w = _normal(4, 256), _normal(512, 256, seed=1) * 256**-0.5
    exact = x @ w.T
    w_scale = w.abs().amax(1, keepdim=True) / 127
    w_8 = torch.round(w / w_scale) * w_scale
    found = []
    for scale in (x.abs().max() / 127, x.abs().amax(1, keepdim=True) / 127):
        found.append(_percent(relative_l2((torch.round(x / scale) * scale) @ w_8.T, exact)))
    return f"one scale for x: {found[0]}; one a token: {found[1]}"


def formats() -> str:
    x = _normal(1 << 16)
    codes, scale = _codes(x)
    found = {"INT8": codes * scale}
    for name, dtype in (("e4m3", torch.float8_e4m3fn), ("e5m2", torch.float8_e5m2)):
        factor = torch.finfo(dtype).max / x.abs().max()
        found[name] = (x * factor).to(dtype).float() / factor
    return ", ".join(f"{name}: {_percent((y - x).square().mean().sqrt())}" for name, y in found.items())


def elementwise_gate() -> str:
    q, k, v = make_qkv("normal", 1, 256, 1024, 1, 1, 128)
    exact, _ = exact_attention(q, k, v)
    p = (q[0, :, 0] @ k[0, :, 0].T * 128**-0.5).softmax(-1).bfloat16().float()
    out = (p @ v[0, :, 0].bfloat16().float()).bfloat16().double()
    error = ((out - exact[0, :, 0]) / exact[0, :, 0]).abs()
    return f"attention in bf16: {_percent(error.mean())} on average, {float(error.max()):.0f} times at most"


def bits_of_nf4() -> str:
    return f"4 + 8/64 + 32/(64 · 256) = {4 + 8 / 64 + 32 / (64 * 256):.3f} bits"


def outlier_columns() -> str:
    x, w = _normal(256, 1024), _normal(512, 1024, seed=1) / 32
    x[:, ::256] *= 40
    exact = x.double() @ w.double().T
    w_scale = w.abs().amax(1, keepdim=True) / 127
    outliers = x.abs().amax(0) > 6 * 4
    quiet = torch.where(outliers, 0.0, x)
    found = {}
    for name, part, scale in (
        ("all in INT8, one scale", x, x.abs().max() / 127),
        ("all in INT8, one a token", x, x.abs().amax(1, keepdim=True) / 127),
        ("outliers in 16 bit, one scale", quiet, quiet.abs().max() / 127),
        ("outliers in 16 bit, one a token", quiet, quiet.abs().amax(1, keepdim=True) / 127),
    ):
        y = (torch.round(part / scale) * scale).double() @ (torch.round(w / w_scale) * w_scale).double().T
        if part is quiet:
            y = y + torch.where(outliers, x, 0.0).double() @ w.double().T
        found[name] = _percent(relative_l2(y, exact))
    return "; ".join(f"{name}: {error}" for name, error in found.items())


def rows_that_see_nothing() -> str:
    q, k, v = make_qkv("normal", 1, 2, 8, 1, 1, 64)
    mask = torch.tensor([[True] * 8, [False] * 8])
    out, lse = sage_attention(q, k, v, attn_mask=mask, return_lse=True)
    return f"output {float(out[0, 1].abs().max()):g}, log-sum-exp {float(lse[0, 1, 0]):g}"


def measured_here() -> list[Claim]:
    """Return the claims that this file measures."""
    return [
        Claim(QUICK, "S = Q̂·K̂ / (s_Q s_K √D)", "q ≈ s_Q q̂, so scales multiply", dividing_by_scales()),
        Claim(QUICK, "INT8 rounding is off by 2.4 %", "(3/127)² / 12 is 4.65e-5, so 0.68 % at 3σ", rounding_error()),
        Claim(QUICK, "sums within ± D · 2¹⁴, 1.05e8 at D = 64", "1.05e6 at D = 64", largest_sum()),
        Claim(QUICK, "the error of a score falls as 1/√D", "noise and signal both grow as √D", error_by_channels()),
        Claim(QUICK, "a relative error of scores is what counts", "the absolute one does", error_of_weights()),
        Claim(QUICK, "scores reach e^16384", "16384 = 128² is no logit; fp32 ends at 88.7", exponentials()),
        Claim(QUICK, "INT32 to fp32 is exact", "up to 2²⁴; scores stay below 2²² for D ≤ 256", int32_to_fp32()),
        Claim(QUICK, "no underflow of softmax in fp16", "subnormal below -9.7, 0 below -17.3", fp16_exponentials()),
        Claim(QUICK, "softmax needs an epsilon of 1e-6", "a sum is ≥ 1 or of nothing", rows_that_see_nothing()),
        Claim(QUICK, "tensors of zeros become 1", "0 with a finite scale", zeros()),
        Claim(QUICK, "a floor of 1e-6 on scales is harmless", "the floor belongs on amax", floor_of_scales()),
        Claim(QUICK, "half of the memory", "of Q and K; V and the output stay in 16 bit", memory()),
        Claim(QUICK, "1.7 times as fast on an A100", "bound of matmuls with P·V in 16 bit", bound_of_speed()),
        Claim(QUICK, "scales follow σ_ref/σ", "features behind a norm do not follow σ at all", sigma_formulas()),
        Claim(LITE, "behind a norm, Q and K lie in [-4, 4]", "the norm's gain, a bias, RoPE follow", after_a_norm()),
        Claim(LITE, "the magic number has to move by one", "both cover ± 2²²", magic_ranges()),
        Claim(LITE, "the scale folds into the exponent", "if its factor is small", folded_scale()),
        Claim(LITE, "a maximum of integers serves", "within one positive scale only", integer_maximum()),
        Claim(LESSON, "an INT8 linear layer is off by 0.1 to 1 %", "about 1 %", linear_layer()),
        Claim(LESSON, "FP8 is more precise than INT8", "for heavy tails only; of N(0, 1)", formats()),
        Claim(LESSON, "gate: 1 % on average, 5 % at most, by element", "16-bit attention fails", elementwise_gate()),
        Claim(LESSON, "NF4 with double quantisation: 4.25 bits", "a scale of scales is of 64 · 256", bits_of_nf4()),
        Claim(LESSON, "outlier columns in 16 bit, one scale for the rest", "one a token", outlier_columns()),
    ]
