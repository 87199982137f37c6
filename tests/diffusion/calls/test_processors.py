"""Every attention family of diffusers: the swap changes the op alone, reaches every attention call, can be undone."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
import torch.nn.functional as F
from torch.utils._python_dispatch import TorchDispatchMode

import sage_kernels
import sage_processors as sp
from sage_kernels.testing import relative_l2
from sage_processors.diffusion.calls import processors, sage_class
from sage_processors.diffusion.host.discovery import attention_modules
from sage_processors.reporting.event_counter import EventCounter
from tests.support.tiny_models import MODELS, OLDEST


EVERYTHING = sp.SageAttnProcessor(min_tokens=1)  # tiny models have few tokens
# Attention calls outside of any processor, per forward: the report lists their modules.
OUTSIDE = {"hunyuan_dit": 1, "mochi": 1}
# Attention that is no softmax attention.
UNSWAPPABLE = {"sana"}
# Attention over frames or over a text encoder's layers: many short sequences that are not alike.
# sequences over time, one a pixel, share plans that do not fit all of them
SHARED_PLANS = {"unet_3d", "unet_motion", "unet_svd", "krea2", "latte"}
# heads of 8 channels, of which one token in the sample decides: a plan that fits seems not to, in one layer of these
FEW_CHANNELS = {"kandinsky3", "prior", "unet_simple_cross"}
SDPA = F.scaled_dot_product_attention


def sdpa_as_op(q, k, v, *, recipe, scaling, rotation, attn_mask=None, causal=False, scale=None, state=None):
    """Exact attention with the interface and the output layout of sage_attention."""
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    options = {"attn_mask": attn_mask, "is_causal": bool(causal), "scale": scale}
    return SDPA(q, k, v, enable_gqa=q.shape[1] != k.shape[1], **options).transpose(1, 2).contiguous()


def flat(output):
    """All tensors that a model returns, as one vector."""
    if isinstance(output, torch.Tensor):
        return output.flatten()
    return torch.cat([flat(x) for x in (output.values() if isinstance(output, dict) else output) if x is not None])


@torch.no_grad()
def forward(model, inputs):
    torch.manual_seed(1)
    return flat(model(**inputs)).clone()


class CountedSDPA:
    """Counts the calls of the real F.scaled_dot_product_attention, from wherever."""

    def __init__(self, monkeypatch):
        self.calls = 0

        def counted(*args, **kwargs):
            self.calls += 1
            return SDPA(*args, **kwargs)

        monkeypatch.setattr(F, "scaled_dot_product_attention", counted)

    def of(self, fn, *args):
        before = self.calls
        result = fn(*args)
        return result, self.calls - before


LARGE = ("kandinsky3", "unet_3d", "unet_motion", "unet_svd")
LARGE_LAST = [name for name in MODELS if name not in LARGE]
LARGE_LAST += [pytest.param(name, marks=pytest.mark.slow("a larger UNet")) for name in LARGE]


@pytest.mark.parametrize("name", LARGE_LAST)
def test_swap_is_exact_complete_close_and_undone(name, monkeypatch):
    model, inputs = MODELS[name]()
    sdpa = CountedSDPA(monkeypatch)
    stock, stock_calls = sdpa.of(forward, model, inputs)
    assert stock_calls > 0 and torch.isfinite(stock).all()
    original = {layer: module.processor for layer, module in attention_modules(model)}

    # 1. with exact attention as the op: the same bits, every call seen
    with monkeypatch.context() as patch:
        patch.setattr(sage_kernels, "sage_attention", sdpa_as_op)
        with sp.apply(model, sp.SageAttnProcessor(min_tokens=1, scaling="dynamic")) as handle:
            swapped, exact_calls = sdpa.of(forward, model, inputs)
            report = handle.report()
    assert torch.equal(swapped, stock)
    assert report.calls > 0, str(report)
    assert report.calls + sum(report.fallbacks.values()) + OUTSIDE.get(name, 0) == stock_calls, str(report)
    assert exact_calls == sum(report.fallbacks.values()) + OUTSIDE.get(name, 0), str(report)

    # 2. taken out again: the identical objects, the same bits
    assert {layer: module.processor for layer, module in attention_modules(model)} == original
    assert all(module.processor is original[layer] for layer, module in attention_modules(model))
    assert torch.equal(forward(model, inputs), stock)

    # 3. the real op, planned scales included: close to stock, every call accounted for
    timestep = next(x for x in ("timestep", "timesteps", "t") if x in inputs)
    earlier = inputs | {timestep: inputs[timestep] * 1.001}
    with sp.apply(model, EVERYTHING) as handle:
        _, exact_before = sdpa.of(forward, model, earlier)
        int8, exact_calls = sdpa.of(forward, model, inputs)
        report = handle.report()
    assert sqnr_db(int8, stock) > 30.0, str(report)
    assert not torch.equal(int8, stock)
    assert any(row["status"] == "not swappable" for row in report.rows) == (name in OUTSIDE or name in UNSWAPPABLE), (
        str(report)
    )
    outside = 2 * OUTSIDE.get(name, 0)
    assert report.calls + sum(report.fallbacks.values()) + outside == 2 * stock_calls, str(report)
    active = [row for row in report.rows if row["status"] == "active" and row["calls"]]
    assert all(row["scaling"] == "timestep" for row in active), str(report)
    # the second call, a step later, runs on the plan of the first one
    fitting = [row for row in active if row["misfit_fraction"] == 0]
    assert name in SHARED_PLANS or len(active) - len(fitting) <= (name in FEW_CHANNELS), str(report)
    assert all(row["dynamic_calls"] <= row["calls"] / 2 for row in fitting), str(report)
    # half of the keys are of the second call: a plan that fits no head of any sequence would be of no use
    assert all(row["misfit_fraction"] < 0.5 for row in active), str(report)
    assert name in SHARED_PLANS | FEW_CHANNELS or not any(row["note"] for row in active), str(report)


def sqnr_db(result, reference):
    error = (result - reference).double().pow(2).sum()
    return float(10 * torch.log10(reference.double().pow(2).sum() / error.clamp_min(1e-300)))


# --- one processor ---


def attention_inputs(tokens=160, heads=4, head_dim=16, qk_norm=None):
    from diffusers.models.attention_processor import Attention

    torch.manual_seed(0)
    attention = Attention(heads * head_dim, heads=heads, dim_head=head_dim, qk_norm=qk_norm).eval()
    return attention.requires_grad_(False), torch.randn(2, tokens, heads * head_dim)


def sage_attention_module(**options):
    attention, x = attention_inputs()
    stock = attention(x)
    base = type(attention.processor)
    attention.processor = sage_class.swap(
        attention.processor, sp.SageAttnProcessor(scaling="dynamic", **options), "layer"
    )
    return attention, x, stock, base


def counted(processor):
    return {name: n for name, n in zip(processors.EVENTS, processor._sage.events.numbers(), strict=True) if n}


def test_fallback_is_exact_counted_and_logged_once(caplog):
    attention, x, stock, _ = sage_attention_module(min_tokens=161)
    processors._fallbacks.logged.clear()
    for _ in range(3):
        assert torch.equal(attention(x), stock)
    assert counted(attention.processor) == {"short": 3}
    assert len([r for r in caplog.records if "short" in r.getMessage()]) == 1


class Operations(TorchDispatchMode):
    """Writes down every operation on tensors."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.seen.append(str(func))
        return func(*args, **kwargs or {})

    @classmethod
    def of(cls, fn, *args):
        with cls() as mode:
            mode.seen = []
            fn(*args)
        return mode.seen


