"""Time attention together with the RMSNorm of heads and the rotary embedding in front of it.

    python kernels/benchmarks/bench_heads.py
    python kernels/benchmarks/bench_heads.py --no-save

In 16 bit this is the model's own code, compiled, followed by PyTorch's attention. Ours is `qk_norm_rope`, followed by
INT8 attention with its quantisation. Only attention's FLOPs are counted.
"""

from __future__ import annotations

import sys

import torch
import torch.nn.functional as F
from bench import (
    FP8_RECIPE,
    exact_rows,
    gate,
    make_sets,
    planned_attention,
    race,
    run_cases,
    torch_sdpa,
)
from cases import Case
from torch.nn.attention import SDPBackend

from sage_kernels import DEFAULT_RECIPE, qk_norm_rope


CASES = [
    Case("flux_1024/norm_rope", 1, 4608, 4608, 24, 24, 128),
    Case("D128_N4096_causal/norm_rope", 2, 4096, 4096, 32, 32, 128, causal=True),
    Case("qwen_image_1328/norm_rope", 1, 7145, 7145, 24, 24, 128),
]
EPS = 1e-6


def make_angles(tokens: int, head_dim: int, device) -> tuple[torch.Tensor, torch.Tensor]:
    """Return cos and sin, fp32 [S, D], for interleaved rotary embeddings."""
    frequencies = 10_000.0 ** (-torch.arange(0, head_dim, 2, device=device, dtype=torch.float32) / head_dim)
    angles = torch.arange(tokens, device=device, dtype=torch.float32)[:, None] * frequencies
    return tuple(f(angles).repeat_interleave(2, -1) for f in (torch.cos, torch.sin))


def stock_heads(x, weight, cos, sin):
    """Return RMSNorm of each head and the rotary embedding in fp32, as in diffusers. x: [B, S, H, D]."""
    x = F.rms_norm(x, x.shape[-1:], weight, EPS)
    real, imaginary = x.unflatten(-1, (-1, 2)).unbind(-1)
    turned = torch.stack((-imaginary, real), -1).flatten(-2)
    return (x.float() * cos[:, None] + turned.float() * sin[:, None]).to(x.dtype)


def providers(case, inputs, weights, angles):
    """Yield (provider, suffix, recipe, function of q, k, v before norm and embedding)."""
    causal = {"causal": "bottom_right"} if case.causal else {}
    heads = torch.compile(stock_heads, dynamic=False)

    def stock(attend):
        return lambda q, k, v: attend(heads(q, weights[0], *angles), heads(k, weights[1], *angles), v)

    def ours(**options):
        def ready(q, k):
            return qk_norm_rope([q], [k], [weights[0]], [weights[1]], eps=EPS, cos=[angles[0]], sin=[angles[1]])

        attend = planned_attention(case, *ready(*inputs[:2]), inputs[2], **options)

        def run(q, k, v):
            return attend(*ready(q, k), v)

        run.scales = attend.scales
        return run

    yield "torch_sdpa_cudnn", "", "", stock(torch_sdpa(case, SDPBackend.CUDNN_ATTENTION, **causal))
    yield "torch_sdpa_flash", "", "", stock(torch_sdpa(case, SDPBackend.FLASH_ATTENTION, **causal))
    yield "sage_kernels", "", DEFAULT_RECIPE, ours(**causal)
    if torch.version.hip is None and torch.cuda.get_device_capability() >= (8, 9):
        yield "sage_kernels", "", FP8_RECIPE, ours(recipe=FP8_RECIPE, **causal)


def run_case(case: Case, save: bool) -> list[str]:
    sets = make_sets(case)
    weights = [1 + 0.1 * torch.randn(case.head_dim, device="cuda", dtype=torch.bfloat16) for _ in range(2)]
    angles = make_angles(case.seq_q, case.head_dim, "cuda")
    q, k, v = sets[0]
    ready = (stock_heads(x.double(), w.double(), *angles) for x, w in zip((q, k), weights, strict=True))
    exact = exact_rows(case, *ready, v)
    entrants, failures = gate(case, sets[0], providers(case, sets[0], weights, angles), exact)
    race(case, entrants, sets, save)
    return failures


if __name__ == "__main__":
    sys.exit(run_cases(__doc__, CASES, run_case))
