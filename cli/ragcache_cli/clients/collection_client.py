"""Client for the documents of one collection; it retries while the gateway is unavailable."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Any
from urllib.parse import quote

import httpx

from ragcache_cli.clients.gateway_client import (
    GatewayApiClient,
    GatewayTarget,
    RequestRefused,
    TryLater,
)
from ragcache_core.errors import Unavailable

_DOCUMENTS = "/v1/documents"
_PAGE = 1000
_CONNECT_S = 5.0
_REPLY_S = 900.0
"""A slow CPU embeds the largest document for minutes, without a byte of response meanwhile."""
_SHORTEST_WAIT_S = 1.0
"""Lower bound of the retry interval, also when the gateway suggests a shorter one."""


@dataclass(frozen=True, slots=True)
class DocumentContent:
    """What a document consists of.

    Args:
        fields: Fields of the document in the REST API, without its id and its collection.
        file: Its bytes, unless the fields have its text.
    """

    fields: Mapping[str, Any]
    file: bytes | None = None


@dataclass(frozen=True, slots=True)
class CollectionDocument:
    """A document of the collection, without its text."""

    id: str
    metadata: Mapping[str, str]
    chunks: int


class CollectionClient(GatewayApiClient):
    """Calls for one collection.

    While the gateway is unavailable or busy, a call retries for ``patience_s``.

    Raises:
        Unavailable: The gateway did not answer in that time.
        TryLater: The gateway stayed busy.
        RequestRefused: The gateway refused the request; this is not retried.
    """

    def __init__(
        self,
        target: GatewayTarget,
        collection: str,
        patience_s: float,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        super().__init__(target)
        self._http.timeout = httpx.Timeout(_REPLY_S, connect=_CONNECT_S)
        self._collection = collection
        self._patience_s = patience_s
        self._clock = clock
        self._sleep = sleep

    async def settings(self) -> dict[str, Any] | None:
        """Return settings and counts of the collection, or None if it does not exist."""
        return await self._find("GET", self._path)

    async def change_settings(self, settings: Mapping[str, Any]) -> None:
        """Create the collection, or change the given settings of it.

        A new chunking splits all its documents again.
        """
        await self._patiently("PATCH", self._path, settings)

    async def documents(self) -> AsyncIterator[CollectionDocument]:
        """Return every document, by id."""
        after = ""
        while True:
            query = f"collection={self._quoted}&limit={_PAGE}&after={quote(after, safe='')}"
            page = await self._patiently("GET", f"/v1/documents?{query}")
            for found in page["data"]:
                yield CollectionDocument(found["id"], found["metadata"], found["chunks"])
            if not page["has_more"]:
                return
            after = page["next"]

    async def put(
        self, document_id: str, content: DocumentContent, metadata: Mapping[str, str]
    ) -> int:
        """Insert or replace a document and return the number of its chunks.

        Args:
            metadata: Of the caller. It goes before that of the document.
        """
        fields = {
            **content.fields,
            "collection": self._collection,
            "id": document_id,
            "metadata": {**content.fields.get("metadata", {}), **metadata},
        }
        if content.file is None:
            reply = await self._patiently("POST", _DOCUMENTS, fields)
        else:
            fields["metadata"] = json.dumps(fields["metadata"])
            reply = await self._patiently("POST", _DOCUMENTS, fields, content.file)
        return int(reply["chunks"])

    async def delete(self, document_id: str) -> None:
        """Delete a document if it exists."""
        path = f"/v1/documents/{quote(document_id, safe='')}?collection={self._quoted}"
        await self._find("DELETE", path)

    @property
    def _quoted(self) -> str:
        return quote(self._collection, safe="")

    @property
    def _path(self) -> str:
        return f"/v1/collections/{self._quoted}"

    async def _find(self, method: str, path: str) -> dict[str, Any] | None:
        try:
            return await self._patiently(method, path)
        except RequestRefused as error:
            if error.status == httpx.codes.NOT_FOUND:
                return None
            raise

    async def _patiently(
        self,
        method: str,
        path: str,
        body: Mapping[str, Any] | None = None,
        file: bytes | None = None,
    ) -> dict[str, Any]:
        began = self._clock()
        while True:
            try:
                return await self._call(method, path, body, file)
            except (TryLater, Unavailable) as error:
                wait_s = max(_SHORTEST_WAIT_S, error.retry_after_s)
                if self._clock() - began + wait_s > self._patience_s:
                    raise
                await self._sleep(wait_s)
