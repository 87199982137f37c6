"""The INT8 back end under diffusers' context parallelism: two processes, each with half of the tokens."""

from __future__ import annotations

import pytest

from tests.diffusion.calls.backend import CLOSE_DB
from tests.support.tiny_models import OLDEST
from tests.support.two_processes import two_processes


pytestmark = pytest.mark.slow("starts two processes")


@pytest.fixture(scope="module")
def rows(tmp_path_factory):
    """{(kind, option): one row of each process}."""
    found: dict = {}
    for row in two_processes("diffusion/calls/context_parallel", tmp_path_factory):
        found.setdefault((row["kind"], *row["options"]), []).append(row)
    return found


@pytest.mark.parametrize(("case", "calls"), [(("ring",), 2), (("ulysses",), 1), (("ulysses", "mask"), 1)])
def test_parts_of_the_tokens_run_in_int8(rows, case, calls):
    if OLDEST and "mask" in case:
        pytest.skip("0.36 refuses masks under context parallelism")
    assert len(rows[case]) == 2
    for row in rows[case]:
        assert row["db"] > CLOSE_DB and row["calls"] == calls and row["fallbacks"] == {}


@pytest.mark.parametrize(
    ("case", "fallbacks", "db"),
    [
        (("ring", "dtype"), {"dtype": 2}, 130),  # diffusers merges the parts in fp32
        (("ulysses", "dtype"), {"dtype": 1}, 200),
        (("ulysses", "grad"), {"requires_grad": 1}, 120),
    ],
)
def test_what_int8_cannot_do_is_exact_and_counted(rows, case, fallbacks, db):
    assert len(rows[case]) == 2
    for row in rows[case]:
        assert row["db"] > db and row["calls"] == 0 and row["fallbacks"] == fallbacks


@pytest.mark.parametrize(
    ("case", "error"),
    [
        (("ring", "mask"), "NotImplementedError: attn_mask: got a mask together with ring attention"),
        (("ring", "grad"), "ValueError: Native attention does not support return_lse=True"),
        (("ring", "gqa"), "ValueError: GQA is not yet supported"),
        (("ulysses", "gqa"), "ValueError: GQA is not yet supported"),
    ],
)
def test_what_diffusers_cannot_do_in_parallel_raises(rows, case, error):
    assert [row["error"].startswith(error) for row in rows[case]] == [True, True]
