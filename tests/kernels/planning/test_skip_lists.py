"""Which lists of key tiles a call gets: by site, shape and place in the step, within a run, and when none."""

from __future__ import annotations

import pytest
import torch

from sage_kernels.facts.skipping import TOTAL_LARGEST, TOTAL_TILES, TOTAL_VISITED, list_bytes
from sage_kernels.ops import skip_state
from sage_kernels.planning import skip_lists
from sage_kernels.planning.skip_lists import MOST_CALLS, SkipLists
from sage_kernels.planning.state import ScaleState, Site


@pytest.fixture(autouse=True)
def small_tiles(monkeypatch):
    monkeypatch.setattr(skip_state, "REFERENCE_BLOCK", (4, 4))
    monkeypatch.setattr(skip_lists, "LEAST_TILES", 2)


def tokens(number: int, batch: int = 1, heads: int = 2):
    return torch.zeros(batch, number, heads, 8)


def lists_of(**options):
    lists = SkipLists(2, "cpu", limit=0.1, every=3, **options)
    lists.place(0, 100)
    return lists


def test_each_site_shape_and_place_in_the_step_has_lists_of_its_own():
    lists = lists_of()
    wanted = [(0, 16, 1), (0, 16, 1), (1, 16, 1), (0, 20, 1), (0, 16, 2)]  # the second is guidance's other call
    found = [lists.of(site, tokens(n, b), tokens(n, b)) for site, n, b in wanted]
    assert len({x.lists.data_ptr() for x in found}) == len(wanted)
    assert lists.nbytes == sum(list_bytes(b, 2, n, n, 4, 4) for _, n, b in wanted) == sum(x.nbytes for x in found)
    lists.next_step()
    again = [lists.of(site, tokens(n, b), tokens(n, b)) for site, n, b in wanted]
    assert all(a is b for a, b in zip(found, again, strict=True))
    assert all(x.now is lists.now for x in found)
    assert [x.limit.data_ptr() for x in found] == [lists.limit_of_step[site].data_ptr() for site, *_ in wanted]
    assert [x.totals.data_ptr() for x in found[:2]] == [lists.totals[0].data_ptr()] * 2


def test_Q50_steps_at_the_ends_of_a_run_and_calls_nobody_follows_have_none():
    lists = SkipLists(2, "cpu", limit=0.1, every=3, first_steps=2, last_steps=1)
    assert lists.of(0, tokens(16), tokens(16)) is None
    for taken in range(5):
        lists.place(taken, 5 - taken)
        found = lists.of(0, tokens(16), tokens(16))
        assert (found is not None) == (2 <= taken < 4)
        wanted = 0.1 if 2 <= taken < 4 else 0.0
        assert lists.limit_of_step[:, 0].tolist() == pytest.approx([wanted] * 2)  # what a graph sees
        lists.next_step()
    lists.place(3, 2)
    lists.stop()
    assert lists.of(1, tokens(16), tokens(16)) is None and not lists.limit_of_step.any()
    assert [row["dense"] for row in lists.summary()] == [{"unfollowed": 1, "first_last": 3}, {"unfollowed": 1}]


def test_what_is_not_worth_a_list_or_does_not_fit_has_none():
    lists = lists_of(memory=list_bytes(1, 2, 16, 16, 4, 4))
    assert lists.of(0, tokens(16), tokens(4)) is None  # one key tile
    assert lists.of(0, tokens(16), tokens(16)) is not None
    assert lists.of(1, tokens(16), tokens(16)) is None
    for _ in range(MOST_CALLS):
        last = lists.of(0, tokens(16), tokens(16))
    assert last is None
    assert lists.summary()[0]["dense"] == {"short": 1, "memory": MOST_CALLS - 1, "calls": 1}
    assert lists.summary()[1]["dense"] == {"memory": 1}


