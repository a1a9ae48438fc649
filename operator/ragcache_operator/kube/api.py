"""A thin client of the API server. A missing object is None, and other failures are exceptions.

``kubernetes_asyncio`` provides authentication and TLS. Objects stay plain JSON, because the
operator compares desired and live objects field by field.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import socket
from collections.abc import AsyncGenerator, AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal
from weakref import WeakSet

import aiohttp
from aiohttp.connector import AddrInfoType
from kubernetes_asyncio.client import ApiClient, Configuration
from kubernetes_asyncio.config import ConfigException, load_incluster_config, load_kube_config

from ragcache_core.errors import InvalidInput, RagCacheError
from ragcache_operator.kube.resources import Object, Resource, resource_of

FIELD_MANAGER = "ragcache-operator"
_COMPONENT = "kubernetes"
_TIMEOUT_S = 30.0
_CLOSE_POLLS = 2000
_CLOSE_POLL_S = 0.001
_GONE = 410
_NOT_FOUND = 404
_CONFLICT = 409
_APPLY = "application/apply-patch+yaml"
_MERGE = "application/merge-patch+json"
_JSON = "application/json"

_WATCH_GRACE_S = 60
_STREAM_ERRORS = (
    aiohttp.ClientError,
    aiohttp.http_exceptions.HttpProcessingError,
    TimeoutError,
    ValueError,
)
"""Failures of a stream: a closed or silent connection, a line that is too long or not JSON."""

EventType = Literal["ADDED", "MODIFIED", "DELETED", "BOOKMARK"]


class ApiError(RagCacheError):
    """A call to the API server failed. ``status`` is the HTTP status, or 0 without a response."""

    def __init__(self, status: int, reason: str, message: str) -> None:
        super().__init__(f"{_COMPONENT}: {message or reason}")
        self.status = status
        self.reason = reason
        self.message = message

    @property
    def is_permanent(self) -> bool:
        """Whether a retry would fail too, because the object or the permissions are wrong."""
        return self.status in (400, 403, 405, 413, 415, 422)


class Conflict(ApiError):
    """The object exists already, or another client has changed its version."""


class Expired(ApiError):
    """The server no longer has the resource version of a watch. The client must list again."""


@dataclass(frozen=True, slots=True)
class Listing:
    """Objects at one resource version, from which a watch can continue."""

    items: tuple[Object, ...]
    resource_version: str


class Api:
    """Client of one API server. Calls may run concurrently."""

    def __init__(self, client: ApiClient) -> None:
        self._client = client
        self._sockets: WeakSet[socket.socket] = WeakSet()
        connector = client.rest_client.pool_manager.connector
        assert isinstance(connector, aiohttp.TCPConnector)
        connector._socket_factory = self._open_socket  # ApiClient takes no connector of ours

    @classmethod
    async def connect(cls, kubeconfig: Path | None = None, context: str | None = None) -> Api:
        """Connect to the cluster of this pod, or to that of the kubeconfig.

        Raises:
            InvalidInput: There is no kubeconfig (KUBECONFIG, ~/.kube/config), or it is invalid.
        """
        configuration = Configuration()
        # Each watch keeps a connection open while the operator runs.
        configuration.connection_pool_maxsize = 200
        try:
            if kubeconfig is None and context is None and "KUBERNETES_SERVICE_HOST" in os.environ:
                load_incluster_config(  # type: ignore[no-untyped-call]
                    client_configuration=configuration
                )
            else:
                await load_kube_config(
                    config_file=str(kubeconfig) if kubeconfig else None,
                    context=context,
                    client_configuration=configuration,
                    persist_config=False,
                )
        except (ConfigException, OSError) as error:
            raise InvalidInput(
                "kubeconfig",
                f"names no cluster: {error}",
                "set KUBECONFIG, or give --kubeconfig and --context",
            ) from error
        return cls(ApiClient(configuration))

    @property
    def host(self) -> str:
        """Base URL of the server."""
        return str(self._client.configuration.host)

    async def close(self) -> None:
        """Close every connection and end the watches."""
        await self._client.close()
        # A cancelled request ends its connection by a TLS shutdown, which waits for the server,
        # possibly longer than the event loop runs. The end of the stream closes it now.
        for opened in self._sockets:
            with contextlib.suppress(OSError):
                opened.shutdown(socket.SHUT_RDWR)
        for _ in range(_CLOSE_POLLS):
            if all(opened.fileno() < 0 for opened in self._sockets):
                break
            await asyncio.sleep(_CLOSE_POLL_S)

    def _open_socket(self, address: AddrInfoType) -> socket.socket:
        family, kind, protocol, *_ = address
        opened = socket.socket(family, kind, protocol)
        self._sockets.add(opened)
        return opened

    async def __aenter__(self) -> Api:
        """Return the client. The context closes it."""
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def get(
        self, resource: Resource, name: str, namespace: str | None = None
    ) -> Object | None:
        """Return the object, or None if it does not exist."""
        return await self._find("GET", resource.path(namespace, name))

    async def read(self, path: str, **query: str) -> Any:
        """Return the JSON at a path that is not a resource, like ``/version`` or ``/apis``."""
        return await self._call("GET", path, query)

    async def text(self, path: str, **query: str) -> str:
        """Return the text at a path, like a pod's log."""
        response = await self._send("GET", path, query, timeout_s=_TIMEOUT_S)
        try:
            return await response.text(errors="replace")
        except (aiohttp.ClientError, TimeoutError) as error:
            raise _no_answer(error) from error
        finally:
            _release(response)

    async def lines(self, path: str, **query: str) -> AsyncIterator[str]:
        """Yield the lines of a text stream, like a pod's log with ``follow``."""
        response = await self._send("GET", path, query, timeout_s=None)
        try:
            async for line in response.content:
                yield line.decode(errors="replace").rstrip("\n")
        except _STREAM_ERRORS as error:
            raise _no_answer(error) from error
        finally:
            _release(response)

    async def list(
        self, resource: Resource, namespace: str | None = None, labels: str = "", fields: str = ""
    ) -> Listing:
        """Return the objects that match the selectors, in one namespace or in all."""
        query = _selectors(labels, fields)
        found = await self._call("GET", resource.path(namespace), query)
        # Items of a list have no apiVersion and kind.
        named = {"apiVersion": resource.api_version, "kind": resource.kind}
        items = tuple({**named, **item} for item in found.get("items") or ())
        return Listing(items, found["metadata"]["resourceVersion"])

    async def create(self, resource: Resource, obj: Object) -> Object:
        """Create an object. Raises Conflict if it already exists."""
        path = resource.path(obj["metadata"].get("namespace"))
        return await self._object("POST", path, {"fieldManager": FIELD_MANAGER}, obj)

    async def replace(self, resource: Resource, obj: Object) -> Object:
        """Replace an object. Raises Conflict if its resource version has changed."""
        meta = obj["metadata"]
        path = resource.path(meta.get("namespace"), meta["name"])
        return await self._object("PUT", path, {"fieldManager": FIELD_MANAGER}, obj)

    async def apply(self, obj: Object) -> Object:
        """Apply an object server-side: set its fields, and release fields it no longer has."""
        meta = obj["metadata"]
        path = resource_of(obj).path(meta.get("namespace"), meta["name"])
        query = {"fieldManager": FIELD_MANAGER, "force": "true"}
        return await self._object("PATCH", path, query, obj, _APPLY)

    async def merge(
        self,
        resource: Resource,
        name: str,
        namespace: str | None,
        patch: Object,
        subresource: str = "",
    ) -> Object | None:
        """Merge a patch into an object or its subresource. Return None if it does not exist."""
        path = resource.path(namespace, name) + (f"/{subresource}" if subresource else "")
        query = {"fieldManager": FIELD_MANAGER}
        return await self._find("PATCH", path, query, patch, _MERGE)

    async def delete(
        self,
        resource: Resource,
        name: str,
        namespace: str | None = None,
        propagation: Literal["Background", "Foreground", "Orphan"] = "Background",
    ) -> bool:
        """Delete an object. Return False if it did not exist."""
        options = {"propagationPolicy": propagation}
        path = resource.path(namespace, name)
        return await self._find("DELETE", path, {}, options) is not None

    async def watch(
        self,
        resource: Resource,
        resource_version: str,
        namespace: str | None = None,
        labels: str = "",
        fields: str = "",
        timeout_s: int = 1800,
    ) -> AsyncGenerator[tuple[EventType, Object], None]:
        """Yield changes since a resource version, until the stream ends after ``timeout_s``.

        Raises:
            Expired: The server no longer knows the resource version.
            ApiError: The stream failed.
        """
        query = {
            **_selectors(labels, fields),
            "watch": "true",
            "allowWatchBookmarks": "true",
            "resourceVersion": resource_version,
            "timeoutSeconds": str(timeout_s),
        }
        # A connection that a proxy has dropped silently would otherwise never end.
        limit_s = timeout_s + _WATCH_GRACE_S
        response = await self._send("GET", resource.path(namespace), query, timeout_s=limit_s)
        try:
            async for line in response.content:
                event = json.loads(line)
                if event["type"] == "ERROR":
                    raise _error(event["object"].get("code", 0), event["object"])
                yield event["type"], event["object"]
        except _STREAM_ERRORS as error:
            raise _no_answer(error) from error
        finally:
            _release(response)

    async def _object(
        self, method: str, path: str, query: dict[str, str], body: Object, media_type: str = _JSON
    ) -> Object:
        found: Object = await self._call(method, path, query, body, media_type)
        return found

    async def _find(
        self,
        method: str,
        path: str,
        query: dict[str, str] | None = None,
        body: Object | None = None,
        media_type: str = _JSON,
    ) -> Object | None:
        try:
            found: Object = await self._call(method, path, query or {}, body, media_type)
        except ApiError as error:
            if error.status == _NOT_FOUND:
                return None
            raise
        return found

    async def _call(
        self,
        method: str,
        path: str,
        query: dict[str, str],
        body: Object | None = None,
        media_type: str = _JSON,
    ) -> Any:
        response = await self._send(method, path, query, body, media_type, timeout_s=_TIMEOUT_S)
        try:
            return await response.json(content_type=None)
        except (aiohttp.ClientError, TimeoutError, ValueError) as error:
            raise _no_answer(error) from error
        finally:
            _release(response)

    async def _send(
        self,
        method: str,
        path: str,
        query: dict[str, str],
        body: Object | None = None,
        media_type: str = _JSON,
        *,
        timeout_s: float | None,
    ) -> aiohttp.ClientResponse:
        """Send a request and return the response with an unread body. Raises ApiError."""
        try:
            response: aiohttp.ClientResponse = await self._client.call_api(
                path,
                method,
                query_params=list(query.items()),
                header_params={"Content-Type": media_type, "Accept": "*/*"},
                body=body,
                auth_settings=["BearerToken"],
                _preload_content=False,
                _return_http_data_only=True,
                _request_timeout=aiohttp.ClientTimeout(
                    total=timeout_s, sock_connect=10, sock_read=timeout_s
                ),
            )
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            raise _no_answer(error) from error
        if response.status < 300:
            return response
        try:
            raw = await response.text(errors="replace")
        except (aiohttp.ClientError, TimeoutError):
            raw = ""
        finally:
            _release(response)
        raise _error(response.status, _status(raw))


