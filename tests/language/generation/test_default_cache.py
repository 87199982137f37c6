"""The cache that `generate` makes for a model with a handle: it goes on in later calls, as transformers' own does."""

from __future__ import annotations

import itertools

import pytest
import torch
import transformers as tf

import sage_processors as sp
from sage_processors.language.generation.decode_graphs import DecodeGraphs
from sage_processors.language.kv_room import LEAST_ROOM
from tests.language.generation.test_apply_language import cache_of
from tests.language.generation.test_decode_graphs import Recorder
from tests.support.out_of_memory import OutOfMemory
from tests.support.tiny_language_models import MODELS, VOCABULARY


FAMILIES = ["llama", "gemma3", "mistral", "wide"]


def ids_of(length, seed=0, batch=2):
    return torch.randint(3, VOCABULARY, (batch, length), generator=torch.Generator().manual_seed(seed))


def model_of(name):
    """A tiny model; "wide" has windows beyond the first room of a cache, whose rings must grow, too."""
    model = MODELS["mistral" if name == "wide" else name]()[0]
    if name == "wide":
        model.config.sliding_window = LEAST_ROOM + 40
        for layer in model.model.layers:
            layer.self_attn.sliding_window = LEAST_ROOM + 40
    return model


@pytest.fixture
def applied(monkeypatch):
    """A function that returns (model, its DecodeGraphs, over which a Recorder stands in for CUDA)."""
    monkeypatch.setattr(DecodeGraphs, "device_type", "cpu")

    def make(name):
        model = model_of(name)
        handle = sp.apply(model, sp.SageAttnProcessor(graphs="auto"))
        handle.graphs.record = Recorder()
        return model, handle.graphs

    return make


def generate(model, ids, cache=None, number=8):
    return model.generate(
        ids, past_key_values=cache, max_new_tokens=number, do_sample=False, return_dict_in_generate=True
    )


def talk(model, cache, turns=((80, 8), (200, 8), (1, 12), (705, 20))):
    """Tokens of several turns over one cache: (new tokens of the user, new tokens of the model)."""
    text = ids_of(0)
    for seed, (asked, answered) in enumerate(turns):
        output = generate(model, torch.cat([text, ids_of(asked, seed)], 1), cache, answered)
        text, cache = output.sequences, cache_of(output)
    return text, cache


@pytest.mark.parametrize("name", FAMILIES)
def test_a_returned_cache_goes_on_as_a_growing_one(name, applied):
    model = model_of(name)
    with sp.apply(model, sp.SageAttnProcessor()):
        want, _ = talk(model, sp.Int8KVCache(model.config))
    model, made = applied(name)
    got, cache = talk(model, None)
    assert isinstance(cache, sp.Int8KVCache) and torch.equal(got, want)
    assert made.replays and not made.eager and int(cache.get_seq_length()) == got.shape[1] - 1


@pytest.mark.parametrize("name", FAMILIES)
def test_forwards_of_one_and_of_many_tokens_make_room(name, applied):
    """Past the end of the room one by one, and by many at once, beside other caches that take the buffers left."""
    steps = [1] * 20 + [290] + [1] * 6
    model = model_of(name)
    with sp.apply(model, sp.SageAttnProcessor()), torch.no_grad():
        growing = sp.Int8KVCache(model.config)
        wants = [model(ids_of(n, i), past_key_values=growing).logits for i, n in enumerate([LEAST_ROOM - 10, *steps])]
        other = generate(model, ids_of(80, 5), sp.Int8KVCache(model.config, LEAST_ROOM)).sequences
    model, made = applied(name)
    cache = cache_of(generate(model, ids_of(LEAST_ROOM - 10), number=2))
    cache.reset()  # the room stays
    with torch.no_grad():
        model(ids_of(LEAST_ROOM - 10), past_key_values=cache)
        for i, number in enumerate(steps, 1):
            got = model(ids_of(number, i), past_key_values=cache).logits
            torch.testing.assert_close(got, wants[i], atol=1e-4, rtol=1e-4)
            if number == 1 and i % 3 == 0:
                assert torch.equal(generate(model, ids_of(80, 5)).sequences, other)
    assert made.replays
    if name != "mistral":  # whose rings never need more room
        assert cache.layers[-1].max_cache_len > LEAST_ROOM


