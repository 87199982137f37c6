"""Command line of sage-processors: demo, report, doctor, time, rate, warm-up and calibrate.

May import everything. Nothing else in the package imports it.
"""

from __future__ import annotations

import sys


def run() -> None:
    """Run the command line. If a package is missing, end with its pip command instead of a traceback."""
    try:
        from .main import app

        app(prog_name="sage-processors")
    except KeyboardInterrupt:  # before a command began: within one, it says what it leaves
        print("Interrupted: nothing was written.", file=sys.stderr)
        sys.exit(130)
    except ImportError as error:
        if "pip install" not in str(error):
            raise
        print(f"Error: {error}", file=sys.stderr)
        sys.exit(1)
