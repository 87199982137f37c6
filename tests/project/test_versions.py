"""The versions that `make test-versions` tries are those that pyproject.toml allows."""

from __future__ import annotations

import re

from tests.project import versions


def numbers(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in version.split("."))


def test_every_requirement_has_a_first_version_and_a_tried_one():
    names = [versions.name_of(requirement) for requirement in versions.requirements()]
    assert names[:2] == ["torch", "triton"] and "diffusers" in names and "transformers" in names
    low, new = versions.lowest(), versions.newest()
    assert [pin.partition("==")[0] for pin in low] == [pin.partition("==")[0] for pin in new] == names
    for requirement, pin in zip(versions.requirements(), new, strict=True):
        tried = numbers(pin.partition("==")[2])
        for sign, bound in re.findall(r"(>=|<)\s*([0-9.]+)", requirement):
            assert (tried >= numbers(bound)) if sign == ">=" else (tried < numbers(bound)), (requirement, pin)


def test_private_names_are_only_promised_for_versions_that_were_tried():
    """torch and triton have an upper bound: the next minor version after the newest that was tried."""
    for requirement, pin in list(zip(versions.requirements(), versions.newest(), strict=True))[:2]:
        major, minor, *_ = numbers(pin.partition("==")[2])
        assert requirement.endswith(f"<{major}.{minor + 1}"), requirement
