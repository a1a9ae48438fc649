"""The option of every command that prints data: its form, for people or for programs."""

from __future__ import annotations

import json
from typing import Annotated, Any, Literal

import typer

OutputOption = Annotated[
    Literal["text", "json"], typer.Option("--output", "-o", help="Form of the result.")
]


def print_json(value: Any) -> None:
    """Print a JSON value to standard output."""
    print(json.dumps(value, ensure_ascii=False, indent=2))
