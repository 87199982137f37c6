"""Language, vision and audio models of transformers with 8-bit linear layers."""

from __future__ import annotations

import pytest
import torch


pytest.importorskip("transformers")

import sage_processors as sp
from sage_processors.evaluation import language
from tests.linears.counting import OpCounter, relative_error
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