def test_a_short_call_is_the_stock_call_operation_by_operation():
    """Not one more: on a GPU each would be a launch, in calls that are exact because they are short."""
    attention, x, _, _ = sage_attention_module(min_tokens=161)
    assert Operations.of(attention, x) == Operations.of(attention_inputs()[0], x)
    assert counted(attention.processor) == {"short": 1}


def test_a_head_too_wide_is_not_called_short():
    attention, x = attention_inputs(heads=1, head_dim=264)
    attention.processor = sage_class.swap(attention.processor, sp.SageAttnProcessor(min_tokens=161), "layer")
    attention(x)
    assert counted(attention.processor) == {"head_dim": 1}


def test_a_counter_moves_with_its_layer():
    counter = EventCounter(2)
    counter.add(1)
    counter.to("meta")
    assert counter.traced.device.type == "meta" and counter.eager == [0, 1]


@pytest.mark.gpu
def test_calls_that_a_graph_makes_again_are_counted():
    attention, x, _, _ = sage_attention_module(min_tokens=161)
    attention, x = attention.cuda(), x.cuda()
    attention.processor._sage.events.to("cuda")
    attention(x)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        attention(x)
    for _ in range(3):
        graph.replay()
    torch.cuda.synchronize()
    assert counted(attention.processor) == {"short": 4}