def test_another_run_makes_all_lists_void_and_drops_those_out_of_use():
    lists = lists_of()
    old, kept = lists.of(0, tokens(16), tokens(16)), lists.of(0, tokens(20), tokens(20))
    lists.clear()
    before = int(lists.now)
    assert before >= 3 and lists.nbytes == old.nbytes + kept.nbytes
    assert lists.of(0, tokens(20), tokens(20)) is kept
    lists.clear()
    assert int(lists.now) - before >= 3 and lists.nbytes == kept.nbytes
    assert lists.of(0, tokens(16), tokens(16)) is not old


def test_Q50_steps_that_go_back_make_all_lists_void():
    lists = lists_of()
    for finished, following in ((1.0, 0.9), (0.9, 0.9), (torch.tensor(0.9), torch.tensor(0.8))):
        lists.in_order(finished, following)
        assert int(lists.now) == int(lists.went_back) == 0
    lists.in_order(0.8, 0.95)
    lists.in_order(torch.tensor(0.8), torch.tensor(0.95))
    assert int(lists.now) == 2 * 3 and int(lists.went_back) == 2


def test_nothing_is_skipped_while_steps_pass_in_compiled_code():
    lists = lists_of()

    @torch.compile(backend="eager", fullgraph=True)
    def step(x):
        lists.next_step()
        return x + 1

    step(torch.zeros(1))
    assert lists.of(0, tokens(16), tokens(16)) is None


def test_a_state_tells_its_lists_of_steps_runs_and_resets():
    state = ScaleState([Site("a", 2, 8), Site("b", 2, 8)], device="cpu")
    lists = state.kept.skip_lists = lists_of()
    lists.of(0, tokens(16), tokens(16)).totals[[TOTAL_TILES, TOTAL_VISITED, TOTAL_LARGEST]] = torch.tensor([8, 6, 0])
    state.advance(1.0, 0.9)
    assert int(lists.now) == 1
    state.begin_run(1.0)
    assert int(lists.now) >= 1 + 3
    assert lists.summary()[0]["skipped_fraction"] == 0.25
    state.reset()
    assert lists.summary()[0]["skipped_fraction"] == 0 and lists.summary()[0]["dense"] == {}


def test_lists_can_be_written_outside_of_inference_mode():
    with torch.inference_mode():
        lists = lists_of()
        found = lists.of(0, tokens(16), tokens(16))
    for tensor in found.tensors:
        tensor.zero_()


def test_sites_have_limits_of_their_own_by_noise_level():
    lists = SkipLists(3, "cpu", limit=[0.1, (0.2, 0.0), 0.0], every=3, borders=(0.5,))
    lists.at_level(1.0)
    lists.place(0, 4)
    found = [lists.of(site, tokens(16), tokens(16)) for site in range(3)]
    assert found[2] is None and lists.summary()[2]["dense"] == {"no_limit": 1}
    seen, now = [], int(lists.now)
    for taken, level in enumerate((torch.tensor(0.5), 0.49, torch.tensor(0.2), 0.8), start=1):
        lists.next_step()
        lists.at_level(level)
        lists.place(taken, 5 - taken)
        seen.append((*(float(x.limit) for x in found[:2]), int(lists.now) - now >= 3))
        now = int(lists.now)
    small, large = pytest.approx(0.1), pytest.approx(0.2)
    # at a border all lists are void: those of 0.2 would leave out more than 0 allows
    assert seen == [(small, 0.0, False), (small, large, True), (small, large, False), (small, 0.0, True)]
    lists.place(4, 0)
    assert not lists.limit_of_step.any()
    lists.stop()
    lists.at_level(0.1)
    assert not lists.limit_of_step.any()  # nobody says which step runs


@pytest.mark.parametrize("ranges", [1, 4])
def test_limits_lie_where_kernels_want_them(ranges):
    borders = (0.2, 0.4, 0.6)[: ranges - 1]
    lists = SkipLists(3, "cpu", limit=[0.1] * 3, every=3, borders=borders)
    lists.at_level(0.5)
    lists.place(0, 4)
    assert all(lists.of(site, tokens(16), tokens(16)).limit.data_ptr() % 16 == 0 for site in range(3))
