"""Continuous batching over an INT8 paged cache: a text is that of its prompt alone, whatever else the server does."""

from __future__ import annotations

import functools

import pytest
import torch
import transformers
from transformers import ContinuousBatchingConfig, GenerationConfig

import sage_processors as sp
from sage_processors.language.generation import paged_cache
from sage_processors.language.generation.batching import PAGED


PAGE, NEW = 16, 6
BASE = dict(vocab_size=97, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4,
            num_key_value_heads=2, head_dim=32, max_position_embeddings=512, initializer_range=0.3)  # fmt: skip
MODELS = {  # full attention; sliding windows alone, beside full layers, and with sinks
    "llama": ("LlamaConfig", {}),
    "mistral": ("MistralConfig", {"sliding_window": 20}),
    "gemma3": ("Gemma3TextConfig", {"sliding_window": 20, "layer_types": ["sliding_attention", "full_attention"]}),
    "gpt_oss": ("GptOssConfig", {"sliding_window": 20, "num_local_experts": 2, "num_experts_per_tok": 1,
                                 "layer_types": ["sliding_attention", "full_attention"]}),
}  # fmt: skip


def make(name="llama", **more):
    kind, own = MODELS[name]
    torch.manual_seed(0)
    config = getattr(transformers, kind)(**BASE | own | more)
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
    return model.requires_grad_(False)


def prompts(*lengths, seed=1):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(3, 97, (n,), generator=generator).tolist() for n in lengths]


def settings(**more):
    size = "page_size" if hasattr(ContinuousBatchingConfig(), "page_size") else "block_size"
    return ContinuousBatchingConfig(**{"num_blocks": 40, "max_batch_tokens": 48, size: PAGE} | more)


def serve(model, inputs, new=NEW, persistent=False, **more):
    """Outputs of a server, in the order of the inputs."""
    generation = GenerationConfig(max_new_tokens=new, do_sample=False, eos_token_id=-1, pad_token_id=0)
    if model.device.type == "cpu":  # which transformers 5.17 does not ask, where there is a GPU
        more |= {"use_cuda_graph": False}
    out = model.generate_batch(inputs, generation, settings(**more), persistent_manager=persistent)
    return list(out.values())


def texts(outputs):
    assert [x.error for x in outputs] == [None] * len(outputs)
    return [x.generated_tokens for x in outputs]


def alone(model, inputs):
    return [texts(serve(model, [x]))[0] for x in inputs]


def cache_of(model):
    return model._cached_continuous_batching_manager.batch_processor.cache


@pytest.fixture(scope="module")
def llama():
    model = make()
    model.set_attn_implementation("sage_int8")
    return model


INPUTS = prompts(5, 40, 17, 70, 3, 33)  # some take several steps, as a step has 48 tokens


@pytest.mark.parametrize(
    "name", [x if x == "llama" else pytest.param(x, marks=pytest.mark.slow("as llama")) for x in MODELS]
)
def test_texts_are_those_of_single_prompts_and_of_stock(name):
    model = make(name)
    ids = [torch.tensor([x]) for x in INPUTS]
    generation = GenerationConfig(max_new_tokens=NEW, do_sample=False, pad_token_id=0)
    stock = [model.generate(x, generation)[0, x.shape[1] :].tolist() for x in ids]
    handle = sp.apply(model, sp.SageAttnProcessor())
    together = texts(serve(model, INPUTS))
    assert together == alone(model, INPUTS[:3]) + together[3:]
    agree = sum(a == b for x, y in zip(together, stock, strict=True) for a, b in zip(x, y, strict=True))
    assert agree >= 0.8 * NEW * len(INPUTS)  # a random model has near ties, which 8 bits may turn
    assert model.config._attn_implementation == "sage_int8"
    rows = handle.report().rows
    assert len(rows) == 2 and all(row["cache_calls"] > NEW and not row["fallbacks"] for row in rows)
    handle.remove()
    assert model.config._attn_implementation == "eager"


