"""Ingests files into a collection."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from ragcache_cli.clients.gateway_client import GatewayApiClient, RequestRefused, TryLater
from ragcache_cli.sources.documents import DocumentFile, read_text
from ragcache_core.errors import InvalidInput, RagCacheError

CONCURRENCY = 4
"""Documents in flight: enough that reading, sending and embedding overlap."""

_ATTEMPTS = 5


@dataclass(frozen=True, slots=True)
class Ingested:
    """Counts of written and unchanged documents, and the refused ones."""

    written: int
    unchanged: int
    refused: tuple[RagCacheError, ...]


async def ingest(
    gateway: GatewayApiClient,
    collection: str,
    files: Sequence[DocumentFile],
    on_done: Callable[[DocumentFile], None],
) -> Ingested:
    """Write files into the collection, and create it if it does not exist.

    A refused file does not stop the others.

    Args:
        on_done: Called after each file, also after a refused one.

    Raises:
        Unavailable: The gateway stopped answering.
        TryLater: The gateway or a part stayed busy.
        RequestRefused: The gateway refused the collection itself.
    """
    if not await gateway.has_collection(collection):
        await gateway.put_collection(collection)
    waiting = iter(files)
    changed: list[bool] = []
    refused: list[RagCacheError] = []

    async def work() -> None:
        # All workers share one iterator, so that no list of tasks grows with the files.
        for file in waiting:
            try:
                changed.append(await _write(gateway, collection, file))
            except InvalidInput as error:
                refused.append(error)
            except TryLater:
                raise
            except RequestRefused as error:
                refused.append(RagCacheError(f"{file.path}: {error}"))
            on_done(file)

    try:
        async with asyncio.TaskGroup() as group:
            for _ in range(CONCURRENCY):
                group.create_task(work())
    except* RagCacheError as errors:
        raise errors.exceptions[0] from None
    return Ingested(sum(changed), len(changed) - sum(changed), tuple(refused))


async def _write(gateway: GatewayApiClient, collection: str, file: DocumentFile) -> bool:
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
