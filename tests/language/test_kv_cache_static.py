"""The preallocated Int8KVCache: the growing one's results, one compiled graph, nothing written where nothing fits."""

from __future__ import annotations

import pytest
import torch
import torch._dynamo.testing
from transformers.cache_utils import DynamicSlidingWindowLayer, StaticSlidingWindowLayer

import sage_processors as sp
from sage_processors.language.kv_static_layers import Int8StaticLayer, Int8StaticSlidingLayer
from sage_processors.language.quantized_kv import QuantizedKV, attend
from tests.diffusion.steps.test_timestep import NoHostRead
from tests.language.tiny_cache_models import (
    BUFFERS,
    HEAD_DIM,
    HEADS,
    assert_holds,
    cached,
    content,
    decode_logits,
    states,
)


@pytest.fixture(autouse=True)
def fresh_dynamo():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def joined(parts):
    return tuple(torch.cat(x, 2) for x in zip(*parts, strict=True))


def bits(layer):
    """What the layer's buffers hold, NaN of unwritten scales included."""
    return [getattr(layer, name).clone().nan_to_num() for name in BUFFERS]


def same(a, b):
    return all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


def test_C01_static_layer_keeps_its_addresses():
    layer, parts = Int8StaticLayer(24), [states(9)]
    layer.update(*parts[0])
    addresses = [getattr(layer, name).data_ptr() for name in BUFFERS]
    layer.reorder_cache(torch.tensor([1, 0]))
    flipped = tuple(x.flip(0) for x in parts[0])
    new = states(4, seed=1)
    assert_holds(layer.update(*new)[0], *joined([flipped, new]))
    layer.crop(-6)
    assert int(layer.get_seq_length()) == 7
    other = states(2, seed=2)
    assert_holds(layer.update(*other)[0], *joined([[x[:, :, :7] for x in flipped], other]))
    layer.reset()
    assert int(layer.get_seq_length()) == 0 and layer.keys is None
    first, second = states(3, seed=3), states(1, seed=4)
    assert layer.update(*first)[0] is first[0]
    assert_holds(layer.update(*second)[0], *joined([first, second]))
    assert addresses == [getattr(layer, name).data_ptr() for name in BUFFERS]
    layer.batch_repeat_interleave(2)
    wide = states(1, batch=4, seed=5)
    repeated = tuple(x.repeat_interleave(2, 0) for x in joined([first, second]))
    assert_holds(layer.update(*wide)[0], *joined([repeated, wide]))
    layer.batch_select_indices(torch.tensor([3, 0]))
    assert layer.batch_size == layer.k_mean.shape[0] == 2


def test_C03_overflow_raises_before_anything_is_written():
    layer = Int8StaticLayer(8)
    with pytest.raises(ValueError, match="expected at most 8"):
        layer.update(*states(9))
    layer.update(*states(6))
    before = bits(layer)
    for call in (lambda: layer.update(*states(3)), lambda: layer.get_mask_sizes(3)):
        with pytest.raises(ValueError, match="got 3 tokens after 6, expected at most 8"):
            call()
    assert int(layer.get_seq_length()) == 6 and same(bits(layer), before)
    layer.update(*states(2))


@pytest.mark.slow("compiles a step")
def test_C03_overflow_of_compiled_calls_writes_nothing_and_gives_nan():
    """A compiled call does not know the length; the next call that does, raises."""
    layer = Int8StaticLayer(8)
    layer.update(*states(7))
    step = torch.compile(lambda k, v: layer.update(k, v)[0], backend="aot_eager", fullgraph=True)
    query = torch.randn(2, 1, HEADS, HEAD_DIM)
    assert attend(query, step(*states(1))).isfinite().all()
    before = bits(layer)
    assert attend(query, step(*states(1, seed=1))).isnan().all()
    assert same(bits(layer), before)
    with pytest.raises(ValueError, match="after 9, expected at most 8"):
        layer.get_mask_sizes(1)