def test_decode_steps_read_block_tables_and_the_cache_takes_half_the_bytes(llama, monkeypatch):
    seen = []
    attend = paged_cache.paged_attention
    monkeypatch.setattr(paged_cache, "paged_attention", lambda q, *a, **k: seen.append(len(q)) or attend(q, *a, **k))
    try:
        serve(llama, prompts(5, 9), persistent=True)
        ours = cache_of(llama)
        assert seen == [2] * 2 * (NEW - 1)  # two sequences, two layers
        tokens = ours.nbytes() // (2 * 2 * 2 * (32 + 2))  # K and V, layers, heads
        assert tokens >= 40 * PAGE and ours.nbytes() == tokens * 272
        assert (128 + 2) / (2 * 128) < 0.53 > (64 + 2) / (2 * 64)
    finally:
        llama.destroy_cached_continuous_batching_manager()


def test_prompts_with_a_common_prefix_share_its_pages(llama):
    common = prompts(3 * PAGE)[0]
    inputs = [common + x for x in prompts(5, 9, 2, seed=4)]
    try:
        first = texts(serve(llama, inputs[:1], persistent=True))
        used = []
        search = cache_of(llama).search_prefix_match
        cache_of(llama).search_prefix_match = lambda *a: used.append(search(*a)) or used[-1]
        second = texts(serve(llama, inputs[1:], persistent=True))
    finally:
        llama.destroy_cached_continuous_batching_manager()
    assert used == [3 * PAGE] * 2
    assert first + second == texts(serve(llama, inputs, allow_block_sharing=False))


def test_without_enough_pages_requests_wait_and_one_too_long_is_refused_alone(llama):
    inputs = prompts(60, 30, 50, 44)
    want = texts(serve(llama, inputs))
    assert texts(serve(llama, inputs, num_blocks=6)) == want  # 96 tokens for 184 and what they add
    long, all_pages = prompts(200, 96 - NEW + 1)
    outputs = serve(llama, [inputs[1], long, inputs[2], all_pages], num_blocks=6)
    assert [x.error is None for x in outputs] == [True, False, True, True]
    assert "got 200 tokens and 6 new ones, expected at most 97" in outputs[1].error
    assert [outputs[0].generated_tokens, outputs[2].generated_tokens] == want[1:3]


def test_a_step_that_fails_ends_its_requests_and_no_later_ones(llama, monkeypatch):
    want = texts(serve(llama, INPUTS))
    append, calls = paged_cache.append_pages, []

    def fail(*args, **kwargs):
        calls.append(1)
        if len(calls) == 6:
            raise torch.OutOfMemoryError("injected")
        return append(*args, **kwargs)

    try:
        monkeypatch.setattr(paged_cache, "append_pages", fail)
        outputs = serve(llama, INPUTS, persistent=True)
        assert outputs and all("injected" in str(x.error) for x in outputs)
        assert llama.config._attn_implementation == "sage_int8"
        monkeypatch.undo()
        assert texts(serve(llama, INPUTS, persistent=True)) == want  # over the same pages
    finally:
        llama.destroy_cached_continuous_batching_manager()


def test_nan_in_one_sequence_reaches_no_other_and_no_later_one(llama):
    inputs = [[x if x != 50 else 51 for x in one] for one in INPUTS]
    want = texts(serve(llama, inputs))
    kept = llama.model.embed_tokens.weight[50].clone()
    llama.model.embed_tokens.weight[50] = torch.nan
    try:
        poisoned = [*inputs[:2], [50, 7, 9] * 9, *inputs[2:]]
        got = texts(serve(llama, poisoned, persistent=True))
        assert [*got[:2], *got[3:]] == want
        assert texts(serve(llama, inputs, persistent=True)) == want  # some of them in pages that held NaN
    finally:
        llama.model.embed_tokens.weight[50] = kept
        llama.destroy_cached_continuous_batching_manager()


