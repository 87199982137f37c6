"""Int8KVCache: what its layers hold after anything that transformers does to a cache, and generation over it."""

from __future__ import annotations

import pytest
import torch
from transformers import DynamicCache
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer

import sage_processors as sp
from sage_processors.language.kv_layers import MIN_SLACK, Int8Layer
from sage_processors.language.quantized_kv import Int8KVCacheError, quantized_kv_of
from tests.language.tiny_cache_models import (
    BUFFERS,
    HEAD_DIM,
    HEADS,
    NAMES,
    Watched,
    assert_holds,
    cached,
    decode_logits,
    states,
)
from tests.support.tiny_language_models import MODELS


def pair(window=None):
    """A layer of ours and the 16-bit one of transformers that it stands in for."""
    stock = DynamicLayer() if window is None else DynamicSlidingWindowLayer(sliding_window=window)
    return Int8Layer(sliding_window=window), stock


def both(layers, method, *args):
    for layer in layers:
        getattr(layer, method)(*args)


def feed(layers, number, seed, batch=2):
    """Update both layers; hold what they return against each other."""
    ours, stock = layers
    new = states(number, batch, seed)
    assert ours.get_mask_sizes(number) == stock.get_mask_sizes(number)
    first = ours.get_seq_length() == 0
    got, want = ours.update(*new), stock.update(*new)
    assert ours.get_seq_length() == stock.get_seq_length()
    if first:
        assert got[0] is new[0] and got[1] is new[1]
    else:
        assert quantized_kv_of(*got) is got[0]
        assert_holds(got[0], *want)


@pytest.mark.parametrize("window", [None, 100], ids=["full", "sliding"])
def test_C01_reorder_repeat_select_crop_reset(window):
    layers = pair(window)
    feed(layers, 13, 0)
    both(layers, "reorder_cache", torch.tensor([1, 0]))
    feed(layers, 1, 1)
    both(layers, "batch_repeat_interleave", 3)
    feed(layers, 2, 2, batch=6)
    both(layers, "batch_select_indices", torch.tensor([5, 0, 1]))
    feed(layers, 1, 3, batch=3)
    both(layers, "crop", -4)
    feed(layers, 1, 4, batch=3)
    both(layers, "reorder_cache", torch.tensor([2, 2, 0]))
    both(layers, "offload")
    both(layers, "prefetch")
    feed(layers, 5, 5, batch=3)
    both(layers, "reset")
    assert layers[0].nbytes() == 0 and layers[0].keys is None
    feed(layers, 3, 6, batch=4)
    feed(layers, 1, 7, batch=4)


@pytest.mark.parametrize("record", [False, True])
def test_C04_sliding_layer_follows_transformers_own(record):
    layers = pair(window=9)
    for seed, number in enumerate((13, 1, 1, 30, 1, 4, 9, 1, 8, 1, *[1] * 150)):
        if record and seed == 2:
            both(layers, "activate_past_recording")
        feed(layers, number, seed)
        if record and seed > 2:
            both(layers, "crop", -min(2, number) if seed % 3 else 0)
    capacity = layers[0].k_codes.shape[2]
    assert capacity <= 30 + 9 + MIN_SLACK  # what falls out of the window makes room again


def test_C01_crop_of_a_full_window_needs_recording():
    layers = pair(window=6)
    feed(layers, 9, 0)
    for layer in layers:
        with pytest.raises(RuntimeError, match="crop"):
            layer.crop(-1)
    with pytest.raises(ValueError, match="crop: got 1"):
        Int8Layer().crop(1)
    ours = Int8Layer()
    ours.update(*states(3))
    with pytest.raises(ValueError, match="3 tokens were seen"):
        ours.crop(-4)


def test_appending_touches_only_the_new_token_and_grows_rarely():
    layer, moves = Int8Layer(), 0
    layer.update(*states(1000))
    for seed in range(200):
        address, end, held = layer.k_codes.data_ptr(), layer.end, layer.k_codes[:, :, : layer.end].clone()
        layer.update(*states(1, seed=seed))
        moves += layer.k_codes.data_ptr() != address
        assert torch.equal(layer.k_codes[:, :, :end], held)
    assert 1 <= moves <= 200 // MIN_SLACK + 1
    assert layer.k_codes.shape[2] <= 1200 + MIN_SLACK + 1


