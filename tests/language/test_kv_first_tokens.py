"""However an Int8KVCache is filled, it is as good as with a balance of channels or without, whichever is better."""

from __future__ import annotations

import random

import pytest
import torch

from sage_kernels.testing import relative_l2
from sage_processors.language.kv_layers import Int8Layer
from sage_processors.language.kv_static_layers import Int8StaticLayer, Int8StaticSlidingLayer
from sage_processors.language.kv_vectors import ENOUGH, FIRST_TOKENS, different_tokens
from sage_processors.language.quantized_kv import QuantizedKV, attend
from tests.language.frozen_vectors import freeze, of_all, without
from tests.language.tiny_cache_models import assert_holds


HEADS, HEAD_DIM, LENGTH = 1, 32, 140
BAR = 1.3  # of the error that the better of both has
KINDS = {
    "growing": Int8Layer,
    "growing window": lambda: Int8Layer(sliding_window=80),
    "static": lambda: Int8StaticLayer(LENGTH),
    "static window": lambda: Int8StaticSlidingLayer(LENGTH, 80),
}


def rotary(x: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """x [B, H, S, D] turned by positions [B, S], as Llama's layers do it."""
    half = x.shape[-1] // 2
    angle = positions[:, None, :, None] * 10000.0 ** (-torch.arange(half) / half)
    cos, sin = angle.cos(), angle.sin()
    a, b = x[..., :half], x[..., half:]
    return torch.cat([a * cos - b * sin, b * cos + a * sin], -1)


def tokens(outliers, sink):
    """Queries, keys, values [B, H, S, D] before rotary embedding.

    outliers: four pairs of channels stand out in all tokens. sink: the first token's channels have sizes of their own,
    as those of attention sinks have.
    """
    generator = torch.Generator().manual_seed(0)
    q, k, v = torch.randn(3, 2, HEADS, LENGTH, HEAD_DIM, generator=generator)
    size = torch.ones(HEADS, 1, HEAD_DIM // 2)
    if outliers:
        size[..., :4] = torch.tensor([8.0, 16.0, 1 / 8, 1 / 16])
    size = torch.cat([size, size], -1)
    offset = torch.randn(HEADS, 1, HEAD_DIM, generator=generator) * size
    keys = k * size + offset
    if sink:
        keys[:, :, 0] *= torch.exp2(2 * torch.randn(HEAD_DIM, generator=generator))
    return q / size, keys, v


def filled(keys, values, queries, chunks, make, hidden=None):
    """Relative L2 error of attention of all tokens after the first of `chunks`. hidden [B]: so many are padding."""
    layer, begin, got, want = make(), 0, [], []
    window = layer.sliding_window
    for number in chunks:
        now = slice(begin, begin + number)
        shown, first = layer.get_mask_sizes(number)
        stored = layer.update(keys[:, :, now], values[:, :, now])[0]
        begin += number
        if not isinstance(stored, QuantizedKV) or begin <= ENOUGH:  # fewer tokens tell nobody which channels stand out
            continue
        column, row = torch.arange(begin), torch.arange(now.start, begin)[:, None]
        seen = column <= row if window is None else (column <= row) & (column > row - window)
        mask = seen[None].repeat(keys.shape[0], 1, 1)
        if hidden is not None:
            mask &= column >= hidden[:, None, None]
        q = queries[:, :, now]
        exact = torch.nn.functional.scaled_dot_product_attention(q, keys[:, :, :begin], values[:, :, :begin],
                                                                 attn_mask=mask[:, None])  # fmt: skip
        padded = torch.nn.functional.pad(mask, (0, stored.shape[2]))[:, None, :, first : first + stored.shape[2]]
        got.append(attend(q.transpose(1, 2), stored, attn_mask=padded).transpose(1, 2))
        want.append(exact)
        assert shown == stored.shape[2]
    assert begin == keys.shape[2]
    return float(relative_l2(torch.cat(got, 2), torch.cat(want, 2)))


def chunked(first, seed=None):
    """The first call's tokens, then 30 at a time, or numbers drawn at random."""
    chunks, generator = [first], torch.Generator().manual_seed(seed or 0)
    while sum(chunks) < LENGTH:
        number = 30 if seed is None else int(torch.randint(1, 40, (), generator=generator))
        chunks.append(min(number, LENGTH - sum(chunks)))
    return chunks


def text(kind, first):
    q, k, v = tokens(*kind)
    positions = torch.arange(LENGTH).expand(2, -1)
    return rotary(k, positions), v, rotary(q, positions), chunked(first)


def one_by_one(kind, number):
    """So many tokens in calls of their own, the others together."""
    return *text(kind, 1)[:3], [*[1] * number, LENGTH - number]


def split(kind, seed):
    return *text(kind, 1)[:3], chunked(1 + seed % 7, seed)


def equal(kind, number):
    """A text that begins with one token over and over."""
    q, k, v = tokens(*kind)
    k[:, :, :number], v[:, :, :number] = k[:, :, :1], v[:, :, :1]
    v[:, :, :number] += 1e-3 * torch.randn(v[:, :, :number].shape, generator=torch.Generator().manual_seed(1))
    positions = torch.arange(LENGTH).expand(2, -1)
    return rotary(k, positions), v, rotary(q, positions), chunked(number)


def padded(kind, first, real):
    """Two sequences whose first calls hold `real` tokens behind padding, which is one token at position 0."""
    q, k, v = tokens(*kind)
    hidden = first - torch.tensor(real)
    positions = (torch.arange(LENGTH) - hidden[:, None]).clamp_min(0)
    for b, number in enumerate(hidden.tolist()):
        k[b, :, :number], v[b, :, :number] = k[b, :, :1], v[b, :, :1]
    return rotary(k, positions), v, rotary(q, positions), chunked(first), hidden


CASES = {
    **{f"a first call of {n}": (text, n) for n in (1, 2, 8, 64, 100)},
    "one by one, 20": (one_by_one, 20),
    **{f"random chunks {seed}": (split, seed) for seed in (1, 2, 3)},
    **{f"{n} equal tokens": (equal, n) for n in (8, 40)},
    "left padding, one token and many": (padded, 60, [1, 60]),
    "left padding, few and some": (padded, 60, [5, 30]),
}


@pytest.mark.parametrize("outliers", [False, True], ids=["alike", "outliers"])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("case", CASES)
def test_V32_a_cache_is_as_good_as_with_a_balance_and_without(case, kind, outliers, monkeypatch):
    """The better of both: vectors frozen by the first call, each pair for itself. Kinds of layers do the same."""
    make, *arguments = CASES[case]
    keys, values, queries, chunks, *hidden = make((outliers, "window" not in kind), *arguments)

    errors = []
    for choose in (None, without, of_all):
        with monkeypatch.context() as patch:
            if choose:
                freeze(patch, choose)
            errors.append(filled(keys, values, queries, chunks, KINDS[kind], *hidden))
    assert errors[0] <= BAR * min(errors[1:])


# --- what is stored ---


def bits(layer, number):
    """What a layer holds of its first `number` tokens, and its vectors."""
    buffers = (layer.k_codes, layer.k_scale, layer.v_codes, layer.v_scale)
    return [layer.k_mean, layer.k_balance, *(x[:, :, :number] for x in buffers)]


def assert_same(got, want):
    assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))


