"""Under torch.inference_mode() a swapped model runs as under torch.no_grad(), and its caller's mode comes back."""

from __future__ import annotations

import copy
import pickle
import threading
import weakref

import pytest
import torch
from torch import nn

import sage_processors as sp
from sage_processors.torch_modes import AsUnderNoGrad, counts_writes
from tests.linears.counting import OpCounter, relative_error
from tests.linears.test_same_bits import NAMES, cast
from tests.support.combinations import shows  # noqa: F401
from tests.support.tiny_models import MODELS


MODES = (torch.no_grad, torch.inference_mode)


class Seen(nn.Module):
    """What runs when it is called: (whether in inference_mode, whether gradients are on, which tensors tell)."""

    def __init__(self, change=lambda x: x):
        super().__init__()
        self.linear, self.change, self.seen = nn.Linear(8, 8), change, []

    def forward(self, x, others=None):
        self.change(x)
        self.seen.append((torch.is_inference_mode_enabled(), torch.is_grad_enabled(), x.is_inference()))
        return self.linear(x)


class Inner(Seen):
    """Calls itself once."""

    def forward(self, x, others=None):
        return super().forward(self(x, "again") if others is None else x)


def installed(model):
    AsUnderNoGrad().install(model)
    return model


ORDINARY, AS_CALLED = (False, False, False), (True, False, True)


def test_a_result_that_waits_until_it_leaves_is_an_ordinary_tensor():
    model = nn.Sequential(nn.LayerNorm(64), nn.Linear(64, 64)).eval().requires_grad_(False)
    with sp.quantize_linears(model, min_features=0), torch.inference_mode():
        found = model(torch.randn(2, 64))
        assert type(found) is torch.Tensor and not found.is_inference()


def test_attention_alone_gets_heads_in_one_pass_too(monkeypatch):
    from sage_processors.diffusion.heads import postponed_heads

    passes, own = [], postponed_heads.qk_norm_rope
    monkeypatch.setattr(postponed_heads, "qk_norm_rope", lambda *a, **k: passes.append(1) or own(*a, **k))
    model, inputs = MODELS["flux"]()
    with sp.apply(model, sp.SageAttnProcessor(min_tokens=0)), torch.inference_mode():
        for _ in range(2):
            model(**cast(inputs, torch.float32))
    assert passes


def test_what_was_given_is_the_same_memory():
    model = installed(Seen(lambda x: x.mul_(2)))
    with torch.inference_mode():
        x = torch.randn(3, 16).t()[2:10:2, 1:2].expand(4, 8).clone()[:, ::1]
        before = x.clone()
        model(x)
    assert model.seen == [ORDINARY] and torch.equal(x, 2 * before)


@pytest.mark.parametrize(
    "view", [lambda x: x[1:3], lambda x: x[:, ::2].repeat(1, 2), lambda x: x.t(), lambda x: x[:1].expand(4, 8)]
)
def test_any_strides_and_any_place_in_memory(view):
    linear = nn.Linear(8, 8).requires_grad_(False)
    model = Seen()
    model.linear = linear
    installed(model)
    with torch.inference_mode():
        x = view(torch.randn(8, 8))
        assert torch.equal(model(x), linear(x)) and model.seen == [ORDINARY]


def test_lists_tuples_and_dicts_are_looked_into():
    model = installed(Seen())
    found = []
    model.register_forward_pre_hook(lambda m, args, kwargs: found.append((args, kwargs)), with_kwargs=True)
    with torch.inference_mode():
        x = torch.randn(2, 8)
        model(x, others={"a": [x, (x, None)], "b": 1.5})
        model(x, others=torch.ones(2))
    (args, kwargs), (_, later) = found
    others = kwargs["others"]
    assert not args[0].is_inference() and not others["a"][0].is_inference() and not others["a"][1][0].is_inference()
    assert type(others["a"][1]) is tuple and others["b"] == 1.5 and not later["others"].is_inference()


class Cache:
    """Holds tensors that a model may write to."""


class Sub(torch.Tensor):
    pass


def marked(x):
    x.of_someone = 1
    return x


UNKNOWN = {
    "cache": lambda x: Cache(),
    "subclass": lambda x: x.as_subclass(Sub),
    "attribute": lambda x: marked(x),
    "conjugate": lambda x: torch.view_as_complex(x.view(2, 4, 2)).conj(),
    "negative": lambda x: torch.view_as_complex(x.view(2, 4, 2)).conj().imag,
    "sparse": lambda x: x.to_sparse(),
    "inside": lambda x: [{"a": (Cache(),)}],
}


@pytest.mark.parametrize("name", UNKNOWN)
def test_what_can_not_be_replaced_leaves_the_call_as_it_is(name):
    model = installed(Seen(lambda x: x.mul_(2)))
    with torch.inference_mode():
        x = torch.randn(2, 8)
        model(x, others=UNKNOWN[name](x.clone()))
        assert torch.is_inference_mode_enabled()
        model(x, others=True)
    assert model.seen == [AS_CALLED, ORDINARY]


