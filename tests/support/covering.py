"""Which combinations of a test's parameters `make test` runs: those that show each value once. The others are slow."""

from __future__ import annotations

import pytest


REASON = "each of its parameters' values is shown by another combination"
IMPLEMENTATIONS = ("tier", "kernel_device")  # each of them is shown each value


def mark_repeats(items):
    """Mark `slow` what adds no value of a parameter that a quick combination of the same test does not have."""
    groups: dict[tuple, list] = {}
    for item in items:
        if hasattr(item, "callspec") and item.get_closest_marker("slow") is None:
            implementation = tuple(item.callspec.params.get(name) for name in IMPLEMENTATIONS)
            groups.setdefault((item.nodeid.partition("[")[0], implementation), []).append(item)
    for group in groups.values():
        quick = covering([_values(item) for item in group])
        for i, item in enumerate(group):
            if i not in quick:
                item.add_marker(pytest.mark.slow(REASON))


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
