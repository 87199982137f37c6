"""What diffusers asks of an attention back end (its AttentionBackendTesterMixin), of ours, for all families of models.

Its bounds are 1e-2.
"""

from __future__ import annotations

import pytest
import torch
from diffusers.models.attention_dispatch import AttentionBackendName, _AttentionBackendRegistry, attention_backend

from tests.diffusion.calls.backend import NAME, counts, registered  # noqa: F401 (pytest finds fixtures here)
from tests.diffusion.calls.test_processors import forward
from tests.support.tiny_models import MODELS


pytestmark = pytest.mark.slow("every family; test_backend.py has one of each kind")


@pytest.mark.parametrize("name", MODELS)
def test_the_method_is_the_context_manager_and_both_are_near_native(name):
    model, inputs = MODELS[name]()
    if not hasattr(model, "set_attention_backend"):
        pytest.skip(f"diffusers gives {type(model).__name__} no set_attention_backend")
    with attention_backend(AttentionBackendName.NATIVE):
        native = forward(model, inputs)
    active, _ = _AttentionBackendRegistry.get_active_backend()
    with attention_backend(NAME):
        assert _AttentionBackendRegistry.get_active_backend()[0] == NAME
        within = forward(model, inputs)
    assert _AttentionBackendRegistry.get_active_backend()[0] == active
    calls, exact = counts()
    model.set_attention_backend(NAME)
    try:
        out = forward(model, inputs)
    finally:
        model.reset_attention_backend()
        _AttentionBackendRegistry.set_active_backend(active)
    assert torch.equal(out, within)
    assert counts() == (2 * calls, {reason: 2 * number for reason, number in exact.items()})
    assert torch.equal(out, native) == (calls == 0)
    scale = native.abs().max().clamp(max=1.0)  # ours have outputs of other sizes than diffusers' own small models
    torch.testing.assert_close(out / scale, native / scale, atol=1e-2, rtol=1e-2)