@pytest.mark.parametrize("head_dim", [64, 128])
def test_bytes_are_half_of_a_16_bit_cache(head_dim):
    """Bar: 0.53, scales and the room that is spare included."""
    layer = Int8Layer()
    layer.update(*states(4096, head_dim=head_dim))
    layer.update(*states(1, head_dim=head_dim))
    of_16_bit = HEADS * head_dim * 2 * 2
    assert layer.bytes_per_token() == HEADS * (2 * head_dim + 4) <= 0.53 * of_16_bit
    assert layer.nbytes() <= 0.53 * of_16_bit * 2 * 4097


def test_cache_reports_its_memory():
    config = MODELS["gemma3"]()[0].config
    config.num_key_value_heads = HEADS
    cache = sp.Int8KVCache(config)
    assert cache.nbytes() == cache.bytes_per_token() == 0
    for layer in range(2):
        cache.update(*states(80), layer)
    assert cache.bytes_per_token() == 2 * HEADS * (2 * HEAD_DIM + 4)
    tensors = [getattr(layer, name) for layer in cache.layers for name in BUFFERS]
    assert cache.nbytes() == sum(x.nbytes for x in tensors)
    assert cache.is_sliding == [True, False]
    # of 80 tokens the sliding layer keeps a window
    assert cache.layers[0].k_codes.shape[2] < 11 + MIN_SLACK + 11


# what may not happen silently


@pytest.mark.parametrize("name", ["eager", "sdpa"])
def test_any_other_attention_raises_when_it_meets_the_cache(name):
    model, inputs = cached("llama", name)
    with pytest.raises(Int8KVCacheError, match="set_attn_implementation"):
        model.generate(**inputs, past_key_values=sp.Int8KVCache(model.config), max_new_tokens=3)


def test_stored_tokens_are_no_tensor():
    layer = Int8Layer()
    layer.update(*states(4))
    stored, _ = layer.update(*states(1))
    query = torch.randn(2, 6, 1, HEAD_DIM)
    assert stored.shape == (2, HEADS, 5, HEAD_DIM) and stored.size(-2) == 5 and stored.dim() == 4
    for use in (
        lambda: query @ stored,
        lambda: torch.matmul(query, stored),
        lambda: torch.nn.functional.scaled_dot_product_attention(query, stored, stored),
        lambda: stored.transpose(2, 3),
        lambda: stored[:, :, None],
        lambda: torch.cat([stored, stored]),
        lambda: stored.to(torch.float16),
    ):
        with pytest.raises((Int8KVCacheError, TypeError)):
            use()
    assert quantized_kv_of(query, query) is None
    other, _ = layer.update(*states(1))
    for key, value in ((stored, query), (query, stored), (stored, other)):
        with pytest.raises(TypeError, match="key, value"):
            quantized_kv_of(key, value)


def test_C03_bad_input_raises_and_stores_nothing():
    cache = sp.Int8KVCache(MODELS["llama"]()[0].config)
    heads = 2  # of the config
    k, v = (x[:, :heads] for x in states(6))
    cache.update(k, v, 0)
    before = {name: getattr(cache.layers[0], name).clone() for name in BUFFERS}
    for states_, layer, error, message in (
        ((k[:1], v[:1]), 0, ValueError, "reorder or repeat the cache first"),  # wrong batch
        ((k[..., :8], v[..., :8]), 0, ValueError, "head_dim 8"),  # another model
        ((k[:, :1], v[:, :1]), 0, ValueError, "1 heads"),
        ((k[:, :1], v[:, :1]), 1, ValueError, "1 heads"),  # of a layer that is empty yet
        ((k, v), 2, ValueError, "layer_idx: got 2"),
        ((k, v[..., :8]), 0, NotImplementedError, "one size"),
        ((k.to("meta"), v.to("meta")), 0, ValueError, "device meta"),
        ((k[0], v[0]), 0, ValueError, "key_states"),
        ((k.clone().requires_grad_(), v), 0, NotImplementedError, "no_grad"),
    ):
        with pytest.raises(error, match=message):
            cache.update(*states_, layer)
    assert cache.get_seq_length() == 6
    for name, x in before.items():
        assert torch.equal(getattr(cache.layers[0], name).nan_to_num(), x.nan_to_num())


