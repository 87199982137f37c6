"""Counts the calls of the op that turns queries and keys of language models in one pass."""

from __future__ import annotations

import pytest


@pytest.fixture
def rotary_passes(monkeypatch):
    """An entry for every call of the op so far."""
    from sage_processors.linears import head_rotation

    made = []
    op = head_rotation.qk_norm_rope
    monkeypatch.setattr(head_rotation, "qk_norm_rope", lambda *a, **k: made.append(1) or op(*a, **k))
    return made
