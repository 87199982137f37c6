"""Rotary embeddings of language models in one pass: the same function, rounded once, and only where it is that one."""

from __future__ import annotations

import copy
import io
import pickle

import pytest
import torch


pytest.importorskip("transformers")

import transformers as tf
from transformers.models.glm import modeling_glm
from transformers.models.llama import modeling_llama

import sage_processors as sp
from sage_processors.linears.head_rotation import HeadRotations, in_one_pass, rotating_class, turns_halves
from sage_processors.patching.other_globals import with_global
from tests.linears.counting import relative_error
from tests.support.tiny_language_models import DECODERS, MODELS, tokens


USUAL = modeling_llama.apply_rotary_pos_emb
NAMED = ("llama", "qwen3", "mistral", "gemma2")
SHAPES = ((2, 4, 5, 16), (2, 2, 5, 16))


def logits(model, **inputs):
    with torch.no_grad():
        return model(**inputs).logits


def layers_of(model) -> int:
    """How many attention modules have a class for it."""
    return sum(rotating_class(type(module)) is not None for module in model.modules())


class rotated:
    """The model with that alone: no layer in 8 bit."""

    def __init__(self, model):
        self._model, self._rotations = model, HeadRotations()
        self._rotations.put(model, True)

    def remove(self):
        self._rotations.remove()

    def __enter__(self):
        return self._model

    def __exit__(self, *exception):
        self.remove()


def operands(dtype=torch.float32, samples=2):
    q, k = (torch.randn(shape, dtype=dtype).transpose(1, 2).contiguous().transpose(1, 2) for shape in SHAPES)
    angles = torch.rand(samples, 5, 8) * 7
    return q, k, *(torch.cat((f(angles), f(angles)), -1).to(dtype) for f in (torch.cos, torch.sin))


# --- which functions ---


def test_a_function_is_known_by_what_it_does():
    assert turns_halves(USUAL) and not turns_halves(modeling_glm.apply_rotary_pos_emb)
    assert not turns_halves(lambda q, k, cos, sin: (q, k))
    assert not turns_halves(lambda q, k, cos, sin: USUAL(q, k, cos, -sin))
    assert not turns_halves(lambda q, k, cos, sin: USUAL(q, k, sin, cos))
    assert not turns_halves(lambda q, k, cos, sin: USUAL(q, q, cos, sin))
    assert not turns_halves(lambda q, k, cos, sin: list(USUAL(q, k, cos, sin)))
    assert not turns_halves(lambda q, cos, sin: q) and not turns_halves(lambda q, k, cos, sin: q.nothing)


def test_it_is_tried_on_a_cpu_whatever_the_default_device_is():
    turns_halves.cache_clear()
    with torch.device("meta"):
        assert turns_halves(USUAL)


@pytest.mark.parametrize("name", DECODERS)
def test_every_family_does_what_it_did(name, rotary_passes):
    model, inputs = MODELS[name]()
    expected, layers = logits(model, **inputs), layers_of(model)
    classes = [type(module) for module in model.modules()]
    with rotated(model):
        given = logits(model, **inputs)
    assert (len(rotary_passes) > 0) <= (layers > 0) and len(rotary_passes) <= layers
    assert name not in NAMED or len(rotary_passes) == model.config.num_hidden_layers
    assert relative_error(given, expected) < 1e-5 if rotary_passes else torch.equal(given, expected)
    assert [type(module) for module in model.modules()] == classes
    assert torch.equal(logits(model, **inputs), expected)


# --- numbers ---


@pytest.mark.parametrize("samples", [1, 2])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_it_is_rounded_once(dtype, samples, rotary_passes):
    q, k, cos, sin = operands(dtype, samples)
    exact = USUAL(*(x.double() for x in (q, k, cos, sin)))
    for x, stock, best in zip(in_one_pass(USUAL)(q, k, cos, sin), USUAL(q, k, cos, sin), exact, strict=True):
        assert x.dtype == dtype and x.shape == stock.shape
        assert (x.double() - best).norm() <= (stock.double() - best).norm()
        ulp = torch.finfo(dtype).eps * best.abs().clamp_min(torch.finfo(dtype).tiny) / 2
        assert ((x.double() - best).abs() <= 1.01 * ulp + 4e-7).all()
    assert len(rotary_passes) == 1


