"""The committed tables of clips: intervals that hold their value, with stock in each run."""

from __future__ import annotations

import sys

import pytest

from tests.support.repository import ROOT


pytest.importorskip("matplotlib", reason="the notebooks extra is not installed")

FOLDER = ROOT / "notebooks"
sys.path.append(str(FOLDER))

import clip_tables  # noqa: E402
import measure  # noqa: E402


# --- leaving key tiles out ---


@pytest.mark.parametrize("name", ["videos", "skipping"])
def test_committed_tables_of_clips_have_intervals(name):
    table = measure.read_table(FOLDER / "data" / f"{name}.csv")
    assert table and tuple(table[0]) == measure.COLUMNS
    assert all(row.low <= row.value <= row.high for row in measure.as_rows(table))
    for own in clip_tables.by_run(table).values():
        assert "stock" in own and len(own) > 1
