"""Client of the gateway's REST API for the commands."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Self
from urllib.parse import quote

import httpx

from ragcache_core.errors import RagCacheError, Unavailable

_CONNECT_S = 5.0
_REPLY_S = 120.0
"""Longest wait between two parts of a response: the engine may first serve a full queue."""
_EVENT_PREFIX = "data:"
_END = "[DONE]"


class RequestRefused(RagCacheError):
    """The gateway refused a request; the message names the field and the fix."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


class TryLater(RequestRefused):
    """The gateway cannot serve the request now: it or a part that it needs is busy or down."""

    def __init__(self, status: int, message: str, retry_after_s: float = 1.0) -> None:
        super().__init__(status, message)
        self.retry_after_s = retry_after_s


@dataclass(frozen=True, slots=True)
class DocumentWrite:
    """The result of writing a document: whether it changed, and its number of chunks."""

    changed: bool
    num_chunks: int


class GatewayApiClient:
    """Calls to one gateway.

    Args:
        url: Base URL.

    Raises:
        RequestRefused: The gateway refused the request.
        Unavailable: No gateway answered.
    """

    def __init__(self, url: str) -> None:
        self._url = url
        timeout = httpx.Timeout(_REPLY_S, connect=_CONNECT_S)
        self._http = httpx.AsyncClient(base_url=url, timeout=timeout)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self._http.aclose()

    async def has_collection(self, name: str) -> bool:
        """Return whether the collection exists."""
        try:
            await self._call("GET", f"/v1/collections/{quote(name, safe='')}")
        except RequestRefused as error:
            if error.status == httpx.codes.NOT_FOUND:
                return False
            raise
        return True

    async def put_collection(self, name: str) -> None:
        """Create a collection with the platform's default settings."""
        await self._call("PUT", f"/v1/collections/{quote(name, safe='')}", {})

    async def put_document(self, document: Mapping[str, Any]) -> DocumentWrite:
        """Insert or replace a document, unless an identical one exists."""
        reply = await self._call("POST", "/v1/documents", document)
        return DocumentWrite(bool(reply["changed"]), int(reply.get("chunks", 0)))

    async def cache(self) -> dict[str, Any]:
        """Return the content of the cache store and its hit rate."""
        return await self._call("GET", "/v1/cache")

    async def list_documents(self, collection: str, limit: int) -> list[dict[str, Any]]:
        """Return the first documents of a collection, without their text."""
        path = f"/v1/documents?collection={quote(collection, safe='')}&limit={limit}"
        return list((await self._call("GET", path))["data"])

    async def get_document(self, collection: str, document_id: str) -> dict[str, Any]:
        """Return a document with its text."""
        path = f"/v1/documents/{quote(document_id, safe='')}"
        return await self._call("GET", f"{path}?collection={quote(collection, safe='')}")

    async def complete(self, body: Mapping[str, Any]) -> dict[str, Any]:
        """Return a chat completion in one piece."""
        return await self._call("POST", "/v1/chat/completions", body)

    async def quality(self) -> dict[str, Any]:
        """Return what is known of the quality of blended answers."""
        return await self._call("GET", "/v1/quality")

    async def capture(self, body: Mapping[str, Any]) -> dict[str, Any]:
        """Have a question's chunks stored after other chunks."""
        return await self._call("POST", "/v1/quality/captures", body)

    async def put_quality_report(self, report: Mapping[str, Any]) -> dict[str, Any]:
        """Store a quality report; return what is known of the quality then."""
        return await self._call("PUT", "/v1/quality/report", report)

    async def ready_problem(self) -> str | None:
        """Return why the gateway cannot answer questions, or None if it can."""
        try:
            await self._call("GET", "/v1/status")
        except RagCacheError as error:
            return str(error)
        return None

    async def chat(self, body: Mapping[str, Any]) -> AsyncIterator[dict[str, Any]]:
        """Yield the chunks of a streamed chat completion; closing early cancels the request."""
        request = self._http.build_request("POST", "/v1/chat/completions", json=body)
        async with self._translated():
            reply = await self._http.send(request, stream=True)
            try:
                if reply.is_error:
                    await reply.aread()
                    raise _refusal(reply)
                async for line in reply.aiter_lines():
                    data = line.removeprefix(_EVENT_PREFIX).strip()
                    if not line.startswith(_EVENT_PREFIX) or data == _END:
                        continue
                    chunk = json.loads(data)
                    if "error" in chunk:
                        message = str(chunk["error"]["message"])
                        raise TryLater(httpx.codes.SERVICE_UNAVAILABLE, message)
                    yield chunk
            finally:
                await reply.aclose()

    async def _call(
        self, method: str, path: str, body: Mapping[str, Any] | None = None
    ) -> dict[str, Any]:
        async with self._translated():
            reply = await self._http.request(method, path, json=body)
            if reply.is_error:
                raise _refusal(reply)
            value = reply.json() if reply.content else {}
            return value if isinstance(value, dict) else {}

    @asynccontextmanager
    async def _translated(self) -> AsyncIterator[None]:
        try:
            yield
        except httpx.TimeoutException as error:
            raise Unavailable("gateway", f"{self._url} did not answer in time") from error
        except httpx.TransportError as error:
            problem = f"nothing answers at {self._url} ({error}); see `ragcache status`"
            raise Unavailable("gateway", problem) from error
        except (httpx.InvalidURL, ValueError, KeyError, TypeError) as error:
            problem = f"{self._url} does not answer as a gateway does ({error})"
            raise Unavailable("gateway", problem) from error


def _refusal(reply: httpx.Response) -> RequestRefused:
    """Return the exception for an error response."""
    try:
        message = str(reply.json()["error"]["message"])
    except (ValueError, KeyError, TypeError):
        message = f"{reply.request.url} answered {reply.status_code}"
    retry_after = reply.headers.get("Retry-After", "")
    if reply.status_code in {httpx.codes.TOO_MANY_REQUESTS, httpx.codes.SERVICE_UNAVAILABLE}:
        seconds = float(retry_after) if retry_after.isdecimal() else 1.0
        return TryLater(reply.status_code, message, seconds)
    return RequestRefused(reply.status_code, message)
