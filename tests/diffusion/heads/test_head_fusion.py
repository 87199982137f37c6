"""Compiled attention makes queries and keys ready in one pass, where it knows all that is done to them."""

from __future__ import annotations

import os

import pytest
import torch
import torch._dynamo
import torch.nn.functional as F
from torch._subclasses.fake_tensor import FakeTensorMode

import sage_kernels
import sage_processors as sp
from sage_kernels.compat import add_graph_pass
from sage_kernels.testing import sqnr_db
from sage_processors.diffusion.heads import rotary  # noqa: F401 - defines the op
from sage_processors.diffusion.heads.head_fusion import OPS, fuse_heads
from sage_processors.linears.compiled.graph_fusion import fuse_in_compiled_code
from tests.support.inductor import passes_alone
from tests.support.tiny_models import MODELS


FUSED, ROTARY = "sage_kernels.qk_norm_rope", torch.ops.sage_processors.rotary
ATTENTION = [f"sage_kernels.{name}" for name in OPS]


def compiled(function, call, backend=passes_alone):
    """(what call(compiled function) returns, how many fused calls its graphs have, how many of attention)."""
    from torch._inductor import config

    torch._dynamo.reset()
    fuse_in_compiled_code(fuse_heads)
    before, found = config.pre_grad_custom_pass, [0, 0]

    def look(graph):
        for node in graph.nodes:
            found[0] += FUSED in str(node.target)
            found[1] += str(node.target).removesuffix(".default") in ATTENTION

    try:
        add_graph_pass(look, os.urandom(8))  # compiled code of an earlier run is not looked at
        with torch.no_grad():
            return call(torch.compile(function, fullgraph=True, backend=backend)), *found
    finally:
        config.pre_grad_custom_pass = before


@pytest.mark.slow("compiles a model")
@pytest.mark.parametrize("linears", ["none", "int8"])
@pytest.mark.parametrize("name", ["flux", "qwen_image_padded"])
def test_a_model_has_one_such_call_for_each_layer(name, linears):
    model, inputs = MODELS[name]()
    options = sp.SageAttnProcessor(min_tokens=0, linears=sp.Linears(linears, min_features=0))
    with torch.no_grad(), sp.apply(model, options) as handle:
        for _ in range(2):
            eager = model(**inputs, return_dict=False)[0]
        handle.new_run()
        first = model(**inputs, return_dict=False)[0]
        handle.new_run()
        got, fused, attended = compiled(model, lambda run: run(**inputs, return_dict=False)[0])
    assert fused == attended > 0
    assert sqnr_db(got, first) > 60 and sqnr_db(eager, first) > 20


def turned(x, cos, sin, pairs=True):
    return ROTARY(x, [cos, sin], "apply_rotary_emb", True, -1 if pairs else -2)


def angles(tokens, seed=0):
    generator = torch.Generator().manual_seed(seed)
    half = torch.randn(tokens, 8, generator=generator)
    return tuple(f(half).repeat_interleave(2, -1) for f in (torch.cos, torch.sin))


def normed(x, weight=None, eps=1e-6):
    return F.rms_norm(x, (16,), weight, eps)


def both(make):
    return lambda t: (make(t, "q"), make(t, "k"))


# name: (t: tensors by name) → q, k; whether they are made in one pass
KNOWN = {
    "norm and rotary": (both(lambda t, x: turned(normed(t[x], t["w"]), t["cos"], t["sin"])), True),
    "rotary alone": (both(lambda t, x: turned(t[x], t["cos"], t["sin"])), True),
    "halves": (both(lambda t, x: turned(t[x], t["cos"], t["sin"], pairs=False)), True),
    "norm alone": (both(lambda t, x: normed(t[x], t["w"])), True),
    "parts of one table": (both(lambda t, x: turned(
        torch.cat([normed(t[x][:, :7]), normed(t[x][:, 7:])], 1), t["cos"], t["sin"]
    )), True),
    "parts with a table each": (both(lambda t, x: torch.cat([
        turned(normed(t[x][:, :7], t["w"]), *t["first"]), turned(normed(t[x][:, 7:], t["v"]), *t["second"])
    ], dim=1)), True),
    "complex numbers": (both(lambda t, x: ROTARY(t[x], [t["complex"]], "apply_rotary_emb_qwen", False, -1)), True),
    "conjugated numbers": (both(lambda t, x: ROTARY(
        t[x], [t["complex"].conj()], "apply_rotary_emb_qwen", False, -1
    )), False),
    "nothing": (both(lambda t, x: t[x] * 2), False),
    "another norm of the keys": (lambda t: (
        turned(normed(t["q"]), t["cos"], t["sin"]), turned(normed(t["k"], eps=0.3), t["cos"], t["sin"])
    ), False),
    "a weight of the queries alone": (lambda t: (
        turned(normed(t["q"], t["w"]), t["cos"], t["sin"]), turned(normed(t["k"]), t["cos"], t["sin"])
    ), False),
    "other angles of the keys": (lambda t: (
        turned(t["q"], t["cos"], t["sin"]), turned(t["k"], t["sin"], t["cos"])
    ), False),
    "other angles of the keys' parts": (lambda t: (
        turned(torch.cat([t["q"][:, :7], t["q"][:, 7:]], 1), t["cos"], t["sin"]),
        turned(torch.cat([t["k"][:, :7], t["k"][:, 7:]], 1), t["sin"], t["cos"]),
    ), False),
    "another rotation of the keys": (lambda t: (
        turned(t["q"], t["cos"], t["sin"]), turned(t["k"], t["cos"], t["sin"], pairs=False)
    ), False),
    "queries that others use": (lambda t: (
        (q := turned(t["q"], t["cos"], t["sin"])), turned(t["k"], t["cos"], t["sin"]) + 0 * q[:, :, :1]
    ), False),
    "an input written to": (lambda t: (
        z := t["q"] * 1, q := turned(z, t["cos"], t["sin"]), k := turned(t["k"], t["cos"], t["sin"]), z.add_(1), (q, k)
    )[-1], False),
    "parts of heads": (both(lambda t, x: torch.cat([normed(t[x][:, :, :1]), normed(t[x][:, :, 1:])], 2)), False),
    "norm over all heads": (both(lambda t, x: F.rms_norm(t[x].flatten(2), (32,)).unflatten(2, (2, 16))), False),
}  # fmt: skip