def test_tensors_that_count_may_be_of_any_kind():
    others = marked(torch.randn(2, 8).as_subclass(Sub))
    model = installed(Seen())
    with torch.inference_mode():
        model(torch.randn(2, 8), others=others)
    assert model.seen == [ORDINARY]


def test_errors_and_calls_in_calls_bring_the_mode_back():
    def fail(x):
        raise KeyError("own")

    model = installed(Seen(fail))
    inner = installed(Inner())
    with torch.inference_mode():
        for _ in range(2):
            with pytest.raises(KeyError, match="own"):
                model(torch.randn(2, 8))
            assert torch.is_inference_mode_enabled() and not torch.is_grad_enabled()
        inner(torch.randn(2, 8))
        assert torch.is_inference_mode_enabled()
    assert inner.seen == [ORDINARY, ORDINARY] and torch.is_grad_enabled()
    refused = installed(Seen())
    refused.register_forward_pre_hook(lambda module, args: fail(None), prepend=True)
    with torch.inference_mode(), pytest.raises(KeyError, match="own"):  # before ours ran
        refused(torch.randn(2, 8))
    assert not torch.is_inference_mode_enabled()


def test_outside_of_inference_mode_nothing_changes():
    model = installed(Seen())
    x = torch.randn(2, 8)
    model(x)
    with torch.no_grad():
        model(x)
    assert model.seen == [(False, True, False), (False, False, False)]


def test_threads_have_modes_of_their_own():
    barrier, model = threading.Barrier(2), Seen(lambda x: barrier.wait(10))
    installed(model)
    states = []

    def call(mode):
        with mode():
            model(torch.randn(2, 8))
            states.append((mode, torch.is_inference_mode_enabled()))

    threads = [threading.Thread(target=call, args=(mode,)) for mode in MODES]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(on for _, on in states) == [False, True] and model.seen == [ORDINARY] * 2
    assert all(on == (mode is torch.inference_mode) for mode, on in states)


def test_copies_have_hooks_of_their_own_and_removal_leaves_none():
    model, inputs = MODELS["flux"]()
    hooks = [len(d) for d in (model._forward_pre_hooks, model._forward_hooks, model._forward_hooks_always_called)]
    options = sp.SageAttnProcessor(min_tokens=0, scaling="per_block", linears=sp.Linears("int8", min_features=0))
    with sp.apply(model, options), torch.inference_mode():
        twin = copy.deepcopy(model)
        x = cast(inputs, torch.float32)
        assert torch.equal(model(**x, return_dict=False)[0], twin(**x, return_dict=False)[0])
        assert torch.is_inference_mode_enabled()
    assert hooks == [
        len(d) for d in (model._forward_pre_hooks, model._forward_hooks, model._forward_hooks_always_called)
    ]
    loaded = pickle.loads(pickle.dumps(installed(Plain())))
    with torch.inference_mode():
        assert not loaded(torch.ones(1)).is_inference()


class Plain(nn.Module):
    def forward(self, x):
        return x + 1


@pytest.mark.slow("compiles a model")
@pytest.mark.parametrize("how", ["in_place", "blocks"])
def test_compiled_models_run_and_are_not_compiled_again(how):
    torch._dynamo.reset()
    model, inputs = MODELS["flux"]()
    with torch.no_grad():
        expected = model(**inputs, return_dict=False)[0]
    options = sp.SageAttnProcessor(min_tokens=0, scaling="per_block", linears=sp.Linears("int8", min_features=0))
    with sp.apply(model, options), torch.inference_mode():
        (model.compile if how == "in_place" else model.compile_repeated_blocks)(backend="eager")
        model(**cast(inputs, torch.float32))
        assert relative_error(model(**cast(inputs, torch.float32), return_dict=False)[0], expected) < 0.05
        torch.compiler.set_stance("fail_on_recompile")
        try:
            for _ in range(3):
                got = model(**cast(inputs, torch.float32), return_dict=False)[0]
        finally:
            torch.compiler.set_stance("default")
        assert relative_error(got, expected) < 0.05 and torch.is_inference_mode_enabled()
    torch._dynamo.reset()


def test_a_language_model_with_a_cache_from_outside_runs_as_it_is_called():
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        vocab_size=64, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=64,
    )  # fmt: skip
    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(config).eval()
    tokens = torch.randint(0, 64, (1, 12))
    expected = model.generate(tokens, max_new_tokens=6, do_sample=False)
    with sp.quantize_linears(model, min_features=0) as swap, torch.inference_mode():
        cache = transformers.StaticCache(config=config, max_cache_len=32)
        cache.early_initialization(1, 2, 16, torch.float32, torch.device("cpu"))
        assert cache.layers[0].keys.is_inference()
        logits = model(tokens, past_key_values=cache).logits
        assert swap.report().calls and torch.isfinite(logits).all()
        got = model.generate(tokens, max_new_tokens=6, do_sample=False)
        static = model.generate(tokens, max_new_tokens=6, do_sample=False, cache_implementation="static")
    assert got.shape == expected.shape and torch.equal(got, static)