def step(layer, k, v, compiled=False):
    update = torch.compile(layer.update, backend="aot_eager", fullgraph=True) if compiled else layer.update
    return update(k, v)[0]


WHOLE = {name: make for name, make in KINDS.items() if "window" not in name} | {
    "growing window": lambda: Int8Layer(sliding_window=100),
    "static window": lambda: Int8StaticSlidingLayer(LENGTH, 100),
}


@pytest.mark.parametrize("chunks", [[1, 63], [3, 1, 20, 40], [1] * 10 + [54], [63, 1]], ids=str)
@pytest.mark.parametrize("kind", WHOLE)
def test_C01_a_cache_holds_the_same_bits_however_its_first_tokens_came(kind, chunks):
    """And no later token changes them."""
    keys, values, _, _ = text((True, True), 1)
    want, layer = WHOLE[kind](), WHOLE[kind]()
    step(want, keys[:, :, :FIRST_TOKENS], values[:, :, :FIRST_TOKENS])
    for end, number in zip(torch.tensor(chunks).cumsum(0).tolist(), chunks, strict=True):
        step(layer, keys[:, :, end - number : end], values[:, :, end - number : end])
    assert_same(bits(layer, FIRST_TOKENS), bits(want, FIRST_TOKENS))
    held = [x.clone() for x in bits(want, FIRST_TOKENS)]
    for either in (layer, want):
        step(either, keys[:, :, FIRST_TOKENS : FIRST_TOKENS + 20], values[:, :, FIRST_TOKENS : FIRST_TOKENS + 20])
        assert_same(bits(either, FIRST_TOKENS), held)