INDUCTOR = "norm and rotary"  # it makes code of one of them, and of the slow tests' models
NAMES = [pytest.param(x, marks=pytest.mark.slow("makes code")) if x == INDUCTOR else x for x in KNOWN]


@pytest.mark.parametrize("name", NAMES)
def test_what_is_known_is_made_in_one_pass(name):
    make, is_known = KNOWN[name]
    generator = torch.Generator().manual_seed(1)
    shapes = {"q": (2, 33, 2, 16), "k": (2, 33, 2, 16), "values": (2, 33, 2, 16), "w": (16,), "v": (16,)}
    given = {x: torch.randn(*shape, generator=generator) for x, shape in shapes.items()}
    given["cos"], given["sin"] = angles(33)
    given["first"], given["second"] = angles(7, seed=2), angles(26, seed=3)
    given["complex"] = torch.complex(given["cos"][:, ::2].contiguous(), given["sin"][:, ::2].contiguous())

    def attend(t):
        q, k = make(t)
        return sage_kernels.sage_attention(q, k, t["values"], scaling="per_token")

    with torch.no_grad():
        expected = attend(given)
    backend = "inductor" if name == INDUCTOR else passes_alone
    got, fused, attended = compiled(attend, lambda run: run(given), backend)
    assert (fused, attended) == (is_known, 1)
    assert sqnr_db(got, expected) > 50  # codes may round the other way here and there


@pytest.mark.parametrize("elsewhere", [False, True])
def test_angles_on_another_device_are_left_to_the_models_own_code(elsewhere):
    """Which moves them; a kernel would read the memory of the wrong device."""
    graph = torch.fx.Graph()
    with FakeTensorMode():
        heads = {name: torch.empty(2, 33, 2, 16, device="cuda") for name in ("q", "k", "v")}
        tables = {name: torch.empty(33, 16, device="cpu" if elsewhere else "cuda") for name in ("cos", "sin")}
        nodes = {name: graph.placeholder(name) for name in (*heads, *tables)}
        for name, value in (heads | tables).items():
            nodes[name].meta["example_value"] = value
        turned_nodes = []
        for name in ("q", "k"):
            given = (nodes[name], [nodes["cos"], nodes["sin"]], "apply_rotary_emb", True, -1)
            turned_nodes.append(graph.call_function(ROTARY, given))
            turned_nodes[-1].meta["example_value"] = heads[name]
        out = graph.call_function(torch.ops.sage_kernels.attention, (*turned_nodes, nodes["v"]))
        graph.output(out)
        fuse_heads(graph)
    assert any(FUSED in str(node.target) for node in graph.nodes) != elsewhere


@pytest.mark.slow("two whole models are compiled")
def test_exact_layers_keep_the_models_own_code():
    model, inputs = MODELS["flux"]()
    with torch.no_grad():
        stock, *_ = compiled(model, lambda run: run(**inputs, return_dict=False)[0])
        with sp.apply(model, sp.SageAttnProcessor(min_tokens=10**6)):
            got, *found = compiled(model, lambda run: run(**inputs, return_dict=False)[0])
    assert found == [0, 0] and torch.equal(got, stock)


def test_the_op_is_the_models_own_function():
    from diffusers.models.embeddings import apply_rotary_emb
    from diffusers.models.transformers.transformer_qwenimage import apply_rotary_emb_qwen

    x, (cos, sin) = torch.randn(2, 9, 3, 16), angles(9)
    for dim in (-1, -2):
        wanted = apply_rotary_emb(x, (cos, sin), use_real_unbind_dim=dim, sequence_dim=1)
        assert torch.equal(ROTARY(x, [cos, sin], "apply_rotary_emb", True, dim), wanted)
    numbers = torch.complex(cos[:, ::2].contiguous(), sin[:, ::2].contiguous())
    wanted = apply_rotary_emb_qwen(x, numbers, use_real=False)
    assert torch.equal(ROTARY(x, [numbers], "apply_rotary_emb_qwen", False, -1), wanted)
