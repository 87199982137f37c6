"""The INT8 back end called through diffusers' own dispatch_attention_fn: masks, arguments, log-sum-exp."""

from __future__ import annotations

import pytest
import torch
from diffusers.models import attention_dispatch
from diffusers.models.attention_dispatch import dispatch_attention_fn
from torch.nn.attention.flex_attention import create_block_mask
from torch.overrides import TorchFunctionMode

import sage_kernels
import sage_processors as sp
from sage_kernels.testing import exact_attention, sqnr_db
from tests.diffusion.calls.backend import CLOSE_DB, NAME, counts, qkv, registered  # noqa: F401 (pytest finds fixtures here)


def both(q, k, v, **options):
    """A call through diffusers' dispatcher: by our back end, and by its native one."""
    ours, native = (dispatch_attention_fn(q, k, v, backend=name, **options) for name in (NAME, "native"))
    return ours, native


def masks(batch, heads, seq_q, seq_kv):
    """Every kind of mask that a model passes; each row sees a key."""
    torch.manual_seed(1)
    seen = torch.rand(batch, heads, seq_q, seq_kv) > 0.4
    seen[..., 0] = True
    keys = seen[:, 0, 0]
    return {
        "bool": seen,
        "bool_broadcast_heads": seen[:, :1],
        "bool_broadcast_batch": seen[:1, :1],
        "bool_keys": keys[:, None, None],
        "bool_keys_2d": keys,
        "additive": torch.randn(batch, heads, seq_q, seq_kv),
        "additive_keys": torch.zeros(batch, 1, 1, seq_kv).masked_fill(~keys[:, None, None], -1e4),
        "additive_infinite": torch.zeros(batch, 1, seq_q, seq_kv).masked_fill(~seen[:, :1], -torch.inf),
        "rank_2": seen[0, 0],
        "rank_3": seen[0],
    }


@pytest.mark.parametrize("kind", masks(2, 4, 40, 56))
@pytest.mark.parametrize("kv_heads", [4, 2])
def test_masks_are_obeyed(kind, kv_heads):
    q, k, v = qkv(seq_q=40, seq_kv=56, kv_heads=kv_heads)
    mask = masks(2, 4, 40, 56)[kind]
    options = {"enable_gqa": kv_heads != 4, "scale": 0.3}
    out = dispatch_attention_fn(q, k, v, attn_mask=mask, backend=NAME, **options)
    wide = mask[:, None, None] if kind == "bool_keys_2d" else mask  # which diffusers 0.36 does not do itself
    native = dispatch_attention_fn(q, k, v, attn_mask=wide, backend="native", **options)
    assert counts() == (1, {}) and sqnr_db(out, native) > CLOSE_DB
    unmasked = dispatch_attention_fn(q, k, v, backend=NAME, **options)
    assert sqnr_db(unmasked, native) < 20


def test_causality_and_grouped_heads_are_obeyed():
    q, k, v = qkv(seq_q=48, seq_kv=64, kv_heads=1)
    out, native = both(q, k, v, is_causal=True, enable_gqa=True)
    assert counts() == (1, {}) and sqnr_db(out, native) > CLOSE_DB
    assert torch.equal(out, sage_kernels.sage_attention(q, k, v, causal="top_left"))


@pytest.mark.parametrize("head_dim", [8, 40, 72, 128, 256])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_head_dims_and_dtypes(head_dim, dtype):
    q, k, v = qkv(head_dim=head_dim, dtype=dtype)
    out, native = both(q, k, v)
    assert counts() == (1, {}) and out.dtype == dtype and sqnr_db(out.float(), native.float()) > CLOSE_DB


class Looking(TorchFunctionMode):
    """Wants to see scaled_dot_product_attention, as guiders of diffusers do."""

    def __init__(self):
        super().__init__()
        self.seen = 0

    def __torch_function__(self, function, types, args=(), kwargs=None):
        self.seen += function is torch.nn.functional.scaled_dot_product_attention
        return function(*args, **(kwargs or {}))


