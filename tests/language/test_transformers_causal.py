"""`sage_int8_causal`: no bit of a state depends on a later token, in every path that a call can take."""

from __future__ import annotations

import pytest
import torch
import transformers

import sage_kernels
import sage_processors as sp
from sage_kernels.testing import relative_l1, relative_l2
from sage_processors.language import names
from tests.support import real_models
from tests.support.tiny_language_models import DECODERS, MODELS, VOCABULARY, tokens


CAUSAL = "sage_int8_causal_strict"
PLAIN = sp.register_transformers("sage_plain_strict", on_unsupported="raise", min_tokens=2)[0]
PREFIX = 23


def states(model, ids, **options) -> torch.Tensor:
    """Of all layers, [layers, B, S, D]."""
    with torch.no_grad():
        return torch.stack(model(ids, output_hidden_states=True, **options).hidden_states)


def continued(ids: torch.Tensor, prefix: int, vocabulary: int) -> torch.Tensor:
    """The same first tokens, and others behind them."""
    return torch.cat([ids[:, :prefix], (ids[:, prefix:] + 7) % vocabulary], 1)


def differs_before(model, prefix: int, ids: torch.Tensor, vocabulary: int, **options) -> float:
    """How far (relative L2) another continuation moves the states of the prefix."""
    one, other = (states(model, x, **options) for x in (ids, continued(ids, prefix, vocabulary)))
    assert not torch.equal(one[-1][:, prefix:], other[-1][:, prefix:])
    ours, others = one[:, :, :prefix], other[:, :, :prefix]
    return 0.0 if torch.equal(ours, others) else relative_l2(ours, others)


@pytest.mark.parametrize("name", DECODERS)
def test_two_continuations_leave_the_prefix_as_it_is_to_the_bit(name):
    model, inputs = MODELS[name]()
    model.set_attn_implementation(CAUSAL)
    assert differs_before(model, PREFIX, inputs["input_ids"], VOCABULARY) == 0
    report = sp.attention_report(model)
    assert report.calls == 2 * 2 and not report.fallbacks
    model.set_attn_implementation(PLAIN)  # center and balance come from a sample of all keys
    assert differs_before(model, PREFIX, inputs["input_ids"], VOCABULARY) > 1e-4


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_in_16_bit_too(dtype):
    model, inputs = MODELS["llama"]()
    model.to(dtype).set_attn_implementation(CAUSAL)
    assert differs_before(model, PREFIX, inputs["input_ids"], VOCABULARY) == 0


def test_in_packed_sequences_too():
    model, _ = MODELS["llama"]()
    ids, starts = tokens(1, 61), (0, 30)  # the second one goes on until the end
    positions = torch.cat([torch.arange(30), torch.arange(31)])[None]
    for name, moves in ((CAUSAL, False), (PLAIN, True)):
        model.set_attn_implementation(name)
        moved = differs_before(model, starts[1] + 20, ids, VOCABULARY, position_ids=positions, use_cache=False)
        assert (moved > 1e-4) if moves else moved == 0, name


@pytest.mark.parametrize("name", ["llama", "mistral"])
def test_a_prompt_behind_a_stored_prefix_is_what_it_is_as_a_whole(name):
    """Sums of fp32 in another order are all that differs: with a center for each call it is rounding to INT8."""
    model, inputs = MODELS[name]()
    ids = inputs["input_ids"]
    far = {}
    for chosen in (CAUSAL, PLAIN):
        model.set_attn_implementation(chosen)
        whole, cache = states(model, ids), transformers.DynamicCache(config=model.config)
        parts = [states(model, part, past_key_values=cache) for part in ids.split((PREFIX, 8, 6), 1)]
        far[chosen] = relative_l2(torch.cat(parts, 2), whole)
    assert far[CAUSAL] < 1e-5 and far[PLAIN] > 1e-3


def test_tokens_one_by_one_over_a_16_bit_cache_are_short_at_every_length():
    model, inputs = MODELS["llama"]()
    model.set_attn_implementation(CAUSAL)
    cache = transformers.DynamicCache(config=model.config)
    with torch.no_grad():
        model(inputs["input_ids"], past_key_values=cache)
        model(tokens(2, 1), past_key_values=cache)
    assert sp.attention_report(model).fallbacks == {"short": 2}
    assert names.IMPLEMENTATIONS["sage_int8_causal"].min_tokens == 2  # and not a GPU's crossover


