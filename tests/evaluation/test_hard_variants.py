"""Planted outliers and biased keys change nothing but INT8's task."""

from __future__ import annotations

from functools import partial

import pytest
import torch

import sage_kernels
import sage_processors as sp
from sage_processors.evaluation import hard_variants, metrics, quality
from tests.evaluation.test_quality import PROMPTS, pipeline
from tests.support.tiny_models import MODELS


def output(model, inputs) -> torch.Tensor:
    with torch.no_grad():
        return model(**inputs, return_dict=False)[0]


# --- biased keys ---


def test_biased_keys_leave_exact_attention_and_shift_every_key_alike(monkeypatch):
    from sage_processors.diffusion.calls import processors

    model, inputs = MODELS["flux"]()
    stock, seen = output(model, inputs), []
    attend = processors._attend

    def recording(query, key, *rest):
        seen.append(key.clone())
        return attend(query, key, *rest)

    monkeypatch.setattr(processors, "_attend", recording)
    with sp.apply(model, sp.SageAttnProcessor(min_tokens=1, scaling="dynamic")):
        plain = output(model, inputs)
        with hard_variants.bias_keys(30.0) as constants:
            biased = output(model, inputs)
    assert processors._attend is recording and len(constants) == 2
    for before, after, constant in zip(seen[:2], seen[2:4], constants.values(), strict=True):
        torch.testing.assert_close(constant, before.std((0, 1)) * torch.linspace(-30, 30, before.shape[3]))
        if after is seen[2]:  # the second layer's inputs have felt the first one's codes
            torch.testing.assert_close(after, before + constant)
    # K smoothed: the same codes up to fp32 rounding of the sum
    assert metrics.sqnr_db(biased, stock) > metrics.sqnr_db(plain, stock) - 1
    with hard_variants.bias_keys(30.0), sp.apply(model, sp.SageAttnProcessor(min_tokens=10_000)):
        assert torch.equal(output(model, inputs), stock)


def test_biased_keys_are_undone_after_an_error_and_refuse_bad_factors():
    from sage_processors.diffusion.calls import processors

    attend = processors._attend
    with pytest.raises(RuntimeError, match="inside"), hard_variants.bias_keys():
        raise RuntimeError("inside")
    assert processors._attend is attend
    for factor in (-1.0, float("nan")):
        with pytest.raises(ValueError, match="factor: got"), hard_variants.bias_keys(factor):
            pass


# --- outlier injection ---


@pytest.mark.parametrize(
    "name", ["unet_sd15", "unet_sdxl", "flux", "sd3", "sd35_dual", "cogvideox", "wan_t2v", "wan_i2v"]
)
@pytest.mark.parametrize("a", [64.0, 256.0])
def test_injection_is_exact_in_fp32_and_undone(name, a):
    model, inputs = MODELS[name]()
    stock = output(model, inputs)
    weights = {n: p.clone() for n, p in model.named_parameters()}
    with hard_variants.inject_outliers(model, a, pairs=2) as names:
        assert names and any(not torch.equal(p, weights[n]) for n, p in model.named_parameters())
        assert torch.equal(output(model, inputs), stock)
    assert all(torch.equal(p, weights[n]) for n, p in model.named_parameters())


@pytest.mark.parametrize(("name", "tensor"), [("unet_sd15", "to_q"), ("flux", "norm_q"), ("flux", "norm_added_q")])
def test_injection_plants_pairs_of_channels_in_every_head(name, tensor):
    model, inputs = MODELS[name]()
    seen = []
    modules = [m for n, m in model.named_modules() if n.endswith("." + tensor)]
    heads = next(m.heads for m in model.modules() if getattr(m, tensor, None) is modules[0])
    modules[0].register_forward_hook(lambda module, args, out: seen.append(out))
    output(model, inputs)
    with hard_variants.inject_outliers(model, 64.0, pairs=2):
        output(model, inputs)
    plain, hard = (
        x.reshape(-1, heads, x.shape[-1] // heads) if tensor == "to_q" else x.flatten(0, -2)[:, None] for x in seen
    )
    factor = (hard.abs().amax(0) / plain.abs().amax(0)).round()
    half = factor.shape[-1] // 2
    expected = torch.ones_like(factor)
    expected[:, [0, 1, half, half + 1]] = 64
    assert torch.equal(factor, expected)


@pytest.mark.slow("draws")
@pytest.mark.parametrize("balanced", [True, False])
def test_injection_is_hard_for_int8_without_a_balance_of_channels(balanced, monkeypatch):
    if not balanced:
        monkeypatch.setattr(sage_kernels, "sage_attention", partial(sage_kernels.sage_attention, smooth_k=False))
    pipe, config = pipeline("tiny_flux"), sp.SageAttnProcessor(scaling="per_head")
    variants = (quality.Variant("per_head", config),)
    plain = quality.evaluate(pipe, PROMPTS[:1], [0], variants, steps=1)["per_head"]
    with hard_variants.inject_outliers(pipe.transformer, 64.0, 2):
        hard = quality.evaluate(pipe, PROMPTS[:1], [0], variants, steps=1)["per_head"]
    assert (hard.psnr_db[0] > plain.psnr_db[0] - 3) if balanced else (hard.psnr_db[0] < plain.psnr_db[0] - 10)
