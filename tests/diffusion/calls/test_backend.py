"""INT8 attention as a back end of diffusers: chosen by name, registered and taken out, beside the swap."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
import torch._dynamo.testing
from diffusers.models import attention_dispatch
from diffusers.models.attention_dispatch import attention_backend, dispatch_attention_fn

import sage_kernels
import sage_processors as sp
from sage_kernels.testing import sqnr_db
from sage_processors.diffusion.host.discovery import attention_modules
from tests.diffusion.calls.backend import NAME, counts, qkv, registered  # noqa: F401 (pytest finds fixtures here)
from tests.diffusion.calls.test_processors import CountedSDPA, forward
from tests.support.repository import fresh
from tests.support.tiny_models import MODELS


# All attention of these asks for a back end: joint, self and cross attention, masks, grouped heads.
DISPATCHING = [
    "flux", "flux2", "chroma", "qwen_image", "qwen_image_padded", "wan_t2v", "wan_i2v", "ltx", "krea2",
]  # fmt: skip
LEGACY = ["sd3", "unet_sdxl", "cogvideox"]  # these call PyTorch directly


@pytest.mark.parametrize("name", DISPATCHING)
def test_a_model_runs_as_with_dynamic_processors(name, monkeypatch):
    model, inputs = MODELS[name]()
    sdpa = CountedSDPA(monkeypatch)
    stock, stock_calls = sdpa.of(forward, model, inputs)
    with sp.apply(model, sp.SageAttnProcessor(scaling="dynamic", min_tokens=0)):
        swapped = forward(model, inputs)
    assert counts() == (0, {})
    model.set_attention_backend(NAME)
    out, exact_calls = sdpa.of(forward, model, inputs)
    assert torch.equal(out, swapped) and not torch.equal(out, stock)
    assert sqnr_db(out, stock) > 30
    assert counts() == (stock_calls, {}) and exact_calls == 0
    model.set_attention_backend("native")
    assert torch.equal(forward(model, inputs), stock) and counts() == (stock_calls, {})


@pytest.mark.parametrize("name", LEGACY)
def test_models_that_ask_for_no_backend_run_as_in_stock_and_the_report_says_so(name):
    model, inputs = MODELS[name]()
    stock = forward(model, inputs)
    model.set_attention_backend(NAME)
    assert torch.equal(forward(model, inputs), stock) and counts() == (0, {})
    notes = " ".join(sp.diffusers_backend_report(model).notes)
    layers = len(list(attention_modules(model)))
    assert f"{layers} of {layers} attention layers" in notes and "sage_processors.apply reaches them" in notes


def test_a_model_with_one_legacy_layer_is_reached_in_part(monkeypatch):
    model, inputs = MODELS["hunyuan_video"]()
    sdpa = CountedSDPA(monkeypatch)
    stock, stock_calls = sdpa.of(forward, model, inputs)
    model.set_attention_backend(NAME)
    out, exact_calls = sdpa.of(forward, model, inputs)
    assert 0 < exact_calls < stock_calls and counts() == (stock_calls - exact_calls, {})
    assert sqnr_db(out, stock) > 30
    assert "ask for no back end" in " ".join(sp.diffusers_backend_report(model).notes)


def test_the_context_manager_ends():
    model, inputs = MODELS["flux"]()
    stock = forward(model, inputs)
    with attention_backend(NAME):
        inside = forward(model, inputs)
        assert "active back end" in str(sp.diffusers_backend_report())
    assert counts() == (2, {}) and not torch.equal(inside, stock)
    assert torch.equal(forward(model, inputs), stock) and counts() == (2, {})
    assert "active back end" not in str(sp.diffusers_backend_report())


@pytest.mark.slow("a process of its own")
def test_the_environment_variable():
    code = """
        import os
        os.environ["DIFFUSERS_ATTN_BACKEND"] = "sage_int8"
        import torch
        import sage_processors as sp
        sp.register_diffusers_backend(min_tokens=0)
        from diffusers.models.attention_dispatch import dispatch_attention_fn
        q = torch.randn(1, 32, 2, 32)
        assert torch.equal(dispatch_attention_fn(q, q, q), sp.diffusers_backend_report() and
            __import__("sage_kernels").sage_attention(q, q, q))
        from diffusers.utils import constants
        assert constants.DIFFUSERS_ATTN_BACKEND == "sage_int8"
        print(sp.diffusers_backend_report().rows[0]["calls"])
        sp.unregister_diffusers_backend()
        exact = torch.nn.functional.scaled_dot_product_attention(*[q.transpose(1, 2)] * 3).transpose(1, 2)
        assert torch.equal(dispatch_attention_fn(q, q, q), exact)
        """
    assert fresh(code).strip() == "1"


def test_copies_and_pickles_of_a_model_keep_the_backend():
    model, inputs = MODELS["flux"]()
    model.set_attention_backend(NAME)
    out = forward(model, inputs)
    for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert torch.equal(forward(twin, inputs), out)
    assert counts() == (6, {})


def test_registering_again_replaces_the_options_and_counts_anew():
    q, k, v = qkv()
    first = dispatch_attention_fn(q, k, v, backend=NAME)
    assert counts() == (1, {})
    assert sp.register_diffusers_backend(recipe="qk_int8_pv_fp8", scaling="per_head", min_tokens=0) == NAME
    assert counts() == (0, {})
    second = dispatch_attention_fn(q, k, v, backend=NAME)
    assert not torch.equal(first, second)
    assert torch.equal(second, sage_kernels.sage_attention(q, k, v, recipe="qk_int8_pv_fp8", scaling="per_head"))
    row = sp.diffusers_backend_report().rows[0]
    assert (row["recipe"], row["scaling"], row["calls"]) == ("qk_int8_pv_fp8", "per_head", 1)


@pytest.mark.parametrize(
    ("options", "error"),
    [
        ({"recipe": "int4"}, ValueError), ({"scaling": "timestep"}, ValueError), ({"min_tokens": 1.5}, TypeError),
        ({"on_unsupported": "quiet"}, ValueError),
    ],
)  # fmt: skip
def test_wrong_options_change_nothing(options, error):
    dispatch_attention_fn(*qkv(), backend=NAME)
    with pytest.raises(error, match=next(iter(options))):
        sp.register_diffusers_backend(**options)
    dispatch_attention_fn(*qkv(), backend=NAME)
    assert counts() == (2, {})


def state_of_diffusers():
    names, registry = attention_dispatch.AttentionBackendName, attention_dispatch._AttentionBackendRegistry
    return {
        "enum": {n: copy.copy(v) for n, v in vars(names).items() if isinstance(v, (dict, list))} | {"all": dir(names)},
        "list": list(names),
        "registry": {n: copy.copy(v) for n, v in vars(registry).items() if isinstance(v, (dict, set))},
        "active": registry._active_backend,
    }


def test_unregistering_puts_all_back():
    sp.unregister_diffusers_backend()
    before = state_of_diffusers()
    model, inputs = MODELS["flux"]()
    stock = forward(model, inputs)
    for _ in range(2):
        sp.register_diffusers_backend(min_tokens=0)
        assert NAME in {name.value for name in attention_dispatch.AttentionBackendName}
        model.set_attention_backend(NAME)  # makes it diffusers' active one, too
        forward(model, inputs)
        model.reset_attention_backend()
        sp.unregister_diffusers_backend()
        assert state_of_diffusers() == before
        assert torch.equal(forward(model, inputs), stock)
    sp.unregister_diffusers_backend()
    with pytest.raises(ValueError, match="sage_int8"):
        model.set_attention_backend(NAME)
    assert "not registered" in str(sp.diffusers_backend_report())


def test_a_model_that_still_names_it_raises():
    model, inputs = MODELS["flux"]()
    model.set_attention_backend(NAME)
    sp.unregister_diffusers_backend()
    with pytest.raises(KeyError):
        forward(model, inputs)
    model.reset_attention_backend()
    forward(model, inputs)


def test_a_backend_of_this_name_that_is_not_ours_is_left_alone(monkeypatch):
    sp.unregister_diffusers_backend()
    names = attention_dispatch.AttentionBackendName
    monkeypatch.setitem(names._value2member_map_, NAME, names.NATIVE)
    with pytest.raises(RuntimeError, match="did not put there"):
        sp.register_diffusers_backend()


def test_another_dispatcher_is_refused_by_name(monkeypatch):
    sp.unregister_diffusers_backend()
    monkeypatch.delattr(attention_dispatch, "_templated_context_parallel_attention")
    with pytest.raises(ImportError, match="_templated_context_parallel_attention.*0.36"):
        sp.register_diffusers_backend()


def test_a_report_is_of_pipelines_and_models():
    with pytest.raises(TypeError, match="target"):
        sp.diffusers_backend_report("flux")


@pytest.mark.slow("compiles a model")
def test_a_compiled_model_is_one_graph_and_counts_its_calls():
    torch._dynamo.reset()
    model, inputs = MODELS["qwen_image_padded"]()
    model.set_attention_backend(NAME)
    eager = forward(model, inputs)
    sp.register_diffusers_backend(min_tokens=0)
    counter = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(model, backend=counter, fullgraph=True)
    for calls in (1, 2):
        assert sqnr_db(forward(compiled, inputs), eager) > 100
        assert counts() == (calls, {}) and counter.frame_count == 1
    sp.register_diffusers_backend(min_tokens=10**6)  # other options, another graph
    forward(compiled, inputs)
    assert counts() == (0, {"short": 1}) and counter.frame_count == 2
    torch._dynamo.reset()


@pytest.mark.parametrize("first", ["apply", "backend"])
@pytest.mark.parametrize("by", ["set_attention_backend", "attention_backend"])
def test_where_both_are_on_a_model_the_rules_of_the_swap_win(first, by):
    model, inputs = MODELS["flux"]()
    stock = forward(model, inputs)
    own = {"transformer_blocks.0.attn": {"recipe": "16bit"}}
    config = sp.SageAttnProcessor(min_tokens=0, scaling="per_block", layers=own)
    with sp.apply(model, config):
        swapped = forward(model, inputs)

    if (first, by) == ("backend", "set_attention_backend"):
        model.set_attention_backend(NAME)
    with sp.apply(model, config) as handle:
        if (first, by) == ("apply", "set_attention_backend"):
            model.set_attention_backend(NAME)
        with attention_backend(NAME if by == "attention_backend" else "native"):
            assert torch.equal(forward(model, inputs), swapped)
        report = handle.report()
        assert report.calls == 1 and report.fallbacks == {"kept": 1} and not any(r["note"] for r in report.rows)
        assert counts() == (0, {})
        assert "rules win" in " ".join(sp.diffusers_backend_report(model).notes)
        if by == "set_attention_backend":
            model.reset_attention_backend()  # nothing for the swap to notice
            assert torch.equal(forward(model, inputs), swapped)
            model.set_attention_backend("native")  # another back end after the swap: the user's later word
            assert torch.equal(forward(model, inputs), stock)
            assert handle.report().fallbacks["backend"] >= 1
            model.set_attention_backend(NAME)
    out = forward(model, inputs)  # taken out: the back end that was chosen is what runs
    assert torch.equal(out, stock) == (by == "attention_backend")
    assert counts() == ((0, {}) if by == "attention_backend" else (2, {}))


def test_eight_bit_linears_alone_hand_ordinary_tensors_to_the_backend():
    model, inputs = MODELS["flux"]()
    model.set_attention_backend(NAME)
    attention_alone = forward(model, inputs)
    swap = sp.quantize_linears(model, min_features=0)
    out = forward(model, inputs)
    assert swap.report().calls and counts() == (4, {}) and sqnr_db(out, attention_alone) > 25
    swap.remove()
    assert torch.equal(forward(model, inputs), attention_alone)
