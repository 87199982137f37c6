"""Sequences packed into one row, as padding-free collators and position_ids that begin anew ask for (case P63)."""

from __future__ import annotations

import pytest
import torch

import sage_kernels
import sage_processors as sp
from sage_kernels.testing import exact_attention, relative_l2
from sage_processors.language import attention as transformers_attention
from sage_processors.language.masks import BandMask
from tests.support.language_calls import ANY_LENGTH, SAME, forward, tiny
from tests.support.placing import placed
from tests.support.tiny_language_models import MODELS


LENGTHS = (20, 1, 16)
ENDS = placed(torch.tensor([0, 20, 21, 37], dtype=torch.int32))
POSITIONS = placed(torch.cat([torch.arange(n) for n in LENGTHS])[None])
ASKED = {
    "position_ids": {"position_ids": POSITIONS},
    "lengths": {"cu_seq_lens_q": ENDS, "cu_seq_lens_k": ENDS, "max_length_q": 20, "max_length_k": 20},
    "both": {"position_ids": POSITIONS, "cu_seq_lens_q": ENDS, "cu_seq_lens_k": ENDS},
    "one of them, int64": {"position_ids": POSITIONS, "cu_seq_lens_k": ENDS.long()},
}


@pytest.fixture
def exact_varlen(monkeypatch):
    """The packed op in exact arithmetic; the list of its calls."""
    calls = []

    def attend(q, k, v, cu_q, cu_k, *, causal, window, softcap, sinks, scale, **options):
        calls.append((cu_q.tolist(), cu_k.tolist(), causal, window))
        out = torch.zeros_like(q)
        numbers = [list(zip(x.tolist(), x.tolist()[1:], strict=False)) for x in (cu_q, cu_k)]
        for (a, b), (c, d) in zip(*numbers, strict=True):
            distance = (
                torch.arange(d - c, device=q.device) - torch.arange(b - a, device=q.device)[:, None] - (d - c - b + a)
            )
            seen = distance <= 0 if causal else distance == distance
            seen = seen if window is None else seen & (distance.abs() < window)
            inputs = q[None, a:b], k[None, c:d], v[None, c:d]
            out[a:b] = exact_attention(*inputs, scale, mask=seen, softcap=softcap, sinks=sinks)[0][0]
        return out

    monkeypatch.setattr(transformers_attention.sage_kernels, "sage_attention_varlen", attend)
    return calls


def alone(model, ids):
    """Logits of each sequence by itself, by the model's own attention."""
    parts = [forward(model, {"input_ids": part, "use_cache": False}) for part in ids.split(LENGTHS, 1)]
    return torch.cat(parts, 1)


@pytest.mark.parametrize("asked", ASKED)
@pytest.mark.parametrize("name", ["llama", "mistral", "gemma2", "gpt_oss"])
def test_P63_packed_sequences_are_each_as_alone_in_the_packed_op(name, asked, exact_varlen):
    model, inputs = MODELS[name]()
    ids = inputs["input_ids"][:1]
    wanted = alone(model, ids)
    if (name, asked) == ("gpt_oss", "position_ids"):  # it tells its masks nothing of them: as in stock
        stock = forward(model, {"input_ids": ids, "use_cache": False} | ASKED[asked])
        assert relative_l2(stock, wanted) > 0.1
        return
    model.set_attn_implementation(ANY_LENGTH)
    # rotary embeddings are of position_ids alone, and do not change by a shift of all of a sequence
    out = forward(model, {"input_ids": ids, "use_cache": False} | ASKED[asked])
    assert relative_l2(out, wanted) < (SAME if asked != "lengths" else 1e-3)
    report = sp.attention_report(model)
    layers = len(report.rows)
    assert report.calls == layers and not report.fallbacks and len(exact_varlen) == layers
    assert all(q == k == ENDS.tolist() and causal for q, k, causal, _ in exact_varlen)
    if name in ("mistral", "gemma2"):
        assert any(window is not None for *_, window in exact_varlen)


def test_P63_int8_is_as_near_as_it_is_alone():
    model, inputs = MODELS["llama"]()
    ids = inputs["input_ids"][:1]
    stock = alone(model, ids)
    model.set_attn_implementation(ANY_LENGTH)
    single = alone(model, ids)
    packed = forward(model, {"input_ids": ids, "position_ids": POSITIONS, "use_cache": False})
    assert relative_l2(packed, single) < SAME  # on a CPU the same codes
    assert relative_l2(packed, stock) < 0.05
    other = ids.clone()
    other[:, :20] = (other[:, :20] + 1) % 7  # another first sequence
    again = forward(model, {"input_ids": other, "position_ids": POSITIONS, "use_cache": False})
    assert relative_l2(again[:, 20:], packed[:, 20:]) < SAME


