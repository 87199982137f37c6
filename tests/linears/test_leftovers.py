"""After remove() nothing of ours is in a model, whatever was copied meanwhile. A layer is in one swap at a time."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

import sage_processors as sp
from sage_processors.linears.weights.linear_state import linear_state
from tests.support.tiny_language_models import MODELS as LANGUAGE
from tests.support.tiny_models import MODELS


HOOKS = ("_forward_hooks", "_forward_pre_hooks")
CONFIG = sp.SageAttnProcessor(min_tokens=0, linears=sp.Linears("int8", min_features=0))


def is_ours(x) -> bool:
    return type(x).__module__.startswith("sage_")


def ours_in(model) -> list[str]:
    """What of ours is in a model: classes, attributes, hooks, processors."""
    found = []
    for name, module in model.named_modules():
        found += [f"{name}: {type(module).__name__}"] * is_ours(module)
        found += [f"{name}.{key}" for key, x in module.__dict__.items() if key.startswith("_sage") or is_ours(x)]
        hooks = (hook for kind in HOOKS for hook in getattr(module, kind).values())
        found += [f"{name}: hook {hook}" for hook in hooks if is_ours(getattr(hook, "__self__", hook))]
    return found


def llama():
    """A model, and what calls it: bits of its logits."""
    model, inputs = LANGUAGE["llama"]()

    @torch.no_grad()
    def run(model=model):
        return model(**inputs).logits

    return model, run


def flux():
    model, inputs = MODELS["flux"]()

    @torch.no_grad()
    def run(model=model):
        return model(**inputs)[0]

    return model, run


def linears(model):
    return sp.quantize_linears(model, min_features=0)


def attention_too(model):
    return sp.apply(model, CONFIG)


def attention_alone(model):
    return sp.apply(model, sp.SageAttnProcessor(min_tokens=0))


CASES = {
    "linears": (llama, linears, linears),
    "attention": (flux, attention_alone, attention_alone),
    "both": (flux, attention_too, attention_too),
    "both, then linears": (flux, attention_too, linears),
    "both, then attention": (flux, attention_too, attention_alone),
}


@pytest.mark.parametrize("kind, first, second", CASES.values(), ids=CASES)
def test_a_swap_of_a_copy_leaves_nothing_of_either(kind, first, second):
    model, run = kind()
    stock = run()
    swap = first(model)
    run()
    twin = copy.deepcopy(model)
    with second(twin):
        assert ours_in(twin) and not torch.equal(run(twin), stock)
    left = ours_in(twin)
    if second is linears and first is attention_too:  # which is kept in a copy
        assert left and all(any(word in x for word in ("processor", "norm_", "RootHook")) for x in left), left
    else:
        assert not left
        assert torch.equal(run(twin), stock)
    assert not torch.equal(run(), stock)  # the model that was copied is as it was
    swap.remove()
    assert not ours_in(model) and torch.equal(run(), stock)


def adapted(model, config):
    peft = pytest.importorskip("peft", reason="peft is not installed")
    return peft.get_peft_model(model, config(peft))


PEFT = {
    "LN tuning": lambda peft: peft.LNTuningConfig(target_modules=["input_layernorm", "norm"]),
    "layers to save": lambda peft: peft.LoraConfig(target_modules=["q_proj"], modules_to_save=["down_proj", "norm"]),
    "blocks to save": lambda peft: peft.LoraConfig(target_modules=["q_proj"], modules_to_save=["mlp", "0"]),
}


@pytest.mark.parametrize("config", PEFT.values(), ids=PEFT)
def test_what_peft_copies_is_put_back_too(config):
    model, run = llama()
    stock = run()
    swap = linears(model)
    run()
    with_adapter = adapted(model, config)
    run()
    swap.remove()
    assert not ours_in(with_adapter)
    torch.testing.assert_close(run(), stock)


def test_what_peft_copies_of_norms_of_heads_is_put_back_too():
    peft = pytest.importorskip("peft", reason="peft is not installed")
    model, run = flux()
    stock = run()
    with attention_too(model):
        run()
        model.add_adapter(peft.LoraConfig(target_modules=["to_q"], modules_to_save=["norm_q", "to_k"]))
        run()
    assert not ours_in(model)
    torch.testing.assert_close(run(), stock)


def test_layers_whose_weights_were_dropped_stay_in_a_copy():
    model, run = llama()
    sp.quantize_linears(model, min_features=0, drop_weights=True)
    expected = run()
    twin = copy.deepcopy(model)
    with pytest.raises(RuntimeError, match="dropped"):
        linears(twin)
    assert torch.equal(run(twin), expected)


# --- one model inside of another ---


class Outer(nn.Module):
    """Two blocks."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        parts = [nn.Sequential(nn.Linear(48, 64), nn.Linear(64, 48)) for _ in range(2)]
        self.blocks = nn.ModuleList(parts)
        self.eval().requires_grad_(False)

    def forward(self, x):
        for block in self.blocks:
            x = x + block(x)
        return x


