"""Which models an Int8KVCache is for, and what it says to the others: encoder-decoders, models without attention."""

from __future__ import annotations

import pytest
import torch
import transformers as tf
from transformers import DynamicCache, EncoderDecoderCache

import sage_processors as sp
from tests.language.tiny_cache_models import cached, states
from tests.support.placing import placed
from tests.support.tiny_language_models import MODELS


def encoder_decoder(name, layers=2):
    model, inputs = cached(name)
    if layers != 2:
        config = model.config
        config.num_layers = config.num_decoder_layers = config.decoder_layers = layers
        torch.manual_seed(0)
        model = placed(type(model)(config).eval())
        model.set_attn_implementation("sage_int8")
    if model.get_decoder().config._attn_implementation == "eager":
        pytest.skip(f"transformers {tf.__version__} gives T5's encoder and decoder no attention implementation")
    return model, inputs["input_ids"], inputs["decoder_input_ids"]


@torch.no_grad()
def step_by_step(model, ids, decoder_ids, cache):
    """Logits of a prompt of 4 tokens and of those after it, one by one."""
    encoded = model.get_encoder()(ids)
    parts = decoder_ids.split([4] + [1] * (decoder_ids.shape[1] - 4), 1)
    outputs = [model(encoder_outputs=encoded, decoder_input_ids=part, past_key_values=cache) for part in parts]
    return torch.cat([output.logits for output in outputs], 1)


@pytest.mark.parametrize(("layers", "capacity"), [(1, None), (2, None), (2, 48)])
@pytest.mark.parametrize("name", ["t5", "bart"])
def test_C12_an_encoder_decoder_model_refuses_a_cache_by_itself(name, layers, capacity):
    model, ids, decoder_ids = encoder_decoder(name, layers)
    for run in (
        lambda cache: model.generate(ids, past_key_values=cache, max_new_tokens=3),
        lambda cache: step_by_step(model, ids, decoder_ids, cache),
    ):
        with pytest.raises(TypeError, match=r"past_key_values: .*EncoderDecoderCache\(Int8KVCache\(model.config\), "):
            run(sp.Int8KVCache(model.config, capacity))


@pytest.mark.parametrize("layers", [1, 2])
@pytest.mark.parametrize(("capacity", "cross"), [(None, "exact"), (48, "int8")], ids=["growing", "static"])
@pytest.mark.parametrize("name", ["t5", "bart"])
def test_C13_an_encoder_decoder_model_with_a_cache_for_each(name, capacity, cross, layers):
    model, ids, decoder_ids = encoder_decoder(name, layers)
    own = sp.Int8KVCache(model.config, capacity)
    other = DynamicCache() if cross == "exact" else sp.Int8KVCache(model.config, capacity)
    got = step_by_step(model, ids, decoder_ids, EncoderDecoderCache(own, other))
    assert own.nbytes() > 0
    assert cross == "exact" or other.nbytes() > 0
    with torch.no_grad():
        without = model(ids, decoder_input_ids=decoder_ids).logits
        model.set_attn_implementation("eager")
        want = model(ids, decoder_input_ids=decoder_ids).logits
    assert (got - want).norm() < max(0.01 * want.norm(), 1.5 * (without - want).norm())


@pytest.mark.parametrize("name", ["t5", "bart"])
def test_C13_generation_with_a_cache_for_each_writes_the_same_text(name):
    model, ids, _ = encoder_decoder(name)
    both = EncoderDecoderCache(sp.Int8KVCache(model.config), sp.Int8KVCache(model.config))
    got = model.generate(ids, past_key_values=both, max_new_tokens=6)
    both.reset()  # and is as new
    assert torch.equal(got, model.generate(ids, past_key_values=both, max_new_tokens=6))
    model.set_attn_implementation("eager")
    assert torch.equal(got, model.generate(ids, max_new_tokens=6))


# (layers of the model; updates by layer, between which a mask's sizes are asked for or the cache is reset; what of it
# is one forward's cross-attention)
FORWARDS = {
    "sizes between": (1, ("sizes", 0, "sizes", 0, "sizes", 0), False),
    "twice after a reset": (1, ("sizes", 0, "reset", 0, 0), True),
    "a ready-made mask": (1, (0, 0, 0), False),  # as in an EncoderDecoderCache: each forward updates it once
    "another layer between": (2, (0, 1, 0, 1), False),
    "twice": (2, (0, 0), True),
}


@pytest.mark.parametrize("name", FORWARDS)
def test_C12_C13_a_layer_that_comes_twice_in_one_forward_is_cross_attention(name):
    layers, steps, is_cross = FORWARDS[name]
    cache = sp.Int8KVCache(encoder_decoder("bart", layers)[0].config)
    k, v = (x.repeat(1, 2, 1, 1)[:, :4] for x in states(2))
    done = {"sizes": lambda: cache.get_mask_sizes(2, 0), "reset": cache.reset}
    for step in steps[: len(steps) - is_cross]:
        done[step]() if step in done else cache.update(k, v, step)
    if is_cross:
        with pytest.raises(TypeError, match="updated twice"):
            cache.update(k, v, steps[-1])
    since = steps[steps.index("reset") :] if "reset" in steps else steps
    assert cache.get_seq_length() == 2 * (since.count(0) - is_cross)


