"""Client of the gateway's REST API for the commands."""

from __future__ import annotations

import asyncio
import json
import re
import ssl
import time
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, Self
from urllib.parse import quote, urlencode

import httpx

from ragcache_core.errors import InvalidInput, RagCacheError, Unavailable

API_KEY_VARIABLE = "RAGCACHE_API_KEY"
"""Environment variable with the API key."""
CA_FILE_VARIABLE = "RAGCACHE_CA_FILE"
"""Environment variable with the authorities of an https gateway."""

_CONNECT_S = 5.0
_REPLY_S = 120.0
"""Longest wait between two parts of a response: the engine may first serve a full queue."""
_COPY_TIMEOUT = httpx.Timeout(600.0, connect=_CONNECT_S)
"""Before the first and after the last byte of a backup the retriever copies and checks it."""
_DOCUMENTS = "/v1/documents"
_PAGE = 1000
SYNC_REPLY_S = 900.0
"""A slow CPU embeds the largest document for minutes, without a byte of response meanwhile."""
_LATER_BYTES = 1 << 18
"""Size above which a document is written later: the command asks what has become of it."""
_RESPOND_ASYNC = {"Prefer": "respond-async"}
_POLL_S = 2.0
_POLL_PATIENCE_S = 120.0
"""Longest time without an answer to the question what has become of a document."""
_SHORTEST_WAIT_S = 1.0
"""Lower bound of the retry interval, also when the gateway suggests a shorter one."""
_EVENT_PREFIX = "data:"
_END = "[DONE]"
_CERTIFICATE = re.compile(r"-----BEGIN CERTIFICATE-----.*?-----END CERTIFICATE-----", re.DOTALL)


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
class BatchFile:
    """A file of a batch: a document, or a line of JSON with one.

    Args:
        id: Of the document; empty if the content names it.
        content_type: Media type of the content.
    """

    id: str
    content_type: str
    content: bytes
    encoding: str = ""


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
    metadata: Mapping[str, Any]
    chunks: int


def _first_certificate(path: Path) -> str:
    """Return a server's own certificate, without the authorities after it that made it.

    Raises:
        OSError: The file cannot be read, or has no certificate.
    """
    found = _CERTIFICATE.search(path.read_text(errors="replace"))
    if found is None:
        raise OSError("it has no certificate")
    return found.group()


@dataclass(frozen=True, slots=True)
class GatewayTarget:
    """A gateway, the API key for it, and what it has to show if its URL is https.

    Args:
        url: Base URL.
        api_key: None: the gateway needs no key.
        ca_file: Authorities in PEM. One of them has made its certificate. None: the public ones.
        certificate: The very certificate that it shows, in PEM. Its names do not count.
    """

    url: str
    api_key: str | None = field(default=None, repr=False)
    ca_file: Path | None = None
    certificate: Path | None = None

    def verification(self) -> ssl.SSLContext | bool:
        """Return how a client checks the certificate of the gateway.

        Raises:
            InvalidInput: A file has no certificate.
        """
        trusted = self.certificate or self.ca_file
        if trusted is None or not self.url.startswith("https://"):
            return True
        try:
            if self.certificate is None:
                return ssl.create_default_context(cafile=trusted)
            context = ssl.create_default_context(cadata=_first_certificate(self.certificate))
        except OSError as error:  # SSLError is one
            name = CA_FILE_VARIABLE if self.certificate is None else "--certificate"
            raise InvalidInput(
                name, f"{trusted} cannot be used: {error}", "name a file with certificates in PEM"
            ) from error
        # The one certificate that is trusted is the server's own, so its names say nothing more.
        context.check_hostname = False
        context.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN
        return context

    def trust_renewed(self, context: ssl.SSLContext | bool) -> None:
        """Let a context of ``verification`` trust the certificate that the file has by now."""
        if self.certificate is not None and isinstance(context, ssl.SSLContext):
            with suppress(OSError):  # it trusts the earlier one still
                context.load_verify_locations(cadata=_first_certificate(self.certificate))

    def __str__(self) -> str:
        return self.url


