"""Tests on real checkpoints: left out or skipped where nobody fetched these, with the command that does."""

from __future__ import annotations

import re

import pytest
import torch

from tests.support import real_models
from tests.support.repository import ROOT


def test_a_checkpoint_that_was_not_fetched_skips_the_test_and_says_how_to_get_it(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    for name in (*real_models.CHECKPOINTS, real_models.ENCODER):
        with pytest.raises(pytest.skip.Exception, match="`make real`"):
            real_models.load(name)


def test_targets_of_ci_leave_real_checkpoints_out():
    makefile = (ROOT / "Makefile").read_text()
    for target in ("test", "test-all", "test-every"):
        recipe = re.search(rf"^{target}:.*\n((?:\t.*\n)+)", makefile, re.MULTILINE)
        assert "not real" in recipe.group(1), target


class Letters:
    """A tokenizer of single characters."""

    def __call__(self, text, add_special_tokens=True):
        return type("Encoded", (), {"input_ids": [ord(letter) % 90 for letter in text]})

    def decode(self, ids):
        return " " + "".join(chr(int(i) + 90) for i in ids)


def test_questions_of_tasks_are_answered_behind_a_copy_of_the_cache_as_without_one(monkeypatch):
    transformers = pytest.importorskip("transformers")
    monkeypatch.syspath_prepend(str(ROOT / "notebooks"))
    import language_tasks

    from tests.support.tiny_language_models import MODELS

    model, _ = MODELS["llama"]()
    tasks = language_tasks.tasks_of(3, language_tasks.NAMES.split())
    assert tasks == language_tasks.tasks_of(3, language_tasks.NAMES.split()) != language_tasks.tasks_of(4, ["x"] * 16)
    prose = "\n".join(f"Line {i} of a text that says nothing of importance to anybody." for i in range(900))
    text = language_tasks.haystack(Letters(), prose, tasks, 3000, 3)
    facts = [fact for task in tasks.values() for fact in task.facts]
    codes = [Letters()(fact).input_ids for fact in facts]
    assert abs(len(text) - 3000) < 100 and all(any(text[i : i + len(c)] == c for i in range(3000)) for c in codes)
    made, empty = [], lambda: made.append(transformers.DynamicCache(config=model.config)) or made[-1]
    found = list(language_tasks.answers(model, Letters(), text[:60], tasks, empty, 25))
    assert len(found) == 4 * language_tasks.QUESTIONS and len(made) == 1 and made[0].get_seq_length() == 60
    for kind, i, said, _ in found[::7]:
        ids = text[:60] + Letters()(tasks[kind].questions[i]).input_ids
        for _ in range(language_tasks.NEW_TOKENS):
            with torch.no_grad():
                ids.append(int(model(torch.tensor([ids])).logits[0, -1].argmax()))
        assert said == Letters().decode(ids[-language_tasks.NEW_TOKENS :])
