"""Run `python -m sage_processors`, the same as the command sage-processors."""

from .cli import run


run()
