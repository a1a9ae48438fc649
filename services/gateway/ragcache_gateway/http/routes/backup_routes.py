"""Routes of backups: all documents as one file, out and in."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing
from typing import Any, Final, Literal

from fastapi import APIRouter, Request
from fastapi.responses import StreamingResponse
from pydantic import BaseModel, Field

from ragcache_core.documents.backup_file import BackupReader, BackupWriter
from ragcache_core.errors import RagCacheError
from ragcache_gateway.audit.notes import note_counts
from ragcache_gateway.http.disconnect import ClientDisconnected, receive_piece
from ragcache_gateway.http.middleware.request_pools import BACKUP_PATH, RESTORE_PATH
from ragcache_gateway.http.openapi import ERRORS, UPSTREAM_ERRORS
from ragcache_gateway.http.services import Services
from ragcache_wire.channel import PART_BYTES
from ragcache_wire.clients.retriever_client import RetrieverClient

MEDIA_TYPE: Final = "application/octet-stream"

_FILE: Final[dict[str, Any]] = {MEDIA_TYPE: {"schema": {"type": "string", "format": "binary"}}}

router = APIRouter(tags=["backup"], responses={**ERRORS, **UPSTREAM_ERRORS})


class Restored(BaseModel):
    """The documents after a restore."""

    object: Literal["backup.restored"] = "backup.restored"
    documents: int = Field(description="Documents that there are now.")


@router.get(
    BACKUP_PATH,
    summary="Download all documents with their embeddings",
    response_class=StreamingResponse,
    responses={
        200: {
            "content": _FILE,
            "description": "A file for `/v1/restore`. Its last 32 bytes are a checksum: without "
            "them the file is not complete.",
        }
    },
)
async def backup(services: Services) -> StreamingResponse:
    """The file is consistent: all documents are in it as they were at one time."""
    file = _backup_file(services.retriever)
    # An error of the first part is still a response of its own.
    first = await anext(file)
    return StreamingResponse(
        _chained(first, file),
        media_type=MEDIA_TYPE,
        headers={"Content-Disposition": 'attachment; filename="documents.ragcache"'},
    )


@router.post(
    RESTORE_PATH,
    summary="Replace all documents by a backup",
    openapi_extra={"requestBody": {"required": True, "content": _FILE}},
)
async def restore(request: Request, services: Services) -> Restored:
    """Documents that are not in the backup are deleted. A damaged file changes nothing."""
    file = _UploadedBackup(request, services.settings.body_timeout_s)
    restoring = asyncio.ensure_future(services.documents.restore(file.parts()))
    try:
        documents = await restoring
        note_counts(restored=documents)
        return Restored(documents=documents)
    except (asyncio.CancelledError, RagCacheError):
        # An error of the file cancels the call, which then tells nothing of the cause.
        if file.error is not None:
            raise file.error from None
        raise
    finally:
        restoring.cancel()


class _UploadedBackup:
    """The body of a request.

    Args:
        timeout_s: Time for the next piece to arrive.
    """

    def __init__(self, request: Request, timeout_s: float) -> None:
        self._request = request
        self._timeout_s = timeout_s
        self.error: Exception | None = None

    async def parts(self) -> AsyncIterator[bytes]:
        """Yield the parts of the copy. It raises before its end if the file is damaged."""
        reader = BackupReader("body")
        try:
            async for piece in self._pieces():
                part = reader.add(piece)
                for start in range(0, len(part), PART_BYTES):
                    yield part[start : start + PART_BYTES]
            reader.end()
        except (RagCacheError, ClientDisconnected) as error:
            self.error = error
            raise

    async def _pieces(self) -> AsyncIterator[bytes]:
        has_more = True
        while has_more:
            piece, has_more = await receive_piece(self._request.receive, self._timeout_s)
            yield piece


async def _backup_file(retriever: RetrieverClient) -> AsyncGenerator[bytes, None]:
    writer = BackupWriter()
    async with aclosing(retriever.backup()) as parts:
        async for part in parts:
            yield writer.add(part)
    yield writer.end()


async def _chained(first: bytes, rest: AsyncGenerator[bytes, None]) -> AsyncIterator[bytes]:
    async with aclosing(rest):
        yield first
        async for piece in rest:
            yield piece
