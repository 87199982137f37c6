"""Forwards that users write, and hooks that they put on library models: none is ever handed what waits."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import sage_processors as sp
from sage_processors.postponed.block import is_enclosed
from sage_processors.postponed.enclosure import Enclosure, _is_dynamo_active
from sage_processors.postponed.region import opened
from sage_processors.postponed.tensor import Postponed
from tests.linears.counting import relative_error
from tests.support.tiny_language_models import MODELS as LANGUAGE
from tests.support.tiny_models import MODELS


WIDTH = 32
QUANTISED = 0.03  # relative L2 of a few layers in 8 bit; a stale or leaking operand makes 0.05 to 8


class Layers(nn.Module):
    """Layers of a user's own block, whose forward is `run`."""

    def __init__(self, run):
        super().__init__()
        torch.manual_seed(0)
        self.norm, self.rms = nn.LayerNorm(WIDTH), nn.RMSNorm(WIDTH, eps=1e-6)
        self.to_q, self.to_k, self.to_v, self.out = (nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.wide, self.run = nn.Linear(WIDTH, 2 * WIDTH), run
        for parameter in self.parameters():
            nn.init.normal_(parameter, 0.4 if parameter.dim() == 1 else 0.0, 0.3)
        self.eval().requires_grad_(False)

    def forward(self, x):
        return self.run(self, x.clone())


def written_half(m, x):
    half, other = m.wide(x).chunk(2, -1)
    t = F.silu(half)
    half.mul_(3)
    return t, half * other


def exchanged_data(m, x):
    y = m.norm(x)
    y.data = torch.ones_like(x)
    return m.out(y)


def wanted_gradient(m, x):
    h = m.norm(x)
    h.requires_grad_()
    y = m.out(h)
    (gradient,) = torch.autograd.grad(y.sum(), h)
    return y.detach(), gradient


def odd_vectors(m, x):
    keep = torch.arange(WIDTH) % 3
    return m.norm(x) * (keep > 0), m.out(x) * keep, m.norm(x) * keep.double(), (keep > 0) * m.out(x)


CASES = [written_half, exchanged_data, wanted_gradient, odd_vectors]  # test_programs.py has many more


def flat(value):
    return [value] if isinstance(value, torch.Tensor) else [x for part in value for x in flat(part)]


@pytest.mark.parametrize("run", CASES, ids=lambda run: run.__name__)
def test_what_a_users_forward_does_is_followed(run):
    model = Layers(run)
    x = torch.randn(2, 6, WIDTH)
    grad = torch.enable_grad if run is wanted_gradient else torch.no_grad
    with grad():
        expected = flat(model(x))
        with sp.quantize_linears(model, min_features=0):
            for _ in range(3):
                got = flat(model(x))
                assert [(type(y), y.shape, y.dtype) for y in got] == [
                    (torch.Tensor, y.shape, y.dtype) for y in expected
                ]
                for a, b in zip(got, expected, strict=True):
                    assert torch.equal(a, b) if b.dtype == torch.bool else relative_error(a, b) < QUANTISED


# hooks of users on models of libraries


def built(name):
    if name == "llama":
        made = LANGUAGE["llama"]()
        model, inputs = made if isinstance(made, tuple) else (made, {})
        return model.eval().requires_grad_(False), inputs
    return MODELS[name]()


def first(output):
    return output[0] if isinstance(output, (tuple, list)) else output.to_tuple()[0]


@pytest.fixture(scope="module", params=["flux", "llama"])
def model_and_inputs(request):
    return built(request.param)


def watched(model, inputs, hook, where):
    """The output, and what the hook kept of every module whose name `where` accepts."""
    kept: list = []
    handles = [m.register_forward_hook(hook(kept)) for n, m in model.named_modules() if n and where(n)]
    try:
        return first(model(**inputs)), kept
    finally:
        for handle in handles:
            handle.remove()


def keeping(kept):
    return lambda module, args, output: kept.append((args, output))


def writing(kept):
    def hook(module, args, output):
        kept.append(output)
        if isinstance(output, torch.Tensor):
            output.data.mul_(1.25)

    return hook


WHERE = {
    "containers": lambda name: name.rpartition(".")[2] in ("ff", "attn", "self_attn", "mlp", "norm1"),
    "leaves": lambda name: (
        name.rpartition(".")[2] in ("norm", "to_q", "proj", "q_proj", "input_layernorm", "gate_proj")
    ),
    "blocks": lambda name: name.rpartition(".")[2].isdigit() and name.count(".") <= 2,
}


@pytest.mark.parametrize("hook", [keeping, writing])
@pytest.mark.parametrize("where", WHERE)
def test_hooks_get_ordinary_tensors_and_keep_them(model_and_inputs, where, hook):
    model, inputs = model_and_inputs
    stock = copy.deepcopy(model)
    with torch.no_grad(), sp.quantize_linears(model, min_features=0):
        model(**inputs)  # what waits has been seen to
        expected, _ = watched(stock, inputs, hook, WHERE[where])
        got, kept = watched(model, inputs, hook, WHERE[where])
        tensors = [x for x in flatten(kept) if isinstance(x, torch.Tensor)]
        assert tensors and all(type(x) in (torch.Tensor, nn.Parameter) for x in tensors)
        before = [x.clone() for x in tensors]
        for module in model.modules():
            for parameter in module.parameters(recurse=False):
                parameter.mul_(1.0)  # a write; the numbers stay
        model(**inputs)
        assert all(map(torch.equal, tensors, before))
    assert relative_error(got, expected) < 2 * QUANTISED


def flatten(value):
    if isinstance(value, (tuple, list)):
        return [x for part in value for x in flatten(part)]
    return [x for part in value.values() for x in flatten(part)] if isinstance(value, dict) else [value]


class Mine(nn.Module):
    """A user's module in the place of a library's: it writes to what it is given, and keeps it."""

    def __init__(self, module):
        super().__init__()
        self.module, self.seen = module, []

    def forward(self, x):
        self.seen.append(type(x))
        y = self.module(x)
        self.seen.append(type(y))
        y.data.mul_(1.5)
        return y


def test_a_users_module_in_a_block_is_handed_ordinary_tensors(model_and_inputs):
    model, inputs = (copy.deepcopy(x) for x in model_and_inputs)
    name = next(n for n, m in model.named_modules() if n.rpartition(".")[2] in ("ff", "mlp"))
    stock = copy.deepcopy(model)
    with torch.no_grad(), sp.quantize_linears(model, min_features=0):
        model(**inputs)
        for each in (stock, model):
            each.set_submodule(name, Mine(each.get_submodule(name)))
        for _ in range(2):
            assert relative_error(first(model(**inputs)), first(stock(**inputs))) < 2 * QUANTISED
        assert set(model.get_submodule(name).seen) == {torch.Tensor}


OBSTACLES = {
    "hook": lambda block: block.mlp.register_forward_hook(lambda *args: None),
    "pre-hook": lambda block: block.mlp.down_proj.register_forward_pre_hook(lambda *args: None),
    "module": lambda block: setattr(block, "mlp", Mine(block.mlp)),
    "forward": lambda block: setattr(block.mlp, "forward", lambda x, own=block.mlp.forward: own(x)),
    "class": lambda block: setattr(block.mlp, "__class__", type("Other", (type(block.mlp),), {"forward": _other})),
    "compiled": lambda block: block.mlp.compile(backend="eager"),
}


def _other(self, x):
    return self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x))