def test_requests_come_and_go_while_others_run(llama):
    want = alone(llama, INPUTS)
    generation = GenerationConfig(max_new_tokens=NEW, do_sample=False, eos_token_id=-1, pad_token_id=0)
    lengths, found = [NEW, 1, 4, 2, NEW, 3], {}
    with llama.continuous_batching_context_manager(
        generation, continuous_batching_config=settings(use_cuda_graph=False)
    ) as manager:
        waiting = list(zip(INPUTS, lengths, strict=True))
        names = [manager.add_request(x, max_new_tokens=n) for x, n in waiting[:2]]
        while len(found) < len(INPUTS):
            result = manager.get_result(timeout=60)
            found[result.request_id] = result
            names += [manager.add_request(x, max_new_tokens=n) for x, n in waiting[len(names) : len(names) + 2]]
    assert [found[x].generated_tokens for x in names] == [x[:n] for x, n in zip(want, lengths, strict=True)]


def test_what_pages_cannot_hold_is_refused_before_a_step(llama):
    odd = make(head_dim=258)
    odd.config._attn_implementation = "sage_int8"
    with pytest.raises(NotImplementedError, match="head_dim: got 258"):
        odd.init_continuous_batching(GenerationConfig(eos_token_id=-1), settings())._create_batch_processor()
    texts(serve(llama, prompts(3)))  # registers the name
    llama.config._attn_implementation = "sage_int8" + PAGED
    try:
        with pytest.raises(sp.UnsupportedAttentionError, match="a call without an INT8 paged cache"):
            llama(torch.tensor([[1, 2]]))
    finally:
        llama.config._attn_implementation = "sage_int8"


def test_attention_in_16_bit_is_stocks(llama):
    """With recipe="16bit" a server runs SDPA over its own pages, and the handle's name comes back."""
    model, inputs = make(), prompts(5, 30)
    model.set_attn_implementation("sdpa")
    want = texts(serve(model, inputs))
    with sp.apply(model, sp.SageAttnProcessor(recipe="16bit")):
        name = model.config._attn_implementation
        try:
            assert texts(serve(model, inputs, persistent=True)) == want
            assert not isinstance(cache_of(model), paged_cache.Int8PagedCache)
        finally:
            model.destroy_cached_continuous_batching_manager()
        assert model.config._attn_implementation == name


@pytest.mark.parametrize("name", ["llama", "gemma3"])
def test_a_forward_under_autocast_is_served_in_its_dtype(name, monkeypatch):
    """Rotary embeddings then give queries and keys another dtype than values."""
    model, inputs, dtypes = make(name), prompts(5, 40), set()
    attend = paged_cache.Int8PagedCache.attend

    def watched(*args, **kwargs):
        out = attend(*args, **kwargs)
        dtypes.add(out.dtype)
        return out

    monkeypatch.setattr(paged_cache.Int8PagedCache, "attend", watched)
    forward = model.forward

    @functools.wraps(forward)
    def cast(*args, **kwargs):
        with torch.autocast("cpu", torch.bfloat16):
            return forward(*args, **kwargs)

    model.forward = cast
    generation = GenerationConfig(max_new_tokens=NEW, do_sample=False, pad_token_id=0)
    stock = [model.generate(torch.tensor([x]), generation)[0, len(x) :].tolist() for x in inputs]
    with sp.apply(model, sp.SageAttnProcessor()):
        together = texts(serve(model, inputs))
    assert dtypes == {torch.bfloat16} and [len(x) for x in together] == [NEW] * 2
    assert all(x[0] == y[0] for x, y in zip(together, stock, strict=True))


@pytest.mark.gpu
def test_texts_on_a_gpu_from_graphs_are_those_of_single_prompts():
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA GPU")
    model, new = make(head_dim=64).to("cuda", torch.float16), 20
    ids = [torch.tensor([x], device="cuda") for x in INPUTS]
    generation = GenerationConfig(max_new_tokens=new, do_sample=False, pad_token_id=0)
    stock = [model.generate(x, generation)[0, x.shape[1] :].tolist() for x in ids]
    with sp.apply(model, sp.SageAttnProcessor()) as handle:
        together = texts(serve(model, INPUTS, new=new))
        assert together == [texts(serve(model, [x], new=new))[0] for x in INPUTS]
        assert all(row["cache_calls"] > new for row in handle.report().rows)
    agree = sum(a == b for x, y in zip(together, stock, strict=True) for a, b in zip(x[:3], y[:3], strict=True))
    assert agree >= 0.8 * 3 * len(INPUTS)  # later tokens follow from the first that differs
