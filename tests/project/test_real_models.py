"""Tests on real checkpoints: left out or skipped where nobody fetched these, with the command that does."""

from __future__ import annotations

import re

import pytest
import torch

import sage_processors as sp
from tests.support import real_models
from tests.support.repository import ROOT


def test_a_checkpoint_that_was_not_fetched_skips_the_test_and_says_how_to_get_it(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    for name in real_models.CHECKPOINTS:
        with pytest.raises(pytest.skip.Exception, match="`make real`"):
            real_models.load(name)


def test_targets_of_ci_leave_real_checkpoints_out():
    makefile = (ROOT / "Makefile").read_text()
    for target in ("test", "test-all", "test-every"):
        recipe = re.search(rf"^{target}:.*\n((?:\t.*\n)+)", makefile, re.MULTILINE)
        assert "not real" in recipe.group(1), target


def test_measurements_for_the_notebook_go_on_where_they_stopped(tmp_path, monkeypatch):
    """Every mode, with a tiny model in the place of the real ones."""
    pytest.importorskip("transformers")
    monkeypatch.syspath_prepend(str(ROOT / "notebooks"))
    import measure_language

    from tests.support.tiny_language_models import MODELS

    class Words:
        def __call__(self, text, **options):
            return type("Encoded", (), {"input_ids": [len(word) % 90 for word in text.split()[:999]]})

    model, _ = MODELS["llama"]()
    model.real_name = "smollm2"
    modes = ["bf16_rotated", "all"]
    monkeypatch.setattr(measure_language, "KINDS", ("code",))
    for wanted in (modes[:1], modes):
        table = measure_language.Table(tmp_path / "a.csv", measure_language.FIELDS, ("model", "kind", "text", "mode"))
        measure_language.measure_texts(model, Words(), table, wanted, 1, 60)
    rows = measure_language.read(tmp_path / "a.csv")
    assert [row["mode"] for row in rows] == ["fp32", *modes]
    assert all(float(row["kl"]) <= float(row["largest"].split()[0]) < 0.2 for row in rows)
    assert float(rows[0]["kl"]) == 0 < min(float(row["kl"]) for row in rows[1:])
    assert model.config._attn_implementation == "eager" and sp.handle_of(model) is None


def test_windows_are_of_one_length_and_begin_as_the_model_expects():
    class Words:
        def __call__(self, text, add_special_tokens):
            assert not add_special_tokens
            return type("Encoded", (), {"input_ids": [len(word) for word in text.split()]})

    plain, gemma = (real_models.windows(name, Words(), 3, 40) for name in ("smollm2", "gemma3"))
    assert plain.shape == gemma.shape == (3, 40) and plain.dtype == torch.int64
    assert torch.equal(gemma[:, 1:], plain[:, :39]) and (gemma[:, 0] == 2).all()
    assert not torch.equal(plain[0], plain[1])
