"""The probe measures the error that attention has, of the calls it says, and changes nothing."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F

import sage_kernels
import sage_processors as sp
from sage_processors.diffusion.calls import processors
from sage_processors.diffusion.reports.probe import exact_rows
from tests.diffusion.steps.test_windows import flux_pipe, options
from tests.diffusion.test_compile import denoise
from tests.support.tiny_models import MODELS


def qkv(heads=4, kv_heads=2, seq_q=37, seq_kv=53, dim=24):
    generator = torch.Generator().manual_seed(0)
    shapes = ((2, seq_q, heads, dim), (2, seq_kv, kv_heads, dim), (2, seq_kv, kv_heads, dim))
    return [torch.randn(shape, generator=generator) for shape in shapes]


def masks():
    generator = torch.Generator().manual_seed(1)
    seen = torch.rand(2, 1, 37, 53, generator=generator) < 0.5
    seen[1, :, 10] = False  # a row that sees nothing
    bias = torch.randn(4, 1, 53, generator=generator)
    return {"none": None, "bool": seen, "keys": seen[:, :, :1], "bias": bias, "2d": seen[0, 0]}


# --- exact rows ---


@pytest.mark.parametrize(("mask", "is_causal"), [*((mask, False) for mask in masks()), ("none", True)])
def test_exact_rows_are_rows_of_exact_attention(mask, is_causal):
    q, k, v = qkv()
    m = masks()[mask]
    rows, heads = torch.tensor([0, 10, 36]), [0, 2, 3]
    ours = exact_rows(q, k, v, rows, heads, m, is_causal, 0.3)
    q64, k64, v64 = (x.double().transpose(1, 2) for x in (q, k, v))
    m64 = m.double() if m is not None and m.dtype != torch.bool else m
    full = F.scaled_dot_product_attention(
        q64, k64, v64, attn_mask=m64, is_causal=is_causal, scale=0.3, enable_gqa=True
    ).transpose(1, 2)
    torch.testing.assert_close(ours.double(), full.nan_to_num(0.0)[:, rows][:, :, heads], atol=2e-6, rtol=2e-5)


# --- in a model ---


def test_probe_measures_the_steps_it_should_and_changes_nothing():
    pipe, model, inputs = flux_pipe()
    with sp.apply(pipe, options()) as handle:
        plain = denoise(pipe, model, inputs, steps=7)
        handle.reset()
        with handle.probe(every=3, heads=2, rows=8) as probe:
            assert torch.equal(denoise(pipe, model, inputs, steps=7), plain)
            data = probe.data()
        assert all(layer.own.probe is None for denoiser in handle._denoisers for layer in denoiser.layers)
        assert handle.report().calls == 14
    batch, heads = 1, 2
    assert {(row["step"], row["rows"]) for row in data} == {(step, 8 * batch) for step in (0, 3, 6)}
    assert len(data) == 2 * heads * 3 and {row["layer"] for row in data} == {r["layer"] for r in handle_rows(pipe)}
    assert all(20 < row["sqnr_db"] < 80 and math.isfinite(row["signal"]) for row in data), data
    assert all(row["rel_l2"] == pytest.approx(10 ** (-row["sqnr_db"] / 20)) for row in data)


def handle_rows(pipe):
    with sp.apply(pipe, options()) as handle:
        return handle.report().rows


def test_probe_with_all_rows_and_heads_is_the_sqnr_of_the_layer(monkeypatch):
    """Against fp64 attention of the very inputs that the op got."""
    calls = []
    attend = sage_kernels.sage_attention

    def recording(q, k, v, **kwargs):
        out = attend(q, k, v, **kwargs)
        calls.append((q.clone(), k.clone(), v.clone(), out.clone()))
        return out

    monkeypatch.setattr(processors.sage_kernels, "sage_attention", recording)
    pipe, model, inputs = flux_pipe()
    with sp.apply(pipe, options(scaling="per_block")) as handle, handle.probe(every=1, heads=64, rows=10_000) as probe:
        denoise(pipe, model, inputs, steps=2)
        rows = probe.summary("step", "layer")
    assert len(rows) == len(calls) == 4
    for row, (q, k, v, out) in zip(sorted(rows, key=lambda r: r["step"]), calls, strict=True):
        exact = F.scaled_dot_product_attention(*(x.double().transpose(1, 2) for x in (q, k, v))).transpose(1, 2)
        noise = (out.double() - exact).square().sum()
        expected = 10 * torch.log10(exact.square().sum() / noise).item()
        assert row["sqnr_db"] == pytest.approx(expected, abs=0.05)


def test_probe_skips_steps_in_a_window_and_follows_refresh():
    pipe, model, inputs = flux_pipe()
    with sp.apply(pipe, options(keep={"first_steps": 2})) as handle:
        probe = handle.probe(every=1)
        model.set_attn_processor({name: type(p)._sage_base() for name, p in model.attn_processors.items()})
        handle.refresh()
        denoise(pipe, model, inputs, steps=4)
        assert {row["step"] for row in probe.data()} == {2, 3}
        again = handle.probe(every=1)  # replaces the first
        denoise(pipe, model, inputs, steps=3)
        assert {row["step"] for row in again.data()} == {2} and {row["step"] for row in probe.data()} == {2, 3}


def test_probe_of_a_raw_model_counts_every_call_as_step_0():
    model, inputs = MODELS["flux"]()
    with torch.no_grad(), sp.apply(model, options()) as handle:
        with handle.probe(every=1, heads=1, rows=4) as probe:
            model(**inputs)
            model(**inputs)
            assert {(row["step"], row["rows"]) for row in probe.data()} == {(0, 8)}
        with pytest.raises(ValueError, match="every: got 2 without a scheduler"):
            handle.probe(every=2)


@pytest.mark.parametrize("option", ["every", "heads", "rows"])
def test_bad_probe_options(option):
    pipe, _, _ = flux_pipe()
    with sp.apply(pipe, options()) as handle:
        with pytest.raises(ValueError, match=f"{option}: got 0, expected at least 1"):
            handle.probe(**{option: 0})
        with pytest.raises(TypeError, match=f"{option}: got float"):
            handle.probe(**{option: 1.0})
    with pytest.raises(RuntimeError, match="removed"):
        handle.probe()
