"""What the operator asks of a gateway: a question, to know that all parts answer, and the cache."""

from __future__ import annotations

import asyncio
import json
from dataclasses import dataclass
from typing import Any

import httpx

SELF_TEST_COLLECTION = "ragcache-self-test"
"""Made by the first self-test of a platform that holds no documents yet."""

_DOCUMENT = {
    "collection": SELF_TEST_COLLECTION,
    "id": "self-test.md",
    "text": "# Self-test\n\nThis page is the operator's. It is asked for before Ready is said.\n",
}
_QUESTION = "Whose is the self-test page?"
_ANSWER_TOKENS = 8
_CALL_TIMEOUT_S = 10.0
_ANSWER_TIMEOUT_S = 120.0
"""A first answer computes everything, on slow processors too."""
_PROGRESS_TIMEOUT_S = 2.0
_LARGEST_ANSWER_BYTES = 4 << 20
_NO_ANSWER = (httpx.HTTPError, httpx.InvalidURL)


@dataclass(frozen=True, slots=True)
class SelfTestResult:
    """Of one self-test. message: one line that names what failed."""

    passed: bool
    message: str


@dataclass(frozen=True, slots=True)
class StoreUsage:
    """Of all shards of a platform. hit_rate: share of reads that hit; None before the first."""

    hit_rate: float | None
    num_bytes: int


class GatewayClient:
    """Client of any number of gateways, by base URL."""

    def __init__(self) -> None:
        # Parts of a cluster reach each other directly, whatever proxy the environment names.
        # Each call has a limit of its own over all of it; this one is for silence.
        self._client = httpx.AsyncClient(timeout=_ANSWER_TIMEOUT_S, trust_env=False)

    async def close(self) -> None:
        """Close every connection."""
        await self._client.aclose()

    async def self_test(self, url: str, model: str) -> SelfTestResult:
        """Ask a question of the collection with most documents, or of one made for it."""
        try:
            collection = await self._collection(url)
            answer = await self._json(
                "POST",
                f"{url}/v1/chat/completions",
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
        except (*_NO_ANSWER, TimeoutError) as error:
            return SelfTestResult(False, f"{url} does not answer: {error or type(error).__name__}")
        except (ValueError, KeyError, TypeError) as error:
            return SelfTestResult(False, f"{url} gave no answer that can be read: {error!r}")
        if not citations:
            return SelfTestResult(False, f"an answer from {collection!r} cited nothing")
        if num_tokens < 1:
            return SelfTestResult(False, "the engine answered with no token")
        return SelfTestResult(True, f"a question to {collection!r} was answered with citations")

    async def cache(self, url: str) -> StoreUsage | None:
        """What the store holds; None when nobody says."""
        try:
            said = await self._json("GET", f"{url}/v1/cache")
            return StoreUsage(said["hit_rate"], int(said["disk_bytes"]))
        except (_ErrorResponse, *_NO_ANSWER, TimeoutError, ValueError, KeyError, TypeError):
            return None

    async def progress(self, address: str) -> str | None:
        """What a pod that is not ready yet says of itself; address: "host:port" of its health."""
        try:
            async with asyncio.timeout(_PROGRESS_TIMEOUT_S):
                _, body = await self._send("GET", f"http://{address}/readyz", None)
            said = json.loads(body).get("progress")
        except (*_NO_ANSWER, TimeoutError, ValueError, AttributeError):
            return None
        return str(said)[:200] if said else None

    async def _collection(self, url: str) -> str:
        listed = await self._json("GET", f"{url}/v1/collections")
        filled = [c for c in listed["data"] if c["documents"]]
        theirs = [c for c in filled if c["name"] != SELF_TEST_COLLECTION]
        if theirs:
            largest: dict[str, Any] = max(theirs, key=lambda c: (c["documents"], c["name"]))
            return str(largest["name"])
        if not filled:
            await self._json("PUT", f"{url}/v1/collections/{SELF_TEST_COLLECTION}", {})
            await self._json("POST", f"{url}/v1/documents", _DOCUMENT)
        return SELF_TEST_COLLECTION

    async def _json(
        self,
        method: str,
        url: str,
        body: dict[str, Any] | None = None,
        timeout_s: float = _CALL_TIMEOUT_S,
    ) -> Any:
        """What a call gave back. Raises _Refused for what is no success."""
        async with asyncio.timeout(timeout_s):
            status, raw = await self._send(method, url, body)
        if not 200 <= status < 300:
            raise _ErrorResponse(_said(status, raw))
        return json.loads(raw)

    async def _send(self, method: str, url: str, body: dict[str, Any] | None) -> tuple[int, bytes]:
        """Status and body. Whatever answers is a tenant's, so neither is trusted to end."""
        async with self._client.stream(method, url, json=body) as response:
            raw = bytearray()
            async for piece in response.aiter_bytes():
                raw += piece
                if len(raw) > _LARGEST_ANSWER_BYTES:
                    raise ValueError(f"more than {_LARGEST_ANSWER_BYTES} bytes")
            return response.status_code, bytes(raw)


class _ErrorResponse(Exception):
    """The gateway answered that it does not."""


def _said(status: int, raw: bytes) -> str:
    try:
        message = json.loads(raw)["error"]["message"]
    except (ValueError, KeyError, TypeError):
        message = raw[:200].decode(errors="replace")
    return f"HTTP {status}: {message}"
