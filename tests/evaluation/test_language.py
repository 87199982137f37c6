"""Perplexity and greedy text of a language model: measured as they should be, and through the INT8 cache for real."""

from __future__ import annotations

import math
from functools import partial
from types import SimpleNamespace

import pytest
import torch


pytest.importorskip("transformers")

from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM

import sage_processors as sp
from sage_processors.evaluation import language


@pytest.fixture(scope="module")
def loaded():
    return language.load()


@pytest.fixture(scope="module")
def model(loaded):
    return loaded[0]


@pytest.fixture(scope="module")
def tokenizer(loaded):
    return loaded[1]


@pytest.fixture(scope="module")
def windows(tokenizer):
    return language.heldout_windows(tokenizer, 131, count=8)


@pytest.fixture(scope="module")
def results(model, windows):
    return language.evaluate(model, windows, windows[:3, :33], new_tokens=19, prefill=17, batch=5)


# --- perplexity ---


def test_perplexity_is_the_exponential_of_the_models_own_loss(model, windows):
    ours = language.perplexity(model, windows, batch=3)
    with torch.no_grad():
        losses = [model(window[None], labels=window[None]).loss.item() for window in windows]
    assert ours.losses.tolist() == pytest.approx(losses, abs=1e-4)  # nats: fp32 logits of about 20
    assert ours.value == pytest.approx(math.exp(sum(losses) / len(losses)), rel=1e-4)


def test_losses_of_a_wide_vocabulary_are_exact(model, windows):
    """In fp32, a CPU's sum along a dimension that is not the last loses some digits of 49,152 terms."""
    torch.manual_seed(0)
    logits = torch.randn(1, windows.shape[1] - 1, 49_152)

    class Model(torch.nn.Module):
        device, config = torch.device("cpu"), model.config

        def forward(self, ids, use_cache):
            return SimpleNamespace(logits=logits)

    part = windows[:1]
    exact = -logits.double().log_softmax(-1).gather(-1, part[:, 1:, None]).mean()
    assert abs(float(language.perplexity(Model(), part).losses[0] - exact)) < 5e-6


def test_a_cache_goes_by_the_name_that_the_forward_knows():
    def old(input_ids, past_key_values=None, **kwargs): ...
    def new(input_ids, cache=None, **kwargs): ...

    held = object()
    assert language.cache_argument(old, held) == {"past_key_values": held}
    assert language.cache_argument(new, held) == {"cache": held}
    assert language.cache_argument(old, None) == language.cache_argument(new, None) == {}


@pytest.mark.parametrize(("prefill", "chunk"), [(1, 50), (17, 1), (64, 7), (130, 1), (None, 16)])
def test_reading_in_chunks_through_a_cache_changes_nothing(model, windows, prefill, chunk):
    whole = language.perplexity(model, windows[:3])
    calls = []
    hook = model.register_forward_hook(lambda *_: calls.append(1))
    cache = partial(DynamicCache, config=model.config)
    parts = language.perplexity(model, windows[:3], cache=cache, prefill=prefill, chunk=chunk, batch=2)
    hook.remove()
    assert parts.losses.tolist() == pytest.approx(whole.losses.tolist(), abs=1e-4)
    assert len(calls) == 2 * (1 + math.ceil((130 - (16 if prefill is None else prefill)) / chunk))


def test_ratio_and_its_error_are_of_the_same_windows():
    ours, stock = (
        language.Perplexity(torch.tensor(x, dtype=torch.float64)) for x in ([1.1, 2.1, 3.4], [1.0, 2.0, 3.0])
    )
    ratio, error = ours.ratio(stock)
    assert ratio == pytest.approx(math.exp(0.2)) and ratio == pytest.approx(ours.value / stock.value)
    assert error == pytest.approx(ratio * math.sqrt(0.03 / 3))  # sample variance of 0.1, 0.1 and 0.4
    assert math.isnan(language.Perplexity(stock.losses[:1]).ratio(language.Perplexity(stock.losses[:1]))[1])


# --- INT8 ---


@pytest.mark.slow("the model reads eight texts in three ways")
def test_bar_perplexity_with_int8_attention_and_cache_is_within_half_a_percent(results):
    for name in ("prefill", "prefill_kv"):
        assert abs(results[name].ratio - 1) < 0.005
        assert results[name].perplexity.losses.tolist() != results["stock"].perplexity.losses.tolist()
    assert results["prefill"].perplexity.losses.tolist() != results["prefill_kv"].perplexity.losses.tolist()


