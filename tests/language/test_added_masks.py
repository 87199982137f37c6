"""Models whose other code reads the masks that attention is given: it gets those of eager attention, to the bit."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
import transformers as tf
from transformers import masking_utils as mu

import sage_processors as sp
from sage_kernels.testing import relative_l2
from sage_processors.language.call import Call, masking
from sage_processors.language.masks import (
    UNLIMITED,
    AddedMask,
    BandMask,
    adds_masks,
    sage_mask,
    visible_mask,
)
from tests.support.combinations import shows  # noqa: F401
from tests.support.placing import placed


EXACT, OURS = "sage_added_exact", "sage_added"
SHARED = {"vocab_size": 97, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "dropout": 0.0}
LAYERS = {
    "encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": 4, "decoder_attention_heads": 4,
    "encoder_ffn_dim": 64, "decoder_ffn_dim": 64, "d_model": 64, "max_position_embeddings": 64,
}  # fmt: skip
# what of the model reads the mask: an encoder that attends by itself, one that has tokens of its own, a router of
# experts; and whether its decoder's layers say that they are causal
WRITERS = {
    "bigbird_pegasus": lambda: tf.BigBirdPegasusForConditionalGeneration(tf.BigBirdPegasusConfig(**SHARED, **LAYERS)),
    "pegasus_x": lambda: tf.PegasusXForConditionalGeneration(
        tf.PegasusXConfig(**SHARED, **LAYERS, block_size=8, num_global_tokens=4)
    ),
    "nllb_moe": lambda: tf.NllbMoeForConditionalGeneration(
        tf.NllbMoeConfig(**SHARED, **LAYERS, num_experts=4, encoder_sparse_step=2, decoder_sparse_step=2)
    ),
}
# and what adds two masks up, or tells queries apart by theirs
READERS = {
    "git": lambda: tf.GitModel(
        tf.GitConfig(
            vocab_size=97, hidden_size=64, num_hidden_layers=2, num_attention_heads=4, intermediate_size=64,
            vision_config={
                "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2,
                "image_size": 32, "patch_size": 16,
            },
        )
    ),
    "informer": lambda: tf.InformerModel(
        tf.InformerConfig(
            prediction_length=8, context_length=16, num_time_features=1, lags_sequence=[1, 2], dropout=0.0, **LAYERS
        )
    ),
}  # fmt: skip


@pytest.fixture(scope="module", autouse=True)
def names():
    sp.register_transformers(EXACT, min_tokens=10**6)
    sp.register_transformers(OURS, min_tokens=0)


def made(name: str):
    torch.manual_seed(0)
    model = (WRITERS | READERS)[name]().eval().requires_grad_(False)
    for parameter in model.parameters():
        if parameter.dim() > 1:
            torch.nn.init.normal_(parameter, std=parameter[0].numel() ** -0.5)
    return model


def inputs(name: str, padding: bool) -> dict:
    generator = torch.Generator().manual_seed(1)
    if name == "informer":
        series = {"past_values": 18, "past_observed_mask": 18, "past_time_features": 18, "future_values": 8}
        series |= {"future_time_features": 8}
        shapes = {key: (2, n, 1) if key.endswith("features") else (2, n) for key, n in series.items()}
        return {key: torch.randn(shape, generator=generator) for key, shape in shapes.items()} | {
            "past_observed_mask": torch.ones(2, 18)
        }
    ids, mask = torch.randint(3, 97, (2, 21), generator=generator), torch.ones(2, 21, dtype=torch.long)
    if padding:
        mask[0, 15:] = 0
    own = torch.randint(3, 97, (2, 9), generator=generator)
    given = {"input_ids": ids.masked_fill(mask == 0, 0), "attention_mask": mask}
    if name == "git":
        return given | {"pixel_values": torch.randn(2, 3, 32, 32, generator=generator)}
    return given | {"decoder_input_ids": own}


def run(model, given: dict) -> torch.Tensor:
    torch.manual_seed(2)  # Informer samples the keys that it looks at
    return model(**given)[0]


def text(model, given: dict) -> torch.Tensor:
    ids, mask = given["input_ids"], given["attention_mask"]
    return model.generate(ids, attention_mask=mask, max_new_tokens=6, do_sample=False)


@pytest.mark.parametrize("padding", [False, True])
@pytest.mark.parametrize("name", [*WRITERS, *READERS])
def test_X89_a_model_that_reads_its_masks_is_eager(name, padding, shows):  # noqa: F811
    model, given = placed((made(name), inputs(name, padding)))
    stock = run(model, given)
    written = text(model, given) if name in WRITERS else None
    exact = copy.deepcopy(model)
    exact.set_attn_implementation(EXACT)
    for each in (exact, copy.deepcopy(exact)):
        # fp32, sums in another order: some ulps of numbers that two layers of each side have grown
        assert relative_l2(run(each, given), stock) < 1e-5
        assert written is None or torch.equal(text(each, given), written)
    model.set_attn_implementation(OURS)
    out = run(model, given)
    shows(sp.attention_report(model), out, stock)


@pytest.mark.parametrize("compiled", [False, pytest.param(True, marks=pytest.mark.slow("compiles a model"))])
def test_the_layers_of_gemma_2_are_causal_and_windowed_as_before(compiled):
    """It takes masks that are added, though only its attention reads them; compiled code can't make an AddedMask."""
    torch.manual_seed(0)
    config = tf.Gemma2Config(
        vocab_size=97, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=16, sliding_window=7, pad_token_id=0,
    )  # fmt: skip
    model = tf.Gemma2ForCausalLM(config).eval().requires_grad_(False)
    ids = torch.randint(3, 97, (2, 19))
    stock = model(ids).logits
    model.set_attn_implementation(EXACT)
    sp.attention_report(model)  # counters of its own; else what compiled code counts is every model's
    run = torch.compile(model, backend="eager", fullgraph=True) if compiled else model
    assert relative_l2(run(ids).logits, stock) < 1e-5