@pytest.mark.parametrize("kind", ["float", "bool"])
def test_a_mask_reaches_the_op(kind):
    """Diffusers hands on [B, 1, S] masks; hidden keys must not matter, and the rest must be attended in INT8."""
    attention, x, _, _ = sage_attention_module()
    keep = torch.arange(160) < 150
    mask = keep if kind == "bool" else torch.where(keep, 0.0, -10000.0)
    mask = mask.expand(2, 1, 160)
    stock = attention_inputs()[0](x, attention_mask=mask)
    out = attention(x, attention_mask=mask)
    assert counted(attention.processor) == {"called": 1}
    assert relative_l2(out, stock) < 0.02 and not torch.equal(out, stock)
    changed = x.clone()
    changed[:, 150:] *= 50
    unmasked = attention(changed)[:, :150]
    assert relative_l2(attention(changed, attention_mask=mask)[:, :150], stock[:, :150]) < 0.02
    assert relative_l2(unmasked, stock[:, :150]) > 0.02  # else the test could not fail


def test_fallback_strict_raises_with_layer_and_reason():
    attention, x, _, _ = sage_attention_module(on_unsupported="raise", min_tokens=128)
    attention(x)
    with pytest.raises(sp.UnsupportedAttentionError, match="short") as caught:
        attention(x[:, :100])
    assert (caught.value.layer, caught.value.reason) == ("layer", "short")
    assert isinstance(caught.value, NotImplementedError)


@pytest.mark.parametrize("tokens, reason", [(127, "short"), (128, "called")])
def test_min_tokens_is_the_first_length_that_runs_in_int8(tokens, reason):
    attention, x, _, _ = sage_attention_module(min_tokens=128)
    attention(x[:, :tokens])
    assert counted(attention.processor) == {reason: 1}


def test_fallback_when_gradients_are_wanted_and_they_are_right():
    attention, x, _, _ = sage_attention_module()
    x.requires_grad_(True)
    stock = attention_inputs()[0](x)
    result = attention(x)
    assert torch.equal(result, stock) and counted(attention.processor) == {"requires_grad": 1}
    torch.testing.assert_close(*(torch.autograd.grad(y.square().sum(), x)[0] for y in (result, stock)))
    with torch.no_grad():
        attention(x)
    assert counted(attention.processor) == {"requires_grad": 1, "called": 1}