EXACT = {
    "dtype": lambda: (qkv(dtype=torch.float64), {}),
    "head_dim": lambda: (qkv(head_dim=264), {}),
    "softmax_scale": lambda: (qkv(), {"scale": -0.1}),
    "value_head_dim": lambda: ((*qkv()[:2], qkv(head_dim=24)[2]), {}),
    "attention_kwargs": lambda: (qkv(), {"attention_kwargs": {"window": 3}}),
    "mask_and_causal": lambda: (qkv(), {"attn_mask": torch.randn(48, 48), "is_causal": True}),
    "mask_type": lambda: (qkv(dtype=torch.float16), {"attn_mask": torch.zeros(48, 48, dtype=torch.float64)}),
}


@pytest.mark.parametrize("reason", EXACT)
def test_what_int8_cannot_do_runs_by_the_native_backend_and_is_counted(reason):
    (q, k, v), options = EXACT[reason]()
    try:
        native = dispatch_attention_fn(q, k, v, backend="native", **options)
    except RuntimeError as error:  # so does ours then, in the same words
        with pytest.raises(RuntimeError) as ours:
            dispatch_attention_fn(q, k, v, backend=NAME, **options)
        assert str(ours.value) == str(error)
    else:
        assert torch.equal(dispatch_attention_fn(q, k, v, backend=NAME, **options), native)
    assert counts() == (0, {reason: 1})
    sp.register_diffusers_backend(min_tokens=0, on_unsupported="raise")
    with pytest.raises(sp.UnsupportedAttentionError, match=f"reason '{reason}'.*register_diffusers_backend") as raised:
        dispatch_attention_fn(q, k, v, backend=NAME, **options)
    assert raised.value.reason == reason and counts() == (0, {})


def test_dropout_is_done_by_the_native_backend():
    q, k, v = qkv()
    outs = []
    for name in (NAME, "native"):
        torch.manual_seed(7)
        outs.append(dispatch_attention_fn(q, k, v, dropout_p=0.5, backend=name))
    assert torch.equal(*outs) and counts() == (0, {"dropout": 1})


def test_a_block_mask_raises_as_in_stock():
    q, k, v = qkv()
    blocks = create_block_mask(lambda b, h, i, j: i >= j, None, None, 48, 48, device="cpu")
    raised = []
    for name in (NAME, "native"):
        with pytest.raises((AttributeError, RuntimeError, TypeError)) as caught:
            dispatch_attention_fn(q, k, v, attn_mask=blocks, backend=name)
        raised.append(str(caught.value))
    assert raised[0] == raised[1] and counts() == (0, {"block_mask": 1})


def test_a_gradient_is_asked_of_the_native_backend():
    grads = []
    for name in (NAME, "native"):
        q, k, v = (x.requires_grad_() for x in qkv())
        dispatch_attention_fn(q, k, v, backend=name).square().sum().backward()
        grads.append(torch.cat([x.grad for x in (q, k, v)]))
    assert torch.equal(*grads) and counts() == (0, {"requires_grad": 1})


def test_a_function_mode_sees_the_native_backend():
    with Looking() as mode:
        ours, native = both(*qkv())
    assert torch.equal(ours, native) and mode.seen == 2 and counts() == (0, {"function_mode": 1})


def test_short_calls_are_exact():
    sp.register_diffusers_backend(min_tokens=49)
    ours, native = both(*qkv())
    assert torch.equal(ours, native) and counts() == (0, {"short": 1})
    sp.register_diffusers_backend(min_tokens=48)
    both(*qkv())
    assert counts() == (1, {})


def test_autocast_casts_as_it_does_for_pytorch():
    q, k, v = qkv()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        ours, native = both(q, k, v)
    assert ours.dtype == native.dtype == torch.bfloat16 and sqnr_db(ours.float(), native.float()) > CLOSE_DB


def test_diffusers_checks_do_not_mind(monkeypatch, caplog):
    monkeypatch.setattr(attention_dispatch._AttentionBackendRegistry, "_checks_enabled", True)
    ours, native = both(*qkv())
    assert sqnr_db(ours, native) > CLOSE_DB and f"backend {NAME}" not in caplog.text