def statuses(swap) -> list[str]:
    return [row["status"] for row in swap.report().rows]


def formats(model) -> list[str]:
    """Of every linear layer, what it runs as."""
    layers = [m for m in model.modules() if isinstance(m, nn.Linear)]
    return [m._sage.format if linear_state(m) is not None else "none" for m in layers]


X = torch.randn(5, 48, generator=torch.Generator().manual_seed(0))


def test_a_part_that_is_swapped_later_is_given_back():
    model = Outer()
    stock = model(X)
    outer = linears(model)
    plain = model(X) + 0
    inner = sp.quantize_linears(model.blocks[0], "fp8", min_features=0)
    assert formats(model) == ["fp8", "fp8", "int8", "int8"]
    mixed = model(X) + 0
    assert not torch.equal(mixed, plain) and not torch.equal(mixed, stock)
    assert statuses(outer) == ["another's"] * 2 + ["active"] * 2 and statuses(inner) == ["active"] * 2
    assert "counted elsewhere: 2 layers another's" in outer.report().verdict
    assert inner.report().calls == 2 and outer.report().calls == 4  # of those that it has still
    outer.refresh()
    assert formats(model) == ["fp8", "fp8", "int8", "int8"]
    inner.remove()
    assert formats(model) == ["int8"] * 4 and statuses(outer) == ["active"] * 4
    assert torch.equal(model(X) + 0, plain)
    outer.remove()
    assert not ours_in(model) and torch.equal(model(X), stock)


def test_a_model_that_is_swapped_later_takes_its_parts_and_gives_them_back():
    model = Outer()
    stock = model(X)
    inner = sp.quantize_linears(model.blocks[0], "fp8", min_features=0)
    first = model(X) + 0
    outer = linears(model)
    assert formats(model) == ["int8"] * 4
    assert statuses(inner) == ["another's"] * 2 and statuses(outer) == ["active"] * 4
    inner.refresh()
    assert formats(model) == ["int8"] * 4
    outer.remove()
    assert formats(model) == ["fp8", "fp8", "none", "none"] and statuses(inner) == ["active"] * 2
    assert torch.equal(model(X) + 0, first)
    inner.remove()
    assert not ours_in(model) and torch.equal(model(X), stock)


@pytest.mark.parametrize("is_outer_first", [True, False])
def test_whoever_is_removed_first_takes_nothing_of_the_other(is_outer_first):
    model = Outer()
    stock = model(X)
    order = [model, model.blocks[0]] if is_outer_first else [model.blocks[0], model]
    earlier, later = (linears(part) for part in order)
    model(X)
    earlier.remove()
    later_has = [linear_state(m) is not None for m in order[1].modules() if isinstance(m, nn.Linear)]
    assert all(later_has) and set(statuses(later)) == {"active"}
    assert not torch.equal(model(X) + 0, stock)
    later.remove()
    assert not ours_in(model) and torch.equal(model(X), stock)