@pytest.mark.parametrize("strided", ["as the model has them", "contiguous", "of a joined projection", "by sample"])
def test_layouts(strided, rotary_passes):
    q, k, cos, sin = operands()
    if strided == "contiguous":
        q, k = q.contiguous(), k.contiguous()
    elif strided == "of a joined projection":
        both = torch.cat((q.transpose(1, 2).flatten(2), k.transpose(1, 2).flatten(2)), -1)
        q, k = (x.unflatten(-1, (-1, 16)).transpose(1, 2) for x in both.split([64, 32], -1))
    elif strided == "by sample":  # samples that lie apart
        q, k = (torch.stack((x, x * torch.nan), 1)[:, 0] for x in (q, k))
    for x, y in zip(in_one_pass(USUAL)(q, k, cos, sin), USUAL(q, k, cos, sin), strict=True):
        torch.testing.assert_close(x, y, rtol=1e-5, atol=1e-6)
    assert len(rotary_passes) == 1


@pytest.mark.parametrize("cache", ["dynamic", "static", "int8"])
def test_texts_are_the_same(cache, rotary_passes):
    model, _ = MODELS["llama"]()
    ids = tokens(2, 7)

    def text():
        own = {"past_key_values": sp.Int8KVCache(model.config)} if cache == "int8" else {"cache_implementation": cache}
        return model.generate(ids, max_new_tokens=6, min_new_tokens=6, do_sample=False, **own)

    if cache == "int8":
        model.set_attn_implementation("sage_int8")
    expected, layers = text(), layers_of(model)
    with rotated(model):
        given = text()
    assert torch.equal(given, expected) and len(rotary_passes) == 6 * layers


# --- where the model's own function runs ---


class Own(torch.Tensor):
    pass


class Mode(torch.overrides.TorchFunctionMode):
    def __torch_function__(self, function, types, args=(), kwargs=None):
        return function(*args, **(kwargs or {}))


def half_of_the_channels(q, k, cos, sin):
    q, k = (torch.cat((x[..., :8], x[..., :8]), -1)[..., ::2] for x in (q, k))
    return q, k, cos[..., :8], sin[..., :8]


OWN = {  # what becomes of the arguments
    "gradient": lambda q, *rest: (q.requires_grad_(), *rest),
    "autocast": lambda *given: given,
    "mode": lambda *given: given,
    "other angles": lambda q, k, cos, sin: (q, k, cos[:1, :1], sin[:1, :1]),
    "half of the channels": half_of_the_channels,
    "an option": lambda q, k, *rest: (q.transpose(1, 2), k.transpose(1, 2), *rest),
    "float64": lambda *given: [x.double() for x in given],
    "subclass": lambda q, *rest: (q.as_subclass(Own), *rest),
    "angles of another dtype": lambda q, k, *rest: (q.bfloat16(), k.bfloat16(), *rest),
}
AROUND = {"gradient": torch.enable_grad, "autocast": lambda: torch.autocast("cpu", torch.bfloat16), "mode": Mode}


@pytest.mark.parametrize("what", OWN)
def test_the_models_own_function_runs(what, rotary_passes):
    q, k, cos, sin = OWN[what](*operands())
    options = {"unsqueeze_dim": 2} if what == "an option" else {}
    with AROUND.get(what, torch.no_grad)():
        given, expected = in_one_pass(USUAL)(q, k, cos, sin, **options), USUAL(q, k, cos, sin, **options)
    assert not rotary_passes and all(torch.equal(x, y) for x, y in zip(given, expected, strict=True))
    assert all(x.dtype == y.dtype for x, y in zip(given, expected, strict=True))


def test_angles_in_fp32_where_the_function_rounds_at_its_end(rotary_passes):
    def rounding(q, k, cos, sin):
        return tuple(x.to(q.dtype) for x in USUAL(q, k, cos, sin))

    q, k, cos, sin = operands()
    q, k = q.bfloat16(), k.bfloat16()
    given = in_one_pass(rounding)(q, k, cos, sin)
    assert rotary_passes and all(torch.equal(x, y) for x, y in zip(given, rounding(q, k, cos, sin), strict=True))


def test_transforms_of_functions(rotary_passes):
    q, k, cos, sin = operands()
    stacked = torch.stack((q, 2 * q))
    given = torch.func.vmap(lambda x: in_one_pass(USUAL)(x, k, cos, sin)[0])(stacked)
    assert torch.equal(given, torch.func.vmap(lambda x: USUAL(x, k, cos, sin)[0])(stacked))
    primal, tangent = torch.func.jvp(lambda x: in_one_pass(USUAL)(x, k, cos, sin)[0], (q,), (q,))
    assert torch.equal(primal, tangent) and not rotary_passes


def test_a_checkpoint_that_runs_twice_rounds_alike(rotary_passes):
    model, inputs = MODELS["llama"]()
    model = model.bfloat16().train().requires_grad_()
    with rotated(model), torch.no_grad():
        model(**inputs)
        assert not rotary_passes
        model.eval()(**inputs)
    assert rotary_passes


