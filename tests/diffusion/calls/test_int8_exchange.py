"""Codes that devices send one another: what they stand for, and which calls are sent as codes at all."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from sage_processors.diffusion.calls import context_parallel
from sage_processors.diffusion.calls.int8_exchange import pack, unpack


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("size", [1e-3, 1.0, 300.0])
def test_P62_a_token_is_rounded_by_at_most_half_a_step_of_its_own(dtype, size):
    torch.manual_seed(0)
    x = (size * torch.randn(2, 5, 3, 40)).to(dtype)
    x[0, 1, 2] = 0.0
    packed = pack(x)
    assert packed.dtype == torch.int8 and packed.shape == (2, 5, 3, 42)
    found = unpack(packed, torch.float32)
    step = x.float().abs().amax(-1, keepdim=True) / 127 * (1 + 2**-8)  # bf16 scales: half a unit in the last place
    # at the top half a step and what the scale is off, of 127 codes
    assert ((found - x.float()).abs() <= step * (0.5 + 127 * 2**-9)).all()
    assert (found[0, 1, 2] == 0).all()
    small = x.float().abs() < 64 * step
    assert ((found - x.float()).abs() <= step * (0.5 + 64 * 2**-8))[small].all()


def test_P62_codes_of_codes_are_the_same():
    x = torch.randn(4, 100, 2, 64)
    once = pack(x)
    assert torch.equal(pack(unpack(once, torch.float32)), once)


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_P62_what_is_no_number_does_not_become_one(bad):
    x = torch.randn(2, 3, 1, 16)
    x[1, 2, 0, 5] = bad
    found = unpack(pack(x), torch.float32)
    assert found[1, 2].isnan().all() and found[0].isfinite().all() and found[1, :2].isfinite().all()


def parallel(ulysses, ring, **options):
    config = SimpleNamespace(**{"ulysses_degree": ulysses, "ring_degree": ring, "ulysses_anything": False} | options)
    return SimpleNamespace(context_parallel_config=config)


def call(heads=4, kv_heads=4, mask=None, is_causal=False):
    q, k = torch.zeros(1, 8, heads, 16), torch.zeros(1, 8, kv_heads, 16)
    return (q, k, k, mask, 0.0, is_causal, None, False)


def test_P62_only_plain_ulysses_sends_codes():
    sends = context_parallel.sends_codes
    assert sends(call(), parallel(2, 1)) and sends(call(), parallel(4, 1))
    assert not sends(call(), parallel(1, 2)) and not sends(call(), parallel(2, 2))
    assert not sends(call(), parallel(2, 1, ulysses_anything=True))
    assert not sends(call(heads=5, kv_heads=5), parallel(2, 1)) and not sends(call(kv_heads=2), parallel(2, 1))
    assert not sends(call(mask=torch.ones(1, 1, 1, 8)), parallel(2, 1))
    assert not sends(call(is_causal=True), parallel(2, 1))


def test_P61_masks_in_a_ring_are_refused_before_anything_is_sent():
    with pytest.raises(NotImplementedError, match="attn_mask: got a mask together with ring attention.*Ulysses"):
        context_parallel.run_in_parallel(call(mask=torch.ones(1, 1, 1, 8)), False, parallel(1, 2), None)


def test_lengths_in_parallel_are_those_of_one_device():
    q, k, *_ = call()
    assert context_parallel.lengths_in_parallel(q, k[:, :6], parallel(2, 1)) == (16, 12, 2)
    assert context_parallel.lengths_in_parallel(q, k[:, :6], parallel(1, 2)) == (8, 6, 4)
