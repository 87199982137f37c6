"""The pip command that messages name, in one place, as it changes with a release."""

from __future__ import annotations


def pip_install(extra: str = "") -> str:
    """Return the command that installs this package, with an extra of pyproject.toml if one is given."""
    brackets = f"[{extra}]" if extra else ""
    wheel = f"its wheel file with {brackets}" if extra else "its wheel file"
    # not by its name: nothing is released on an index, where anybody could have registered it
    return f'pip install -e ".{brackets}" in a checkout of sage-processors, or {wheel}'
