"""Random calls: shapes, head groups, memory layouts, masks, bands, caps, sinks and scales together."""

from __future__ import annotations

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from sage_kernels import DEFAULT_RECIPE, RECIPES, SCALINGS, new_head_state
from sage_kernels.testing import FAMILIES, FP32_ROUNDING, exact_attention, make_qkv
from tests.kernels.attention.attention_cases import LAYOUTS, band_mask, in_layout


HEAD_DIMS = (8, 13, 16, 24, 32, 40, 59, 64, 72, 80, 96)
SENTINEL = -1e4  # what models write for "hidden" in fp16
SENTINEL_EXPONENT = 1.5e4  # its size in base 2: scores are formed beside it where a row has nothing else


@st.composite
def masks(draw, batch, heads, seq_q, seq_kv):
    """A mask of any shape that broadcasts, bool or float, dense or of stride 0; and the exponent that it makes."""
    full = (batch, heads, seq_q, seq_kv)
    shape = [size if draw(st.booleans()) else 1 for size in full[:3]] + [seq_kv]
    generator = torch.Generator().manual_seed(draw(st.integers(0, 99)))
    share = draw(st.sampled_from([0.0, 0.1, 0.5, 0.9, 1.0]))
    hidden = torch.rand(shape, generator=generator) < share
    kind = draw(st.sampled_from(["bool", "-inf", "sentinel", "lowest"]))
    dtype = draw(st.sampled_from([torch.float32, torch.float16, torch.bfloat16]))
    if kind == "bool":
        mask = ~hidden
    else:
        bias = 3 * torch.randn(shape, generator=generator).to(dtype)
        low = {"-inf": -torch.inf, "sentinel": SENTINEL, "lowest": torch.finfo(torch.bfloat16).min}[kind]
        mask = bias.float().masked_fill(hidden, low).to(torch.float32 if kind == "lowest" else dtype)
    if draw(st.booleans()):
        mask = mask.expand(full)
    while mask.dim() > 1 and mask.shape[0] == 1 and draw(st.booleans()):
        mask = mask[0]
    return mask, (SENTINEL_EXPONENT if kind == "sentinel" else 64.0)


@st.composite
def calls(draw):
    """q, k, v in some layout, and the options of one call."""
    lengths = st.one_of(st.integers(1, 20), st.integers(1, 64), st.sampled_from([1, 16, 63, 64, 65, 70]))
    # mostly one: every head is another program for the interpreter
    batch, kv_heads, group = (draw(st.sampled_from(sizes)) for sizes in ([1, 1, 1, 1, 2], [1, 1, 1, 1, 2], [1, 1, 2]))
    seq_q, seq_kv = draw(lengths), draw(lengths)
    heads = kv_heads * group
    options = {
        "scaling": draw(st.sampled_from(SCALINGS)),
        "smooth_k": draw(st.booleans()),
        "scale": draw(st.sampled_from([None, None, 0.05, 0.3])),
        "softcap": draw(st.sampled_from([0.0, 0.0, 0.0, 1.0, 30.0])),
    }
    masking = draw(st.sampled_from(["none", "mask", "mask", "band", "band", "window", "mask and window"]))
    exponent = 64.0
    if masking in ("window", "mask and window"):
        seq_q = seq_kv  # a window without causality
        options["window"] = draw(st.integers(1, 70))
    if "mask" in masking:
        options["attn_mask"], exponent = draw(masks(batch, heads, seq_q, seq_kv))
    if masking == "band":
        options["causal"] = draw(st.sampled_from(["top_left", "bottom_right"] + [True] * (seq_q == seq_kv)))
        options["window"] = draw(st.sampled_from([None, 1, 5, 40]))
    if draw(st.sampled_from([False, False, True])):
        generator = torch.Generator().manual_seed(draw(st.integers(0, 9)))
        options["sinks"] = 2 * torch.randn(heads, generator=generator)
        options["sinks"][0] = draw(st.sampled_from([0.0, 5.0, -torch.inf]))
    q, k, v = make_qkv(
        draw(st.sampled_from(FAMILIES)), batch, seq_q, seq_kv, heads, kv_heads, draw(st.sampled_from(HEAD_DIMS)),
        dtype=torch.float16, seed=draw(st.integers(0, 999)),
    )  # fmt: skip
    if draw(st.sampled_from([False, False, False, True])):
        dim = draw(st.sampled_from([0, 1, 2]))
        k, v = (x.narrow(dim, 0, 1).expand(x.shape) for x in (k, v))
    else:
        k, v = (in_layout(x, draw(st.sampled_from(LAYOUTS))) for x in (k, v))
    q = in_layout(q, draw(st.sampled_from(LAYOUTS)))
    planned = draw(st.sampled_from([False, False, False, True]))
    return (q, k, v), options, planned, exponent