def test_a_fallback_is_logged_once_for_a_reason(caplog):
    for _ in range(2):
        both(*qkv(dtype=torch.float64))
    assert [r.message for r in caplog.records if "reason: dtype" in r.message] == [
        "back end sage_int8 runs without INT8 (reason: dtype); sage_processors.diffusers_backend_report() counts"
    ]


@pytest.mark.parametrize("kv_heads", [4, 2])
@pytest.mark.parametrize("exact", [False, True])
def test_lse_is_natural_and_merges_parts_as_ring_attention_does(exact, kv_heads):
    q, k, v = qkv(seq_kv=64, kv_heads=kv_heads, dtype=torch.float64 if exact else torch.float32)
    options = {"backend": NAME, "enable_gqa": kv_heads != 4, "attention_kwargs": {"return_lse": True}}
    want, want_lse = exact_attention(q, k, v)
    out, lse = dispatch_attention_fn(q, k, v, **options)
    assert lse.shape == q.shape[:3] and out.shape == q.shape
    assert sqnr_db(out, want) > (200 if exact else CLOSE_DB)
    assert (lse - want_lse).abs().max() < (1e-12 if exact else 0.02)
    (first, first_lse), (second, second_lse) = (
        dispatch_attention_fn(q, k[:, part], v[:, part], **options) for part in (slice(0, 24), slice(24, 64))
    )
    merged = first - torch.sigmoid(second_lse - first_lse).unsqueeze(-1) * (first - second)
    assert sqnr_db(merged, want) > (200 if exact else CLOSE_DB)
    assert counts() == ((0, {"dtype": 3}) if exact else (3, {}))


def test_exact_lse_with_masks_causality_and_rows_that_see_nothing():
    q, k, v = qkv(dtype=torch.float64, seq_kv=56)
    seen = masks(2, 4, 48, 56)["bool"].clone()
    seen[0, 1, 2] = False
    lse = {"return_lse": True}
    out, got = dispatch_attention_fn(q, k, v, attn_mask=seen, backend=NAME, attention_kwargs=lse)
    native = dispatch_attention_fn(q, k, v, attn_mask=seen, backend="native").nan_to_num()
    native[0, 2, 1] = 0
    assert sqnr_db(out, native) > 200 and got[0, 2, 1] == -torch.inf and not out[0, 2, 1].any()
    out, _ = dispatch_attention_fn(q, k, v, is_causal=True, backend=NAME, attention_kwargs=lse)
    assert sqnr_db(out, dispatch_attention_fn(q, k, v, is_causal=True, backend="native")) > 200
    with pytest.raises(NotImplementedError, match="return_lse"):
        dispatch_attention_fn(q, k, v, dropout_p=0.1, backend=NAME, attention_kwargs=lse)


def test_exact_lse_is_the_same_in_parts(monkeypatch):
    from sage_processors.diffusion.calls import fallback

    q, k, v = qkv(dtype=torch.float64)
    whole = fallback.attention_with_lse(q, k, v, None, True, None)
    monkeypatch.setattr(fallback, "_SCORES", 2 * 4 * 48 * 7)  # 7 rows at a time
    parts = fallback.attention_with_lse(q, k, v, None, True, None)
    assert all(torch.allclose(a, b, rtol=1e-12, atol=1e-12) for a, b in zip(whole, parts, strict=True))


def test_unknown_arguments_are_counted_in_compiled_code_too():
    torch._dynamo.reset()
    options = {"backend": attention_dispatch.AttentionBackendName(NAME), "attention_kwargs": {"window": 3}}
    compiled = torch.compile(lambda q: dispatch_attention_fn(q, q, q, **options), backend="eager", fullgraph=True)
    q = qkv()[0]
    assert sqnr_db(compiled(q), dispatch_attention_fn(q, q, q, backend="native")) > 100
    assert counts() == (0, {"attention_kwargs": 1})
    torch._dynamo.reset()