def _release(response: aiohttp.ClientResponse) -> None:
    """Release a response, and abort its connection unless the body was read completely.

    A graceful TLS shutdown would wait for the server, possibly longer than the event loop runs.
    """
    if response.connection is not None and response.connection.transport is not None:
        response.connection.transport.abort()
    response.close()


def _selectors(labels: str, fields: str) -> dict[str, str]:
    given = {"labelSelector": labels, "fieldSelector": fields}
    return {name: value for name, value in given.items() if value}


def _status(raw: str) -> Object:
    """Return the server's Status object. A response of a proxy becomes its message."""
    try:
        status = json.loads(raw)
    except ValueError:
        status = None
    return status if isinstance(status, dict) else {"message": raw[:500]}


def _error(code: int, status: Object) -> ApiError:
    kinds: dict[int, type[ApiError]] = {_CONFLICT: Conflict, _GONE: Expired}
    reason = status.get("reason") or f"HTTP {code}"
    return kinds.get(code, ApiError)(code, reason, status.get("message") or reason)


def _no_answer(error: BaseException) -> ApiError:
    return ApiError(0, "NoAnswer", f"no answer: {error or type(error).__name__}")


async def write_status(api: Api, body: Object, status: Object) -> bool:
    """Write a status, unless it equals the current one. Return whether it was written.

    The function updates ``body`` with the server's response. The next comparison then uses the
    status just written, even if the watch has not delivered it yet.
    """
    live = body.get("status") or {}
    if status == live:
        return False
    patch = {"status": _with_removals(live, status)}
    meta = body["metadata"]
    written = await api.merge(resource_of(body), meta["name"], meta["namespace"], patch, "status")
    if written is not None:
        body.update(written)
    return True


def _with_removals(live: Object, wanted: Object) -> Object:
    """Return a merge patch. It keeps keys that it does not name, so removed keys become null."""
    patch: Object = dict.fromkeys(live.keys() - wanted.keys())
    for key, value in wanted.items():
        before = live.get(key)
        if isinstance(before, dict) and isinstance(value, dict):
            patch[key] = _with_removals(before, value)
        else:
            patch[key] = value
    return patch
