"""Transforms of torch.func over a model in 8 bit: exact where they want derivatives or bring weights of their own."""

from __future__ import annotations

import pytest
import torch
from torch.func import functional_call, functionalize, grad, jacrev, jvp, linearize, stack_module_state, vjp, vmap

import sage_processors as sp
from tests.linears.counting import layers, relative_error


X = torch.randn(4, 64, generator=torch.Generator().manual_seed(0))


OTHERS = [layers(seed) for seed in (1, 2)]
STACKED = {name: x.detach() for name, x in stack_module_state(OTHERS)[0].items()}
OWN = dict(OTHERS[0].named_parameters())

# (what is called, whether all of it runs exactly)
CALLS = {
    "parameters": (lambda m: functional_call(m, OWN, (X,)), False),
    "tensors": (lambda m: functional_call(m, {k: v.detach().clone() for k, v in OWN.items()}, (X,)), False),
    "vmap": (lambda m: vmap(m)(torch.stack([X, 2 * X])), False),
    "vmap_of_weights": (lambda m: vmap(lambda p: functional_call(m, p, (X,)))(STACKED), True),
    "functionalize": (lambda m: functionalize(m)(X), False),
    "grad": (lambda m: grad(lambda x: m(x).square().sum())(X), True),
    "grad_of_weights": (lambda m: grad(lambda p: functional_call(m, p, (X,)).square().sum())(OWN)["1.weight"], True),
    "grad_of_a_bias": (lambda m: grad(lambda b: functional_call(m, {"1.bias": b}, (X,)).sum())(OWN["1.bias"]), True),
    "jvp": (lambda m: jvp(m, (X,), (X,))[1], True),
    "jvp_of_weights": (lambda m: jvp(lambda p: functional_call(m, p, (X,)), (OWN,), (OWN,))[1], True),
    "jacrev": (lambda m: jacrev(lambda x: m(x).sum(0))(X), True),
    "vjp": (lambda m: vjp(m, X)[1](X)[0], True),
    "linearize": (lambda m: linearize(m, X)[1](X), True),
}


@pytest.mark.parametrize("mode", [torch.no_grad, torch.enable_grad, torch.inference_mode])
@pytest.mark.parametrize("name", CALLS)
def test_results_are_the_models_own_and_nothing_of_the_transform_stays(name, mode):
    call, is_exact = CALLS[name]
    if name == "linearize" and mode is torch.inference_mode:
        pytest.skip("PyTorch asks our ops for tangents there, and fails an assertion of its own")
    model, stock = layers(), layers()
    with mode():
        wanted = call(stock)
    with sp.quantize_linears(model, min_features=0), torch.no_grad():
        before = model(X) + 0
        with mode():
            got = call(model) + 0
        error = relative_error(got.detach(), wanted.detach())
        assert error < (1e-5 if is_exact else 0.03)
        assert torch.equal(model(X), before)
