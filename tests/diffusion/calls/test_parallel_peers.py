"""Processes of context parallelism that differ: an error on both before anything is sent, or both run eagerly."""

from __future__ import annotations

import pytest

from sage_processors.diffusion.graphs.model_graphs import WARM_UP
from tests.diffusion.calls.parallel_peers import CALLS, GRAPHS, STEPS
from tests.support.tiny_models import OLDEST
from tests.support.two_processes import two_processes


if OLDEST:
    pytest.skip("0.36 has no hooks for it on models like these", allow_module_level=True)


@pytest.fixture(scope="module")
def rows(tmp_path_factory):
    """{case: one row of each process}."""
    found: dict = {}
    for row in two_processes("diffusion/calls/parallel_peers", tmp_path_factory):
        found.setdefault(row["case"], []).append(row)
    return {case: sorted(pair, key=lambda row: row["rank"]) for case, pair in found.items()}


@pytest.mark.parametrize(
    ("case", "told"),
    [
        ("options", "options: got SageAttnProcessor"), ("versions", "sage_processors: got 0.1.0 in process 0, 0.0.9"),
        ("shapes", "argument hidden_states: got [["), ("dtypes", "argument img_ids: got [["),
    ],
)  # fmt: skip
def test_P61_processes_that_differ_are_told_before_anything_is_sent(rows, case, told):
    assert all("error" not in row and row["sent"] > 0 for row in rows["alike"])
    assert len(rows[case]) == 2 and set(CALLS) <= set(rows)
    for row in rows[case]:
        assert row["error"].startswith(told) and row["error"].endswith("nothing was sent yet") and row["sent"] == 0
    assert rows[case][0]["error"] == rows[case][1]["error"]


FORWARDS = 4 * STEPS
# what each process counts: replays, reasons. A capture after a change is warm in the process that did not change,
# but not in the other one.
COUNTED = {
    "alike": [(FORWARDS - WARM_UP, {"warm_up": WARM_UP})] * 2,
    "stream": [(STEPS - WARM_UP, {"warm_up": WARM_UP, "peers": 3 * STEPS}),
               (STEPS - WARM_UP, {"warm_up": WARM_UP, "stream": 3 * STEPS})],
    "not_capturable": [(0, {"warm_up": WARM_UP, "peers": FORWARDS - WARM_UP}),
                       (0, {"warm_up": WARM_UP, "not_capturable": FORWARDS - WARM_UP})],
    "memory": [(0, {"warm_up": WARM_UP, "peers": FORWARDS - WARM_UP}),
               (0, {"warm_up": WARM_UP, "memory": FORWARDS - WARM_UP})],
    "refreshed": [(FORWARDS - 2 * WARM_UP, {"warm_up": WARM_UP, "peers": WARM_UP}),
                  (FORWARDS - 2 * WARM_UP, {"warm_up": 2 * WARM_UP})],
}  # fmt: skip


@pytest.mark.parametrize("kind", ["ulysses", "ring"])
@pytest.mark.parametrize("case", GRAPHS)
def test_P66_processes_replay_together_or_not_at_all(rows, kind, case):
    first, second = rows[f"{kind} {case}"]
    assert first["replays"] == second["replays"] and sum(first["eager"].values()) + first["replays"] == FORWARDS
    assert first["same"] == second["same"] == [True, case != "differs", True, True]
    if case in COUNTED:
        assert [(row["replays"], row["eager"]) for row in (first, second)] == COUNTED[case]
    if case == "changed":  # captured again, by both
        assert second["eager"]["changed"] == 1 and first["eager"]["peers"] >= 1 and first["replays"] > STEPS
    if case == "differs":  # noticed in the second picture, gone in the later ones
        assert second["eager"]["differs"] == first["eager"]["peers"] == 2 * STEPS


def test_graphs_are_gone_before_the_process_group_is(rows):
    assert [row["live"] for row in rows["end"]] == [[1, 0], [1, 0]]
