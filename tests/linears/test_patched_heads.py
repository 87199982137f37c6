"""Functions that somebody puts into a language model's class or file are the ones that run, at any time."""

from __future__ import annotations

import pytest
import torch


pytest.importorskip("transformers")

from transformers.models.llama import modeling_llama

from sage_processors.linears import head_rotation
from sage_processors.linears.head_rotation import FUNCTION
from tests.linears.counting import relative_error
from tests.linears.test_head_rotation import logits, rotated
from tests.support.patching import as_profilers_do, mixed_up
from tests.support.tiny_language_models import MODELS


PATCHED = {
    "rotary": (modeling_llama, FUNCTION),
    "half": (modeling_llama, "rotate_half"),
    "eager": (modeling_llama, "eager_attention_forward"),
    "table": (modeling_llama, "ALL_ATTENTION_FUNCTIONS"),
    "forward": (modeling_llama.LlamaAttention, "forward"),
}


class _Table:
    """In place of transformers' table of attention functions."""

    def get_interface(self, name, default):
        return mixed_up(modeling_llama.eager_attention_forward)


@pytest.mark.parametrize("way", [mixed_up, as_profilers_do])
@pytest.mark.parametrize("what", PATCHED)
def test_what_is_patched_after_the_swap_is_what_runs(what, way, rotary_passes, monkeypatch):
    place, name = PATCHED[what]
    model, inputs = MODELS["llama"]()
    with rotated(model):
        before = logits(model, **inputs)
        made = len(rotary_passes)
        with monkeypatch.context() as patch:
            own = (lambda x: x.flip(-1)) if what == "half" else way(getattr(place, name))
            patch.setattr(place, name, _Table() if what == "table" else own)
            given = logits(model, **inputs)
            expected = logits(MODELS["llama"]()[0], **inputs)
        assert torch.equal(given, expected) and relative_error(given, before) > 0.1
        assert made and len(rotary_passes) == made  # gives way to the model's own code, and comes back
        assert torch.equal(logits(model, **inputs), before) and len(rotary_passes) == 2 * made


@pytest.mark.parametrize("name", [FUNCTION, "rotate_half"])
def test_a_function_of_somebody_else_is_called(name, rotary_passes, monkeypatch):
    """One that was put there before the swap, and does what the usual one does, may keep count of it."""
    seen, usual = [], getattr(modeling_llama, name)

    def watching(*args):
        seen.append(1)
        return usual(*args)

    model, inputs = MODELS["llama"]()
    expected = logits(model, **inputs)
    head_rotation._class_with.cache_clear()  # as in a process that swaps for the first time
    with monkeypatch.context() as patch:
        patch.setattr(modeling_llama, name, watching)
        with rotated(model):
            assert torch.equal(logits(model, **inputs), expected) and not rotary_passes and len(seen) >= 2
    with rotated(model):
        logits(model, **inputs)
    assert len(rotary_passes) == 2
