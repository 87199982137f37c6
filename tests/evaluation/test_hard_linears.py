"""Planted channel outliers change nothing but the task of 8-bit linear layers."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import sage_kernels
from sage_processors.evaluation import hard_linears
from tests.evaluation.test_hard_variants import output
from tests.support.tiny_models import MODELS


# behind a norm's own gain everything is multiplied exactly; 1 + scale is rounded anew: some ulps of fp32
@pytest.mark.parametrize(
    ("name", "norms", "bound"), [("unet_sd15", 3, 0.0), ("unet_sdxl", 3, 0.0), ("flux", 5, 1e-5), ("sd3", 5, 1e-5)]
)
def test_injection_keeps_the_function_and_is_undone(name, norms, bound):
    model, inputs = MODELS[name]()
    stock = output(model, inputs)
    weights = {n: p.clone() for n, p in model.named_parameters()}
    with hard_linears.inject_channel_outliers(model) as names:
        assert len(names) >= norms
        changed = [n for n, p in model.named_parameters() if not torch.equal(p, weights[n])]
        assert {n.rpartition(".")[0] for n in changed if n.endswith(("proj.weight", "to_q.weight"))}
        hard = output(model, inputs)
    assert (hard - stock).norm() <= bound * stock.norm()
    assert all(torch.equal(p, weights[n]) for n, p in model.named_parameters())


def test_a_language_model_keeps_its_function():
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2,
    )  # fmt: skip
    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(config).eval()
    tokens = torch.arange(8)[None]
    with torch.no_grad():
        stock = model(tokens).logits
        with hard_linears.inject_channel_outliers(model) as names:
            assert len(names) == 4 and torch.equal(model(tokens).logits, stock)


@pytest.mark.parametrize(("name", "layer"), [("unet_sd15", "attn1.to_q"), ("flux", "attn.to_q"), ("flux", "proj_mlp")])
def test_every_factor_is_planted_in_a_channel_of_the_input(name, layer):
    model, inputs = MODELS[name]()
    module = next(m for n, m in model.named_modules() if n.endswith("." + layer))
    seen = []
    module.register_forward_pre_hook(lambda _, args: seen.append(args[0].flatten(0, -2)))
    plain_weight = module.weight.detach().clone()
    output(model, inputs)
    with hard_linears.inject_channel_outliers(model, (4.0, 256.0)):
        output(model, inputs)
        columns = (plain_weight.norm(dim=0) / module.weight.norm(dim=0)).round()
    # the second block's input is the same up to rounding: a channel that is large for all tokens tells its factor
    factor = (seen[1].norm(dim=0) / seen[0].norm(dim=0)).log2().round()
    assert torch.equal(factor.exp2(), columns) and sorted(columns.unique().tolist()) == [1, 4, 256]
    assert (columns > 1).sum() == 2


def test_injection_is_hard_for_a_layer_without_a_balance():
    model, inputs = MODELS["flux"]()
    module = model.transformer_blocks[0].attn.to_q
    seen = []
    module.register_forward_pre_hook(lambda _, args: seen.append(args[0]))

    def error():
        output(model, inputs)
        x, w = seen.pop(), module.weight
        rows, columns = sage_kernels.quantize_activation(x), sage_kernels.quantize_weight(w)
        got = sage_kernels.quantized_linear(rows, columns, module.bias, dtype=torch.float32)
        exact = nn.functional.linear(x, w, module.bias)
        return (got - exact).norm() / exact.norm()

    plain = error()
    with hard_linears.inject_channel_outliers(model):
        assert error() > 10 * plain
