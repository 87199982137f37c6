"""Where one rule of the KV cache and of windows ends and the next begins: one more or one less is another result."""

from __future__ import annotations

import pytest
import torch
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer
from transformers.modeling_utils import AttentionInterface

import sage_processors as sp
from sage_kernels import append_kv
from sage_kernels.testing import relative_l2
from sage_processors.language.kv_layers import Int8Layer
from sage_processors.language.kv_static_layers import Int8StaticLayer, Int8StaticSlidingLayer
from sage_processors.language.kv_vectors import ENOUGH, choose_vectors
from sage_processors.language.masks import BandMask
from sage_processors.language.quantized_kv import QuantizedKV, quantized_kv_of
from sage_processors.language.report import INT8, INT8_CACHE, counted
from tests.language.tiny_cache_models import assert_holds, states
from tests.support.language_calls import ANY_LENGTH, tiny
from tests.support.tiny_language_models import MODELS


def attention_layer():
    model, _ = tiny()
    return AttentionInterface._global_mapping[ANY_LENGTH], model.model.layers[0].self_attn


def test_C16_values_of_another_dtype_than_the_keys_are_refused():
    layer = Int8Layer()
    layer.update(*(x.half() for x in states(4)))
    before = [x.clone() for x in (layer.k_codes, layer.v_codes)]
    k, v = states(2, seed=1)
    with pytest.raises(ValueError, match=r"v: got torch.float32 .*, expected k's torch.float16"):
        buffers = (layer.k_codes, layer.k_scale, layer.v_codes, layer.v_scale)
        append_kv(k.half(), v, layer.k_mean, *buffers, position=4)
    assert all(torch.equal(a, b) for a, b in zip(before, (layer.k_codes, layer.v_codes), strict=True))


@pytest.mark.parametrize("cast", [None, torch.bfloat16, torch.float16], ids=["plain", "bf16", "fp16"])
@pytest.mark.parametrize(
    "make",
    [
        Int8Layer,
        lambda: Int8Layer(sliding_window=9),
        lambda: Int8StaticLayer(64),
        lambda: Int8StaticSlidingLayer(64, 9),
    ],
    ids=["growing", "growing_sliding", "static", "static_sliding"],
)
def test_C16_a_layer_brings_keys_and_values_to_one_dtype(make, cast):
    """As if they had come in it: autocast's, else that of the values. A prompt comes back as it was given."""
    layer, plain, want = make(), make(), cast or torch.float16
    for seed, number in enumerate((4, 1, 13, 1)):  # within a window, beyond it, and after it
        k, v = states(number, seed=seed)
        v = v.half() if cast is None else v.bfloat16()
        with torch.autocast("cpu", cast, enabled=cast is not None):
            got = layer.update(k, v)
        expected = plain.update(k.to(want), v.to(want))
        if seed == 0:
            assert got[0] is k and got[1] is v
        else:
            assert got[0].dtype == layer.dtype == want
            assert_same_codes(got[0], expected[0])


def assert_same_codes(got, expected):
    assert got.shape == expected.shape
    seen = slice(None) if got.lengths is None else slice(min(int(got.lengths), got.shape[2]))
    for name in ("k_codes", "k_scale", "v_codes", "v_scale"):
        assert torch.equal(getattr(got, name)[:, :, seen], getattr(expected, name)[:, :, seen])
    assert torch.equal(got.k_mean, expected.k_mean) and torch.equal(got.k_balance, expected.k_balance)


def test_C16_attention_over_a_cache_returns_autocasts_dtype():
    attend, module = attention_layer()
    layer = Int8Layer()
    for number in (12, 1):
        k, v = (x[:, :2] for x in states(number))
        with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
            out = attend(module, torch.randn(2, 4, number, 16), *layer.update(k, v.bfloat16()))[0]
        assert out.dtype == torch.bfloat16


@pytest.mark.parametrize(("window", "expected"), [(8, "window_without_mask"), (9, INT8), (10, INT8)])
def test_C17_a_window_matters_where_it_is_shorter_than_the_keys(window, expected):
    """Nine keys, no mask: a window of nine hides nothing."""
    attend, module = attention_layer()
    query, key, value = torch.randn(1, 4, 9, 16), torch.randn(1, 2, 9, 16), torch.randn(1, 2, 9, 16)
    with torch.no_grad():
        attend(module, query, key, value, sliding_window=window)
    assert set(counted(module)) == {expected}


def test_C18_a_window_to_both_sides_over_a_cache():
    """The op's window looks back alone, so this one has to be a mask."""
    attend, module = attention_layer()
    layer = Int8Layer()
    k, v = (x[:, :2] for x in states(12))
    layer.update(k, v)
    query = torch.randn(2, 4, 12, 16)
    band = BandMask((2, 1, 12, 12), 0, 2, 2, torch.empty(0))
    with torch.no_grad():
        got, _ = attend(module, query, layer.keys, layer.values, attention_mask=band)
    k, v = (x.repeat_interleave(2, 1) for x in (k, v))
    want = torch.nn.functional.scaled_dot_product_attention(query, k, v, attn_mask=band.plain()).transpose(1, 2)
    assert relative_l2(got, want) < 0.02
    assert set(counted(module)) == {INT8_CACHE}