@pytest.mark.parametrize("name", ["gemma3", "wide"])
def test_a_cache_that_has_grown_shares_no_buffers(name, applied):
    model, made = applied(name)
    caches = []
    for seed in range(3):
        kept = cache_of(generate(model, ids_of(80, seed)))
        caches.append(cache_of(generate(model, ids_of(290, seed), kept)))
        held = [getattr(layer, each).data_ptr() for one in caches for layer in one.layers for each in layer._tensors()]
        assert len(set(held)) == len(held)
    lent = [x.data_ptr() for one in made.buffers.sets for own in one.layers for x in own.tensors.values()]
    assert len(lent) > len(caches[0].layers) * 6 and len(set(lent)) == len(lent)


def test_memory_that_runs_out_while_growing_leaves_the_cache_as_it_was():
    model = model_of("wide")
    with sp.apply(model, sp.SageAttnProcessor()), torch.no_grad():
        cache = cache_of(generate(model, ids_of(80)))
        want = model(ids_of(1, 1), past_key_values=cache).logits
        cache.crop(-1)
        before = [dict(vars(layer)) for layer in cache.layers]
        for n in itertools.count(1):
            try:
                with OutOfMemory(n):
                    cache.make_room(600)
                break
            except torch.OutOfMemoryError:
                assert [vars(layer) for layer in cache.layers] == before
        assert n > 8 and {layer.max_cache_len for layer in cache.layers} == {768}
        assert torch.equal(model(ids_of(1, 1), past_key_values=cache).logits, want)


def test_a_size_that_the_user_chose_stays():
    model = model_of("llama")
    with sp.apply(model, sp.SageAttnProcessor()):
        cache = cache_of(generate(model, ids_of(80), sp.Int8KVCache(model.config, LEAST_ROOM)))
        with pytest.raises(ValueError, match="got 201 tokens after 87, expected at most 256"):
            generate(model, ids_of(288), cache)
        assert cache.layers[0].max_cache_len == LEAST_ROOM


@pytest.mark.parametrize("name", ["llama", "wide"])
def test_steps_from_graphs_stop_at_a_size_that_the_user_chose(name, applied):
    model, made = applied(name)
    with pytest.raises(ValueError, match="got 1 tokens after 256, expected at most 256"):
        generate(model, ids_of(240), sp.Int8KVCache(model.config, LEAST_ROOM), 40)
    assert made.replays


WITHOUT_INT8 = {
    "head_dim 512": ("Llama", {"head_dim": 512}, "head_dim: got 512"),
    "latent attention": (
        "DeepseekV3",
        {
            "num_key_value_heads": 4, "q_lora_rank": 32, "kv_lora_rank": 16, "qk_rope_head_dim": 8,
            "qk_nope_head_dim": 16, "v_head_dim": 16, "n_routed_experts": 4, "n_group": 1, "topk_group": 1,
            "num_experts_per_tok": 2, "moe_intermediate_size": 32, "first_k_dense_replace": 1,
        },
        "value_states: got shape",
    ),
    "values in two halves": ("DiffLlama", {}, "chunk: got a layer of an Int8KVCache"),
}  # fmt: skip


@pytest.mark.parametrize("case", WITHOUT_INT8)
def test_a_model_that_an_int8_cache_does_not_serve_keeps_its_own(case):
    family, options, said = WITHOUT_INT8[case]
    config = getattr(tf, f"{family}Config")(
        **{"vocab_size": VOCABULARY, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2}
        | {"num_attention_heads": 4, "num_key_value_heads": 2, "pad_token_id": 0, "eos_token_id": None, **options}
    )
    model = getattr(tf, f"{family}ForCausalLM")(config).eval()
    want = generate(model, ids_of(80)).sequences
    with sp.apply(model, sp.SageAttnProcessor(recipe="16bit")) as handle:
        for number in (1, 2):
            output = generate(model, ids_of(80))
            assert type(cache_of(output)) is tf.DynamicCache and torch.equal(output.sequences, want)
            note = handle.report().notes[0]
            assert said in note and note.endswith(f" Calls: {number}.")
        for row in handle.report().rows:
            assert sum(row["fallbacks"].values()) % 16 == 0  # what ran to find out is not counted
        with pytest.raises(NotImplementedError, match=said):
            model.generate(ids_of(80), max_new_tokens=8, cache_implementation="int8")


def test_a_model_whose_inputs_are_unknown_gets_an_int8_cache(monkeypatch):
    model = model_of("llama")
    forward = model.forward

    def picky(input_ids, **options):
        if input_ids.shape[0] != 2:
            raise ValueError("expected two sequences")
        return forward(input_ids=input_ids, **options)

    model.forward = picky
    with sp.apply(model, sp.SageAttnProcessor()) as handle:
        assert isinstance(cache_of(generate(model, ids_of(80))), sp.Int8KVCache)
        assert not any("stay in 16 bit" in note for note in handle.report().notes)
