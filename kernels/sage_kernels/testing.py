"""Inputs and error budgets of the tests and benchmarks: the tolerances are derived here, nowhere else."""

from __future__ import annotations

import torch

from .numerics import pv_dtype
from .reference import ref_attention


# What real attention inputs look like, from harmless to hard.
FAMILIES = ("normal", "biased_keys", "outlier_channels", "outlier_tokens")


def make_qkv(family, batch, seq_q, seq_kv, heads, kv_heads, head_dim, *, dtype=torch.float32, device="cpu", seed=0):
    """Random q [B, S_q, H, D], k, v [B, S_kv, H_kv, D].

    family: "normal" N(0, 1); "biased_keys" adds one vector to all keys of a head; "outlier_channels" multiplies two
        channels of q by 64 and divides them in k (the scores stay as they were); "outlier_tokens" makes one
        key in 50 twenty times larger in one channel.
    """
    generator = torch.Generator("cpu").manual_seed(seed)

    def normal(*shape):
        return torch.randn(*shape, generator=generator)

    q = normal(batch, seq_q, heads, head_dim)
    k = normal(batch, seq_kv, kv_heads, head_dim)
    v = normal(batch, seq_kv, kv_heads, head_dim)
    if family == "biased_keys":
        # the bias belongs to the model, not to the draw: the same for every seed
        k += 3 * torch.randn(1, 1, kv_heads, head_dim, generator=torch.Generator("cpu").manual_seed(0))
    elif family == "outlier_channels":
        q[..., :2] *= 64
        k[..., :2] /= 64
    elif family == "outlier_tokens":
        k[:, ::50, :, 1] *= 20
    elif family != "normal":
        raise ValueError(f"family: got {family!r}, expected one of {FAMILIES}")
    return tuple(x.to(device, dtype) for x in (q, k, v))


def exact_attention(q, k, v, scale=None):
    """Attention in fp64, and its LSE (natural log): out [B, S_q, H, D], lse [B, S_q, H]."""
    repeat = q.shape[2] // k.shape[2]
    q, k, v = (x.double().transpose(1, 2) for x in (q, k, v))
    k, v = (x.repeat_interleave(repeat, 1) for x in (k, v))
    scores = q @ k.mT * (q.shape[-1] ** -0.5 if scale is None else scale)
    return (scores.softmax(-1) @ v).transpose(1, 2), scores.logsumexp(-1).transpose(1, 2)


def relative_l1(out, reference, dim=None) -> torch.Tensor:
    """Σ|out - reference| / Σ|reference|, over everything or over `dim`."""
    out, reference = out.double().cpu(), reference.double().cpu()
    if dim is None:
        return (out - reference).abs().sum() / reference.abs().sum()
    return (out - reference).abs().sum(dim) / reference.abs().sum(dim)


def relative_l2(out, reference, dim=None) -> torch.Tensor:
    """‖out - reference‖ / ‖reference‖, over everything or over `dim`."""
    out, reference = out.double().cpu(), reference.double().cpu()
    dim = tuple(range(out.dim())) if dim is None else dim
    return (out - reference).square().sum(dim).sqrt() / reference.square().sum(dim).sqrt()


def sqnr_db(out, reference) -> float:
    """Signal to quantisation-noise ratio, 10·log10(Σr² / Σ(o - r)²), in dB."""
    return float(-20 * relative_l2(out, reference).log10())


# fp32 rounding of an exponent of up to 64: what even an unrounded P of one key is off by.
EXPONENT_ROUNDING = 64 * 2.0**-24


def assert_matches_reference(out, lse, q, k, v, *, state=None, **options) -> None:
    """The kernel against the same-quantisation reference, per (batch, head) and in the worst row.

    FlashAttention's rule: against the reference without rounding of P and of the output, a kernel may be twice as far
    off as the reference with both (that is the floor: what rounding alone costs). Codes that flip because a sum ran in
    another order are rare enough to stay inside.
    """
    cpu = [x.detach().cpu() for x in (q, k, v)]

    def reference(inputs, **extra):
        copied = None if state is None else type(state)(*(x.clone() for x in state))
        return ref_attention(*inputs, state=copied, **options, **extra)

    # V is rounded in both: it is an input, and rounding it is no error of the kernel
    unrounded, ref_lse = reference([x.float() for x in (*cpu[:2], cpu[2].to(pv_dtype(v.dtype)))], round_p=False)
    rounded, _ = reference(cpu)
    out = out.cpu()
    for name, dim in (("head", (1, 3)), ("row", 3)):
        floor = relative_l2(rounded, unrounded, dim).max()
        error = relative_l2(out, unrounded, dim).max()
        if not error <= 2 * floor + EXPONENT_ROUNDING:
            raise AssertionError(f"worst {name}: relative L2 {error:.2e} from the reference, floor {floor:.2e}")
    if lse is not None:
        worst = (lse.cpu() - ref_lse).abs().max()
        if not worst <= 2e-3:
            raise AssertionError(f"lse: worst error {worst:.2e}")
