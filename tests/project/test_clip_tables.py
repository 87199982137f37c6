"""What the notebook on clips shows of measured tables: devices stay apart, and its sentences are what rows say."""

from __future__ import annotations

import sys

import pytest

from tests.support.repository import ROOT


pytest.importorskip("matplotlib", reason="the notebooks extra is not installed")

FOLDER = ROOT / "notebooks"
sys.path.append(str(FOLDER))

import clip_tables  # noqa: E402
import measure  # noqa: E402
import skip_tables  # noqa: E402


def line(recipe: str, scaling: str, metric: str, value: float, off: float = 0.0, **others) -> dict[str, str]:
    """A row of a table as `read_table` gives it; off: of both ends."""
    whole = {"pipeline": "clips", "device": "cpu", "steps": 25, "images": 64, "unit": "1"} | others
    ends = {"value": value, "low": value - off, "high": value + off}
    return {k: str(v) for k, v in {**whole, "recipe": recipe, "scaling": scaling, "metric": metric, **ends}.items()}


# --- leaving key tiles out ---


def left_out(label: str, share: float, psnr: float, lost: float, pipeline: str, obeyed: float | None = None):
    found = [line("r", label, "skipped_mean", share, 0.01, pipeline=pipeline)]
    found += [line("r", label, "lost_max", lost, pipeline=pipeline), line("r", label, "flicker_mean", 0.01, 0.002)]
    found.append(line("r", label, "psnr_db_mean", psnr, 1.5, unit="dB"))
    if obeyed is not None:
        found.append(line("r", label, "obeyed_mean", obeyed, 0.05))
    return [row | {"pipeline": pipeline} for row in found]


@pytest.fixture
def skips():
    """(steady, switched) numbers, and stock's of the steady run."""
    table = [line("stock", "stock", "obeyed_mean", 0.5, 0.125)]
    promised = {"images": 12}
    table += [line("r", "calibrated", "promised_psnr_db", 48.5, **promised)]
    table += [line("r", "calibrated", "promised_skipped", 0.16, **promised)]
    for pipeline, more, obeyed in (("clips", 0, 0.5), ("clips_switched", 0.3, None)):
        table += left_out("dense", 0, 50, 0, pipeline, obeyed)
        table += left_out("within 0.1", 0.1, 49.5 - more, 0.15 + more, pipeline, obeyed)
        table += left_out("within 0.2", 0.3, 40, 0.25 + more, pipeline, obeyed and 0.4375)
        table += left_out("calibrated", 0.2, 48 - 2 * more, 0.2 + more, pipeline, obeyed)
    found = clip_tables.by_run(table)
    steady, switched = (clip_tables.Run(name, "cpu", 25) for name in ("clips", "clips_switched"))
    return {run: found[run]["r"] for run in (steady, switched)}, found[steady]["stock"]


def test_losses_are_counted_from_dense(skips):
    (steady, switched), _ = skips[0].values(), skips[1]
    lines = skip_tables.table(steady).splitlines()
    cells = ["within 0.1", "10.0 [9.0, 11.0]", "15.0", "49.50 [48.00, 51.00]", "0.50", "0.01000 [0.00800, 0.01200]"]
    assert lines[3] == " | ".join(["| " + cells[0], *cells[1:], "50.0 [45.0, 55.0]", "64 |"])
    assert len(lines) == 6 and all(text.endswith("| 64 |") for text in lines[2:])  # what was promised is no line
    assert " | 0.80 | " in skip_tables.table(switched) and " | – | 64 |" in skip_tables.table(switched)


def test_sentences_are_what_the_rows_say(skips):
    (steady, switched), stock = skips[0].values(), skips[1]
    found = skip_tables.sentences(steady, switched, stock, loss_db=3, listed=0.88)
    assert "`within 0.1` leaves out most: 10.0 % left out for 0.50 dB, and 10.0 % left out for 0.80 dB" in found[0]
    assert "20.0 % left out for 2.00 dB, and 20.0 % left out for 2.60 dB where prompts change" in found[1]
    assert "asked for 47.00 dB, 3 less than dense, and promised 48.50 dB by 12 clips" in found[2]
    assert "48.00 [46.50, 49.50] dB, 0.50 dB below the promise" in found[2]
    assert "promised 16.0 %" in found[3] and "in 88 % of the steps, so that this is 17.6 % of all" in found[3]
    assert "at most 0.60 dB" in found[4] and "`calibrated`" in found[4]
    assert "25 % of its probability, and 55 % where" in found[5]
    assert "stock obeys 32, and no variant differs by more than 4" in found[6] and "25 points wide" in found[6]


def test_no_limit_is_called_free_that_is_not(skips):
    (steady, switched), stock = skips[0].values(), skips[1]
    key = ("within 0.1", "psnr_db_mean")
    dear = steady | {key: steady[key]._replace(value=48.9)}
    assert "No single limit costs less than 1 dB" in skip_tables.sentences(dear, switched, stock, 3, 0.88)[0]


@pytest.mark.parametrize("name", ["videos", "skipping"])
def test_committed_tables_of_clips_have_intervals(name):
    table = measure.read_table(FOLDER / "data" / f"{name}.csv")
    assert table and tuple(table[0]) == measure.COLUMNS
    assert all(row.low <= row.value <= row.high for row in measure.as_rows(table))
    for own in clip_tables.by_run(table).values():
        assert "stock" in own and len(own) > 1
