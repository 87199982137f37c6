"""The ComfyUI node, on a stand-in of the contract: an override is called with a function and that call's arguments."""

from __future__ import annotations

import importlib.util
import sys

import pytest
import torch

import sage_kernels
from sage_kernels.testing import exact_attention, sqnr_db
from tests.support.repository import ROOT


CLOSE_DB = 36.0  # INT8 scores, P·V in bf16, N(0, 1): some 42 dB; heads, tokens or a mask mixed up: below 20
B, S_Q, S_KV, H, D = 2, 40, 56, 4, 32


@pytest.fixture(scope="module")
def nodes():
    """The folder, loaded as ComfyUI loads a folder of custom_nodes."""
    folder = ROOT / "examples" / "comfyui"
    name = "custom_node_sage_int8"
    spec = importlib.util.spec_from_file_location(
        name, folder / "__init__.py", submodule_search_locations=[str(folder)]
    )
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    yield module.NODE_CLASS_MAPPINGS
    for loaded in [key for key in sys.modules if key.partition(".")[0] == name]:
        del sys.modules[loaded]


class Model:
    """What the node is handed: clone() and model_options."""

    def __init__(self, options=None):
        self.model_options = {"transformer_options": {"other": 1}} if options is None else options

    def clone(self):
        return Model(self.model_options)  # shares the dictionaries: the node must not write into them


def optimized_attention(
    q, k, v, heads, mask=None, attn_precision=None, skip_reshape=False, skip_output_reshape=False, **kwargs
):
    """The contract: [B, S, H·D], or [B, H, S, D] with skip_reshape; likewise what is returned."""
    if not skip_reshape:
        head_dim = q.shape[2] // heads
        q, k, v = (x.view(x.shape[0], x.shape[1], -1, head_dim).transpose(1, 2) for x in (q, k, v))
    if mask is not None and mask.dim() == 3:
        mask = mask.unsqueeze(1)
    more = {"scale": kwargs.get("scale"), "enable_gqa": kwargs.get("enable_gqa", False)}
    out = torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=mask, **more)
    return out if skip_output_reshape else out.transpose(1, 2).flatten(2)


def patched(nodes, **options):
    node = nodes["SageInt8Attention"]
    required = node.INPUT_TYPES()["required"]
    chosen = {name: kind[1]["default"] for name, kind in required.items() if name != "model"} | options
    (model,) = getattr(node(), node.FUNCTION)(Model(), **chosen)
    return model, model.model_options["transformer_options"]["optimized_attention_override"]


def qkv(skip_reshape=False, kv_heads=H, dtype=torch.float32):
    torch.manual_seed(0)
    shapes = ((S_Q, H), (S_KV, kv_heads), (S_KV, kv_heads))
    heads_apart = [torch.randn(B, tokens, heads, D, dtype=dtype) for tokens, heads in shapes]
    return [x.transpose(1, 2) if skip_reshape else x.flatten(2) for x in heads_apart], heads_apart


@pytest.mark.parametrize("skip_reshape", [False, True])
@pytest.mark.parametrize("skip_output_reshape", [False, True])
@pytest.mark.parametrize("kv_heads", [H, 2])
def test_layouts(nodes, skip_reshape, skip_output_reshape, kv_heads):
    _, override = patched(nodes, scaling="per_block")
    given, (q, k, v) = qkv(skip_reshape, kv_heads)
    options = {"skip_reshape": skip_reshape, "skip_output_reshape": skip_output_reshape}
    options |= {"enable_gqa": kv_heads != H, "transformer_options": {"block": 3}, "_bookkeeping": True}
    out = override(optimized_attention, *given, H, **options)
    want = optimized_attention(*given, H, **options)
    assert out.shape == want.shape and sqnr_db(out, want) > CLOSE_DB
    ours = sage_kernels.sage_attention(q, k, v, scaling="per_block")
    assert torch.equal(out, ours.transpose(1, 2) if skip_output_reshape else ours.flatten(2))
    assert override.counts == {"int8": 1}