@pytest.mark.slow("the model reads eight texts in three ways")
def test_every_call_is_counted_as_what_it_was(model, results):
    layers, batches = model.config.num_hidden_layers, 2  # 8 windows by 5; the 3 prompts are one batch
    stock, prefill, kv = (results[name] for name in ("stock", "prefill", "prefill_kv"))
    assert (stock.int8_calls, stock.cache_calls, stock.exact, stock.recipe) == (0, 0, {}, "")
    assert (prefill.int8_calls, prefill.cache_calls) == (layers * (batches + 1), 0)
    assert prefill.exact == {"short": layers * 18}  # decoding on an fp32 cache: 18 of 19 tokens
    assert kv.cache_calls == layers * (batches * (130 - 17) + 18) and kv.exact == {}
    assert kv.int8_calls == kv.cache_calls + layers * (batches + 1)


@pytest.mark.slow("the model reads eight texts in three ways")
def test_cache_bytes_are_those_of_codes_and_scales(model, results):
    config = model.config
    heads, dim = config.num_hidden_layers * config.num_key_value_heads, config.head_dim
    assert results["stock"].kv_bytes_per_token == heads * 2 * dim * 4
    assert results["prefill_kv"].kv_bytes_per_token == heads * 2 * (dim + 2)  # a bf16 scale for each key and value
    assert results["prefill_kv"].kv_bytes_per_token <= 0.53 * heads * 2 * dim * 2  # of bf16


@pytest.mark.parametrize("make", [DynamicCache, sp.Int8KVCache])
def test_cache_bytes_are_counted_per_token_of_one_sequence(model, make):
    config, cache = model.config, make(config=model.config)
    with pytest.raises(ValueError, match=f"cache: got a {make.__name__} that holds no keys and values"):
        language.kv_bytes_per_token(cache)
    for layer in range(config.num_hidden_layers):
        cache.update(*torch.randn(2, 3, config.num_key_value_heads, 5, config.head_dim), layer)
    numbers = config.num_hidden_layers * config.num_key_value_heads * 2 * config.head_dim
    assert language.kv_bytes_per_token(cache, torch.bfloat16) == 2 * numbers
    exact = numbers + 2 * numbers // config.head_dim if make is sp.Int8KVCache else 4 * numbers
    assert language.kv_bytes_per_token(cache) == exact


def test_perplexity_reads_what_the_int8_cache_holds(model, windows):
    """Spoil the codes after each update: a measurement that attended to anything else would not notice."""

    class Spoiled(sp.Int8KVCache):
        def update(self, *args, **kwargs):
            result = super().update(*args, **kwargs)
            for layer in self.layers:
                if layer.is_initialized:
                    layer.v_codes.zero_()
            return result

    model.set_attn_implementation("sage_int8")
    try:
        honest, spoiled = (
            language.perplexity(model, windows[:2], cache=lambda make=make: make(model.config), prefill=100, chunk=10)
            for make in (sp.Int8KVCache, Spoiled)
        )
    finally:
        model.set_attn_implementation("sdpa")
    assert (spoiled.losses > honest.losses + 0.01).all()


@pytest.mark.parametrize("fails", [False, True])
def test_the_model_has_its_own_attention_again(windows, fails):
    config = LlamaConfig(
        vocab_size=4096, hidden_size=32, intermediate_size=32, num_hidden_layers=1, num_attention_heads=1,
        num_key_value_heads=1, head_dim=320 if fails else 16,
    )  # fmt: skip
    torch.manual_seed(0)
    model = LlamaForCausalLM(config).eval()
    model.set_attn_implementation("eager")
    if fails:  # no INT8 attention with heads this wide
        with pytest.raises(sp.UnsupportedAttentionError, match="head_dim"):
            language.evaluate(model, windows[:1, :20], windows[:1, :9], new_tokens=2)
    else:
        language.evaluate(model, windows[:1, :20], windows[:1, :9], new_tokens=2)
    assert model.config._attn_implementation == "eager"


# --- greedy text ---


def test_greedy_takes_the_best_token_every_time_and_never_ends(model, tokenizer):
    prompts = language.chat_ids(tokenizer, "Thank you.")
    tokens = language.greedy(model, prompts.repeat(3, 1), 12, batch=2)
    ids, end = prompts, tokenizer.eos_token_id
    with torch.no_grad():
        for _ in range(12):
            logits = model(ids).logits[:, -1]
            logits[:, end] = -torch.inf  # min_new_tokens: a text that ended could no longer diverge
            ids = torch.cat([ids, logits.argmax(-1, keepdim=True)], 1)
    assert tokens.shape == (3, 12) and end not in tokens and (tokens == ids[:, prompts.shape[1] :]).all()