def test_C03_a_window_longer_than_the_buffers_may_not_go_round():
    layer = Int8StaticSlidingLayer(8, sliding_window=20)
    layer.update(*states(8))
    with pytest.raises(ValueError, match="expected at most 8"):
        layer.update(*states(1))
    ring = Int8StaticSlidingLayer(20, sliding_window=8)
    for seed in range(30):
        ring.update(*states(1, seed=seed))
    assert ring.get_seq_length() == 30


@pytest.mark.parametrize("prompt", [3, 7, 8, 9, 20])
def test_C04_ring_shows_what_transformers_layers_show(prompt):
    """One token at a time and several; the newest 8 tokens, and for several all that any of their windows reaches."""
    window = 8
    ours, stock = Int8StaticSlidingLayer(64, window), StaticSlidingWindowLayer(64, window)
    dynamic = DynamicSlidingWindowLayer(window)
    for seed, number in enumerate((prompt, 1, 1, 5, 1, 1, 12, *[1] * 11, 2)):
        new = states(number, seed=seed)
        if seed:
            assert ours.get_mask_sizes(number) == stock.get_mask_sizes(number)
        got, want = ours.update(*new), dynamic.update(*new)
        stock.update(*new)
        assert ours.get_seq_length() == int(ours.cumulative_length) == dynamic.get_seq_length()
        if seed == 0:
            assert got == new
            continue
        reach = window - 1 + number  # the dynamic layer shows one token less than a full ring holds
        (k, k_step), (v, _) = content(got[0])
        number_shown = min(want[0].shape[2], reach)
        assert ((k[:, :, -number_shown:] - want[0]).abs() <= k_step[:, :, -number_shown:] * 0.5001 + 1e-6).all()
        assert v.shape == k.shape


def test_C04_ring_chooses_its_smoothing_anew_and_refuses_late_crops():
    layer = Int8StaticSlidingLayer(64, 8)
    k, v = states(5)
    layer.update(k, v)
    layer.crop(-2)
    assert layer.get_seq_length() == 3
    more = states(4, seed=1)
    assert_holds(layer.update(*more)[0], *joined([(k[:, :, :3], v[:, :, :3]), more]))
    before = layer.k_mean.clone()
    long = tuple(x + y for x, y in zip(states(20, seed=2), (40, 0), strict=True))
    stored, _ = layer.update(*long)
    assert_holds(stored, *joined([(k[:, :, :3], v[:, :, :3]), more, long]))
    assert (layer.k_mean - before).mean() > 30
    new = tuple(x + y for x, y in zip(states(1, seed=3), (40, 0), strict=True))
    assert_holds(layer.update(*new)[0], *(x[:, :, -8:] for x in joined([long, new])))
    with pytest.raises(RuntimeError, match="gone round"):
        layer.crop(-1)


@pytest.mark.parametrize("layer", [Int8StaticLayer(16), Int8StaticSlidingLayer(64, 16)], ids=["full", "ring"])
def test_outside_of_compiled_calls_the_host_knows_the_length(layer):
    """Reading it would wait for the device, every token."""
    layer.update(*states(3))
    with NoHostRead():
        for number in (1, 2):
            layer.get_mask_sizes(number)
            layer.update(*states(number))
    assert int(layer.get_seq_length()) == 6


def test_C01_a_compiled_first_update_keeps_its_addresses():
    """Its vectors are chosen in place: code that was compiled for a prompt serves the next one."""
    layer = Int8StaticLayer(16)
    layer.lazy_initialization(*states(0))
    addresses = [getattr(layer, name).data_ptr() for name in BUFFERS]
    k, v = states(5)
    torch.compile(lambda k, v: layer.update(k, v), backend="aot_eager", fullgraph=True)(k, v)
    assert addresses == [getattr(layer, name).data_ptr() for name in BUFFERS]
    assert_holds(layer.keys, k, v)


