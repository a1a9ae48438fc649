"""``ragcache ingest``: files into a collection, with progress."""

from __future__ import annotations

import asyncio
import json
import time
from pathlib import Path
from typing import Annotated, Literal

import typer
from rich.console import Console
from rich.text import Text

from ragcache_cli.clients.gateway_client import GatewayApiClient, GatewayTarget
from ragcache_cli.commands.ingest import DocumentResult, Ingested, ingest
from ragcache_cli.commands.progress import IngestProgress
from ragcache_cli.documents.gateway_option import (
    ApiKeyOption,
    CollectionOption,
    GatewayOption,
    gateway_target,
)
from ragcache_cli.output.console import make_console
from ragcache_cli.sources.documents import Selection, num_documents, select
from ragcache_core.documents.formats import FORMAT_OF_SUFFIX
from ragcache_core.errors import InvalidInput, RagCacheError

FAILED = 1


def ingest_command(
    paths: Annotated[list[Path], typer.Argument(metavar="PATH...", help="Files and folders.")],
    collection: CollectionOption = "default",
    output: Annotated[
        Literal["text", "json"],
        typer.Option("--output", "-o", help="json: a line per document, and then the counts."),
    ] = "text",
    gateway: GatewayOption = None,
    api_key: ApiKeyOption = None,
) -> None:
    """Ingest documents into a collection; unchanged ones are skipped.

    Markdown, text, HTML, PDF, JSON lines, and Word, PowerPoint and Excel files.
    """
    selection = select(paths)
    if not selection.files and not selection.refused:
        known = ", ".join(FORMAT_OF_SUFFIX)
        raise InvalidInput("PATH", f"holds no file of {known}", "name another folder")
    console = make_console(stderr=True)
    begun = time.monotonic()
    as_json = output == "json"
    done = asyncio.run(
        _ingest(gateway_target(gateway, api_key), collection, selection, console, as_json=as_json)
    )
    refused = (*selection.refused, *done.refused)
    if as_json:
        _print_json(selection, done, collection)
    else:
        if done.chunks and console.is_terminal:
            rate = done.chunks / (time.monotonic() - begun)
            console.print(f"{done.chunks:,} chunks, {rate:.0f} chunks/s")
        for error in refused:
            console.print(Text(f"skipped {error}", style="yellow"))
        print(
            f"{done.written} written, {done.unchanged} unchanged, {len(refused)} skipped "
            f"in collection {collection!r}"
        )
    if refused:
        raise typer.Exit(FAILED)


async def _ingest(
    url: GatewayTarget, collection: str, selection: Selection, console: Console, *, as_json: bool
) -> Ingested:
    total = await asyncio.to_thread(num_documents, selection.files)
    async with GatewayApiClient(url) as client:
        with IngestProgress(console, total) as progress:

            def show(result: DocumentResult) -> None:
                progress.advance(result.new_chunks)
                if as_json:
                    print(_line(result.id, result.error, result.changed, result.chunks), flush=True)

            return await ingest(client, collection, selection.files, show)


def _print_json(selection: Selection, done: Ingested, collection: str) -> None:
    for error in selection.refused:
        print(_line(error.field, error, changed=False, chunks=0))
    counts = {
        "collection": collection,
        "written": done.written,
        "unchanged": done.unchanged,
        "skipped": len(selection.refused) + len(done.refused),
        "chunks": done.chunks,
    }
    print(json.dumps(counts))


def _line(name: str, error: RagCacheError | None, changed: bool, chunks: int) -> str:
    if error is not None:
        return json.dumps({"id": name, "state": "failed", "error": str(error)})
    return json.dumps({"id": name, "state": "done", "changed": changed, "chunks": chunks})
