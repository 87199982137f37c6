"""`make test` runs each value of each parameter; which combinations of them, is decided by support/covering.py."""

from __future__ import annotations

import itertools

from tests.support.covering import covering


def test_each_value_is_covered_by_as_few_combinations_as_the_longest_parameter_has():
    grid = [{("a", a), ("b", b), ("c", c)} for a, b, c in itertools.product(range(5), range(3), range(2))]
    found = covering(grid)
    assert set().union(*(grid[i] for i in found)) == set().union(*grid) and len(found) == 5
    assert covering([]) == set() and covering([{("a", 1)}, {("a", 1)}]) == {0}