class Swallow(torch.overrides.TorchFunctionMode):
    """Replaces the attention by its values, as diffusers' perturbed attention guidance does."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        return args[2] if func is F.scaled_dot_product_attention else func(*args, **(kwargs or {}))


def test_function_mode_keeps_its_effect():
    attention, x, stock, _ = sage_attention_module()
    with Swallow():
        perturbed = attention(x)
        expected = attention_inputs()[0](x)
    assert torch.equal(perturbed, expected) and not torch.allclose(perturbed, stock)
    assert counted(attention.processor) == {"function_mode": 1}
    with torch.device("cpu"):  # a function mode too, but harmless
        attention(x)
    assert counted(attention.processor) == {"function_mode": 1, "called": 1}


def test_grouped_query_heads_are_not_repeated(monkeypatch):
    model, inputs = MODELS["ace_step_gqa"]()
    shapes = []

    def watched(q, k, v, **kwargs):
        shapes.append((q.shape[2], k.shape[2]))
        return sdpa_as_op(q, k, v, **kwargs)

    stock = forward(model, inputs)
    monkeypatch.setattr(sage_kernels, "sage_attention", watched)
    with sp.apply(model, EVERYTHING):
        assert torch.equal(forward(model, inputs), stock)
    assert (4, 2) in shapes


def test_inputs_reach_the_op_as_views(monkeypatch):
    attention, x, _, _ = sage_attention_module()
    seen = []

    def watched(q, k, v, **kwargs):
        seen.extend((q, k, v))
        return sdpa_as_op(q, k, v, **kwargs)

    monkeypatch.setattr(sage_kernels, "sage_attention", watched)
    attention(x)
    assert all(t.shape == (2, 160, 4, 16) and t._base is not None for t in seen)


def split_heads(x):
    return x.unflatten(-1, (4, -1)).transpose(1, 2)


def attend(q, k, v):
    return F.scaled_dot_product_attention(split_heads(q), split_heads(k), split_heads(v), scale=0.7)


class HelperProcessor:
    """Calls attention through a function of its module, with a softmax scale of its own."""

    def __call__(self, attn, hidden_states):
        return attend(hidden_states, hidden_states * 0.5, hidden_states + 1).transpose(1, 2).flatten(2)


def test_helper_function_and_softmax_scale_reach_the_op():
    attention, x = attention_inputs()
    attention.processor = HelperProcessor()
    stock = attention.processor(attention, x)
    sage = sage_class.swap(attention.processor, sp.SageAttnProcessor(scaling="dynamic"), "layer")
    assert sqnr_db(sage(attention, x), stock) > 30 and counted(sage) == {"called": 1}
    assert torch.equal(attention.processor(attention, x), stock)


def test_signature_is_the_stock_one():
    import inspect

    for name in ("flux", "z_image", "hunyuan_video", "qwen_image"):
        model, _ = MODELS[name]()
        before = {n: inspect.signature(m.processor.__call__) for n, m in attention_modules(model)}
        with sp.apply(model, EVERYTHING):
            assert {n: inspect.signature(m.processor.__call__) for n, m in attention_modules(model)} == before


def test_P01_copy_and_pickle_give_independent_processors_without_a_state():
    model, inputs = MODELS["flux"]()
    with sp.apply(model, EVERYTHING):
        forward(model, inputs)
        sage = model.transformer_blocks[0].attn.processor
        for other in (copy.deepcopy(sage), copy.copy(sage), pickle.loads(pickle.dumps(sage))):
            assert type(other) is type(sage) and other._sage.config == EVERYTHING
            assert counted(other) == {} and all(site.state is None for site in other._sage.sites)


def test_threads_do_not_mix_up_their_processors():
    from concurrent.futures import ThreadPoolExecutor

    modules = [sage_attention_module() for _ in range(4)]

    def work(i):
        with torch.no_grad():
            for _ in range(5 + i):
                modules[i][0](modules[i][1])

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(work, range(4)))
    assert [counted(m[0].processor) for m in modules] == [{"called": 5 + i} for i in range(4)]


# --- Sage<Name> ---


def every_processor_class():
    import re
    from pathlib import Path

    import diffusers

    names = set()
    for path in (Path(diffusers.__file__).parent / "models").rglob("*.py"):
        names |= set(re.findall(r"^class (\w*AttnProcessor\w*)[(:]", path.read_text(encoding="utf-8"), re.MULTILINE))
    # our own options are called SageAttnProcessor; the next two are deprecated names that can't be looked through
    # without arguments or XLA; the LoRA classes are markers for old checkpoints and can't be called
    other = {"AttnProcessor", "FluxIPAdapterJointAttnProcessor2_0", "XLAFluxFlashAttnProcessor2_0"}
    return sorted(name for name in names - other if not name.startswith("LoRA"))


def test_sage_class_exists_for_every_processor_class_of_diffusers():
    import inspect

    names = every_processor_class()
    assert len(names) > (70 if OLDEST else 90)
    made = 0
    for name in names:
        cls = getattr(sp, "Sage" + name)
        assert issubclass(cls, cls._sage_base) and cls.__name__ == "Sage" + cls._sage_base.__name__
        assert cls._sage_base.__name__ in names  # a deprecated name leads to the class that replaced it
        parameters = list(inspect.signature(cls._sage_base.__init__).parameters.values())[1:]
        if all(p.default is not p.empty or p.kind in (p.VAR_POSITIONAL, p.VAR_KEYWORD) for p in parameters):
            try:
                cls._sage_base()
            except (ImportError, NotImplementedError, TypeError, ValueError):
                continue  # needs an NPU, XLA or natten, or arguments that it calls optional
            assert cls()._sage.config == sp.SageAttnProcessor(scaling="dynamic")
            made += 1
    assert made > (50 if OLDEST else 80)


def test_sage_class_of_an_unknown_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match="NoSuchProcessor"):
        sp.SageNoSuchProcessor  # noqa: B018
    with pytest.raises(TypeError, match="expected an attention processor class"):
        sp.sage_class(3)


def test_sage_class_counts_every_call_in_the_code():
    from diffusers.models.transformers import transformer_flux2, transformer_wan

    assert sp.sage_class(transformer_wan.WanAttnProcessor)._sage_binding.calls == 2
    assert sp.sage_class(transformer_flux2.Flux2AttnProcessor)._sage_binding.calls == 1
    if not OLDEST:  # the calls are in a helper function of the module
        assert sp.sage_class(transformer_flux2.Flux2KVAttnProcessor)._sage_binding.calls > 1
    assert sp.SageSanaLinearAttnProcessor2_0._sage_binding.calls == 0