@pytest.mark.slow("compiles a model")
def test_compiled_code_has_the_models_own(rotary_passes):
    model, inputs = MODELS["llama"]()
    expected = torch.compile(copy.deepcopy(model), backend="eager", fullgraph=True)(**inputs).logits
    with rotated(model):
        given = torch.compile(model, backend="eager", fullgraph=True)(**inputs).logits
    torch._dynamo.reset()
    assert torch.equal(given, expected) and not rotary_passes


# --- the modules ---


@pytest.mark.parametrize("how", ["deepcopy", "pickle", "torch.save"])
def test_copies_go_on(how, rotary_passes):
    model, inputs = MODELS["llama"]()
    swap = rotated(model)
    expected = logits(model, **inputs)
    if how == "deepcopy":
        other = copy.deepcopy(model)
    elif how == "pickle":
        other = pickle.loads(pickle.dumps(model))
    else:
        file = io.BytesIO()
        torch.save(model, file)
        other = torch.load(io.BytesIO(file.getvalue()), weights_only=False)
    swap.remove()
    del rotary_passes[:]
    assert torch.equal(logits(other, **inputs), expected) and len(rotary_passes) == layers_of(model)
    sp.quantize_linears(other, "none").remove()
    assert [type(m) for m in other.modules()] == [type(m) for m in model.modules()]


@pytest.mark.parametrize("options", [{"linears": "none"}, {"layers": {"*": "none"}}])
def test_a_model_without_a_layer_in_8_bit_is_as_it_was(options, rotary_passes):
    model, inputs = MODELS["llama"]()
    expected = logits(model, **inputs)
    with rotated(copy.deepcopy(model)) as swapped:
        copied = copy.deepcopy(swapped)  # a copy of a model that has layers in 8 bit
    for each in (model, copied):
        with sp.quantize_linears(each, min_features=0, **options):
            assert torch.equal(logits(each, **inputs), expected) and not rotary_passes


@pytest.mark.parametrize("hooked", ["before", "after"])
def test_a_hook_of_accelerate_round_an_attention_module(hooked, rotary_passes):
    hooks = pytest.importorskip("accelerate.hooks")
    model, inputs = MODELS["llama"]()
    expected, attention, layers = logits(model, **inputs), model.model.layers[0].self_attn, layers_of(model)
    if hooked == "before":
        hooks.add_hook_to_module(attention, hooks.ModelHook())
    swap = rotated(model)
    if hooked == "after":
        hooks.add_hook_to_module(attention, hooks.ModelHook())
    logits(model, **inputs)
    assert len(rotary_passes) == layers
    swap.remove()
    assert torch.equal(logits(model, **inputs), expected) and len(rotary_passes) == layers
    hooks.remove_hook_from_module(attention)
    assert torch.equal(logits(model, **inputs), expected)


def test_decorators_of_a_forward_stay():
    """transformers has one that renames an argument."""
    model, _ = MODELS["llama"]()
    attention, x = model.model.layers[0].self_attn, torch.randn(1, 5, 64)
    cos, sin = model.model.rotary_emb(x, torch.arange(5)[None])
    old = {"past_key_values": tf.DynamicCache(), "position_embeddings": (cos, sin), "attention_mask": None}
    with rotated(model), torch.no_grad():
        given = attention(x, **old)[0]
    assert old["past_key_values"].get_seq_length() == 5 and given.shape == x.shape


def test_what_can_not_be_given_another_global_is_left():
    def outer(fn):
        def wrapped():
            return held[0]()

        held = [fn]
        wrapped.__wrapped__ = fn
        return wrapped

    def plain():
        return SHAPES

    assert with_global(outer(plain), "SHAPES", 1) is None and with_global(len, "SHAPES", 1) is None
    assert with_global(plain, "SHAPES", 1)() == 1 and plain() == SHAPES


@pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning", "ignore::DeprecationWarning")
def test_a_traced_model_turns_heads_as_its_own_code_does():
    model, inputs = MODELS["llama"]()
    ids = inputs["input_ids"]

    class Logits(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.model = model

        def forward(self, ids):
            return self.model(input_ids=ids, use_cache=False).logits

    with torch.no_grad():
        expected = model(input_ids=ids.flip(1)).logits
        with sp.quantize_linears(model, min_features=0):
            traced = torch.jit.trace(Logits().eval(), ids)
            assert "sage_kernels::" in str(traced.inlined_graph)
            assert 0 < relative_error(traced(ids.flip(1)), expected) < 0.05