@pytest.mark.slow("compiles a step")
@pytest.mark.parametrize("kind", ["static", "static window"])
def test_C01_compiled_calls_store_what_others_do(kind):
    torch._dynamo.reset()
    keys, values, _, _ = text((True, True), 1)
    whole, other, layer = (WHOLE[kind]() for _ in range(3))
    step(whole, keys[:, :, :FIRST_TOKENS], values[:, :, :FIRST_TOKENS])
    for either in (layer, other):
        step(either, keys[:, :, :28], values[:, :, :28])
    for i in range(28, FIRST_TOKENS + 3):
        for either in (layer, other):
            step(either, keys[:, :, i : i + 1], values[:, :, i : i + 1], compiled=either is layer)
        assert_same(bits(layer, i + 1), bits(other, i + 1))
    assert_same(bits(layer, FIRST_TOKENS), bits(whole, FIRST_TOKENS))
    step(layer, keys[:, :, 67:90], values[:, :, 67:90])  # and the host takes over again
    assert_same(bits(layer, FIRST_TOKENS), bits(whole, FIRST_TOKENS))


def test_C01_a_graph_that_was_captured_among_the_first_tokens_leaves_later_ones_alone():
    """Replayed over a cache that was reset and filled by a long prompt: no guard of Dynamo's is asked then."""
    keys, values, _, _ = text((True, True), 1)
    layer = Int8StaticLayer(LENGTH)
    step(layer, keys[:, :, :3], values[:, :, :3])
    layer.reset()
    step(layer, keys[:, :, :100], values[:, :, :100])
    held = [x.clone() for x in bits(layer, 100)]
    layer._store_again_compiled(keys[:, :, 100:101], values[:, :, 100:101])
    assert_same(bits(layer, 100), held)


@pytest.mark.parametrize("kind", ["growing", "static"])
def test_C01_sequences_of_a_batch_decide_each_for_itself(kind):
    keys, values, _, chunks, _ = padded((True, True), 60, [3, 60])
    both = KINDS[kind]()
    alone = [KINDS[kind]() for _ in range(2)]
    begin = 0
    for number in chunks:
        now = slice(begin, begin + number)
        step(both, keys[:, :, now], values[:, :, now])
        for b, layer in enumerate(alone):
            step(layer, keys[b : b + 1, :, now], values[b : b + 1, :, now])
        begin += number
    for b, layer in enumerate(alone):
        assert_same(bits(layer, begin), [x[b : b + 1] for x in bits(both, begin)])
    assert (both.k_balance != 1).any(2).all()  # the one with 3 tokens behind padding has got its own by now


def test_tokens_that_differ_are_counted_by_their_values():
    values = torch.randn(2, 3, 20, 16, generator=torch.Generator().manual_seed(0))
    assert torch.equal(different_tokens(values), torch.ones(2, 20))
    values[0, :, 5:12] = values[0, :, 5:6] * (1 + 1e-3 * torch.randn(7, 16))
    values[1, :, 19] = torch.nan
    weight = different_tokens(values)
    assert weight[0].tolist() == [1] * 6 + [0] * 6 + [1] * 8 and weight[1].sum() == 19


# --- any order of operations ---


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("kind", ["growing", "static", "compiled"])
def test_C01_any_order_of_operations_leaves_the_tokens_right(kind, seed):
    """Updates, crops, reorders, copies of a batch and resets, most of them while the first tokens come."""
    torch._dynamo.reset()
    draw, generator = random.Random(seed), torch.Generator().manual_seed(seed)
    layer = Int8Layer() if kind == "growing" else Int8StaticLayer(400)
    parts = [torch.empty(2, 2, 0, 16) for _ in range(2)]
    for _ in range(10 if kind == "compiled" else 25):
        number, held = draw.choice([1, 1, 1, 2, 7, 30]), parts[0].shape[2]
        operation = draw.choice(["update"] * 6 + ["crop", "reorder", "reset"])
        if operation == "update" or not held:
            new = [torch.randn(2, 2, number, 16, generator=generator) * 2**i + 1 for i in (0, 1)]
            compiled = kind == "compiled" and held and number == 1
            stored = step(layer, *new, compiled=compiled)
            parts = [torch.cat(x, 2) for x in zip(parts, new, strict=True)]
            if isinstance(stored, QuantizedKV):
                assert_holds(stored, *parts)
        elif operation == "crop":
            removed = draw.randint(0, held)
            layer.crop(-removed)
            parts = [x[:, :, : held - removed] for x in parts]
        elif operation == "reorder":
            index = torch.tensor(draw.choice([[1, 0], [0, 0], [1, 1]]))
            layer.reorder_cache(index)
            parts = [x[index] for x in parts]
        else:
            layer.reset()
            parts = [x[:, :, :0] for x in parts]
        if parts[0].shape[2]:
            assert_holds(layer.keys, *parts)
