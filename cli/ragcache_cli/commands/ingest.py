"""``ragcache ingest``: files into a collection, in batches, with progress."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Final, Literal

import typer
from rich.console import Console
from rich.text import Text

from ragcache_cli.clients.gateway_client import (
    BatchFile,
    GatewayApiClient,
    GatewayTarget,
    RequestRefused,
    TryLater,
)
from ragcache_cli.commands.options import FAILED, CollectionOption, GatewayOptions, grouped
from ragcache_cli.commands.progress import IngestProgress
from ragcache_cli.output.console import make_console, printable
from ragcache_cli.sources.documents import (
    DocumentFile,
    Selection,
    documents_in,
    num_documents,
    read_content,
    select,
)
from ragcache_cli.sources.skipped import counts_of, summary_of
from ragcache_core.documents.formats import FORMAT_OF_SUFFIX, DocumentFormat
from ragcache_core.errors import InvalidInput, RagCacheError, Unavailable

CONCURRENCY: Final = 8
"""Documents of a batch that the gateway has in work at once."""

_BATCHES: Final = 2
"""Batches at once: the next one is read and sent while the gateway works on the one before."""

_BATCH_DOCUMENTS: Final = 2 * CONCURRENCY
_BATCH_BYTES: Final = 4 << 20
"""Size of a batch that has several documents. A batch is sent before its first event is read."""

INCOMPLETE: Final = 3
"""Exit status with --strict if a file was skipped or has failed."""

_ATTEMPTS: Final = 5
_RETRY_S: Final = 1.0
_RETRYABLE: Final = ("service_unavailable_error", "rate_limit_error")


@dataclass(frozen=True, slots=True)
class DocumentResult:
    """What has become of one document.

    Args:
        id: Of the document, or where it is if it has none.
        error: Why it was refused; None: it is in the collection.
        changed: False: the same document was stored already.
        chunks: Chunks of the document.
        warnings: What of it was not read, and what was assumed.
    """

    id: str
    error: RagCacheError | None = None
    changed: bool = False
    chunks: int = 0
    warnings: tuple[str, ...] = ()

    @property
    def new_chunks(self) -> int:
        """Chunks that were written."""
        return self.chunks if self.changed else 0


@dataclass(frozen=True, slots=True)
class Ingested:
    """Counts of written and unchanged documents, and the refused ones."""

    written: int
    unchanged: int
    refused: tuple[RagCacheError, ...]
    chunks: int
    """Chunks of the written documents."""

    warnings: tuple[str, ...] = ()
    """Of documents that are in the collection, each after the id of its document."""


async def ingest(
    gateway: GatewayApiClient,
    collection: str,
    files: Sequence[DocumentFile],
    on_done: Callable[[DocumentResult], None],
    encoding: str = "",
) -> Ingested:
    """Write files into the collection, and create it if it does not exist.

    A refused document does not stop the others. A repetition writes only what has changed.

    Args:
        on_done: Called after each document.
        encoding: Of text in all formats. Empty: the gateway finds it out.

    Raises:
        Unavailable: The gateway stopped answering.
        TryLater: The gateway or a part stayed busy.
        RequestRefused: The gateway refused the collection itself.
    """
    if await gateway.find_collection(collection) is None:
        await gateway.put_collection(collection)
    results: list[DocumentResult] = []

    def add(result: DocumentResult) -> None:
        results.append(result)
        on_done(result)

    waiting = _batches(documents_in(files))

    async def work() -> None:
        # All workers share one iterator, so that no list of tasks grows with the files.
        for batch in waiting:
            await _FileBatch(gateway, collection, add, encoding).write(batch)

    try:
        async with asyncio.TaskGroup() as group:
            for _ in range(_BATCHES):
                group.create_task(work())
    except* RagCacheError as errors:
        raise errors.exceptions[0] from None
    written = [one for one in results if one.error is None and one.changed]
    refused = tuple(one.error for one in results if one.error is not None)
    return Ingested(
        written=len(written),
        unchanged=len(results) - len(written) - len(refused),
        refused=refused,
        chunks=sum(one.chunks for one in written),
        warnings=tuple(f"{one.id}: {said}" for one in results for said in one.warnings),
    )


class _FileBatch:
    """Writes one batch, and what failed for the moment again."""

    def __init__(
        self,
        gateway: GatewayApiClient,
        collection: str,
        on_done: Callable[[DocumentResult], None],
        encoding: str,
    ) -> None:
        self._encoding = encoding
        self._gateway = gateway
        self._collection = collection
        self._on_done = on_done
        self._delay = TryLater(503, "the gateway is busy", _RETRY_S)

    async def write(self, files: Sequence[DocumentFile]) -> None:
        """Write the documents of a batch. Raises TryLater or another error of the gateway."""
        waiting, unreadable = await asyncio.to_thread(_read, files, self._encoding)
        for result in unreadable:
            self._on_done(result)
        for attempt in range(_ATTEMPTS):
            if not waiting:
                return
            if attempt:
                await asyncio.sleep(self._delay.retry_after_s)
            try:
                waiting = await self._send(waiting)
            except TryLater as error:
                self._delay = error
        if waiting:
            raise self._delay

    async def _send(
        self, batch: Sequence[tuple[DocumentFile, BatchFile]]
    ) -> list[tuple[DocumentFile, BatchFile]]:
        """Send documents; return those to send again."""
        left = dict(enumerate(batch))
        submitted: list[tuple[DocumentFile, dict[str, Any]]] = []
        sent = self._gateway.put_batch(self._collection, [content for _, content in batch])
        async with aclosing(sent) as events:
            async for event in events:
                if event["object"] == "batch.summary":
                    await self._follow(submitted)
                    return list(left.values())
                if event["state"] == "submitted":
                    submitted.append((left.pop(event["index"])[0], event))
                elif event["state"] != "accepted" and not self._is_to_repeat(event):
                    file, _ = left.pop(event["index"])
                    self._on_done(_result(file, event))
        raise Unavailable("gateway", "it ended a batch early")

    async def _follow(self, submitted: Sequence[tuple[DocumentFile, dict[str, Any]]]) -> None:
        """Wait until long documents are written."""
        for file, event in submitted:
            name = event["id"] or file.where
            try:
                done = await self._gateway.operation_end(event["operation"])
            except TryLater:
                raise
            except RequestRefused as error:
                self._on_done(DocumentResult(name, RagCacheError(f"{file.where}: {error}")))
            else:
                written = {"state": "done", "changed": done["changed"], "chunks": done["chunks"]}
                self._on_done(_result(file, event | written))

    def _is_to_repeat(self, event: dict[str, Any]) -> bool:
        error = event.get("error") or {}
        if error.get("type") not in _RETRYABLE:
            return False
        self._delay = TryLater(503, str(error["message"]), _RETRY_S)
        return True


def _read(
    files: Sequence[DocumentFile], encoding: str
) -> tuple[list[tuple[DocumentFile, BatchFile]], list[DocumentResult]]:
    """Read files; return those with their content, and the results of unreadable ones."""
    found, unreadable = [], []
    for file in files:
        try:
            content = read_content(file)
        except InvalidInput as error:
            unreadable.append(DocumentResult(file.id, error))
        else:
            kind = file.kind
            name = "" if kind is DocumentFormat.JSON_LINES else file.id
            named = encoding if kind.has_encoding else ""
            found.append((file, BatchFile(name, kind.media_type, content, named)))
    return found, unreadable


def _result(file: DocumentFile, event: dict[str, Any]) -> DocumentResult:
    name = event["id"] or file.where
    if event["state"] == "failed":
        return DocumentResult(name, RagCacheError(f"{file.where}: {event['error']['message']}"))
    warnings = tuple(event.get("warnings", ()))
    return DocumentResult(name, None, bool(event["changed"]), int(event["chunks"]), warnings)


def _batches(files: Iterator[DocumentFile]) -> Iterator[list[DocumentFile]]:
    """Yield files in groups of bounded number and size."""
    batch: list[DocumentFile] = []
    num_bytes = 0
    for file in files:
        size = _size(file)
        if batch and (len(batch) == _BATCH_DOCUMENTS or num_bytes + size > _BATCH_BYTES):
            yield batch
            batch, num_bytes = [], 0
        batch.append(file)
        num_bytes += size
    if batch:
        yield batch


def _size(file: DocumentFile) -> int:
    if file.line is not None:
        return file.line.size
    try:
        return file.path.stat().st_size
    except OSError:
        return 0  # reading it says why


@grouped
def ingest_command(
    paths: Annotated[list[Path], typer.Argument(metavar="PATH...", help="Files and folders.")],
    options: GatewayOptions,
    collection: CollectionOption = "default",
    output: Annotated[
        Literal["text", "json"],
        typer.Option("--output", "-o", help="json: a line per document, and then the counts."),
    ] = "text",
    encoding: Annotated[
        str, typer.Option(help="Encoding of text, Markdown, HTML and CSV, such as cp1252.")
    ] = "",
    strict: Annotated[
        bool, typer.Option("--strict", help="Exit with 3 if a file was skipped or has failed.")
    ] = False,
) -> None:
    """Ingest documents into a collection; unchanged ones are not written again.

    Markdown, MDX, reStructuredText, text, HTML, PDF, CSV, JSON, JSON lines, notebooks, and Word,
    PowerPoint and Excel files. Files that are no documents are skipped, and counted at the end.
    """
    selection = select(paths)
    console = make_console(stderr=True)
    for line in summary_of(selection.skipped):
        console.print(Text(f"skipped {printable(line)}", style="yellow"))
    if not selection.files and not selection.refused:
        known = ", ".join(FORMAT_OF_SUFFIX)
        raise InvalidInput("PATH", f"holds no file of {known}", "name another folder")
    begun = time.monotonic()
    as_json = output == "json"
    work = _ingest(options.target, collection, selection, console, encoding, as_json=as_json)
    done = asyncio.run(work)
    refused = (*selection.refused, *done.refused)
    if as_json:
        _print_json(selection, done, collection)
    else:
        if done.chunks and console.is_terminal:
            rate = done.chunks / (time.monotonic() - begun)
            console.print(f"{done.chunks:,} chunks, {rate:.0f} chunks/s")
        for warning in done.warnings:
            console.print(Text(f"warning {printable(warning)}", style="yellow"))
        for error in refused:
            console.print(Text(f"failed {error}", style="yellow"))
        print(
            f"{done.written} written, {done.unchanged} unchanged, {len(refused)} failed, "
            f"{len(selection.skipped)} skipped in collection {collection!r}"
        )
    if strict and (refused or selection.skipped):
        raise typer.Exit(INCOMPLETE)
    if refused:
        raise typer.Exit(FAILED)


async def _ingest(
    url: GatewayTarget,
    collection: str,
    selection: Selection,
    console: Console,
    encoding: str,
    *,
    as_json: bool,
) -> Ingested:
    total = await asyncio.to_thread(num_documents, selection.files)
    async with GatewayApiClient(url) as client:
        with IngestProgress(console, total) as progress:

            def show(result: DocumentResult) -> None:
                progress.advance(result.new_chunks)
                if as_json:
                    print(_line(result), flush=True)

            return await ingest(client, collection, selection.files, show, encoding)


def _print_json(selection: Selection, done: Ingested, collection: str) -> None:
    for error in selection.refused:
        print(_line(DocumentResult(error.field, error)))
    for one in selection.skipped:
        print(json.dumps({"id": one.name, "state": "skipped", "reason": one.reason.value}))
    counts = {
        "collection": collection,
        "written": done.written,
        "unchanged": done.unchanged,
        "failed": len(selection.refused) + len(done.refused),
        "skipped": len(selection.skipped),
        "skipped_by_reason": counts_of(selection.skipped),
        "chunks": done.chunks,
        "warnings": len(done.warnings),
    }
    print(json.dumps(counts))


def _line(result: DocumentResult) -> str:
    if result.error is not None:
        return json.dumps({"id": result.id, "state": "failed", "error": str(result.error)})
    done = {"id": result.id, "state": "done", "changed": result.changed, "chunks": result.chunks}
    return json.dumps(done | ({"warnings": result.warnings} if result.warnings else {}))