def test_C12_a_decoder_whose_own_config_does_not_tell_is_known_by_the_whole_one():
    """T5Gemma: neither is_encoder_decoder nor add_cross_attention there; and as many layers as the decoder has."""
    config = tf.T5GemmaConfig(encoder={"num_hidden_layers": 3}, decoder={"num_hidden_layers": 2})
    decoder = config.get_text_config(decoder=True)
    assert not decoder.is_encoder_decoder and not getattr(decoder, "add_cross_attention", False)
    cache = sp.Int8KVCache(config)
    assert len(cache.layers) == 2
    with pytest.raises(ValueError, match=f"key_states: got {decoder.num_key_value_heads + 1} heads"):
        cache.update(*torch.randn(2, 1, decoder.num_key_value_heads + 1, 3, decoder.head_dim), 0)
    k, v = (torch.randn(1, decoder.num_key_value_heads, 3, decoder.head_dim) for _ in range(2))
    cache.get_mask_sizes(3, 0)
    cache.update(k, v, 0)
    with pytest.raises(TypeError, match="updated twice"):
        cache.update(k, v, 0)


@pytest.mark.parametrize("capacity", [None, 48], ids=["growing", "static"])
@pytest.mark.parametrize("name", ["MambaConfig", "Mamba2Config", "FalconMambaConfig", "RwkvConfig", "xLSTMConfig"])
def test_C14_a_model_without_keys_is_refused(name, capacity):
    with pytest.raises(NotImplementedError, match=f"{name} .*nothing would be stored"):
        sp.Int8KVCache(getattr(tf, name)(), capacity)


def test_C14_a_model_with_some_keys_is_not():
    config = tf.JambaConfig(num_hidden_layers=8, attn_layer_offset=4, attn_layer_period=8)
    cache = sp.Int8KVCache(config)
    assert len(cache.layers) == 8
    heads, dim = config.num_key_value_heads, config.hidden_size // config.num_attention_heads
    for _ in range(2):
        cache.update(*torch.randn(2, 1, heads, 3, dim), 4)
    # of the one layer with keys; what the others hold is theirs
    assert cache.bytes_per_token() == heads * (2 * dim + 4)
    assert cache.nbytes() == cache.layers[4].nbytes() > 6 * cache.bytes_per_token()


def test_C15_advice_for_another_batch_works():
    """A growing cache is ready after reset(); a static one keeps its buffers, and says so."""
    config = MODELS["llama"]()[0].config
    k, v = (x[:, :2] for x in states(6, batch=3))
    growing, static = sp.Int8KVCache(config), sp.Int8KVCache(config, 20)
    for cache, advice in ((growing, r"call reset\(\)"), (static, "make a new Int8KVCache")):
        cache.update(k, v, 0)
        with pytest.raises(ValueError, match=f"{advice}.*"):
            cache.update(k[:2], v[:2], 0)
        cache.reset()
    growing.update(k[:2], v[:2], 0)
    with pytest.raises(ValueError, match=r"make a new Int8KVCache: reset\(\) keeps"):
        static.update(k[:2], v[:2], 0)
    static.batch_select_indices(torch.tensor([0, 1]))  # the other half of the advice
    static.update(k[:2], v[:2], 0)


@pytest.mark.parametrize("capacity", [None, 256])
@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("llama", {"layer_types": ["sliding_attention", "sliding_attention"], "sliding_window": 11}),
        ("mistral", {"sliding_window": None}),
        ("mistral", {"sliding_window": 12}),
        ("gemma3", {"layer_types": ["full_attention", "sliding_attention"]}),
    ],
)
def test_a_cache_of_other_windows_is_refused_before_a_token_is_stored(name, change, capacity):
    model, inputs = MODELS[name]()
    model.set_attn_implementation("sage_int8")
    want = model.generate(**inputs, past_key_values=sp.Int8KVCache(model.config, capacity), max_new_tokens=12)
    other = type(model.config)(**model.config.to_dict() | change)
    for call in (model.generate, model):
        cache = sp.Int8KVCache(other, capacity)
        with pytest.raises(ValueError, match=r"sliding_window: got \w+ in layer 0 of the cache, expected \w+ as in"):
            call(**inputs, past_key_values=cache)
        assert int(cache.get_seq_length()) == 0
    fitting = sp.Int8KVCache(type(model.config)(**model.config.to_dict()), capacity)
    assert torch.equal(model.generate(**inputs, past_key_values=fitting, max_new_tokens=12), want)
    with pytest.raises(ValueError, match="sliding_window: got"):  # though it has served a model
        fitting.check_windows(other)