def test_margins_are_the_lead_of_the_token_that_was_taken(model, tokenizer):
    """Also where the likeliest token would have ended the text, which `greedy` does not allow."""
    prompts = language.chat_ids(tokenizer, "Thank you.").repeat(3, 1)
    tokens, end = language.greedy(model, prompts, 12), tokenizer.eos_token_id
    found, wished = language.margins(model, prompts, tokens, batch=2), 0
    with torch.no_grad():
        logits = model(torch.cat([prompts, tokens], 1)).logits[0, prompts.shape[1] - 1 : -1]
    for row, lead in zip(logits, found[0], strict=True):
        wished += row.argmax().item() == end
        row[end] = -torch.inf
        best = row.topk(2).values
        assert lead.item() == pytest.approx((best[0] - best[1]).item(), abs=1e-4)
    assert found.shape == (3, 12) and (found >= 0).all() and wished


def test_divergence_is_reported_with_stocks_margin(model, windows, monkeypatch):
    """A cache whose values are wrong changes the text: where, and how sure stock was there, must be in the result."""
    update = sp.Int8KVCache.update

    def wrong(self, keys, values, *args, **kwargs):
        return update(self, keys, -values, *args, **kwargs)

    monkeypatch.setattr(sp.Int8KVCache, "update", wrong)
    result = language.evaluate(model, windows[:2], windows[:3, :33], new_tokens=19, chunk=50)["prefill_kv"]
    assert result.ratio > 1.05 and result.identical < 1
    for place, margin in zip(result.first, result.margin, strict=True):
        assert (place is None) == (margin is None) and (margin is None or (0 <= place < 19 and margin >= 0))


# --- held-out text, loading, chat ---


def test_heldout_windows_do_not_overlap_and_spread_over_all_kinds(tokenizer):
    every = language.heldout_windows(tokenizer, 128)
    some = language.heldout_windows(tokenizer, 128, count=8)
    assert every.dtype == torch.int64 and every.shape[1] == 128 and some.shape == (8, 128)
    kinds = [language.heldout_windows(tokenizer, 128, kinds=(kind,)) for kind in language.KINDS]
    assert torch.equal(torch.cat(kinds), every)
    assert torch.equal(some, every[torch.arange(8) * len(every) // 8])
    assert tokenizer.decode(kinds[3][0]).startswith("<|user|>")


@pytest.mark.parametrize(
    ("ids", "options", "message"),
    [
        (torch.zeros(2, 9), {}, r"windows: got torch.float32 \(2, 9\), expected token ids, int64"),
        (torch.zeros(9, dtype=torch.int64), {}, r"windows: got torch.int64 \(9,\)"),
        ([[1, 2]], {}, "windows: got list"),
        (torch.zeros(0, 9, dtype=torch.int64), {}, r"windows: got torch.int64 \(0, 9\)"),
        (torch.zeros(2, 1, dtype=torch.int64), {}, "windows: got windows of 1 token"),
        (torch.zeros(2, 9999, dtype=torch.int64), {}, r"windows: got 9999 tokens, expected at most \d+"),
        (torch.zeros(2, 9, dtype=torch.int64), {"batch": 0}, "batch: got 0"),
        (torch.zeros(2, 9, dtype=torch.int64), {"cache": DynamicCache, "chunk": 0}, "chunk: got 0, expected 1 to 8"),
        (
            torch.zeros(2, 9, dtype=torch.int64),
            {"cache": DynamicCache, "prefill": 9},
            "prefill: got 9, expected 1 to 8",
        ),
    ],
)
def test_perplexity_refuses(model, ids, options, message):
    with pytest.raises(ValueError, match=message):
        language.perplexity(model, ids, **options)


@pytest.mark.parametrize(("kind", "most"), [("Bert", 40), ("Roberta", 38), ("XLMRoberta", 38)])
def test_positions_behind_the_one_of_padding_are_not_for_tokens(kind, most):
    import transformers

    config = getattr(transformers, f"{kind}Config")(
        vocab_size=50, hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=16,
        max_position_embeddings=40, pad_token_id=1,
    )  # fmt: skip
    encoder = getattr(transformers, f"{kind}Model")(config).eval()
    assert language.positions(encoder) == most
    with torch.no_grad():
        encoder(torch.full((1, most), 5))
        with pytest.raises((IndexError, RuntimeError)):
            encoder(torch.full((1, most + 1), 5))


def test_chat_ids_takes_a_question_or_a_conversation(tokenizer):
    said = [{"role": "user", "content": "Hello!"}]
    assert torch.equal(language.chat_ids(tokenizer, "Hello!"), language.chat_ids(tokenizer, said))
    assert tokenizer.decode(language.chat_ids(tokenizer, "Hello!")[0]) == "<|user|>Hello!<|assistant|>"
    _, bare = language.load()
    bare.chat_template = None
    more = [*said, {"role": "assistant", "content": "Hi."}]
    assert bare.decode(language.chat_ids(bare, more)[0]) == "Hello!\nHi."
