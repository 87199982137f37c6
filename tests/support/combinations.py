"""The fixture `shows`: what a test found is the `state` of its case in tests/cases.json.

A combination of features is one of "int8": INT8 attention runs, within a distance of stock's; "exact": exact attention
runs, stock's bits, and the report says so; "error": an error of a type that says what to do.
"""

from __future__ import annotations

import contextlib

import pytest
import torch

from sage_kernels.testing import sqnr_db
from tests.project.case_table import case_ids, cases


STATES = ("int8", "exact", "error")
# INT8 attention in models of random weights, which damp what attention does: 30 dB and more. Another feature that is
# dropped or done twice: below 20
CLOSE_DB = 25.0


class Shows:
    """What a test found, held against the state that the cases in its name have."""

    def __init__(self, expected: set[str]):
        self.expected, self.found = expected, set()

    def __call__(self, report, out: torch.Tensor, stock: torch.Tensor, *, exact=(), noted="") -> None:
        """What came of a combination.

        Args: report: of all calls behind `out`. stock: the same with stock attention. exact: the reasons that the
            report has for exact calls. noted: words of a note of the report, where it can count no exact call.
        """
        told = str(report)
        assert out.isfinite().all() and out.shape == stock.shape
        if report.calls:
            assert set(report.fallbacks) == set(exact), told
            assert not torch.equal(out, stock) and sqnr_db(out, stock) > CLOSE_DB, told
            self.found.add("int8")
            return
        unseen = {row["status"] for row in report.rows} - {"active"}
        assert set(report.fallbacks) == set(exact), told
        assert report.fallbacks or unseen == {"not swappable"} or (noted and noted in told), told
        assert torch.equal(out, stock), told
        self.found.add("exact")

    @contextlib.contextmanager
    def error(self, kind: type[Exception], words: str):
        """The block raises such an error."""
        assert kind is not Exception
        with pytest.raises(kind, match=words):
            yield
        self.found.add("error")


@pytest.fixture
def shows(request):
    states = {row["id"]: row.get("state") for row in cases()}
    ids = case_ids(request.node.name)
    expected = {states[case] for case in ids} - {None}  # other cases than combinations have no state
    assert expected and expected <= set(STATES), "the name says which combination a test is of"
    found = Shows(expected)
    yield found
    assert found.found == found.expected
