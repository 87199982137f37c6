"""However an Int8KVCache of a real model is filled: its output is as near to stock's as with a balance or without."""

from __future__ import annotations

import pytest
import torch
from transformers import DynamicCache

import sage_processors as sp
from tests.language.frozen_vectors import freeze, of_all, without
from tests.support import real_models


pytestmark = pytest.mark.real

CACHE_ONLY = "sage_int8_real_cache"  # prompts are exact: what is measured is the cache
BAR = 1.3  # of the KL that the better of both has
LENGTH, CHUNK, TEXTS, PADDING = 144, 16, 2, 70
EVERY = 4  # the logits of so many tokens are compared


@pytest.fixture(scope="module", params=list(real_models.CHECKPOINTS))
def checkpoint(request):
    sp.register_transformers(CACHE_ONLY, min_tokens=10**6)
    model, tokenizer = real_models.load(request.param)
    return request.param, model, tokenizer


def chunked(first, length, chunk=CHUNK):
    return [first, *torch.full(((length - first) // chunk,), chunk).tolist(), (length - first) % chunk]


def case_of(name, checkpoint):
    """(ids, chunks, mask) of a case."""
    which, _, tokenizer = checkpoint
    kind, _, number = name.partition(" ")
    length = LENGTH if number != "512" else 512 + 64
    ids = real_models.windows(which, tokenizer, TEXTS if number != "512" else 1, length)
    if kind == "first":
        return ids, chunked(int(number), length), None
    if kind == "split":
        generator = torch.Generator().manual_seed(int(number))
        chunks = []
        while sum(chunks) < length:
            chunks.append(min(int(torch.randint(1, 30, (), generator=generator)), length - sum(chunks)))
        return ids, chunks, None
    if kind == "equal":  # the same token over and over, as a text begins with it
        begin = len(real_models.CHECKPOINTS[which].tokens_before)
        ids[:, begin : int(number)] = tokenizer("\n", add_special_tokens=False).input_ids[0]
        return ids, chunked(int(number), length), None
    mask = torch.ones_like(ids)  # the first call ends behind so many tokens of each text
    for row, real in enumerate((1, int(number))):
        padding = PADDING - real
        ids[row] = torch.cat([torch.zeros(padding, dtype=ids.dtype), ids[row, : length - padding]])
        mask[row, :padding] = 0
    return ids, chunked(PADDING, length), mask


@torch.no_grad()
def logits(model, case, cache):
    """Log-probabilities [B, S, V] of what comes after the first chunk, of every fourth token."""
    ids, chunks, mask = case
    begin, found = 0, []
    for number in chunks:
        if not number:
            continue
        given = {}
        if mask is not None:
            positions = (mask.cumsum(-1) - 1).clamp_min(0)
            given = {"attention_mask": mask[:, : begin + number], "position_ids": positions[:, begin : begin + number]}
        given["logits_to_keep"] = torch.arange((-begin) % EVERY, number, EVERY)
        out = model(ids[:, begin : begin + number], past_key_values=cache, use_cache=True, **given).logits
        if begin:
            found.append(out.log_softmax(-1))
        begin += number
    return torch.cat(found, 1)


CASES = [
    "first 1",
    "first 2",
    "first 8",
    "first 64",
    "first 512",
    "split 1",
    "split 2",
    "equal 8",
    "equal 40",
    "pad 5",
]


@pytest.mark.parametrize("capacity", [None, 640], ids=["growing", "static"])
@pytest.mark.parametrize("name", CASES)
def test_V32_a_real_models_cache_is_as_good_as_with_a_balance_and_without(
    checkpoint, name, capacity, monkeypatch, request
):
    """Sliding layers are among Gemma's. Static ones hold the same codes: of these three cases are enough."""
    if capacity and name not in ("first 1", "split 1", "pad 5"):
        pytest.skip("the growing cache shows it")
    if (checkpoint[0], name) == ("gemma3", "pad 5"):
        # a sequence with fewer than eight tokens behind its padding keeps ones for good: half the KL of no centre, but
        # 1.3 to 2.3 times that of a balance (kernels/NOTES.md)
        request.applymarker(pytest.mark.xfail(strict=True, reason="the cache is not told which tokens are padding"))
    _, model, _ = checkpoint
    case = case_of(name, checkpoint)
    model.set_attn_implementation("sdpa")
    want = logits(model, case, DynamicCache(config=model.config))
    model.set_attn_implementation(CACHE_ONLY)

    def distance(choose=None):
        with monkeypatch.context() as patch:
            if choose:
                freeze(patch, choose)
            got = logits(model, case, sp.Int8KVCache(model.config, capacity))
        return torch.nn.functional.kl_div(got, want, log_target=True, reduction="none").sum(-1).mean().item()

    ours, plain, balanced = distance(), distance(without), distance(of_all)
    print(f"{checkpoint[0]} {name} {capacity}: {ours:.2e}, without a balance {plain:.2e}, with {balanced:.2e}")
    assert ours <= BAR * min(plain, balanced)
