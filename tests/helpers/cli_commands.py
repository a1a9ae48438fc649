"""Every command of the CLI, as its own parser knows them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import typer

from ragcache_cli.main import app


def cli_commands() -> dict[tuple[str, ...], Any]:
    """Return the commands, without groups, by their words."""
    return dict(_below((), typer.main.get_command(app)))


def parse(words: list[str]) -> tuple[str, ...]:
    """Parse the words after ``ragcache`` and return those of the command; nothing runs.

    Raises what the parser raises.
    """
    command: Any = typer.main.get_command(app)
    context, found = None, list[str]()
    while hasattr(command, "commands"):
        context = command.make_context("ragcache", [], parent=context, resilient_parsing=True)
        name, command, words = command.resolve_command(context, words)
        found.append(name)
    command.make_context(found[-1], list(words), parent=context)
    return tuple(found)


def _below(words: tuple[str, ...], command: Any) -> Iterator[tuple[tuple[str, ...], Any]]:
    if not hasattr(command, "commands"):
        yield words, command
        return
    for name, one in command.commands.items():
        yield from _below((*words, name), one)
