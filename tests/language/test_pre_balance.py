"""Names that rotate: centre and balance come first, so what a rotation would spread is gone before it."""

from __future__ import annotations

import pytest
import torch

import sage_kernels
import sage_processors as sp
from sage_kernels.testing import relative_l2
from tests.support.outliers import varying_outliers


transformers = pytest.importorskip("transformers")

from sage_processors.language.pre_balance import WIDEST, balanced  # noqa: E402
from tests.language.test_transformers_models import forward  # noqa: E402
from tests.support.tiny_language_models import MODELS  # noqa: E402


ROTATED = "sage_int8_rotated_strict"


def hard_inputs(kind: str, dtype=torch.float32):
    """q [2, 96, 4, 32], k and v of two heads: outliers that move from token to token, or a mean that turns slowly."""
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(2, 96, h, 32, generator=generator) for h in (4, 2, 2))
    if kind == "moving":
        q, k = varying_outliers(q, 12.0), varying_outliers(k, 12.0)
    else:  # as a rotary embedding of a low frequency does to a bias of K: no centre takes all of it
        angle = torch.arange(96) / 60
        k[..., 3] += 60 * angle.cos()[None, :, None]
        k[..., 19] += 60 * angle.sin()[None, :, None]
        q[..., [3, 19]] /= 20
    return [x.to(dtype) for x in (q, k, v)]


def errors(kind: str, dtype=torch.float32) -> dict[str, float]:
    q, k, v = hard_inputs(kind, dtype)
    wide = [x.double().transpose(1, 2) for x in (q, k, v)]
    exact = torch.nn.functional.scaled_dot_product_attention(*wide, is_causal=True, enable_gqa=True).transpose(1, 2)
    both = balanced(q, k, centered=True)

    def error(q, k, rotation):
        return relative_l2(sage_kernels.sage_attention(q, k, v, causal=True, rotation=rotation).double(), exact)

    return {"plain": error(q, k, "none"), "rotated": error(q, k, "hadamard"), "ours": error(*both, "hadamard")}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_never_worse_than_without_a_rotation_and_half_the_error_where_outliers_move(dtype):
    """A sixth for what two samples of channels differ by; bf16 rounds Q and K twice more than INT8 alone."""
    found = {kind: errors(kind, dtype) for kind in ("moving", "mean")}
    assert found["moving"]["ours"] < 0.6 * found["moving"]["plain"]
    assert found["mean"]["ours"] < 7 / 6 * found["mean"]["plain"] < 0.5 * found["mean"]["rotated"]


@pytest.mark.parametrize("centered", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_scores_stay_the_same_but_for_a_constant_in_each_row(dtype, centered):
    q, k, _ = hard_inputs("mean", dtype)
    k[:, :, 1] = 1.0  # a head without range once its centre is gone
    one, other = (
        torch.einsum("bshd,bthd->bhst", x.double(), y.repeat_interleave(2, 2).double())
        for x, y in ((q, k), balanced(q, k, centered=centered))
    )
    change = other - one
    if centered:
        change = change - change.mean(-1, keepdim=True)
    assert change.isfinite().all() and change.abs().max() <= 16 * torch.finfo(dtype).eps * one.abs().max()


def test_a_nan_in_padding_reaches_no_other_token():
    q, k, _ = hard_inputs("mean")
    want = balanced(q, k, centered=True)
    k[:, 5] = torch.nan
    got = balanced(q, k, centered=True)
    assert all(x[:, 6:].isfinite().all() for x in got)
    assert relative_l2(got[0][:, 6:], want[0][:, 6:]) < 0.5 and WIDEST.is_integer()


def test_sinks_are_weighed_against_scores_without_a_centre():
    """A centre would move scores beside a sink. Keys with a large bias show it; experts make errors jump."""
    model, inputs = MODELS["gpt_oss"]()
    for layer in model.model.layers:
        layer.self_attn.k_proj.bias.data += 4.0
    want, far = forward(model, inputs), {}
    for name in (ROTATED, "sage_int8_strict"):
        model.set_attn_implementation(name)
        far[name] = relative_l2(forward(model, inputs), want)
    assert far[ROTATED] < 1.5 * far["sage_int8_strict"] < 0.2


def test_the_one_line_takes_it():
    model, _ = MODELS["llama"]()
    with sp.apply(model, sp.SageAttnProcessor(rotation="hadamard")):
        assert model.config._attn_implementation == "sage_int8_rotated"
