"""Calls under context parallelism, as far as one process can show them: short calls, masks in a ring."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

import sage_processors as sp
from sage_processors.diffusion.calls import context_parallel
from sage_processors.diffusion.calls.call_reasons import is_short


def parallel(ulysses, ring):
    return SimpleNamespace(context_parallel_config=SimpleNamespace(ulysses_degree=ulysses, ring_degree=ring))


def test_P61_masks_in_a_ring_are_refused_before_anything_is_sent():
    q = torch.zeros(1, 8, 4, 16)
    call = (q, q, q, torch.ones(1, 1, 1, 8), 0.0, False, None, False)
    with pytest.raises(NotImplementedError, match="attn_mask: got a mask together with ring attention.*Ulysses"):
        context_parallel.run_in_parallel(call, False, parallel(1, 2), None)


@pytest.mark.parametrize(("ulysses", "ring"), [(2, 1), (1, 2), (4, 1), (1, 4), (2, 2)])
def test_P60_calls_are_short_by_the_tokens_of_all_devices(ulysses, ring):
    devices = ulysses * ring
    query, key = torch.zeros(1, 9, 4, 16), torch.zeros(1, 7, 4, 16)
    assert context_parallel.lengths_in_parallel(query, key, parallel(ulysses, ring)) == (
        9 * devices, 7 * devices, 4 // ulysses,
    )  # fmt: skip
    for least, short in ((7 * devices, False), (7 * devices + 1, True)):
        config = sp.SageAttnProcessor(min_tokens=least)
        assert is_short(config, query, key, 1, 2, False, parallel(ulysses, ring)) is short