def test_which_models_add_their_masks():
    class Unknown(tf.LlamaConfig): ...

    for adds, kinds in (
        (True, (tf.BigBirdPegasusModel, tf.GptOssModel)), (False, (tf.LlamaModel, tf.BertModel, tf.WhisperModel)),
    ):  # fmt: skip
        assert all(adds_masks(kind.config_class) is adds for kind in kinds)
    assert adds_masks(Unknown)  # no model that we know


# --- the mask itself ---

CALLS = {
    "causal": {},
    "behind a cache": {"q_length": 4, "q_offset": 5},
    "one row": {"q_length": 1, "q_offset": 8},
    "window": {"mask_function": mu.sliding_window_causal_mask_function(3)},
    "padding": {"attention_mask": torch.tensor([[0, 0] + [1] * 7, [1] * 9]).bool()},
    "encoder": {"mask_function": mu.bidirectional_mask_function, "allow_is_bidirectional_skip": False},
    "padded encoder": {
        "mask_function": mu.bidirectional_mask_function, "allow_is_bidirectional_skip": True,
        "attention_mask": torch.tensor([[1] * 6 + [0] * 3, [1] * 9]).bool(),
    },
}  # fmt: skip


def mask_of(name: str, dtype=torch.bfloat16):
    """(ours, that of eager attention) of such a call."""
    given = {"batch_size": 2, "q_length": 9, "kv_length": 9, "dtype": dtype, "config": tf.GptOssConfig()}
    given |= CALLS[name]
    return sage_mask(**given), mu.eager_mask(**given)


@pytest.mark.parametrize("name", CALLS)
def test_to_all_other_code_it_is_the_mask_of_eager_attention(name):
    mask, wanted = mask_of(name)
    assert type(mask) is AddedMask and mask.dtype == torch.bfloat16 and mask.shape == wanted.shape
    for of in (lambda x: x + 0, lambda x: x.bool(), lambda x: x[:, :, :, 1:], lambda x: x.float().sum(-1)):
        assert type(of(mask)) is torch.Tensor and torch.equal(of(mask), of(wanted))
    assert torch.equal(copy.deepcopy(mask), wanted)
    assert torch.equal(pickle.loads(pickle.dumps(mask)), wanted)
    assert torch.equal(torch.where(plain(visible_mask(mask)), 0.0, torch.finfo(torch.bfloat16).min).bfloat16(), wanted)


def plain(mask):
    return mask.plain() if isinstance(mask, BandMask) else mask


def test_our_attention_is_asked_for_a_band_not_for_numbers():
    for name in ("causal", "behind a cache", "one row", "window"):
        mask, _ = mask_of(name)
        if name != "one row":
            assert isinstance(visible_mask(mask), BandMask)
        assert visible_mask(mask).dtype == torch.bool
    assert visible_mask(None) is None
    other = torch.zeros(1)
    assert visible_mask(other) is other


def test_a_row_that_sees_all_keys_asks_for_no_mask():
    """As without a mask: decoding is no causal call."""
    visible = BandMask((2, 1, 1, 9), 8, UNLIMITED, 0, torch.empty(0))
    call = Call(torch.nn.Identity(), visible, 0.0, None, False, None, None, None, None, False, {})
    assert masking(call, 1, 9) == (None, False, None, 9)


def test_it_moves_between_devices_as_it_is():
    mask, _ = mask_of("causal")
    moved = mask.to("meta")
    assert type(moved) is AddedMask and moved.device.type == "meta" and moved.dtype == torch.bfloat16
    assert type(mask.to(torch.float32)) is torch.Tensor


def test_an_encoder_without_padding_has_no_mask_in_either():
    given = {"batch_size": 1, "q_length": 3, "kv_length": 3, "mask_function": mu.bidirectional_mask_function}
    given |= {"allow_is_bidirectional_skip": True, "config": tf.GptOssConfig(), "dtype": torch.float32}
    assert sage_mask(**given) is mu.eager_mask(**given) is None


def test_compiled_code_gets_the_numbers():
    """Also for a configuration that nobody has asked about: what is not known may add."""

    class Unknown(tf.LlamaConfig): ...

    for config in (tf.GptOssModel.config_class(), Unknown()):

        def run(x, config=config):
            return x + sage_mask(batch_size=1, q_length=5, kv_length=5, dtype=torch.float32, config=config)

        torch.compiler.reset()
        got = torch.compile(run, backend="eager", fullgraph=True)(torch.zeros(5, 5))
        wanted = mu.eager_mask(batch_size=1, q_length=5, kv_length=5, dtype=torch.float32)
        assert torch.equal(got, wanted)
