"""A sentence encoder that others trained: INT8 attention keeps its embeddings nearer to fp32 than bf16 does."""

from __future__ import annotations

import pytest
import torch


pytest.importorskip("transformers", reason="transformers is not installed")

from tests.support import real_models  # noqa: E402
from tests.support.repository import ROOT  # noqa: E402


@pytest.mark.real
def test_embeddings_of_a_real_encoder(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "notebooks"))
    import measure_encoder

    model, tokenizer = real_models.load(real_models.ENCODER)
    pairs = measure_encoder.halves("reference", 12)
    found = {mode: measure_encoder.measured(model, tokenizer, mode, pairs) for mode in ("fp32", "bf16", "int8", "all")}
    distances = {mode: x.distance(found["fp32"]) for mode, x in found.items()}
    assert distances["int8"].mean() <= 0.5 * distances["bf16"].mean()
    assert distances["int8"].max() <= distances["bf16"].max() and distances["all"].max() < 5e-3
    for mode in ("int8", "all"):
        assert (found[mode].first() == found["fp32"].first()).double().mean() >= 0.9
        assert torch.isfinite(found[mode].questions).all()
