"""Which combinations of a test's parameters run everywhere: those that show each value once. Others are repeats."""

from __future__ import annotations

import zlib

import pytest


IMPLEMENTATIONS = ("tier", "kernel_device")  # each of them is shown each value
# The interpreter takes seconds for a call. Quickly it shows each value of these parameters, and of the others one a
# test, which is another one from test to test. `make test-all` shows all.
KERNELS = ("recipe", "format", "base", "op")


def mark_repeats(items):
    """Mark `repeat` what adds no value of a parameter to the other combinations of the same test.

    Of the others, those in the interpreter that add none of KERNELS are marked `slow`.
    """
    groups: dict[tuple, list] = {}
    for item in items:
        if hasattr(item, "callspec"):
            implementation = tuple(item.callspec.params.get(name) for name in IMPLEMENTATIONS)
            is_slow = item.get_closest_marker("slow") is not None  # the quick ones show all of theirs by themselves
            groups.setdefault((item.nodeid.partition("[")[0], implementation, is_slow), []).append(item)
    for (test, implementation, is_slow), group in groups.items():
        needed = covering([_values(item) for item in group])
        for i, item in enumerate(group):
            if i not in needed:
                item.add_marker(pytest.mark.repeat)
        if "interpreter" in implementation and not is_slow:
            first = zlib.crc32(test.encode()) % len(needed)
            left = [group[i] for i in sorted(needed)]
            left = left[first:] + left[:first]
            quick = covering([{pair for pair in _values(item) if pair[0] in KERNELS} | {("any", 0)} for item in left])
            for i, item in enumerate(left):
                if i not in quick:
                    item.add_marker(pytest.mark.slow("the interpreter takes seconds for each value"))


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
