"""Run the command sage-processors as `python -m sage_processors.cli`."""

from . import run


run()
