"""A thin client of the API server. Not found is a value, everything else that fails an exception.

``kubernetes_asyncio`` brings authentication and TLS; objects stay plain JSON, because the operator
compares what it wants with what is there, field by field.
"""

from __future__ import annotations

import json
import os
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import aiohttp
from kubernetes_asyncio.client import ApiClient, Configuration
from kubernetes_asyncio.config import (
    ConfigException,
    load_incluster_config,
    load_kube_config,
)

from ragcache_core.errors import InvalidInput, RagCacheError
from ragcache_operator.kube.resources import Object, Resource, resource_of

FIELD_MANAGER = "ragcache-operator"
PART = "kubernetes"
_TIMEOUT_S = 30.0
_GONE = 410
_NOT_FOUND = 404
_CONFLICT = 409
_APPLY = "application/apply-patch+yaml"
_MERGE = "application/merge-patch+json"
_JSON = "application/json"

_WATCH_GRACE_S = 60
_BROKEN = (
    aiohttp.ClientError,
    aiohttp.http_exceptions.HttpProcessingError,
    TimeoutError,
    ValueError,
)
"""How a stream ends badly: cut, silent, or with a line that is too long or no JSON."""

EventType = Literal["ADDED", "MODIFIED", "DELETED", "BOOKMARK"]


class ApiError(RagCacheError):
    """The API server refused or failed a call. status: HTTP's, 0 if there was no answer."""

    def __init__(self, status: int, reason: str, message: str) -> None:
        super().__init__(f"{PART}: {message}" if message else f"{PART}: {reason}")
        self.status = status
        self.reason = reason
        self.message = message

    @property
    def is_permanent(self) -> bool:
        """Whether the same call would be refused again: the object or the rights are wrong."""
        return self.status in (400, 403, 405, 413, 415, 422)


class Conflict(ApiError):
    """Somebody else was faster: the object exists already, or its version has moved on."""


class Expired(ApiError):
    """A watch's place in history is gone; list again."""


@dataclass(frozen=True, slots=True)
class Listing:
    """Objects as of one version of the store, from which a watch goes on."""

    items: tuple[Object, ...]
    resource_version: str


class Api:
    """One API server. Calls are safe to run side by side."""

    def __init__(self, client: ApiClient) -> None:
        self._client = client

    @classmethod
    async def connect(cls, kubeconfig: Path | None = None, context: str | None = None) -> Api:
        """The cluster this pod runs in, else the kubeconfig's (KUBECONFIG, ~/.kube/config).

        Raises InvalidInput if there is neither, or it cannot be read.
        """
        configuration = Configuration()
        # Watches hold a connection each for as long as the operator lives.
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
        """Close every connection; watches end."""
        await self._client.close()

    async def __aenter__(self) -> Api:
        """Itself, closed at the end."""
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def get(
        self, resource: Resource, name: str, namespace: str | None = None
    ) -> Object | None:
        """The object, or None if there is none."""
        return await self._find("GET", resource.path(namespace, name))

    async def read(self, path: str, **query: str) -> Any:
        """JSON at a path that belongs to no resource: ``/version``, ``/apis``."""
        return await self._call("GET", path, query)

    async def text(self, path: str, **query: str) -> str:
        """Text at a path: a pod's log."""
        response = await self._send("GET", path, query, timeout_s=_TIMEOUT_S)
        try:
            return await response.text(errors="replace")
        except (aiohttp.ClientError, TimeoutError) as error:
            raise _no_answer(error) from error
        finally:
            _end(response)

    async def lines(self, path: str, **query: str) -> AsyncIterator[str]:
        """Lines of a text that goes on: a pod's log with ``follow``."""
        response = await self._send("GET", path, query, timeout_s=None)
        try:
            async for line in response.content:
                yield line.decode(errors="replace").rstrip("\n")
        except _BROKEN as error:
            raise _no_answer(error) from error
        finally:
            _end(response)

    async def list(
        self, resource: Resource, namespace: str | None = None, labels: str = "", fields: str = ""
    ) -> Listing:
        """Objects that match the selectors, of one namespace or of all."""
        query = _selectors(labels, fields)
        found = await self._call("GET", resource.path(namespace), query)
        # Items of a list do not say what they are.
        named = {"apiVersion": resource.api_version, "kind": resource.kind}
        items = tuple({**named, **item} for item in found.get("items") or ())
        return Listing(items, found["metadata"]["resourceVersion"])

    async def create(self, resource: Resource, obj: Object) -> Object:
        """Create an object. Raises Conflict if it is there already."""
        path = resource.path(obj["metadata"].get("namespace"))
        return await self._object("POST", path, {"fieldManager": FIELD_MANAGER}, obj)

    async def replace(self, resource: Resource, obj: Object) -> Object:
        """Replace an object by its next version. Raises Conflict if its version has moved on."""
        meta = obj["metadata"]
        path = resource.path(meta.get("namespace"), meta["name"])
        return await self._object("PUT", path, {"fieldManager": FIELD_MANAGER}, obj)

    async def apply(self, obj: Object) -> Object:
        """Server-side apply: what obj names becomes so, what it no longer names is given up."""
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
        """Merge a patch into an object, or into its status; None if it is gone."""
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
        """Delete an object; False if there was none."""
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
    ) -> AsyncIterator[tuple[EventType, Object]]:
        """Changes since a version, until the server ends the stream after timeout_s or breaks off.

        Raises Expired when that version is no longer known.
        """
        query = {
            **_selectors(labels, fields),
            "watch": "true",
            "allowWatchBookmarks": "true",
            "resourceVersion": resource_version,
            "timeoutSeconds": str(timeout_s),
        }
        # A connection that something in between has dropped says nothing at all, for ever.
        limit_s = timeout_s + _WATCH_GRACE_S
        response = await self._send("GET", resource.path(namespace), query, timeout_s=limit_s)
        try:
            async for line in response.content:
                event = json.loads(line)
                if event["type"] == "ERROR":
                    raise _error(event["object"].get("code", 0), event["object"])
                yield event["type"], event["object"]
        except _BROKEN as error:
            raise _no_answer(error) from error
        finally:
            _end(response)

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
            _end(response)

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
        """An answer whose body is still to be read; refusals are raised."""
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
            _end(response)
        raise _error(response.status, _status(raw))


def _end(response: aiohttp.ClientResponse) -> None:
    """Let go of an answer: of its connection, too, unless all was read.

    That one is cut off: the goodbye of TLS waits for the server, perhaps beyond the event loop.
    """
    if response.connection is not None and response.connection.transport is not None:
        response.connection.transport.abort()
    response.close()


def _selectors(labels: str, fields: str) -> dict[str, str]:
    given = {"labelSelector": labels, "fieldSelector": fields}
    return {name: value for name, value in given.items() if value}


def _status(raw: str) -> Object:
    """The server's Status object; a proxy in between may have answered in its own words."""
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
