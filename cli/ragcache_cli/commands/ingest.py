"""Ingests files into a collection."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from ragcache_cli.clients.gateway_client import (
    DocumentWrite,
    GatewayApiClient,
    RequestRefused,
    TryLater,
)
from ragcache_cli.sources.documents import DocumentFile, read_text
from ragcache_core.errors import InvalidInput, RagCacheError

CONCURRENCY = 8
"""Documents in flight: enough that reading, sending and storing overlap, and that the embedder has
texts of several documents to batch."""

_ATTEMPTS = 5


@dataclass(frozen=True, slots=True)
class Ingested:
    """Counts of written and unchanged documents, and the refused ones."""

    written: int
    unchanged: int
    refused: tuple[RagCacheError, ...]
    chunks: int
    """Chunks of the written documents."""


async def ingest(
    gateway: GatewayApiClient,
    collection: str,
    files: Sequence[DocumentFile],
    on_done: Callable[[int], None],
) -> Ingested:
    """Write files into the collection, and create it if it does not exist.

    A refused file does not stop the others.

    Args:
        on_done: Called after each file, also after a refused one, with the number of chunks that
            were written.

    Raises:
        Unavailable: The gateway stopped answering.
        TryLater: The gateway or a part stayed busy.
        RequestRefused: The gateway refused the collection itself.
    """
    if not await gateway.has_collection(collection):
        await gateway.put_collection(collection)
    waiting = iter(files)
    writes: list[DocumentWrite] = []
    refused: list[RagCacheError] = []

    async def work() -> None:
        # All workers share one iterator, so that no list of tasks grows with the files.
        for file in waiting:
            num_chunks = 0
            try:
                write = await _write(gateway, collection, file)
                writes.append(write)
                num_chunks = write.num_chunks if write.changed else 0
            except InvalidInput as error:
                refused.append(error)
            except TryLater:
                raise
            except RequestRefused as error:
                refused.append(RagCacheError(f"{file.path}: {error}"))
            on_done(num_chunks)

    try:
        async with asyncio.TaskGroup() as group:
            for _ in range(CONCURRENCY):
                group.create_task(work())
    except* RagCacheError as errors:
        raise errors.exceptions[0] from None
    changed = [write for write in writes if write.changed]
    chunks = sum(write.num_chunks for write in changed)
    return Ingested(len(changed), len(writes) - len(changed), tuple(refused), chunks)


async def _write(gateway: GatewayApiClient, collection: str, file: DocumentFile) -> DocumentWrite:
    document = {
        "collection": collection,
        "id": file.id,
        "text": await asyncio.to_thread(read_text, file),
        "content_type": file.content_type,
    }
    for attempt in range(1, _ATTEMPTS + 1):
        try:
            return await gateway.put_document(document)
        except TryLater as error:
            if attempt == _ATTEMPTS:
                raise
            await asyncio.sleep(error.retry_after_s)
    raise AssertionError("unreachable")