def masks():
    torch.manual_seed(1)
    seen = torch.rand(B, H, S_Q, S_KV) > 0.4
    seen[..., 0] = True
    return {
        "heads": seen,
        "keys": seen[:, :1, :1],
        "rank_3": seen[:, 0],
        "rank_3_broadcast": seen[:1, 0],
        "rank_2": seen[0, 0],
        "additive": torch.randn(B, 1, S_Q, S_KV),
        "additive_rank_3": torch.randn(B, S_Q, S_KV),
    }


@pytest.mark.parametrize("kind", masks())
def test_masks_are_obeyed(nodes, kind):
    _, override = patched(nodes)
    given, (q, k, v) = qkv()
    out = override(optimized_attention, *given, H, masks()[kind])  # by position, as some models pass it
    assert override.counts == {"int8": 1}
    full = masks()[kind]
    full = full.unsqueeze(1) if full.dim() == 3 else full
    assert sqnr_db(out.unflatten(2, (H, D)), exact_attention(q, k, v, mask=full)[0]) > CLOSE_DB
    assert (
        sqnr_db(override(optimized_attention, *given, H).unflatten(2, (H, D)), exact_attention(q, k, v, mask=full)[0])
        < 20
    )


EXACT = {
    "dtype": lambda: (qkv(dtype=torch.float64)[0], {}),
    "low_precision_attention": lambda: (qkv()[0], {"low_precision_attention": False}),
    "attn_precision": lambda: (qkv(dtype=torch.float16)[0], {"attn_precision": torch.float32}),
    "unknown_argument": lambda: (qkv()[0], {"something_new": 3}),
    "softmax_scale": lambda: (qkv()[0], {"scale": -0.1}),
    "rank": lambda: ([x.unsqueeze(0) for x in qkv()[0]], {}),
    "mask_shape": lambda: (qkv()[0], {"mask": torch.ones(B, S_KV, dtype=torch.bool)}),
    "heads": lambda: (qkv(kv_heads=2)[0], {}),
}


@pytest.mark.parametrize("reason", EXACT)
def test_what_int8_cannot_do_goes_to_the_given_function_as_it_came(nodes, reason, caplog):
    _, override = patched(nodes)
    given, options = EXACT[reason]()
    seen = []

    def function(*args, **kwargs):
        seen.append((args, kwargs))
        return "its result"

    for _ in range(2):
        assert override(function, *given, H, **options) == "its result"
    (args, kwargs), _ = seen
    assert all(a is b for a, b in zip(args, (*given, H), strict=True)) and kwargs == options
    assert override.counts == {reason: 2}
    assert sum(f"reason: {reason}" in record.message for record in caplog.records) == 1


def test_short_calls_and_other_heads_go_to_the_given_function(nodes):
    _, override = patched(nodes, min_tokens=S_Q + 1)
    given, _ = qkv()
    assert torch.equal(override(optimized_attention, *given, H), optimized_attention(*given, H))
    assert override(lambda *args: "its result", *given, 3) == "its result"
    assert override(lambda *args: "its result", *given, 10**6) == "its result"
    assert override.counts == {"short": 1, "heads": 2}


def test_only_the_clone_is_changed_and_the_report_counts(nodes):
    model = Model()
    node = nodes["SageInt8Attention"]()
    (clone,) = node.patch(model, "qk_int8_pv_bf16", "per_token", 0)
    assert model.model_options == {"transformer_options": {"other": 1}}
    inner = clone.model_options["transformer_options"]
    assert inner["other"] == 1 and "optimized_attention_override" in inner
    (again,) = node.patch(clone, "qk_int8_pv_fp8", "per_head", 5)
    other = again.model_options["transformer_options"]["optimized_attention_override"]
    assert (other.recipe, other.scaling, other.min_tokens) == ("qk_int8_pv_fp8", "per_head", 5)
    override = inner["optimized_attention_override"]
    assert (override.recipe, override.scaling, override.min_tokens) == ("qk_int8_pv_bf16", "per_token", 0)
    for dtype in (torch.float32, torch.float64):
        override(optimized_attention, *qkv(dtype=dtype)[0], H)
    report = nodes["SageInt8AttentionReport"]()
    assert report.report(clone, "latent") == ("latent", "INT8 attention: 1 calls; 16 bit: dtype 1")
    assert "has none" in report.report(model, "latent")[1]
