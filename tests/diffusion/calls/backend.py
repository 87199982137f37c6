"""What tests of the back end share: it is registered while each runs, and what it counted."""

from __future__ import annotations

import pytest
import torch
from diffusers.models import attention_dispatch

import sage_processors as sp
from sage_processors.diffusion.host import dispatcher


NAME = dispatcher.NAME
# INT8 scores and P·V in bf16 on N(0, 1): some 42 dB (kernels/README.md). With a mask or a scale mixed up: below 20
CLOSE_DB = 36.0


@pytest.fixture(autouse=True)
def registered():
    sp.register_diffusers_backend(min_tokens=0)
    yield
    sp.unregister_diffusers_backend()
    assert attention_dispatch._AttentionBackendRegistry._active_backend.value == "native"


def counts():
    """(INT8 calls, {reason: exact calls}) of the back end."""
    report = sp.diffusers_backend_report()
    return report.calls, report.fallbacks


def qkv(batch=2, seq_q=48, seq_kv=48, heads=4, kv_heads=4, head_dim=32, dtype=torch.float32):
    torch.manual_seed(0)
    return tuple(
        torch.randn(batch, tokens, h, head_dim, dtype=dtype)
        for tokens, h in ((seq_q, heads), (seq_kv, kv_heads), (seq_kv, kv_heads))
    )