@dataclass(frozen=True, slots=True)
class PlatformState:
    """What a gateway says about its platform.

    Args:
        status: Response of ``GET /v1/status``.
        cache: Response of ``GET /v1/cache``; None if no shard of the cache store answered.
        collections: Of ``GET /v1/collections``; None if the retriever did not answer, or if the
            API key does not allow it.
    """

    status: Mapping[str, Any]
    cache: Mapping[str, Any] | None
    collections: list[dict[str, Any]] | None

    @property
    def problem(self) -> str | None:
        """Why questions cannot be answered; None if they can."""
        error = self.status.get("error")
        return error["message"] if error else None

    @property
    def remakes(self) -> list[dict[str, Any]] | None:
        """The collections whose documents are prepared again; None if they are not known."""
        if self.collections is None:
            return None
        remade = (one for one in self.collections if one["remake"])
        return [{"collection": one["name"], **one["remake"]} for one in remade]


class GatewayApiClient:
    """Calls to one gateway.

    Args:
        reply_s: Longest wait between two parts of a response.
        patience_s: How long a call with JSON is repeated while the gateway is unavailable or busy.

    Raises:
        RequestRefused: The gateway refused the request; this is not repeated.
        TryLater: The gateway stayed busy.
        Unavailable: No gateway answered in that time.
    """

    def __init__(
        self,
        target: GatewayTarget,
        reply_s: float = _REPLY_S,
        patience_s: float = 0.0,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        self._target = target
        self._url = target.url
        self._verification = target.verification()
        self._patience_s = patience_s
        self._clock = clock
        self._sleep = sleep
        timeout = httpx.Timeout(reply_s, connect=_CONNECT_S)
        key = target.api_key
        headers = {} if key is None else {"Authorization": f"Bearer {key}"}
        self._http = httpx.AsyncClient(
            base_url=target.url, timeout=timeout, headers=headers, verify=self._verification
        )

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self._http.aclose()

    async def find_collection(self, name: str) -> dict[str, Any] | None:
        """Return settings and counts of a collection, or None if it does not exist."""
        return await self._find("GET", _collection(name))

    async def collections(self) -> list[dict[str, Any]]:
        """Return settings and counts of all collections."""
        return list((await self._call("GET", "/v1/collections"))["data"])

    async def collection(self, name: str) -> dict[str, Any]:
        """Return settings and counts of a collection."""
        return await self._call("GET", _collection(name))

    async def put_collection(
        self, name: str, settings: Mapping[str, Any] | None = None
    ) -> dict[str, Any]:
        """Create a collection or replace its settings; those left out get their defaults."""
        return await self._call("PUT", _collection(name), settings or {})

    async def patch_collection(self, name: str, settings: Mapping[str, Any]) -> dict[str, Any]:
        """Create a collection or change some settings; those left out stay as they are."""
        return await self._call("PATCH", _collection(name), settings)

    async def delete_collection(self, name: str) -> dict[str, Any]:
        """Delete a collection with all its documents."""
        return await self._call("DELETE", _collection(name))

    async def put_batch(
        self, collection: str, files: Sequence[BatchFile]
    ) -> AsyncGenerator[dict[str, Any], None]:
        """Insert or replace documents; yield the events of the batch, and its summary.

        Closing early stops the batch. Long documents are ``submitted``, see ``operation_end``.
        """
        path = f"/v1/documents:batch?collection={_quoted(collection)}"
        form: list[tuple[str, Any]] = []
        for file in files:
            if file.id:
                form.append(("id", (None, file.id)))
            form.append(("content_type", (None, file.content_type)))
            if file.encoding:
                form.append(("encoding", (None, file.encoding)))
            form.append(("file", ("file", file.content)))
        request = self._http.build_request("POST", path, files=form, headers=_RESPOND_ASYNC)
        async for event in self._events(request):
            yield event

    async def operation_end(self, operation_id: str) -> dict[str, Any]:
        """Wait until a document that is written later is written, and return its operation.

        Raises:
            RequestRefused: It was not written.
            TryLater: The gateway or a part stayed busy.
            Unavailable: No gateway answered.
        """
        answered_s = self._clock()
        while True:
            try:
                found = await self._call("GET", f"/v1/operations/{_quoted(operation_id)}")
            except (TryLater, Unavailable):
                if self._clock() - answered_s > _POLL_PATIENCE_S:
                    raise
            else:
                answered_s = self._clock()
                if found["state"] == "done":
                    return found
                if found["state"] != "pending":
                    raise _failure_of(found)
            await self._sleep(_POLL_S)

    async def backup(self) -> AsyncGenerator[bytes, None]:
        """Yield the parts of a file with all documents."""
        request = self._http.build_request("GET", "/v1/backup", timeout=_COPY_TIMEOUT)
        async with self._translated():
            reply = await self._http.send(request, stream=True)
            try:
                if reply.is_error:
                    await reply.aread()
                    raise _refusal(reply)
                async for part in reply.aiter_raw():
                    yield part
            finally:
                await reply.aclose()

    async def restore(self, parts: AsyncIterator[bytes]) -> int:
        """Replace all documents by a backup, and return their number."""
        async with self._translated():
            reply = await self._http.post("/v1/restore", content=parts, timeout=_COPY_TIMEOUT)
            if reply.is_error:
                raise _refusal(reply)
            return int(reply.json()["documents"])

    async def cache(self) -> dict[str, Any]:
        """Return the content of the cache store and its hit rate."""
        return await self._call("GET", "/v1/cache")

    async def read_state(self) -> PlatformState:
        """Return the state of the platform, without what another part than the gateway refuses."""
        async with self._translated():
            reply = await self._http.get("/v1/status")
            if reply.is_error and reply.status_code != httpx.codes.SERVICE_UNAVAILABLE:
                raise _refusal(reply)
            status = dict(reply.json())
            if "parts" not in status:
                raise _refusal(reply)
        cache = collections = None
        with suppress(RagCacheError):
            cache = await self.cache()
        with suppress(RagCacheError):
            collections = await self.collections()
        return PlatformState(status, cache, collections)

    async def metrics(self) -> str:
        """Return the gateway's metrics in Prometheus' text format."""
        async with self._translated():
            reply = await self._http.get("/metrics", headers={"Accept": "text/plain"})
            if reply.is_error:
                raise _refusal(reply)
            return reply.text

    async def explanation(self, request_id: str) -> dict[str, Any]:
        """Return where the KV of an answer's prompt came from."""
        return await self._call("GET", f"/v1/requests/{_quoted(request_id)}")

    async def documents(self, collection: str) -> AsyncGenerator[CollectionDocument, None]:
        """Yield every document of a collection, by id."""
        after = ""
        while True:
            query = f"collection={_quoted(collection)}&limit={_PAGE}&after={_quoted(after)}"
            found = await self._call("GET", f"{_DOCUMENTS}?{query}")
            for one in found["data"]:
                yield CollectionDocument(one["id"], one["metadata"], one["chunks"])
            if not found["has_more"]:
                return
            after = found["next"]

    async def get_document(self, collection: str, document_id: str) -> dict[str, Any]:
        """Return a document with its text."""
        return await self._call("GET", _document(collection, document_id))

    async def put_document(
        self,
        collection: str,
        document_id: str,
        content: DocumentContent,
        metadata: Mapping[str, str],
    ) -> dict[str, Any]:
        """Insert or replace a document and return it without its text, with its warnings.

        Args:
            metadata: Of the caller. It goes before that of the document.
        """
        fields = {
            **content.fields,
            "collection": collection,
            "id": document_id,
            "metadata": {**content.fields.get("metadata", {}), **metadata},
        }
        if content.file is not None:
            fields["metadata"] = json.dumps(fields["metadata"])
        text = content.file if content.file is not None else str(fields.get("text", ""))
        if len(text) <= _LATER_BYTES:
            return await self._call("POST", _DOCUMENTS, fields, content.file)
        accepted = await self._call("POST", _DOCUMENTS, fields, content.file, is_later=True)
        done = await self.operation_end(accepted["id"])
        return done | {"warnings": accepted.get("warnings", [])}

    async def delete_document(self, collection: str, document_id: str) -> None:
        """Delete a document if it exists."""
        await self._find("DELETE", _document(collection, document_id))

    async def erasure(self, body: Mapping[str, Any]) -> dict[str, Any]:
        """Return what is left of a deleted document.

        Args:
            body: Its receipt, or its collection and id.
        """
        return await self._call("POST", "/v1/erasure", body)

    async def complete(self, body: Mapping[str, Any]) -> dict[str, Any]:
        """Return a chat completion in one piece."""
        return await self._call("POST", "/v1/chat/completions", body)

    async def usage(self, query: Mapping[str, str]) -> list[dict[str, Any]]:
        """Return what keys have used, all pages.

        Args:
            query: Parameters of ``GET /v1/usage``.
        """
        entries: list[dict[str, Any]] = []
        after: dict[str, str] = {}
        while True:
            parameters = urlencode({**query, "limit": str(_PAGE), **after})
            page = await self._call("GET", f"/v1/usage?{parameters}")
            entries += page["data"]
            if page["next"] is None:
                return entries
            after = {"after": page["next"]}

    async def quality(self, model: str | None = None) -> dict[str, Any]:
        """Return the measured quality of blended answers, by default those of the first model."""
        params = "" if model is None else f"?{urlencode({'model': model})}"
        return await self._call("GET", f"/v1/quality{params}")

    async def capture(self, body: Mapping[str, Any]) -> dict[str, Any]:
        """Have a question's chunks stored after other chunks."""
        return await self._call("POST", "/v1/quality/captures", body)

    async def put_quality_report(self, report: Mapping[str, Any]) -> dict[str, Any]:
        """Store a quality report; return what is known of the quality then."""
        return await self._call("PUT", "/v1/quality/report", report)

    async def chat(self, body: Mapping[str, Any]) -> AsyncGenerator[dict[str, Any], None]:
        """Yield the chunks of a streamed chat completion; closing early cancels the request."""
        request = self._http.build_request("POST", "/v1/chat/completions", json=body)
        async for chunk in self._events(request):
            if "error" in chunk:
                message = str(chunk["error"]["message"])
                raise TryLater(httpx.codes.SERVICE_UNAVAILABLE, message)
            yield chunk

    async def _events(self, request: httpx.Request) -> AsyncGenerator[dict[str, Any], None]:
        """Yield the server-sent events of a response, which are JSON objects."""
        async with self._translated():
            reply = await self._http.send(request, stream=True)
            try:
                if reply.is_error:
                    await reply.aread()
                    raise _refusal(reply)
                async for line in reply.aiter_lines():
                    data = line.removeprefix(_EVENT_PREFIX).strip()
                    if line.startswith(_EVENT_PREFIX) and data != _END:
                        yield json.loads(data)
            finally:
                await reply.aclose()

    async def _find(self, method: str, path: str) -> dict[str, Any] | None:
        try:
            return await self._call(method, path)
        except RequestRefused as error:
            if error.status == httpx.codes.NOT_FOUND:
                return None
            raise

    async def _call(
        self,
        method: str,
        path: str,
        body: Mapping[str, Any] | None = None,
        file: bytes | None = None,
        *,
        is_later: bool = False,
    ) -> dict[str, Any]:
        """Send a request, and repeat it while the gateway is unavailable or busy."""
        began_s = self._clock()
        while True:
            try:
                return await self._send(method, path, body, file, is_later=is_later)
            except (TryLater, Unavailable) as error:
                wait_s = max(_SHORTEST_WAIT_S, error.retry_after_s)
                if self._clock() - began_s + wait_s > self._patience_s:
                    raise
                await self._sleep(wait_s)
                self._target.trust_renewed(self._verification)

    async def _send(
        self,
        method: str,
        path: str,
        body: Mapping[str, Any] | None,
        file: bytes | None,
        *,
        is_later: bool,
    ) -> dict[str, Any]:
        """Send a request with a JSON object, or with a file and the fields of a form."""
        headers = _RESPOND_ASYNC if is_later else {}
        async with self._translated():
            if file is None:
                reply = await self._http.request(method, path, json=body, headers=headers)
            else:
                form = {"file": ("file", file)}
                reply = await self._http.request(
                    method, path, data=body, files=form, headers=headers
                )
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
            fix = "see `ragcache status`"
            if "CERTIFICATE_VERIFY_FAILED" in str(error):
                fix = f"name the authority of its certificate with --ca-file or {CA_FILE_VARIABLE}"
            problem = f"nothing answers at {self._url} ({error}); {fix}"
            raise Unavailable("gateway", problem) from error
        except (httpx.InvalidURL, ValueError, KeyError, TypeError) as error:
            problem = f"{self._url} does not answer as a gateway does ({error})"
            raise Unavailable("gateway", problem) from error


def _quoted(text: str) -> str:
    return quote(text, safe="")


def _collection(name: str) -> str:
    return f"/v1/collections/{_quoted(name)}"


def _document(collection: str, document_id: str) -> str:
    return f"{_DOCUMENTS}/{_quoted(document_id)}?collection={_quoted(collection)}"


def _failure_of(operation: Mapping[str, Any]) -> RequestRefused:
    """Return the exception for a document that was not written."""
    if operation["state"] == "cancelled":
        message = "it was written or deleted again before it was written; ingest it again"
    else:
        message = str(operation["error"]["message"])
    return RequestRefused(httpx.codes.BAD_REQUEST, message)


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
    if reply.status_code == httpx.codes.UNAUTHORIZED:
        message = f"{message}; give the key with --api-key or {API_KEY_VARIABLE}"
    return RequestRefused(reply.status_code, message)
