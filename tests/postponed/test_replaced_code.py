"""Functions that a program puts in the place of a library's while a model is swapped: they get ordinary tensors."""

from __future__ import annotations

import functools

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import sage_processors as sp
from sage_processors.postponed.tensor import Postponed
from tests.linears.counting import relative_error
from tests.support.tiny_language_models import MODELS as LANGUAGE
from tests.support.tiny_models import MODELS


QUANTISED = 0.03  # relative L2 of a few layers in 8 bit


def seen_by(seen, own):
    """The function `own`, that notes the types of its arguments."""

    def noted(*args, **kwargs):
        seen.extend(map(type, (*args, *kwargs.values())))
        return own(*args, **kwargs)

    return noted


def replaced_operation(model, patch, seen):
    patch.setattr(F, "gelu", seen_by(seen, F.gelu))


def replaced_method(model, patch, seen):
    from diffusers.models.activations import GELU

    patch.setattr(GELU, "gelu", seen_by(seen, GELU.gelu))


def replaced_inherited_method(model, patch, seen):
    from diffusers.models.activations import GEGLU

    patch.setattr(GEGLU, "gelu", seen_by(seen, GEGLU.gelu))


def replaced_helper_of_a_helper(model, patch, seen):
    from diffusers.models.transformers import transformer_flux

    own = transformer_flux._get_projections
    patch.setattr(transformer_flux, "_get_projections", seen_by(seen, own))


def replaced_call_of_all_modules(model, patch, seen):
    patch.setattr(nn.Module, "_call_impl", seen_by(seen, nn.Module._call_impl))


def function_in_the_place_of_a_module(model, patch, seen):
    for layer in model.model.layers:
        del layer.mlp.act_fn
        layer.mlp.act_fn = functools.partial(seen_by(seen, F.silu), inplace=False)


def another_function_of_a_module(model, patch, seen):
    for layer in model.model.layers:
        if isinstance(layer.mlp.act_fn, nn.Module):
            del layer.mlp.act_fn
        layer.mlp.act_fn = F.silu
    model(torch.ones(1, 4, dtype=torch.long))  # the blocks are examined with this one
    for layer in model.model.layers:
        layer.mlp.act_fn = seen_by(seen, F.silu)


REPLACED = {
    replaced_operation: "flux",
    replaced_method: "flux",
    replaced_inherited_method: "unet_sd15",
    replaced_helper_of_a_helper: "flux",
    replaced_call_of_all_modules: "flux",
    function_in_the_place_of_a_module: "llama",
    another_function_of_a_module: "llama",
}


@pytest.mark.parametrize("replace", REPLACED, ids=lambda replace: replace.__name__)
def test_what_is_put_in_the_place_of_a_librarys_code_gets_ordinary_tensors(replace, monkeypatch):
    made = (MODELS | LANGUAGE)[REPLACED[replace]]()
    model, inputs = made if isinstance(made, tuple) else (made, {"input_ids": torch.ones(1, 4, dtype=torch.long)})
    model.eval().requires_grad_(False)
    with torch.no_grad(), sp.quantize_linears(model, min_features=0) as swap:
        expected = model(**inputs)[0]
        seen: list[type] = []
        with monkeypatch.context() as patch:
            replace(model, patch, seen)
            seen.clear()
            got = model(**inputs)[0]
        assert seen and all(not issubclass(kind, Postponed) for kind in seen)
        assert relative_error(got, expected) < QUANTISED
        assert any(block._sage.enclosure.obstacle for block in swap.blocks)
