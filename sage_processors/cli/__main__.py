"""`python -m sage_processors.cli`: the same as the command sage-processors."""

from .main import main


main()