@pytest.mark.parametrize("layer", [Int8StaticLayer(16), Int8StaticSlidingLayer(64, 16)], ids=["full", "ring"])
def test_C01_a_layer_is_empty_when_all_of_it_is_cropped_and_not_before(layer):
    """An empty one returns its tokens as they came, and chooses its vectors by them."""
    k, v = states(3)
    layer.update(k, v)
    layer.crop(-2)
    more = states(1, seed=1)
    assert_holds(layer.update(*more)[0], *joined([(k[:, :, :1], v[:, :, :1]), more]))
    layer.crop(-2)
    assert layer.keys is None and layer.get_mask_sizes(2) == (2, 0)
    far = tuple(x + 40 for x in states(2, seed=2))
    assert layer.update(*far)[0] is far[0] and layer.k_mean.min() > 20


@pytest.mark.parametrize("padding", [False, True], ids=["even", "left padded"])
@pytest.mark.parametrize("name", ["llama", "mistral", "gemma3", "gpt_oss"])
def test_C04_static_cache_decodes_as_the_growing_one(name, padding):
    model, inputs = cached(name)
    ids = inputs["input_ids"]
    mask = torch.ones_like(ids)
    if padding:
        mask[0, :6] = 0
    ids, mask = ids[:, :30], mask[:, :30]
    for prompt in (20, 7):  # longer and shorter than the windows
        want = decode_logits(model, sp.Int8KVCache(model.config), ids, prompt, mask)
        got = decode_logits(model, sp.Int8KVCache(model.config, 40), ids, prompt, mask)
        # the same codes but for a float mask's rounding and another order of the keys
        assert (got - want).norm() <= 1e-3 * want.norm()


@pytest.mark.slow("compiles a model")
@pytest.mark.parametrize("name", ["llama", "mistral"])
def test_static_cache_decodes_in_compiled_graphs(name):
    """fullgraph, and no step after the second compiles anew (a sliding layer counts its tokens on the host)."""
    model, inputs = cached(name)
    ids = inputs["input_ids"][:, :30]
    want = decode_logits(model, sp.Int8KVCache(model.config, 40), ids, 14)
    cache = sp.Int8KVCache(model.config, 40)
    counter = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")
    with torch.no_grad():
        model(ids[:, :14], past_key_values=cache)
        fast = torch.compile(model.forward, backend=counter, fullgraph=True)
        got, frames = [], []
        for i in range(14, 30):
            position = torch.tensor([[i], [i]])
            got.append(fast(ids[:, i : i + 1], position_ids=position, past_key_values=cache).logits)
            frames.append(counter.frame_count)
        assert frames[-1] == frames[1] <= (1 if name == "llama" else 2)
    assert (torch.cat(got, 1) - want).norm() <= 1e-3 * want.norm()


def test_generate_with_a_static_cache():
    model, inputs = cached("llama")
    options = {"max_new_tokens": 12, "do_sample": False}
    cache = sp.Int8KVCache(model.config, 49)
    assert not cache.is_compileable  # `generate` would compile anew for every cache
    want = model.generate(**inputs, **options, past_key_values=sp.Int8KVCache(model.config))
    assert torch.equal(model.generate(**inputs, **options, past_key_values=cache), want)
    cache.reset()
    assert torch.equal(model.generate(**inputs, **options, past_key_values=cache), want)
    with pytest.raises(ValueError, match="larger max_cache_len"):
        model.generate(**inputs, **options, past_key_values=sp.Int8KVCache(model.config, 40))


def test_early_initialization_allocates_once():
    model, inputs = cached("llama")
    cache = sp.Int8KVCache(model.config, 48)
    cache.early_initialization(2, 2, 16, torch.float32, torch.device("cpu"))
    address, held = cache.layers[0].k_codes.data_ptr(), cache.nbytes()
    of_vectors = 2 * 2 * 2 * 16 * 4 + 2 * 2 * 2 * 48 * 16 * 4  # and of the first tokens, by which they are chosen
    assert held == 2 * (2 * 48 * cache.bytes_per_token() // 2 + of_vectors) and cache.is_initialized
    with torch.no_grad():
        model(**inputs, past_key_values=cache)
        stored = cache.layers[0].keys
    assert isinstance(stored, QuantizedKV) and stored.k_codes.data_ptr() == address and cache.nbytes() == held
