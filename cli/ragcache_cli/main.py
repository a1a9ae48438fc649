"""The commands of ``ragcache``. Each parses its arguments, calls one module and prints the result.

Exit status: 0 success; 1 failure; 2 a mistake of the user, reported with field and fix.
"""

from __future__ import annotations

import sys
from typing import Annotated, Any, Final, Literal

import typer
from typer._completion_classes import completion_init
from typer.completion import shell_complete
from typer.core import TyperGroup

from ragcache_cli.clients.gateway_client import RequestRefused, TryLater
from ragcache_cli.commands.ask import ask_command, explain_command
from ragcache_cli.commands.backup import backup_command, restore_command
from ragcache_cli.commands.cluster import install_command, render_command
from ragcache_cli.commands.collections import collection_app
from ragcache_cli.commands.doctor import doctor_command
from ragcache_cli.commands.erasure import erasure_command
from ragcache_cli.commands.ingest import ingest_command
from ragcache_cli.commands.keys import keys_app
from ragcache_cli.commands.model import model_app
from ragcache_cli.commands.options import FAILED
from ragcache_cli.commands.quality import quality_command
from ragcache_cli.commands.size import size_command
from ragcache_cli.commands.status import logs_command, status_command
from ragcache_cli.commands.sync import sync_command
from ragcache_cli.commands.up import down_command, up_command
from ragcache_cli.commands.usage import usage_command
from ragcache_cli.monitoring.top import top_command
from ragcache_core.errors import InvalidInput, NotFound, RagCacheError

MISTAKE: Final = 2
_PROGRAM: Final = "ragcache"

# Typer knows the shells only after this call. It calls it itself only for its own options.
completion_init()


class _ErrorEdge(TyperGroup):
    """Turns expected errors into a line and an exit status."""

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except RagCacheError as error:
            for problem in getattr(error, "problems", (error,)):
                print(f"ragcache: {problem}", file=sys.stderr)
            raise typer.Exit(MISTAKE if _is_mistake(error) else FAILED) from error


def completion_command(
    context: typer.Context,
    shell: Annotated[
        Literal["bash", "zsh", "fish"], typer.Argument(metavar="SHELL", help="bash, zsh or fish.")
    ],
) -> None:
    """Print a script that completes commands and options; the shell's start file sources it."""
    variable = f"_{_PROGRAM.upper()}_COMPLETE"
    shell_complete(context.find_root().command, {}, _PROGRAM, variable, f"source_{shell}")


app = typer.Typer(
    cls=_ErrorEdge,
    no_args_is_help=True,
    # `ragcache completion` is the only way to get it.
    add_completion=False,
    pretty_exceptions_enable=False,
    help="RAG on vLLM that reuses the KV cache of retrieved chunks.",
)
for command in (
    *(up_command, down_command, status_command, logs_command, install_command, ingest_command),
    *(ask_command, explain_command, quality_command, size_command, sync_command, top_command),
    *(completion_command, backup_command, restore_command, render_command, doctor_command),
    *(usage_command, erasure_command),
):
    app.command(name=command.__name__.removesuffix("_command"))(command)
app.add_typer(keys_app)
app.add_typer(collection_app, name="collection")
app.add_typer(model_app, name="model")


def main() -> None:
    """Entry point of the command."""
    app()


def _is_mistake(error: RagCacheError) -> bool:
    """Return whether the user can correct it with other input."""
    if isinstance(error, RequestRefused):
        return error.status < 500 and not isinstance(error, TryLater)
    return isinstance(error, InvalidInput | NotFound)