OPS = {"sage_attention": {}, "sage_attention_varlen": {}, "differentiable_attention": {"training": "int8"}}


@pytest.mark.parametrize("op", OPS)
def test_every_op_is_told(op, monkeypatch):
    given, original = [], getattr(sage_kernels, op)
    monkeypatch.setattr(sage_kernels, op, lambda *a, **k: given.append(k) or original(*a, **k))
    mine = sp.register_transformers("my_causal", min_tokens=2, smooth_k=False, rotation="hadamard", **OPS[op])[0]
    model, _ = MODELS["llama"]()
    model.set_attn_implementation(mine)
    packed = {"position_ids": torch.arange(20)[None] % 10, "use_cache": False} if "varlen" in op else {}
    if "differentiable" in op:
        model.requires_grad_()
        model(tokens(1, 20)).logits.sum().backward()
        assert all(p.grad is not None for p in model.model.layers.parameters())
    else:
        states(model, tokens(1, 20), **packed)
    assert [(k["smooth_k"], k["rotation"], k["scaling"]) for k in given] == [(False, "hadamard", "per_token")] * 2
    row = sp.attention_report(model).rows[0]
    assert row["numbers"] == "qk_int8_pv_bf16, per_token, not smoothed, hadamard" and row["calls"] == 1
    assert "my_causal, qk_int8_pv_bf16, per_token, not smoothed, hadamard" in str(sp.attention_report(model))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"smooth_k": 3}, "smooth_k: got 3, expected None, False or True"),
        ({"smooth_k": True, "recipe": "int_flash_half"}, "smooth_k: got True, expected None, False$"),
        ({"rotation": "auto"}, "rotation: got 'auto', expected one of"),
    ],
)
def test_options_that_can_not_be_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        sp.register_transformers("sage_never", **options)
    assert "sage_never" not in names.IMPLEMENTATIONS


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["llama", "mistral", "gemma2"])
def test_two_continuations_on_a_gpu(name):
    model, _ = MODELS[name]()
    model = model.to("cuda", torch.bfloat16)
    ids = tokens(2, 1021).to("cuda")
    model.set_attn_implementation(CAUSAL)
    assert differs_before(model, 700, ids, VOCABULARY) == 0 and not sp.attention_report(model).fallbacks


# other people's models


def op_error(model, ids, **options) -> torch.Tensor:
    """Relative L1 of the op against exact attention, on each layer's queries, keys and values in stock's forward."""
    attend, found = sage_kernels.sage_attention, []

    def compared(q, k, v, **given):
        exact = torch.nn.functional.scaled_dot_product_attention(
            *(x.transpose(1, 2) for x in (q, k, v)), is_causal=True, scale=given["scale"], enable_gqa=True
        )
        ours = attend(q, k, v, **given | options)
        found.append(relative_l1(ours, exact.transpose(1, 2)))
        return exact.transpose(1, 2)

    model.set_attn_implementation(PLAIN)
    with pytest.MonkeyPatch.context() as patch, torch.no_grad():
        patch.setattr(sage_kernels, "sage_attention", compared)
        model(ids, use_cache=False)
    return torch.tensor(found)


@pytest.mark.real
@pytest.mark.parametrize("name", real_models.CHECKPOINTS)
def test_two_continuations_of_a_real_model(name):
    model, tokenizer = real_models.load(name)
    ids, vocabulary = real_models.windows(name, tokenizer, 1, 384), len(tokenizer)
    model.set_attn_implementation(CAUSAL)
    assert differs_before(model, 256, ids, vocabulary) == 0
    assert not sp.attention_report(model).fallbacks
    model.set_attn_implementation(PLAIN)
    assert differs_before(model, 256, ids, vocabulary) > 1e-3


@pytest.mark.real
@pytest.mark.parametrize(("name", "worst"), [("smollm2", 2.0), ("gemma3", 6.0)])
def test_what_it_costs_in_error(name, worst):
    """Against the default on the same inputs, as docs/language.md has it in words: next to nothing in the mean over
    layers, several times the error in single layers of Gemma; without the rotation much more."""
    model, tokenizer = real_models.load(name)
    ids = real_models.windows(name, tokenizer, 1, 384)
    default = op_error(model, ids)
    causal = op_error(model, ids, smooth_k=False, rotation="hadamard")
    unrotated = op_error(model, ids, smooth_k=False)
    assert 0.8 < causal.mean() / default.mean() < 1.3 < unrotated.mean() / default.mean()
    assert worst / 2 < (causal / default).max() < worst
