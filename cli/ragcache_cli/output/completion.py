"""``ragcache completion``: a script that completes commands and options in a shell."""

from __future__ import annotations

from typing import Annotated, Final, Literal

import typer
from typer._completion_classes import completion_init
from typer.completion import shell_complete

_PROGRAM: Final = "ragcache"

# Typer knows the shells only after this call. It calls it itself only for its own options.
completion_init()


def completion_command(
    context: typer.Context,
    shell: Annotated[
        Literal["bash", "zsh", "fish"], typer.Argument(metavar="SHELL", help="bash, zsh or fish.")
    ],
) -> None:
    """Print a script that completes commands and options; the shell's start file sources it."""
    variable = f"_{_PROGRAM.upper()}_COMPLETE"
    shell_complete(context.find_root().command, {}, _PROGRAM, variable, f"source_{shell}")
