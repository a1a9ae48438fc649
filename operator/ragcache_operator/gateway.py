"""What the operator asks of a gateway: a question, to know that all parts answer, and the cache."""

from __future__ import annotations

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


@dataclass(frozen=True, slots=True)
class Verdict:
    """Of one self-test. message: one line that names what failed."""

    passed: bool
    message: str


@dataclass(frozen=True, slots=True)
class CacheUse:
    """Of all shards of a platform. hit_rate: share of reads that hit; None before the first."""

    hit_rate: float | None
    num_bytes: int


class Gateways:
    """Client of any number of gateways, by base URL."""

    def __init__(self) -> None:
        # Parts of a cluster reach each other directly, whatever proxy the environment names.
        self._client = httpx.AsyncClient(timeout=_CALL_TIMEOUT_S, trust_env=False)

    async def close(self) -> None:
        """Close every connection."""
        await self._client.aclose()

    async def self_test(self, url: str, model: str) -> Verdict:
        """Ask a question of the collection with most documents, or of one made for it."""
        try:
            collection = await self._collection(url)
            reply = await self._client.post(
                f"{url}/v1/chat/completions",
                json={
                    "model": model,
                    "messages": [{"role": "user", "content": _QUESTION}],
                    "max_tokens": _ANSWER_TOKENS,
                    "ragcache": {"collection": collection, "top_k": 1},
                },
                timeout=_ANSWER_TIMEOUT_S,
            )
            reply.raise_for_status()
            answer = reply.json()
            citations = answer["ragcache"]["citations"]
            num_tokens = answer["usage"]["completion_tokens"]
        except httpx.HTTPStatusError as error:
            return Verdict(False, _said(error.response))
        except httpx.HTTPError as error:
            return Verdict(False, f"{url} does not answer: {error or type(error).__name__}")
        except (ValueError, KeyError, TypeError) as error:
            return Verdict(False, f"{url} gave no answer that can be read: {error!r}")
        if not citations:
            return Verdict(False, f"an answer from {collection!r} cited nothing")
        if num_tokens < 1:
            return Verdict(False, "the engine answered with no token")
        return Verdict(True, f"a question to {collection!r} was answered with citations")

    async def cache(self, url: str) -> CacheUse | None:
        """What the store holds; None when nobody says."""
        try:
            reply = await self._client.get(f"{url}/v1/cache")
            reply.raise_for_status()
            said = reply.json()
            return CacheUse(said["hit_rate"], int(said["disk_bytes"]))
        except (httpx.HTTPError, ValueError, KeyError, TypeError):
            return None

    async def progress(self, address: str) -> str | None:
        """What a pod that is not ready yet says of itself; address: "host:port" of its health."""
        try:
            reply = await self._client.get(f"http://{address}/readyz", timeout=2.0)
            said = reply.json().get("progress")
        except (httpx.HTTPError, ValueError, AttributeError):
            return None
        return str(said)[:200] if said else None

    async def _collection(self, url: str) -> str:
        reply = await self._client.get(f"{url}/v1/collections")
        reply.raise_for_status()
        filled = [c for c in reply.json()["data"] if c["documents"]]
        theirs = [c for c in filled if c["name"] != SELF_TEST_COLLECTION]
        if theirs:
            largest: dict[str, Any] = max(theirs, key=lambda c: (c["documents"], c["name"]))
            return str(largest["name"])
        if not filled:
            made = await self._client.put(f"{url}/v1/collections/{SELF_TEST_COLLECTION}", json={})
            made.raise_for_status()
            written = await self._client.post(f"{url}/v1/documents", json=_DOCUMENT)
            written.raise_for_status()
        return SELF_TEST_COLLECTION


def _said(response: httpx.Response) -> str:
    try:
        message = response.json()["error"]["message"]
    except (ValueError, KeyError, TypeError):
        message = response.text[:200]
    return f"HTTP {response.status_code}: {message}"
