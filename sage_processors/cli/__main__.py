"""Run the command sage-processors as `python -m sage_processors.cli`."""

from .main import main


main()