@pytest.mark.parametrize("prompt", [5, 6, 7, 8])
@pytest.mark.parametrize("number", [2, 3])
def test_C19_tokens_that_fill_a_ring_exactly_and_one_more(prompt, number):
    """One token too many overwrites what the first of the new ones still sees."""
    ring = Int8StaticSlidingLayer(64, 8)
    first, new = states(prompt), states(number, seed=1)
    ring.update(*first)
    shown, offset = ring.get_mask_sizes(number)
    stored, _ = ring.update(*new)
    assert isinstance(stored, QuantizedKV) and stored.ring == (prompt + number <= 8)
    want = [torch.cat(x, 2) for x in zip(first, new, strict=True)]
    if stored.ring:  # read as it lies: a copy in order of age would be made for every token
        assert (shown, offset) == (8, 0) and stored.k_codes is ring.k_codes
        assert_holds(stored, *want)
    else:
        reach = min(prompt, 7) + number
        assert (shown, offset) == (reach, prompt + number - reach)
        assert_holds(stored, *(x[:, :, -reach:] for x in want))


def test_C20_key_and_value_of_two_layers_are_refused():
    """Layers that hold as many tokens look alike."""
    stored = []
    for seed in (0, 1):
        layer = Int8Layer()
        layer.update(*states(4, seed=seed))
        stored.append(layer.update(*states(1, seed=seed))[0])
    with pytest.raises(TypeError, match="do not belong together"):
        quantized_kv_of(*stored)
    assert stored[0].owner is not stored[1].owner and stored[1].owner is layer
    assert quantized_kv_of(layer.keys, layer.values).owner is layer  # which are made anew each time


@pytest.mark.parametrize("layer", [Int8Layer(), Int8StaticSlidingLayer(64, 8)], ids=["growing", "static"])
def test_keys_are_written_by_update_alone(layer):
    for name in ("keys", "values"):
        with pytest.raises(TypeError, match="keys: got Tensor, expected None.*update"):
            setattr(layer, name, torch.zeros(1, 2, 3, 16))


@pytest.mark.parametrize(
    ("options", "error"),
    [
        ({"max_cache_len": 0}, ValueError),
        ({"max_cache_len": True}, TypeError),
        ({"max_cache_len": 8.0}, TypeError),
        ({"offloading": 1}, TypeError),
        ({"offload_only_non_sliding": torch.zeros(3)}, TypeError),
    ],
)
def test_a_cache_says_which_option_it_can_t_take(options, error):
    with pytest.raises(error, match=f"{next(iter(options))}: got .*expected"):
        sp.Int8KVCache(MODELS["llama"]()[0].config, **options)


def test_a_cache_may_have_room_for_one_token():
    config = MODELS["llama"]()[0].config
    cache = sp.Int8KVCache(config, 1)
    cache.update(*(x[:, :2] for x in states(1)), 0)
    with pytest.raises(ValueError, match="expected at most 1 in all"):
        cache.update(*(x[:, :2] for x in states(1)), 0)


@pytest.mark.parametrize("window", [None, 8])
def test_the_length_of_a_growing_layer_is_transformers_own(window):
    stock = DynamicLayer() if window is None else DynamicSlidingWindowLayer(sliding_window=window)
    assert Int8Layer(sliding_window=window).get_max_length() == stock.get_max_length()


def test_one_token_counts_for_a_half():
    keys, values = torch.randn(2, 2, 3, 4, 16)
    assert torch.equal(choose_vectors(keys[:, :, :1], values[:, :, :1])[0], keys[:, :, 0] / 2)
    torch.testing.assert_close(choose_vectors(keys, values)[0], keys.sum(2) / 5)


@pytest.mark.parametrize("copies", [1, 5])
def test_a_centre_is_drawn_to_the_first_token_or_the_first_behind_padding(copies):
    """A quarter of the way; what stands before it says nothing, however often."""
    keys, values = torch.randn(2, 1, 1, ENOUGH, 16)
    keys[:, :, 0] *= 1.5
    want = choose_vectors(keys, values)[0]
    mean = keys.sum(2) / (ENOUGH + 1)
    size = (keys - mean[:, :, None]).abs().mean(2)
    torch.testing.assert_close(want, mean + ((keys[:, :, 0] - mean) / 4).clamp(-2 * size, 2 * size))
    if copies > 1:  # one token counts for all of them
        pad = torch.randn(2, 1, 1, 1, 16)
        several, one = (
            [torch.cat([x.expand(-1, -1, n, -1), y], 2) for x, y in zip(pad, (keys, values), strict=True)]
            for n in (copies, 1)
        )
        assert not torch.equal(choose_vectors(*several)[0], choose_vectors(*one)[0])  # drawn to the padding there
        means = [choose_vectors(*x, first_stays=False)[0] * (1 + 1 / x[0].shape[2]) for x in (several, one)]
        torch.testing.assert_close(*means)


@pytest.fixture
def one_rank(tmp_path):
    """A process group of this process alone."""
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()


@pytest.mark.parametrize(("heads", "fits"), [(8, True), (4, True), (3, True), (5, False), (16, False)])
def test_a_ranks_share_of_the_heads_fits_where_there_are_ranks(heads, fits, one_rank):
    """Of a model with layers of 8 heads and of 6: half of either."""
    tokens = [torch.randn(1, heads, 3, 16) for _ in range(2)]
    layer = Int8Layer(heads=frozenset({8, 6}))
    if fits:
        assert layer.update(*tokens)[0] is tokens[0]
        return
    with pytest.raises(ValueError, match=f"key_states: got {heads} heads"):
        layer.update(*tokens)


def test_without_ranks_no_share_fits():
    with pytest.raises(ValueError, match="key_states: got 4 heads"):
        Int8Layer(heads=frozenset({8})).update(*(torch.randn(1, 4, 3, 16) for _ in range(2)))