@pytest.mark.parametrize("asked", ["position_ids", "lengths"])
@pytest.mark.parametrize("how", ["training", "output_attentions", "short"])
def test_P63_exact_calls_keep_them_apart_too_and_are_counted(how, asked):
    model, inputs = MODELS["mistral"]()
    ids = inputs["input_ids"][:1]
    wanted = alone(model, ids)
    name = ANY_LENGTH
    if how == "short":
        name = sp.register_transformers("sage_packed_short", min_tokens=21)[0]  # the longest has 20
    model.set_attn_implementation(name)
    model.train(how == "training")
    given = {"input_ids": ids, "use_cache": False, "output_attentions": how == "output_attentions"} | ASKED[asked]
    with torch.no_grad():
        out = model(**given).logits
    assert relative_l2(out, wanted) < (SAME if asked != "lengths" else 1e-3)
    assert set(sp.attention_report(model).fallbacks) == {how}


@pytest.mark.parametrize(("training", "reason"), [("16bit", "training"), ("int8", "no_backward")])
def test_P63_gradients_of_a_padding_free_training_step_are_those_of_stock(training, reason):
    name = sp.register_transformers(f"sage_packed_{training}", min_tokens=0, training=training)[0]
    model, inputs = MODELS["llama"]()
    model.train().requires_grad_(True)
    ids = inputs["input_ids"][:1]
    grads = []
    for implementation in ("sdpa", name):
        model.set_attn_implementation(implementation)
        model.zero_grad()
        asked = {"position_ids": POSITIONS, "cu_seq_lens_q": ENDS, "cu_seq_lens_k": ENDS}
        model(ids, labels=ids, use_cache=False, **asked).loss.backward()
        grads.append(torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None]))
    assert relative_l2(grads[1], grads[0]) < SAME
    assert set(sp.attention_report(model).fallbacks) == {reason}


def test_P63_lengths_that_disagree_with_position_ids_are_both_heeded(exact_varlen, monkeypatch):
    """A mask of both, as every mask and all lengths are: no row sees a key that either hides."""
    seen = []

    def attend(q, k, v, *, attn_mask, **_):
        seen.append(attn_mask)
        return torch.zeros_like(q)

    monkeypatch.setattr(transformers_attention.sage_kernels, "sage_attention", attend)
    model, inputs = tiny()
    ends = placed(torch.tensor([0, 30, 37]))
    forward(model, {"input_ids": inputs["input_ids"][:1], "position_ids": POSITIONS, "use_cache": False,
                    "cu_seq_lens_q": ends, "cu_seq_lens_k": ends})  # fmt: skip
    assert not exact_varlen and seen
    mask = seen[0][0, 0]
    assert not mask[25, 19] and not mask[31, 29] and mask[31, 30] and mask[25, 21]


def test_P63_a_mask_of_packed_sequences_is_its_values_to_other_code():
    ends = torch.tensor([0, 3, 3, 7], dtype=torch.int32)
    mask = BandMask((1, 1, 7, 7), 0, 1, 0, ends, 4)
    wanted = torch.block_diag(torch.ones(3, 3), torch.ones(4, 4)).bool().tril().triu(-1)
    assert torch.equal(mask & True, wanted[None, None])
    moved = mask.to("cpu", copy=True)
    assert isinstance(moved, BandMask) and moved.longest == 4 and torch.equal(moved & True, mask & True)


def test_P63_queries_and_keys_of_unlike_lengths():
    """A vision tower or an encoder: no mask, lengths alone, not causal; the op gets both lists."""
    from transformers.modeling_utils import AttentionInterface

    model, _ = MODELS["llama"]()
    module, attend = model.model.layers[0].self_attn, AttentionInterface._global_mapping[ANY_LENGTH]
    query, key, value = torch.randn(1, 4, 9, 16), torch.randn(1, 2, 11, 16), torch.randn(1, 2, 11, 16)
    cu_q, cu_k = torch.tensor([0, 4, 9]), torch.tensor([0, 5, 11])
    query, key, value, cu_q, cu_k = placed((query, key, value, cu_q, cu_k))
    asked = {"cu_seq_lens_q": cu_q, "cu_seq_lens_k": cu_k, "is_causal": False, "scaling": 0.25}
    out, _ = attend(module, query, key, value, None, **asked)
    q, k, v = (x[0].transpose(0, 1) for x in (query, key, value))
    expected = sage_kernels.sage_attention_varlen(q, k, v, cu_q.int(), cu_k.int(), scale=0.25)
    assert torch.equal(out[0], expected)
    module.train()
    exact, _ = attend(module, query, key, value, None, **asked)
    for rows, keys in ((slice(0, 4), slice(0, 5)), (slice(4, 9), slice(5, 11))):
        stock = exact_attention(q[None, rows], k[None, keys], v[None, keys], 0.25)[0]
        assert relative_l2(exact[:, rows], stock) < SAME