def layers():
    return nn.Sequential(nn.LayerNorm(64), nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 64)).eval()


def loaded(model, other):
    model.load_state_dict(other.state_dict())


def copied(model, other):
    for mine, new in zip(model.parameters(), other.parameters(), strict=True):
        mine.copy_(new)


def exchanged(model, other):
    for mine, new in zip(model.parameters(), other.parameters(), strict=True):
        mine.data = new.data.clone()


@pytest.mark.parametrize("made", ["inside", "moved", "moved_later", "outside"])
@pytest.mark.parametrize("needs_grad", [True, False])
@pytest.mark.parametrize("held", [False, True])
@pytest.mark.parametrize("write", [loaded, copied, exchanged])
def test_weights_that_are_written_to_in_inference_mode_are_quantised_anew(made, needs_grad, held, write):
    """held: somebody has weak references to them, as compiled code has, and they get no counter."""
    with torch.inference_mode(made == "inside"):
        model, other = layers().requires_grad_(needs_grad), layers()
    with torch.inference_mode():
        if made == "moved":
            model.double().float()
        references = [weakref.ref(p) for p in model.parameters()] if held else []
        with sp.quantize_linears(model, min_features=0) as swap:
            x = torch.randn(4, 64)
            model(x)
            if made == "moved_later":
                model.double().float()
                model(x)
            write(model, other)
            assert relative_error(model(x), other(x)) < 0.03 and not swap.report().fallbacks
        assert all(a() is b for a, b in zip(references, model.parameters(), strict=False))
        assert torch.equal(model(x), other(x))


def test_a_parameter_that_gets_a_counter_is_the_same_one():
    with torch.inference_mode():
        linear = nn.Linear(8, 8)
        weight, before = linear.weight, linear.weight.clone()
        weight.of_someone, row = 1, weight[0]
        assert counts_writes(weight) and counts_writes(weight)
        assert linear.weight is weight and type(weight) is nn.Parameter and weight.requires_grad
        assert weight.of_someone == 1 and torch.equal(weight, before) and not weight.is_inference()
        version = weight._version
        weight.mul_(2)
        assert weight._version > version and torch.equal(row, 2 * before[0])
        bias = weakref.ref(linear.bias)
        assert not counts_writes(linear.bias) and linear.bias is bias() and bias().is_inference()


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("name", NAMES)
def test_X98_a_model_made_or_called_in_inference_mode_gives_the_bits_of_others(name, device, shows):  # noqa: F811
    """On a GPU calls after the first are launched as that one was."""
    outputs, counts = [], set()
    for made in MODES:
        with made():
            model, inputs = MODELS[name]()
            model = model.to(device, torch.bfloat16)
        options = sp.SageAttnProcessor(min_tokens=0, scaling="per_block", linears=sp.Linears("int8", min_features=0))
        given = {key: placed(x, device) for key, x in cast(inputs).items()}
        with torch.no_grad():
            stock = model(**given, return_dict=False)[0]
        for mode in MODES:
            with mode(), sp.apply(model, options) as handle:
                outputs += [model(**cast(given), return_dict=False)[0] for _ in range(2)]
                with OpCounter() as ops:
                    outputs.append(model(**cast(given), return_dict=False)[0])
                counts.add((ops.quantized, ops.multiplied))
                assert torch.is_inference_mode_enabled() == (mode is torch.inference_mode)
                report = handle.report()
            shows(report, outputs[-1], stock)
    assert all(torch.equal(outputs[0], other) and not other.is_inference() for other in outputs) and len(counts) == 1


def placed(x, device):
    if isinstance(x, dict):
        return {key: placed(value, device) for key, value in x.items()}
    return x.to(device) if isinstance(x, torch.Tensor) else x


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("how", ["jit", "fx"])
def test_a_trace_hangs_on_what_the_model_was_given(how):
    from torch.fx.experimental.proxy_tensor import make_fx

    model = installed(Plain())
    with torch.inference_mode():
        x = torch.ones(3)
        traced = torch.jit.trace(model, x) if how == "jit" else make_fx(lambda y: model(y))(x)
        assert torch.equal(traced(torch.full((3,), 5.0)), torch.full((3,), 6.0))


@pytest.mark.parametrize("change", ["load", "data", "in place"])
def test_weights_that_became_inference_tensors_are_followed(change):
    """`to(dtype)` and `.data =` turn the parameter itself into one, whose count of writes stands still."""
    model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64)).eval().requires_grad_(False)
    swap, x = sp.quantize_linears(model, min_features=0), torch.randn(3, 64, dtype=torch.bfloat16)
    with torch.inference_mode():
        model.to(torch.bfloat16)
        before = model(x)
        if change == "load":
            model.load_state_dict({name: value * 1.5 for name, value in model.state_dict().items()})
        for parameter in model.parameters() if change != "load" else ():
            if change == "data":
                parameter.data = parameter * 1.5
            else:
                parameter.mul_(1.5)
        after = model(x)
        swap.remove()
        assert relative_error(after, model(x)) < 0.03 and relative_error(before, after) > 0.2