@pytest.mark.parametrize("kind", OBSTACLES)
def test_what_stands_against_waiting_is_seen_and_said(kind):
    model, inputs = built("llama")
    with torch.no_grad(), sp.quantize_linears(model, min_features=0) as swap:
        for module in model.modules():
            module._compiled_call_impl = None  # as after a `compile` that was undone
        model(**inputs)
        blocks = list(swap._blocks.values())
        assert [block._sage.enclosure.obstacle for block in blocks] == [""] * len(blocks)
        assert not any("postponed" in note for note in swap.report().notes)
        OBSTACLES[kind](blocks[0])
        assert not blocks[0]._sage.enclosure.is_closed(blocks[0])
        assert all(block._sage.enclosure.is_closed(block) for block in blocks[1:])
        said = [note for note in swap.report().notes if "postponed" in note]
        assert len(said) == 1 and f"1 of {len(blocks)} blocks" in said[0]


def test_a_function_of_users_that_a_library_calls_gets_ordinary_tensors():
    """An attention function that calls a layer of the module which it is handed."""
    from transformers import AttentionInterface
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    seen = []

    def mine(module, query, key, value, attention_mask, **kwargs):
        seen.append(type(module.o_proj(query.transpose(1, 2).flatten(2))))
        return sdpa_attention_forward(module, query, key, value, attention_mask, **kwargs)

    model, inputs = built("llama")
    AttentionInterface.register("mine", mine)
    model.config._attn_implementation = "mine"
    with torch.no_grad(), sp.quantize_linears(model, min_features=0):
        for _ in range(2):
            model(**inputs)
    assert seen and set(seen) == {torch.Tensor}


