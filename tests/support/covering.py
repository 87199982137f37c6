"""Which combinations of a test's parameters run everywhere: those that show each value once. Others are repeats."""

from __future__ import annotations

import pytest


IMPLEMENTATIONS = ("tier", "kernel_device")  # each of them is shown each value


def mark_repeats(items):
    """Mark `repeat` what adds no value of a parameter to the other combinations of the same test."""
    groups: dict[tuple, list] = {}
    for item in items:
        if hasattr(item, "callspec"):
            implementation = tuple(item.callspec.params.get(name) for name in IMPLEMENTATIONS)
            is_slow = item.get_closest_marker("slow") is not None  # the quick ones show all of theirs by themselves
            groups.setdefault((item.nodeid.partition("[")[0], implementation, is_slow), []).append(item)
    for group in groups.values():
        needed = covering([_values(item) for item in group])
        for i, item in enumerate(group):
            if i not in needed:
                item.add_marker(pytest.mark.repeat)


def _values(item) -> set[tuple[str, int]]:
    """A parameter's values are the objects that `parametrize` was given: not all can be compared."""
    return {(name, id(value)) for name, value in item.callspec.params.items()}


def covering(combinations: list[set]) -> set[int]:
    """Indices of combinations that have every value of all of them: greedily, those with the most new ones first."""
    missing, found = set().union(*combinations), set()
    while missing:
        best = max(range(len(combinations)), key=lambda i: len(combinations[i] & missing))
        missing -= combinations[best]
        found.add(best)
    return found
