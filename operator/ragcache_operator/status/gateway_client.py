"""Client of the gateways: the self-test question, the cache usage and the startup progress."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import quote

import httpx

from ragcache_operator.status.conditions import ObjectEvent
from ragcache_operator.status.retriever_state import RetrieverState, retriever_state

SELF_TEST_COLLECTION = "ragcache-self-test"
"""The first self-test creates this collection if the platform has no documents."""

_DOCUMENT = {
    "collection": SELF_TEST_COLLECTION,
    "id": "self-test.md",
    "text": "# Self-test\n\nThis page belongs to the operator. Its self-test asks about it.\n",
}
_QUESTION = "Who owns the self-test page?"
_ANSWER_TOKENS = 8
_CALL_TIMEOUT_S = 10.0
_ANSWER_TIMEOUT_S = 120.0
"""The first answer computes the whole prompt, possibly on a slow processor."""
_PROGRESS_TIMEOUT_S = 2.0
_MAX_RESPONSE_BYTES = 4 << 20
_CONNECTION_ERRORS = (httpx.HTTPError, httpx.InvalidURL)


@dataclass(frozen=True, slots=True)
class SelfTestResult:
    """Result of one self-test. ``message`` is one line."""

    passed: bool
    message: str


@dataclass(frozen=True, slots=True)
class StoreUsage:
    """Usage of all shards. ``hit_rate`` is the share of reads that hit, None without reads.

    ``resets`` has the shards whose data was damaged once, so that they started empty.
    """

    hit_rate: float | None
    num_bytes: int
    resets: tuple[ShardReset, ...] = ()


@dataclass(frozen=True, slots=True)
class GatewayAccess:
    """A gateway: its base URL and the key for it. A gateway without keys gets none."""

    url: str
    key: str | None = field(default=None, repr=False)


class _ErrorResponse(Exception):
    """The gateway answered with an HTTP error."""


_NO_ANSWER = (
    *(_ErrorResponse, *_CONNECTION_ERRORS, TimeoutError),
    *(ValueError, KeyError, TypeError, AttributeError),
)


class GatewayClient:
    """Client of the gateways of all platforms.

    Args:
        transport: How it connects. None: to the Services of a cluster, by their names.
    """

    def __init__(self, transport: httpx.AsyncBaseTransport | None = None) -> None:
        # Connections inside a cluster must not use a proxy of the environment. Each call has its
        # own total timeout; this timeout limits a single read.
        # Certificates are not checked: the operator reads no Secret, and so knows no authority of
        # users. It tells engines nothing, and a gateway its own key alone.
        self._client = httpx.AsyncClient(
            timeout=_ANSWER_TIMEOUT_S, trust_env=False, verify=False, transport=transport
        )

    async def close(self) -> None:
        """Close every connection."""
        await self._client.aclose()

    async def self_test(self, gateway: GatewayAccess, models: Sequence[str]) -> SelfTestResult:
        """Ask each model a question. The result is that of the first one that does not answer."""
        for model in models:
            result = await self._ask(gateway, model)
            if not result.passed and len(models) > 1:
                return SelfTestResult(False, f"model {model}: {result.message}")
            if not result.passed:
                break
        return result

    async def _ask(self, gateway: GatewayAccess, model: str) -> SelfTestResult:
        """Ask a question of the largest collection, or of a new test collection."""
        try:
            collection = await self._collection(gateway)
            answer = await self._json(
                gateway,
                "POST",
                "/v1/chat/completions",
                {
                    "model": model,
                    "messages": [{"role": "user", "content": _QUESTION}],
                    "max_tokens": _ANSWER_TOKENS,
                    "ragcache": {"collection": collection, "top_k": 1},
                },
                timeout_s=_ANSWER_TIMEOUT_S,
            )
            citations = answer["ragcache"]["citations"]
            num_tokens = answer["usage"]["completion_tokens"]
        except _ErrorResponse as error:
            return SelfTestResult(False, str(error))
        except (*_CONNECTION_ERRORS, TimeoutError) as error:
            return SelfTestResult(
                False, f"{gateway.url} does not answer: {error or type(error).__name__}"
            )
        except (ValueError, KeyError, TypeError) as error:
            return SelfTestResult(False, f"{gateway.url} sent an invalid answer: {error!r}")
        if not citations:
            return SelfTestResult(False, f"the answer from {collection!r} has no citations")
        if num_tokens < 1:
            return SelfTestResult(False, "the engine's answer has no tokens")
        return SelfTestResult(True, f"a question to {collection!r} was answered with citations")

    async def store_usage(self, gateway: GatewayAccess) -> StoreUsage | None:
        """Return the usage of the cache store, or None if the gateway does not answer."""
        try:
            usage = await self._json(gateway, "GET", "/v1/cache")
            resets = [
                ShardReset(
                    str(shard["address"]), int(shard["reset_at_ms"]), str(shard["reset_reason"])
                )
                for shard in usage["shards"]
                if shard["reset_at_ms"]
            ]
            return StoreUsage(usage["hit_rate"], int(usage["disk_bytes"]), tuple(resets))
        except _NO_ANSWER:
            return None

    async def retriever_state(self, gateway: GatewayAccess) -> RetrieverState:
        """Return the state of the retriever, which is not settled if no gateway answers."""
        try:
            return retriever_state((await self._json(gateway, "GET", "/v1/collections"))["data"])
        except _NO_ANSWER:
            return retriever_state(None)

    async def blend_verdict(self, gateway: GatewayAccess, models: Sequence[str]) -> str | None:
        """Return unverified, passed or failed, or None if the gateway does not answer.

        It is failed or unverified if one of the models is. It is lossless if blends have passed,
        and those of values in cacheStore.precision have not.
        """
        try:
            paths = [f"/v1/quality?model={quote(one, safe='')}" for one in models]
            states = [await self._json(gateway, "GET", path) for path in paths]
            found = {one["verdict"] for one in states}
            if any(one.get("lossy_verdict") not in {"passed", None} for one in states):
                found.add("lossless")
        except _NO_ANSWER:
            return None
        return next((one for one in ("failed", "unverified", "lossless") if one in found), "passed")

    async def startup_progress(self, address: str) -> str | None:
        """Return the startup progress of a pod. ``address`` is "host:port" of its health port."""
        try:
            async with asyncio.timeout(_PROGRESS_TIMEOUT_S):
                _, body = await self._send(
                    GatewayAccess(f"http://{address}"), "GET", "/readyz", None
                )
            progress = json.loads(body).get("progress")
        except (*_CONNECTION_ERRORS, TimeoutError, ValueError, AttributeError):
            return None
        return str(progress)[:200] if progress else None

    async def slow_number_type(self, url: str) -> str | None:
        """Return the number type that an engine's processor computes slowly.

        Args:
            url: Base URL of the engine's HTTP port.

        Returns:
            The type; empty if it is fast; None if the engine does not answer.
        """
        try:
            async with asyncio.timeout(_PROGRESS_TIMEOUT_S):
                status, body = await self._send(
                    GatewayAccess(url), "GET", "/ragcache/processor", None
                )
            if status != httpx.codes.OK:
                return None
            found = json.loads(body)
            return str(found["number_type"])[:20] if found["is_slow"] else ""
        except _NO_ANSWER:
            return None

    async def _collection(self, gateway: GatewayAccess) -> str:
        listed = await self._json(gateway, "GET", "/v1/collections")
        filled = [c for c in listed["data"] if c["documents"]]
        theirs = [c for c in filled if c["name"] != SELF_TEST_COLLECTION]
        if theirs:
            largest: dict[str, Any] = max(theirs, key=lambda c: (c["documents"], c["name"]))
            return str(largest["name"])
        if not filled:
            await self._json(gateway, "PUT", f"/v1/collections/{SELF_TEST_COLLECTION}", {})
            await self._json(gateway, "POST", "/v1/documents", _DOCUMENT)
        return SELF_TEST_COLLECTION

    async def _json(
        self,
        gateway: GatewayAccess,
        method: str,
        path: str,
        body: dict[str, Any] | None = None,
        timeout_s: float = _CALL_TIMEOUT_S,
    ) -> Any:
        """Return the JSON of a response. Raises _ErrorResponse for an HTTP error."""
        async with asyncio.timeout(timeout_s):
            status, raw = await self._send(gateway, method, path, body)
        if not 200 <= status < 300:
            raise _ErrorResponse(_error_text(status, raw))
        return json.loads(raw)

    async def _send(
        self, gateway: GatewayAccess, method: str, path: str, body: dict[str, Any] | None
    ) -> tuple[int, bytes]:
        """Return status and body. The server is a tenant's, so the size of the body is limited."""
        headers = {} if gateway.key is None else {"Authorization": f"Bearer {gateway.key}"}
        url = f"{gateway.url}{path}"
        async with self._client.stream(method, url, json=body, headers=headers) as response:
            raw = bytearray()
            async for piece in response.aiter_bytes():
                raw += piece
                if len(raw) > _MAX_RESPONSE_BYTES:
                    raise ValueError(f"response over {_MAX_RESPONSE_BYTES} bytes")
            return response.status_code, bytes(raw)


def _error_text(status: int, raw: bytes) -> str:
    try:
        message = json.loads(raw)["error"]["message"]
    except (ValueError, KeyError, TypeError):
        message = raw[:200].decode(errors="replace")
    return f"HTTP {status}: {message}"


RECENT_MS = 3600 * 1000
"""An operator that has just started reports resets up to this age. Others were reported before."""


@dataclass(frozen=True, slots=True)
class ShardReset:
    """A start of a shard with an empty data folder. ``at_ms`` is a Unix time."""

    shard: str
    at_ms: int
    reason: str


def unreported_resets(
    resets: Iterable[ShardReset], reported: Collection[ShardReset], now_ms: int
) -> list[ShardReset]:
    """Return the recent resets that no Event has reported."""
    return [reset for reset in resets if reset not in reported and now_ms - reset.at_ms < RECENT_MS]


def reset_event(reset: ShardReset) -> ObjectEvent:
    """Return the Event that reports a reset."""
    return ObjectEvent(
        "Warning",
        "CacheDataDamaged",
        f"cache store shard {reset.shard} has started empty, because its metadata was damaged; "
        f"check its volume. {reset.reason}",
    )