class MyProcessor:
    def __call__(self, attn, hidden_states, *args, **kwargs):
        return hidden_states


def test_a_processor_of_users_keeps_its_block_open():
    model, inputs = MODELS["flux"]()
    with torch.no_grad(), sp.quantize_linears(model, min_features=0) as swap:
        block = swap.blocks[-1]
        assert block._sage.enclosure.is_closed(block)
        block.attn.processor = MyProcessor()
        assert not block._sage.enclosure.is_closed(block)
        assert "MyProcessor" in block._sage.enclosure.obstacle


def test_a_function_in_the_place_of_a_librarys_keeps_its_block_open(monkeypatch):
    from transformers.models.llama import modeling_llama

    model, inputs = built("llama")
    own = modeling_llama.eager_attention_forward
    with torch.no_grad(), sp.quantize_linears(model, min_features=0) as swap:
        block = swap.blocks[0]
        assert block._sage.enclosure.is_closed(block)
        with monkeypatch.context() as patch:
            patch.setattr(modeling_llama, "eager_attention_forward", lambda *args, **kwargs: own(*args, **kwargs))
            assert not block._sage.enclosure.is_closed(block)
        assert block._sage.enclosure.is_closed(block)


def test_modes_arguments_and_global_hooks_of_users_keep_a_block_open():
    from torch.overrides import TorchFunctionMode

    model, inputs = built("llama")
    with torch.no_grad(), sp.quantize_linears(model, min_features=0) as swap:
        block = next(iter(swap._blocks.values()))
        known = block._sage.enclosure
        assert known.is_closed(block, (torch.ones(1), None, (1, {"a": torch.ones(1)})), {"scale": 0.5})
        assert not known.is_closed(block, (lambda x: x,)) and not known.is_closed(
            block, (), {"cache": Mine(block.mlp)}
        )
        assert not known.is_closed(block, ([Mine],)) and not known.is_closed(block, ({"a": object()},))
        with TorchFunctionMode():
            assert not known.is_closed(block)
        handle = nn.modules.module.register_module_forward_hook(lambda *args: None)
        try:
            assert not known.is_closed(block)
        finally:
            handle.remove()
        assert known.is_closed(block)


def test_nothing_waits_outside_of_a_region_and_what_does_is_computed_at_its_end(library_tests):
    model = Layers(lambda m, x: x)
    x = torch.randn(2, 6, WIDTH)
    with torch.no_grad(), sp.quantize_linears(model, min_features=0):
        assert type(model.norm(x)) is torch.Tensor and type(model.out(x)) is torch.Tensor
        with opened():
            y = model.out(x)
            assert type(y) is not torch.Tensor and y._ordinary is None
        assert isinstance(y, Postponed) and y._ordinary is not None
        assert torch.equal(y.tensor(), model.out(x))
        with pytest.raises(RuntimeError, match="mine"), opened():
            raise RuntimeError("mine")
        assert type(model.norm(x)) is torch.Tensor


def test_a_copy_of_a_block_has_an_enclosure_of_its_own():
    model, inputs = built("llama")
    with torch.no_grad(), sp.quantize_linears(model, min_features=0) as swap:
        expected = first(model(**inputs))
        twin = copy.deepcopy(model)
        assert torch.equal(first(twin(**inputs)), expected)
        blocks = [m for m in twin.modules() if is_enclosed(m)]
        assert len(blocks) == len(swap._blocks)
        for block in blocks:
            assert block._sage.enclosure.modules[0] is block
            assert block.__class__ is type(block) and type(block).__name__ == type(block)._sage_base.__name__
    assert not any("_sage" in m.__dict__ for m in model.modules())


def test_nothing_waits_in_what_compiled_code_calls_behind_a_graph_break():
    """Dynamo would compile our code there, and see what waits."""
    block, answers, active = nn.Sequential(nn.Linear(4, 4)), [], []
    enclosures = Enclosure(), Enclosure()
    assert enclosures[0].is_closed(block)

    def ask():
        answers.extend(enclosure.is_closed(block) for enclosure in enclosures)
        active.append(_is_dynamo_active())  # for frames that Dynamo leaves as they are

    asked = torch._dynamo.disable(ask, recursive=False)

    @torch.compile(backend="eager")
    def run(x):
        y = x + 1
        asked()
        return y * 2

    run(torch.ones(2))
    assert answers == [False, False] and enclosures[0].is_closed(block)
    assert active == [True] and not _is_dynamo_active()
