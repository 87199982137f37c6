"""Language, vision and audio models of transformers with 8-bit linear layers."""

from __future__ import annotations

import pytest
import torch


pytest.importorskip("transformers")

import sage_processors as sp
from sage_processors.evaluation import language
from sage_processors.linears.weights.layers import matrices_of_others
from tests.linears.counting import OpCounter, relative_error
from tests.support import tiny_models
from tests.support.tiny_language_models import MODELS


@pytest.mark.slow("reads texts twice")
def test_perplexity_of_the_embedded_model_within_a_percent():
    model, tokenizer = language.load()
    windows = language.heldout_windows(tokenizer, 128, count=6)
    stock = language.perplexity(model, windows)
    for format in ("int8", "fp8"):
        with sp.quantize_linears(model, format, min_features=0) as swap:
            ratio, _ = language.perplexity(model, windows).ratio(stock)
            assert swap.report().calls and swap.report().fallbacks == {}
        assert abs(ratio - 1) < 0.01
    assert torch.equal(language.perplexity(model, windows).losses, stock.losses)


@pytest.mark.parametrize("name", sorted(MODELS))
def test_every_family_within_quantisation(name):
    model, inputs = MODELS[name]()

    def run():
        with torch.no_grad():
            return next(x for x in model(**inputs).to_tuple() if isinstance(x, torch.Tensor))

    expected = run()
    with sp.quantize_linears(model, min_features=0) as swap:
        for _ in range(3):
            assert relative_error(run(), expected) < 0.15
        assert swap.report().calls > 0 and set(swap.report().fallbacks) <= {"rank", "empty"}
        status = {row["layer"]: row["status"] for row in swap.report().rows}
        assert status.get("lm_head", "outside of the blocks") == "outside of the blocks"
    assert torch.equal(run(), expected)


def test_a_llama_block_quantises_three_activations_and_multiplies_four_times():
    model, inputs = MODELS["llama"]()
    with sp.quantize_linears(model, min_features=0), torch.no_grad():
        for _ in range(2):
            model(**inputs)
        with OpCounter() as ops:
            model(**inputs)
    layers = model.config.num_hidden_layers
    # norm → q k v | attention → out | norm → gate and up | their product → down
    assert (ops.quantized, ops.multiplied) == (4 * layers, 4 * layers)


def test_the_attention_report_lists_linear_layers():
    model, inputs = MODELS["llama"]()
    assert sp.attention_report(model).linears is None
    with sp.quantize_linears(model, min_features=0, on_unsupported="raise"), torch.no_grad():
        model(**inputs)
        report = sp.attention_report(model)
        assert report.linears.calls == sum(row["format"] is not None for row in report.linears.rows)
        assert "8-bit linear layers" in str(report)


# --- matrices that are no linear layer's ---


def test_the_report_says_how_much_of_a_mixture_of_experts_stays_in_16_bit():
    import transformers

    sizes = dict(vocab_size=97, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4)
    config = transformers.MixtralConfig(**sizes, num_key_value_heads=2, num_local_experts=8)
    model = transformers.MixtralForCausalLM(config).eval()
    experts = 2 * 8 * 3 * 64 * 96
    share = 100 * experts / sum(parameter.numel() for parameter in model.parameters())
    with sp.apply(model, sp.SageAttnProcessor("fast", linears=sp.Linears("int8", min_features=1))) as handle:
        with torch.no_grad():
            model(torch.randint(97, (1, 40)))
        report = handle.report().linears
    assert "100 % of linear calls" in report.verdict
    [note] = report.notes
    assert note.startswith(f"{experts:,} parameters ({share:.0f} % of the model's) stay in 16 bit")
    assert note.endswith(": MixtralExperts.")
    assert matrices_of_others(model, None) == []  # too small to gain from 8 bit, were they linear layers


def test_models_without_experts_have_no_such_matrices():
    for models in (tiny_models.MODELS, MODELS):
        for name, make in models.items():
            kinds = {kind for kind, _ in matrices_of_others(make()[0], 1)}
            assert kinds == ({"GptOssExperts"} if name == "gpt_oss" else set()), name


def test_convolutions_tables_adapters_and_8_bit_codes_are_no_such_matrices():
    block = torch.nn.ModuleDict({name: torch.nn.Linear(32, 32) for name in ("first", "second", "parametrized")})
    torch.nn.utils.parametrizations.weight_norm(block["parametrized"])
    block.update({"conv": torch.nn.Conv1d(32, 32, 16), "words": torch.nn.Embedding(32, 32)})
    shapes = {"experts": (4, 32, 32), "table": (6, 32), "lora_experts": (32, 32), "bias": (1024,)}
    for name, shape in shapes.items():
        block.register_parameter(name, torch.nn.Parameter(torch.zeros(shape)))
    for name, dtype in (("codes", torch.int8), ("fp8", torch.float8_e4m3fn)):
        block.register_parameter(name, torch.nn.Parameter(torch.zeros(32, 32).to(dtype), requires_grad=False))
    model = torch.nn.Module()
    model.blocks, model.outside = torch.nn.ModuleList([block]), torch.nn.Parameter(torch.zeros(32, 32))
    assert matrices_of_others(model, 32) == [("ModuleDict", 4 * 32 * 32)]
    assert matrices_of_others(model, 65) == []
