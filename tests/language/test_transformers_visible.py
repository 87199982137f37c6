"""What a call sees beside its mask, and arguments that a model hands over by the name of the implementation alone."""

from __future__ import annotations

import pytest
import torch
import transformers as tf
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.llama.modeling_llama import eager_attention_forward

import sage_processors as sp
from sage_kernels.testing import relative_l2
from sage_processors.language import attention as transformers_attention
from sage_processors.language.masks import BandMask
from sage_processors.language.report import counted
from tests.support.language_calls import ANY_LENGTH, SAME, exact_op, forward, llama_attention, tiny
from tests.support.tiny_language_models import _DECODER, MODELS, VOCABULARY, tokens, weigh


def made(model_class, config):
    torch.manual_seed(0)
    model = model_class._from_config(config, attn_implementation="eager")
    weigh(model)
    return model.float().eval().requires_grad_(False)


def deepseek(value_dim):
    """DeepSeek 3.2: each row sees the five keys that an indexer picks."""
    sizes = {"vocab_size": VOCABULARY, "hidden_size": 64, "intermediate_size": 96, "moe_intermediate_size": 32}
    heads = {"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 4, "v_head_dim": value_dim}
    latent = {"q_lora_rank": 32, "kv_lora_rank": 32, "qk_nope_head_dim": 16, "qk_rope_head_dim": 16}
    experts = {"n_routed_experts": 4, "num_experts_per_tok": 2, "n_group": 1, "topk_group": 1}
    indexer = {"index_topk": 5, "index_n_heads": 2, "index_head_dim": 32, "first_k_dense_replace": 1}
    return made(tf.DeepseekV32ForCausalLM, tf.DeepseekV32Config(**sizes, **heads, **latent, **experts, **indexer))


@pytest.mark.parametrize(("value_dim", "int8"), [(32, True), (16, False)])
def test_P54_keys_that_a_model_selected_are_the_only_ones_seen(value_dim, int8, monkeypatch):
    model, inputs = deepseek(value_dim), {"input_ids": tokens()}
    stock = forward(model, inputs)
    model.set_attn_implementation(ANY_LENGTH)
    monkeypatch.setattr(transformers_attention.sage_kernels, "sage_attention", exact_op)
    assert relative_l2(forward(model, inputs), stock) < SAME
    report = sp.attention_report(model)
    assert (report.calls, report.fallbacks) == ((2, {}) if int8 else (0, {"value_head_dim": 2}))


def by_hand(query, key, value, seen):
    scores = 0.25 * query @ key.repeat_interleave(2, 1).transpose(2, 3)
    scores = scores.masked_fill(~seen, -torch.inf)
    return (scores.softmax(-1) @ value.repeat_interleave(2, 1)).transpose(1, 2)


CAUSAL = torch.ones(9, 9, dtype=torch.bool).tril()[None, None]


@pytest.mark.parametrize("mask", ["none", "not causal", "bool", "float"])
def test_P54_selected_keys_meet_every_kind_of_mask(mask, monkeypatch):
    attend, module, query, key, value = llama_attention()
    monkeypatch.setattr(transformers_attention.sage_kernels, "sage_attention", exact_op)
    indices = torch.stack([torch.randperm(9)[:4] for _ in range(18)]).reshape(2, 9, 4).int()
    indices[..., 0] = torch.arange(9)  # its own key, so that no row is empty
    indices[0, :, 3], indices[1, 2, 2] = -1, 9  # neither is a key
    seen = (indices[..., None] == torch.arange(9)).any(2)[:, None]
    arguments = {"none": {}, "not causal": {"is_causal": False}, "bool": {"attention_mask": CAUSAL}}
    arguments["float"] = {"attention_mask": torch.zeros(1, 1, 9, 9).masked_fill(~CAUSAL, torch.finfo().min)}
    wanted = by_hand(query, key, value, seen if mask == "not causal" else seen & CAUSAL)
    out, _ = attend(module, query, key, value, indices=indices, **arguments[mask])
    assert relative_l2(out, wanted) < SAME and counted(module) == {"int8": 1}


@pytest.mark.parametrize("positions", [None, torch.arange(9), torch.arange(9)[None], torch.arange(18).view(2, 9)])
def test_P54_blocks_that_a_model_selected_are_the_only_ones_seen(positions, monkeypatch):
    attend, module, query, key, value = llama_attention()
    monkeypatch.setattr(transformers_attention.sage_kernels, "sage_attention", exact_op)
    asked = []

    class Indexer(torch.nn.Module):
        def build_block_mask(self, blocks, mask, length, dtype, device, positions):
            asked.append((mask, length, positions.tolist()))
            return torch.zeros(2, 1, 9, 9, dtype=dtype, device=device).masked_fill(~seen, torch.finfo(dtype).min)

    seen = CAUSAL & (torch.arange(9) % 3 != 1)
    module.indexer = Indexer()
    blocks = torch.zeros(2, 1, 9, 2, dtype=torch.int64)
    out, _ = attend(module, query, key, value, block_indices=blocks, position_ids=positions)
    assert relative_l2(out, by_hand(query, key, value, seen)) < SAME
    wanted = torch.arange(9) if positions is None else positions
    assert asked == [(None, 9, wanted.expand(2, 9).tolist())] and counted(module) == {"int8": 1}


class _ByName(torch.nn.Module):
    """As the attention modules of transformers that write what they select into the mask for names they know."""

    def __init__(self, config):
        super().__init__()
        self.config, self.num_key_value_groups, self.is_causal = config, 2, True

    def forward(self, query, key, value):
        selected = None if self.config._attn_implementation in ("eager", "sdpa") else torch.zeros(3)
        interface = ALL_ATTENTION_FUNCTIONS.get_interface(self.config._attn_implementation, eager_attention_forward)
        return interface(self, query, key, value, None, scaling=0.25, new_selection=selected)


def test_P54_an_argument_that_the_eager_function_would_drop_is_refused():
    """The module told "eager" otherwise: to run its eager function without the argument would be silently wrong."""
    _, module, query, key, value = llama_attention()
    module = _ByName(module.config).eval()
    module.config._attn_implementation = ANY_LENGTH
    with pytest.raises(NotImplementedError, match="_ByName: got new_selection.*eager_attention_forward does not take"):
        module(query, key, value)


@pytest.mark.parametrize(("name", "given"), [("softcap", 5.0), ("s_aux", torch.zeros(4))])
def test_P54_the_exact_way_drops_no_soft_cap_and_no_sinks(name, given):
    attend, module, query, key, value = llama_attention()  # Llama's eager function knows neither
    with pytest.raises(NotImplementedError, match=f"LlamaAttention 0: got {name}"):
        attend(module, query, key, value, output_attentions=True, **{name: given})
    assert attend(module, query, key, value, **{name: given})[0].isfinite().all()  # in INT8 both are known


@pytest.mark.slow("compiles a call")
@pytest.mark.parametrize("warm", [False, True])
@pytest.mark.filterwarnings("error:Dynamo detected a call to a `functools.lru_cache`")
def test_a_compiled_exact_call_finds_its_eager_function_without_dynamo(warm):
    """Which would trace the search through the classes, and can give up on it."""
    sp.register_transformers("sage_short_calls", min_tokens=10**6)
    model = made(tf.Gemma2ForCausalLM, tf.Gemma2Config(**_DECODER, sliding_window=8, query_pre_attn_scalar=16))
    ids = tokens()
    expected = model(ids).logits
    model.set_attn_implementation("sage_short_calls")
    sp.attention_report(model)
    if warm:
        model(ids)
    torch._dynamo.reset()
    with torch.no_grad():
        got = torch.compile(model, backend="eager", fullgraph=True)(ids).logits
    assert relative_l2(got, expected) < SAME
    rows = sp.attention_report(model)
    assert rows.calls == 0 and rows.fallbacks["short"] >= 2


def gemma4(**options):
    layers = {"num_kv_shared_layers": 1, "layer_types": ["full_attention"] * 2, "sliding_window": 11}
    extra = {"hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": VOCABULARY, "global_head_dim": 16}
    return made(tf.Gemma4ForCausalLM, tf.Gemma4TextConfig(**_DECODER, **layers, **extra, **options))


@pytest.mark.parametrize("cache", [None, "dynamic", "static"])
@pytest.mark.parametrize("kept", [0, 1, 2, 5])
def test_P55_rows_that_a_model_cut_off_see_what_they_saw(kept, cache, monkeypatch):
    """Gemma 4 keeps the last rows for the layers that share keys, and cuts masks; where there is none, we know."""
    model, ids = gemma4(), tokens()
    caches = {None: lambda: None, "dynamic": lambda: tf.DynamicCache(config=model.config)}
    caches["static"] = lambda: tf.StaticCache(config=model.config, max_cache_len=64)
    ask = {"input_ids": ids, "logits_to_keep": kept, "use_cache": cache is not None}
    stock = forward(model, ask | {"past_key_values": caches[cache]()})
    model.set_attn_implementation(ANY_LENGTH)
    monkeypatch.setattr(transformers_attention.sage_kernels, "sage_attention", exact_op)
    assert relative_l2(forward(model, ask | {"past_key_values": caches[cache]()}), stock) < SAME
    report = sp.attention_report(model)
    assert report.calls == 2 and not report.fallbacks, str(report)


@pytest.mark.parametrize("exactly", [False, True])
def test_P55_so_do_rows_of_exact_and_of_traced_calls(exactly, monkeypatch):
    attend, module, query, key, value = llama_attention()
    module.is_kv_shared_layer = True
    monkeypatch.setattr(transformers_attention.sage_kernels, "sage_attention", exact_op)
    wanted = by_hand(query[:, :, 5:], key, value, CAUSAL[:, :, 5:])
    function = torch.compile(attend, backend="eager") if exactly else attend
    module.train(exactly)
    out, _ = function(module, query[:, :, 5:], key, value)
    assert relative_l2(out, wanted) < SAME


LENGTHS = torch.tensor([0, 20, 37], dtype=torch.int32)


def test_P56_packed_sequences_stay_apart_whatever_the_mask(monkeypatch):
    model, inputs = MODELS["llama"]()
    ids = inputs["input_ids"][:1]
    second = forward(model, {"input_ids": ids[:, 20:], "use_cache": False})
    model.set_attn_implementation(ANY_LENGTH)
    monkeypatch.setattr(transformers_attention.sage_kernels, "sage_attention", exact_op)
    causal = torch.ones(37, 37, dtype=torch.bool).tril()[None, None]
    positions = torch.cat([torch.arange(20), torch.arange(17)])[None]
    masks = (causal, torch.zeros(1, 1, 37, 37).masked_fill(~causal, torch.finfo().min))
    for mask in masks:
        for lengths in ({"cu_seq_lens_q": LENGTHS}, {"cu_seq_lens_k": LENGTHS}):
            asked = {"input_ids": ids, "position_ids": positions, "attention_mask": mask, "use_cache": False}
            assert relative_l2(forward(model, asked | lengths)[:, 20:], second) < SAME
    assert sp.attention_report(model).calls == 8


def test_P56_packed_sequences_beside_a_batch_or_a_cache_are_refused():
    model, inputs = tiny("mistral")
    ids, lengths = inputs["input_ids"], {"cu_seq_lens_q": LENGTHS, "cu_seq_lens_k": LENGTHS, "use_cache": False}
    mask = torch.ones(2, 1, 37, 37, dtype=torch.bool)
    with pytest.raises(NotImplementedError, match="cu_seq_lens.*batch of 2, 37 queries and 37 keys.*one row"):
        forward(model, {"input_ids": ids, "attention_mask": mask} | lengths)
    attend, module, query, key, value = llama_attention()
    lengths = {"cu_seq_lens_q": torch.tensor([0, 3, 9]), "cu_seq_lens_k": torch.tensor([0, 3, 7])}
    with pytest.raises(NotImplementedError, match="cu_seq_lens.*9 queries, 7 keys and a mask"):
        attend(module, query[:1], key[:1, :, :7], value[:1, :, :7], CAUSAL[..., :7], **lengths)
    whole = torch.tensor([0, 37], dtype=torch.int32)  # one sequence needs nothing
    assert forward(model, {"input_ids": ids, "cu_seq_lens_q": whole, "cu_seq_lens_k": whole}).isfinite().all()


@pytest.mark.parametrize("name", ["llama", "bert"])
def test_P57_weights_that_the_config_asks_for_are_given(name):
    model, inputs = MODELS[name]()
    model.config.output_attentions = True  # while it is eager; transformers refuses it afterwards
    with torch.no_grad():
        stock = model(**inputs)
        model.set_attn_implementation(ANY_LENGTH)
        out = model(**inputs)
    assert len(stock.attentions) == 2
    assert all(torch.equal(a, b) for a, b in zip(out.attentions, stock.attentions, strict=True))
    assert set(sp.attention_report(model).fallbacks) == {"output_attentions"}


def test_P57_the_exact_way_is_the_one_that_the_module_names():
    """TimesFM's eager function is called simple_eager_attention_forward."""
    from transformers.models.timesfm.modeling_timesfm import TimesFmAttention

    attend, _, query, key, value = llama_attention()
    module = TimesFmAttention(tf.TimesFmConfig(hidden_size=64, num_attention_heads=4, head_dim=16), 0).eval()
    key, value = (x.repeat_interleave(2, 1) for x in (key, value))
    asked = {"scaling": 0.25, "output_attentions": True, "attention_mask": CAUSAL}
    out, weights = attend(module, query, key, value, **asked)
    assert relative_l2(out, by_hand(query, key[:, ::2], value[:, ::2], CAUSAL)) < SAME and weights.shape[-1] == 9
    assert counted(module) == {"output_attentions": 1}


def test_P57_a_subclass_of_users_has_its_parents_exact_way():
    attend, module, query, key, value = llama_attention()

    class Mine(type(module)):
        pass

    module.__class__ = Mine
    out, weights = attend(module, query, key, value, output_attentions=True)
    assert relative_l2(out, by_hand(query, key, value, CAUSAL)) < SAME and weights.shape == (2, 4, 9, 9)


@pytest.mark.parametrize("mask", ["none", "bool", "float", "band", "not causal"])
@pytest.mark.parametrize("seq_kv", [9, 12])
def test_a_position_bias_meets_every_kind_of_mask(seq_kv, mask, monkeypatch):
    attend, module, query, *_ = llama_attention()
    monkeypatch.setattr(transformers_attention.sage_kernels, "sage_attention", exact_op)
    key, value = torch.randn(2, 2, seq_kv, 16), torch.randn(2, 2, seq_kv, 16)
    bias, offset = torch.randn(1, 4, 9, seq_kv), 0 if mask == "none" else seq_kv - 9
    seen = torch.ones(9, seq_kv, dtype=torch.bool).tril(offset if mask != "not causal" else seq_kv)[None, None]
    given = {"none": {}, "bool": {"attention_mask": seen}, "not causal": {"is_causal": False}}
    given["float"] = {"attention_mask": torch.zeros(1, 1, 9, seq_kv).masked_fill(~seen, torch.finfo().min)}
    given["band"] = {"attention_mask": BandMask((2, 1, 9, seq_kv), offset, -1, 0, torch.empty(0))}
    scores = (0.25 * query @ key.repeat_interleave(2, 1).transpose(2, 3) + bias).masked_fill(~seen, -torch.inf)
    wanted = (scores.softmax(-1) @ value.repeat_interleave(2, 1)).transpose(1, 2)
    out, _ = attend(module, query, key, value, position_bias=bias, **given[mask])
    module.train()
    exact, _ = attend(module, query, key, value, position_bias=bias, **given[mask])
    assert relative_l2(out, wanted) < SAME and relative_l2(exact, wanted) < SAME
    assert counted(module) == {"int8": 1, "training": 1}