def check_against_exact(lse, q, k, v, *, scale, softcap, attn_mask=None, causal=False, window=None, sinks=None, **_):
    """With a scale per token and no smoothing, a score is off by half a step of each factor at most, and so is the LSE
    (capping, masks and sinks only shrink the error): the masks mean what torch's own say, whatever is rounded."""
    scale = q.shape[3] ** -0.5 if scale is None else scale
    mask = band_mask(q.shape[1], k.shape[1], causal, window) if causal or window is not None else None
    if attn_mask is not None:
        mask = attn_mask if mask is None else _both(attn_mask, mask)
    _, exact = exact_attention(q, k, v, scale, mask=mask, softcap=softcap, sinks=sinks)
    groups = q.shape[2] // k.shape[2]
    q, k = q.double().transpose(1, 2), k.double().transpose(1, 2).repeat_interleave(groups, 1)
    half_q, half_k = (x.abs().amax(-1) / 254 for x in (q, k))
    bound = scale * (
        half_q[..., None] * k.abs().sum(-1)[:, :, None]
        + half_k[:, :, None] * q.abs().sum(-1)[..., None]
        + q.shape[3] * half_q[..., None] * half_k[:, :, None]
    )
    bound = bound.amax(-1).transpose(1, 2) * (1 + 1e-3)
    low = exact < -1e30  # hidden altogether, or by a finite bias so low that its own size does not matter
    assert (lse[low] < -1e30).all()
    assert ((lse - exact).abs() <= bound + exact.abs() * 2.0**-20 + 64 * FP32_ROUNDING)[~low].all()


def _both(mask, seen):
    return mask & seen if mask.dtype == torch.bool else mask.float().masked_fill(~seen, -torch.inf)


def random_calls(number: int):
    """The test for this many calls, the same ones every time."""

    def decorate(test):
        for decorator in (
            given(call=calls()),
            settings(
                max_examples=number,
                derandomize=True,
                database=None,
                deadline=None,
                suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
            ),
            pytest.mark.parametrize("tier", ["interpreter"], indirect=True),
            # the interpreter is numpy: it warns where a GPU returns inf
            pytest.mark.filterwarnings("ignore::RuntimeWarning"),
        ):
            test = decorator(test)
        return test

    return decorate


STUDIED = pytest.mark.parametrize("recipe", [recipe.name for recipe in RECIPES.values() if recipe.study])


@random_calls(30)
def test_random_calls_match_the_reference(call, attend):
    check(call, attend)


@pytest.mark.slow("five times as many")
@random_calls(150)
def test_many_random_calls_match_the_reference(call, attend):
    check(call, attend)


@pytest.mark.usefixtures("true_fp8")
@STUDIED
@random_calls(10)
def test_random_calls_of_the_recipes_to_compare_with_match_the_reference(call, recipe, attend):
    check_recipe(call, recipe, attend)


def check_recipe(call, recipe, attend):
    inputs, options, planned, exponent = call
    options = options | {"recipe": recipe}
    if RECIPES[recipe].plain:
        options |= {"scaling": "per_token", "smooth_k": False}
    check((inputs, options, planned and not RECIPES[recipe].plain, exponent), attend)


def check(call, attend):
    (q, k, v), options, planned, exponent = call
    kept = [x.clone() for x in (q, k, v)]
    state = new_head_state(k.shape[2], q.shape[3], "cpu") if planned else None
    out, lse = attend.check(q, k, v, state=state, exponent=exponent, **options)
    assert torch.isfinite(out).all() and not lse.isnan().any()
    assert all(torch.equal(a, b) for a, b in zip(kept, (q, k, v), strict=True))
    own = RECIPES[options.get("recipe", DEFAULT_RECIPE)]
    sums_exactly = own.qk == "int8" and not own.sums_codes
    if options["scaling"] == "per_token" and not options["smooth_k"] and not planned and sums_exactly:
        check_against_exact(lse, q, k, v, **options)
