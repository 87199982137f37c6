"""The rotation of "sage_int8": what it must not do beside sinks, and which door gives it."""

from __future__ import annotations

import pytest

import sage_processors as sp
from sage_kernels.testing import relative_l2


transformers = pytest.importorskip("transformers")

from tests.language.test_transformers_models import forward  # noqa: E402
from tests.support.tiny_language_models import MODELS  # noqa: E402


def test_sinks_are_weighed_against_scores_without_a_centre():
    """A centre would move scores beside a sink. Keys with a large bias show it; experts make errors jump."""
    model, inputs = MODELS["gpt_oss"]()
    for layer in model.model.layers:
        layer.self_attn.k_proj.bias.data += 4.0
    want, far = forward(model, inputs), {}
    for name in ("sage_int8_strict", "sage_qk_int8_pv_bf16_strict"):
        model.set_attn_implementation(name)
        far[name] = relative_l2(forward(model, inputs), want)
    assert far["sage_int8_strict"] < 1.5 * far["sage_qk_int8_pv_bf16_strict"] < 0.2


@pytest.mark.parametrize("options", [{}, {"preset": "fast"}, {"rotation": "hadamard"}])
def test_the_one_line_takes_it(options):
    model, _ = MODELS["llama"]()
    with sp.apply(model, sp.SageAttnProcessor(**options)):
        assert model.config._attn_implementation == "sage_int8"
