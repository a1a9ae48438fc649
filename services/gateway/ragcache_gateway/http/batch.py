"""Writes the documents of a batch while its body arrives, and streams an event for each.

Several documents are in work at once. The body is read no further than they need, so the memory of
a batch is bounded however long it is.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any, Final, Literal

from pydantic import BaseModel, Field
from starlette.types import Receive

from ragcache_core.access.caller import Caller, NotAllowed
from ragcache_core.errors import InvalidInput, RagCacheError
from ragcache_gateway.audit.notes import note_counts, note_documents
from ragcache_gateway.documents.incoming import IncomingDocument
from ragcache_gateway.documents.retriever_errors import to_rest_error
from ragcache_gateway.documents.schema import WARNINGS_HELP
from ragcache_gateway.documents.writer import DocumentWriter
from ragcache_gateway.extraction.extractor import TextExtractor
from ragcache_gateway.http.batch_parser import BatchItem, BatchParser, RefusedDocument
from ragcache_gateway.http.disconnect import ClientDisconnected, receive_piece
from ragcache_gateway.http.errors import ErrorDetail, error_body, to_http
from ragcache_gateway.http.operation_schema import LATER_CHARS

log = logging.getLogger(__name__)

CONCURRENCY: Final = 8
"""Documents of one batch in work at once."""

KEEP_ALIVE_S: Final = 15.0
"""Time without an event after which the client gets a sign of life, for proxies that close silent
streams."""

_PIECES: Final = 16
"""Pieces of a body that are received before they are used. A client that disconnects is noticed
unless it had sent more."""

_EVENTS: Final = 64
"""Events that wait for the client. When it takes none, the batch waits."""


class BatchEvent(BaseModel):
    """What has become of one document of a batch."""

    object: Literal["batch.document"] = "batch.document"
    index: int = Field(description="Position in the batch, from 0.")
    id: str = Field(description="Empty if the document has no id that can be read.")
    line: int | None = Field(default=None, description="Of a file of JSON lines, from 1.")
    state: Literal["accepted", "done", "failed", "submitted"] = Field(
        description="submitted: a long document that is written later, see `Prefer`."
    )
    operation: str | None = Field(
        default=None, description="With submitted: id of the operation, see /v1/operations/{id}."
    )
    changed: bool | None = Field(
        default=None, description="With done; false: the same document was stored already."
    )
    chunks: int | None = Field(default=None, description="With done: chunks of the document.")
    warnings: list[str] | None = Field(
        default=None, description=f"With done and submitted. {WARNINGS_HELP}"
    )
    error: ErrorDetail | None = Field(default=None, description="With failed.")


class BatchSummary(BaseModel):
    """The last event of a batch. Documents that it does not count were not read."""

    object: Literal["batch.summary"] = "batch.summary"
    documents: int = 0
    written: int = 0
    unchanged: int = 0
    failed: int = 0
    submitted: int = 0
    chunks: int = Field(default=0, description="Chunks of the written documents.")
    error: ErrorDetail | None = Field(
        default=None, description="Why the rest of the body was not read; null: all was read."
    )


@dataclass(frozen=True, slots=True)
class BatchLimit:
    """Bounds of one batch.

    Args:
        max_bytes: Size of all documents in work.
        body_timeout_s: Time for the next piece of the body to arrive.
        defers_long: Whether documents over LATER_CHARS are written later.
    """

    max_bytes: int
    body_timeout_s: float
    defers_long: bool = False


class DocumentBatch:
    """One batch. Its events end with a BatchSummary.

    Args:
        receive: Gives the request's body.
    """

    def __init__(
        self,
        parser: BatchParser,
        receive: Receive,
        *,
        writer: DocumentWriter,
        extractor: TextExtractor,
        caller: Caller,
        limit: BatchLimit,
    ) -> None:
        self._parser = parser
        self._receive = receive
        self._writer = writer
        self._extractor = extractor
        self._caller = caller
        self._limit = limit
        self._summary = BatchSummary()
        self._events: asyncio.Queue[BatchEvent] = asyncio.Queue(_EVENTS)
        self._pieces: asyncio.Queue[bytes | InvalidInput | None] = asyncio.Queue(_PIECES)
        self._slots = asyncio.Semaphore(CONCURRENCY)
        self._bytes_in_work = 0
        self._has_room = asyncio.Condition()
        self._in_work: dict[tuple[str, str], asyncio.Task[None]] = {}

    async def events(self) -> AsyncGenerator[BatchEvent | BatchSummary | None, None]:
        """Yield the events, and None after a time without one. Closing this stops the batch.

        Raises:
            ClientDisconnected: The client has disconnected.
        """
        working = asyncio.create_task(self._run(), name="batch")
        try:
            while not (working.done() and self._events.empty()):
                event = await self._next_event(working)
                if event is not None or not working.done():
                    yield event
            await working
        finally:
            working.cancel()
            await asyncio.gather(working, return_exceptions=True)
            done = self._summary
            counts = {"written": done.written, "unchanged": done.unchanged, "failed": done.failed}
            if done.submitted:
                counts["submitted"] = done.submitted
            note_counts(**counts)
        yield self._summary

    async def _next_event(self, working: asyncio.Task[None]) -> BatchEvent | None:
        """Wait for an event, the end of the work, or the time of a sign of life."""
        getting = asyncio.create_task(self._events.get())
        try:
            await asyncio.wait(
                (getting, working),
                timeout=KEEP_ALIVE_S,
                return_when=asyncio.FIRST_COMPLETED,
            )
            return getting.result() if getting.done() else None
        finally:
            getting.cancel()

    async def _run(self) -> None:
        is_gone = False
        try:
            async with asyncio.TaskGroup() as group:
                receiving = group.create_task(self._receive_body())
                await self._read(group)
                while self._in_work:
                    await asyncio.wait(self._in_work.values())
                receiving.cancel()
        except* ClientDisconnected:
            is_gone = True
        if is_gone:
            raise ClientDisconnected

    async def _read(self, group: asyncio.TaskGroup) -> None:
        try:
            async with aclosing(self._items()) as items:
                async for item in items:
                    await self._begin(group, item)
        except RagCacheError as error:
            self._summary.error = _detail(error)

    async def _items(self) -> AsyncGenerator[BatchItem, None]:
        """Yield the documents of the body. Raises InvalidInput or ClientDisconnected."""
        async for data in self._body():
            for item in self._parser.feed(data):
                yield item
        for item in self._parser.close():
            yield item

    async def _body(self) -> AsyncIterator[bytes]:
        while (piece := await self._pieces.get()) is not None:
            if isinstance(piece, InvalidInput):
                raise piece
            yield piece

    async def _receive_body(self) -> None:
        """Receive the body ahead of its use, and then the disconnect. Raises ClientDisconnected."""
        has_more = True
        while True:
            timeout_s = self._limit.body_timeout_s if has_more else None
            try:
                piece, has_more = await receive_piece(self._receive, timeout_s)
            except InvalidInput as error:
                await self._pieces.put(error)
                return
            await self._pieces.put(piece)
            if not has_more:
                await self._pieces.put(None)

    async def _begin(self, group: asyncio.TaskGroup, item: BatchItem) -> None:
        """Have a document written when there is room for it."""
        index = self._summary.documents
        self._summary.documents += 1
        if isinstance(item, RefusedDocument):
            await self._fail(index, item, item.error)
            return
        try:
            self._caller.check_collection(item.fields.collection)
        except NotAllowed as error:
            await self._fail(index, item, error)
            return
        await self._slots.acquire()
        size = item.num_bytes
        async with self._has_room:
            await self._has_room.wait_for(
                lambda: (
                    not self._bytes_in_work or self._bytes_in_work + size <= self._limit.max_bytes
                )
            )
            self._bytes_in_work += size
        await self._report(index, item, "accepted")
        key = item.fields.collection, item.fields.id
        earlier = self._in_work.get(key)
        self._in_work[key] = group.create_task(self._write(index, item, key, earlier))

    async def _write(
        self,
        index: int,
        item: IncomingDocument,
        key: tuple[str, str],
        earlier: asyncio.Task[None] | None,
    ) -> None:
        try:
            if earlier is not None:
                # Of two documents with one id the later one stays.
                await earlier
            read = await item.read(self._extractor)
            told = {"warnings": list(read.warnings)} if read.warnings else {}
            if self._limit.defers_long and len(read.message.text) > LATER_CHARS:
                owner = self._caller.tenant or ""
                accepted = await self._writer.submit(read.message, owner)
                self._summary.submitted += 1
                await self._report(index, item, "submitted", operation=accepted.id, **told)
                return
            reply, _ = await self._writer.write(read.message)
            chunks = reply.document.num_chunks
            if reply.changed:
                self._summary.written += 1
                self._summary.chunks += chunks
            else:
                self._summary.unchanged += 1
            await self._report(index, item, "done", changed=reply.changed, chunks=chunks, **told)
        except RagCacheError as error:
            await self._fail(index, item, to_rest_error(error))
        except Exception:
            log.exception("batch: document not written id=%s", item.fields.id)
            await self._fail(index, item, None)
        finally:
            if self._in_work.get(key) is asyncio.current_task():
                del self._in_work[key]
            self._slots.release()
            async with self._has_room:
                self._bytes_in_work -= item.num_bytes
                self._has_room.notify_all()

    async def _fail(self, index: int, item: BatchItem, error: RagCacheError | None) -> None:
        self._summary.failed += 1
        await self._report(index, item, "failed", error=_detail(error))

    async def _report(
        self,
        index: int,
        item: BatchItem,
        state: Literal["accepted", "done", "failed", "submitted"],
        **fields: Any,
    ) -> None:
        if isinstance(item, RefusedDocument):
            collection, name = "", item.id
        else:
            collection, name = item.fields.collection, item.fields.id
        if state != "accepted":
            use = "unchanged" if fields.get("changed") is False else state
            note_documents(collection, [name], use)
        event = BatchEvent(index=index, id=name, line=item.line, state=state, **fields)
        await self._events.put(event)


def _detail(error: RagCacheError | None) -> ErrorDetail:
    if error is None:
        body = error_body("an internal error; the log has more", "server_error", code="internal")
    else:
        body = to_http(error).body
    return ErrorDetail(**body["error"])