# whole models


def relative(a, b):
    return float((a - b).norm() / b.norm())


@pytest.mark.parametrize("padding", [False, True], ids=["even", "left padded"])
@pytest.mark.parametrize("name", NAMES)
def test_C04_decoding_is_a_16_bit_caches(name, padding):
    """Logits of 9 tokens given one by one."""
    model, inputs = cached(name)
    ids = torch.cat([inputs["input_ids"], inputs["input_ids"][:, :9]], 1)
    mask = torch.ones_like(ids)
    if padding:
        mask[0, :6] = 0
    got = decode_logits(model, sp.Int8KVCache(model.config), ids, 37, mask)
    model.set_attn_implementation("eager")
    want = decode_logits(model, DynamicCache(config=model.config), ids, 37, mask)
    assert got.isfinite().all()
    error = relative(got, want)
    assert error < 0.01
    model.set_attn_implementation("sage_int8")
    forgetful = decode_logits(model, sp.Int8KVCache(model.config), ids[:, 30:], 7, mask[:, 30:])
    assert relative(forgetful, want) > 10 * error  # the cache matters to these models


@pytest.mark.parametrize("name", ["llama", "gemma3"])
def test_C01_beam_search(name):
    model, inputs = cached(name)
    cache = Watched(model.config)
    model.generate(**inputs, past_key_values=cache, max_new_tokens=12, num_beams=3, do_sample=False)
    assert cache.layers[0].k_codes.shape[0] == 6
    assert cache.done.count("compared") == 11 * 2 and "reordered" in cache.done


@pytest.mark.parametrize("name", ["llama", "mistral"])
def test_C01_assisted_decoding_is_greedy_decoding(name):
    """The assistant's guesses are cropped again; what is accepted is what greedy decoding over the cache gives."""
    model, inputs = cached(name)
    ids = inputs["input_ids"][:1]
    options = {"max_new_tokens": 16, "do_sample": False, "attention_mask": torch.ones_like(ids)}
    plain = model.generate(ids, **options, past_key_values=sp.Int8KVCache(model.config))
    assistant = MODELS[name]()[0]
    torch.nn.init.normal_(assistant.lm_head.weight, std=1 / 8)  # a guess that is often wrong
    cache = Watched(model.config)
    got = model.generate(ids, **options, past_key_values=cache, assistant_model=assistant)
    assert torch.equal(got, plain)
    assert "compared" in cache.done and "cropped" in cache.done


@pytest.mark.gpu
def test_C01_offloaded_layers_decode_the_same():
    model, inputs = cached("llama")
    model, ids = model.cuda(), inputs["input_ids"].cuda()
    results = [
        decode_logits(model, sp.Int8KVCache(model.config, offloading=offload), ids, 30) for offload in (False, True)
    ]
    assert torch.equal(*results)


@pytest.mark.gpu
@pytest.mark.parametrize("capacity", [None, 48], ids=["growing", "static"])
@pytest.mark.parametrize("name", ["llama", "mistral", "gemma3", "gpt_oss"])
def test_C01_C04_models_decode_on_a_gpu(name, capacity):
    """The kernels in whole models, left padded: the reference's logits; generation compiles with a static cache."""
    model, inputs = cached(name)
    ids = inputs["input_ids"]
    mask = torch.ones_like(ids)
    mask[0, :6] = 0
    want = decode_logits(model, sp.Int8KVCache(model.config, capacity), ids, 20, mask)
    model, ids, mask = model.cuda(), ids.cuda(), mask.cuda()
    got = decode_logits(model, sp.Int8KVCache(model.config, capacity), ids, 20, mask)
    assert relative(got.cpu(), want) < 0.01
    cache = sp.Int8KVCache(model.config, capacity)
    text = model.generate(ids, attention_mask=mask, past_key_values=cache, max_new_tokens=10, do_sample=False)
    assert text.shape == (2, 47) and int(cache.get_seq_length()) == 46
