"""Wrong input to a command is answered in one line, exit code 2: no usage, no box, no traceback."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

import typer
from typer.core import TyperGroup


class OneLineErrors(TyperGroup):
    """A group of commands whose mistakes of use are one line on stderr."""

    def main(
        self,
        args: Sequence[str] | None = None,
        prog_name: str | None = None,
        complete_var: str | None = None,
        standalone_mode: bool = True,
        windows_expand_args: bool = True,
        **extra: Any,
    ) -> Any:
        """As click's own, which prints usage, a hint and a box around the message of a mistake."""
        if not standalone_mode:
            return super().main(args, prog_name, complete_var, False, windows_expand_args, **extra)
        try:
            code = super().main(args, prog_name, complete_var, False, windows_expand_args, **extra)
        except typer.Abort:
            typer.echo("Aborted.", err=True)
            code = 1
        except Exception as error:
            if not hasattr(error, "format_message"):  # only click's own have it: typer.BadParameter and its relatives
                raise
            said = " ".join(error.format_message().split())
            context = getattr(error, "ctx", None)
            if not said or type(error).__name__ == "NoArgsIsHelpError":  # asked for nothing: the help is the answer
                error.show()  # type: ignore[attr-defined]
            else:
                where = f" ({context.command_path} --help)" if context is not None else ""
                typer.echo(f"Error: {said}{where}", err=True)
            code = error.exit_code  # type: ignore[attr-defined]
        sys.exit(code if isinstance(code, int) else 0)
