"""An embedder behind an OpenAI-compatible /embeddings endpoint.

An endpoint may serve another model under the same name. It is recognized by the vectors that it
gives to a few texts. The vectors of one model differ a little from server to server, by precision
and by batch, so a sketch of them is compared by its angle.
"""

from __future__ import annotations

import asyncio
import base64
import binascii
import hashlib
import logging
from collections.abc import Iterable, Sequence
from typing import Any

import httpx
import numpy as np
import numpy.typing as npt
from typing_extensions import override

from ragcache_core.errors import InvalidInput, Unavailable
from ragcache_retriever.embedding.embedder import Embedder, Vectors, normalised

log = logging.getLogger(__name__)

PROBES = (
    "The service runs in region north and is owned by the team that answers its alerts.",
    "Wie wird Brot gebacken?",
    "def total(values): return sum(values) if values else 0",
)
MIN_COSINE = 0.997
"""Of sketches of one model. Precisions differ by 0.0005; a model trained further by 0.01 or more.
A sketch shows three quarters of that."""
_NUM_VALUES = 96
SERVICE = "embedder"
QUERY_DEADLINE_S = 5.0
BATCH_DEADLINE_S = 60.0
FIRST_BACKOFF_S = 0.1
"""Doubles after each attempt, until the deadline."""
_IDENTITY = "endpoint:"
_REFUSES_TEXT = (400, 413, 422)
_RETRIED = (408, 425, 429, 500, 502, 503, 504)
_BATCH_SIZE = 32
"""Texts of one request."""


def sketch(vectors: npt.NDArray[np.float32]) -> str:
    """Return a short text that tells about the vectors of the probes, shape (probes, dimension)."""
    flat = vectors.ravel().astype(np.float64)
    signs = hashlib.shake_256(b"ragcache-probe").digest(_NUM_VALUES * len(flat) // 8)
    matrix = np.unpackbits(np.frombuffer(signs, np.uint8)).reshape(_NUM_VALUES, -1) * 2.0 - 1
    projected = matrix @ flat
    scale = 127 / max(np.abs(projected).max(), 1e-12)
    values = np.round(projected * scale).astype(np.int8)
    return base64.urlsafe_b64encode(values.tobytes()).decode()


def is_same_model(one: str, other: str) -> bool:
    """Whether two sketches are of one model. False for a text that is no sketch."""
    a, b = _values(one), _values(other)
    if a is None or b is None:
        return False
    lengths = float(np.linalg.norm(a) * np.linalg.norm(b))
    return lengths > 0 and float(a @ b) / lengths >= MIN_COSINE


def _values(text: str) -> npt.NDArray[np.float64] | None:
    try:
        content = base64.urlsafe_b64decode(text.encode())
    except (binascii.Error, ValueError):
        return None
    if len(content) != _NUM_VALUES:
        return None
    return np.frombuffer(content, np.int8).astype(np.float64)


class EmbeddingEndpoint(Embedder):
    """Embeds by POST {url}/embeddings, and retries temporary failures until a deadline.

    Args:
        url: Base URL of the endpoint.
        model: Model that requests name.
        api_key: Sent as a bearer token, unless it is empty.
    """

    def __init__(self, url: str, model: str, api_key: str = "") -> None:
        headers = {"authorization": f"Bearer {api_key}"} if api_key else {}
        self._client = httpx.AsyncClient(headers=headers)
        self._url = _checked_url(f"{url}/embeddings")
        self._model = model
        self.dimension = 0
        # The model's name and a sketch of its vectors, because a model may move to another address
        # and an address may get another model.
        self.identity = ""
        self._sketch = ""

    @override
    async def start(self) -> None:
        try:
            vectors = await self._embed(PROBES, QUERY_DEADLINE_S)
        except _EndpointRefusal as refusal:
            raise InvalidInput(
                "RAGCACHE_EMBEDDER",
                str(refusal),
                "check the address, RAGCACHE_EMBEDDER_MODEL and RAGCACHE_EMBEDDER_API_KEY",
            ) from refusal
        self.dimension = vectors.shape[1]
        self._sketch = sketch(vectors)
        self.identity = f"{_IDENTITY}{self._model}:{self._sketch}"

    @override
    def adopt(self, identities: Iterable[str]) -> None:
        # It recognizes the model by its vectors, under any name.
        is_known = False
        for identity in identities:
            if not identity.startswith(_IDENTITY):
                continue
            model, _, stored = identity.removeprefix(_IDENTITY).rpartition(":")
            if is_same_model(stored, self._sketch):
                self.identity, self._sketch = identity, stored
                return
            is_known = is_known or model == self._model
        if is_known:
            log.warning(
                "embedder: the endpoint has another model under the same name; documents are "
                "embedded again model=%s",
                self._model,
            )

    @override
    async def embed(self, texts: Sequence[str], *, urgent: bool) -> Vectors:
        # Requests of several calls run concurrently, so a query waits for no document.
        parts = [texts[i : i + _BATCH_SIZE] for i in range(0, len(texts), _BATCH_SIZE)]
        vectors = [np.empty((0, self.dimension), np.float32)]
        vectors += [await self._embed_part(part, urgent=urgent) for part in parts]
        return np.concatenate(vectors)

    async def _embed_part(self, texts: Sequence[str], *, urgent: bool) -> Vectors:
        try:
            vectors = await self._embed(texts, QUERY_DEADLINE_S if urgent else BATCH_DEADLINE_S)
        except _EndpointRefusal as refusal:
            if refusal.status not in _REFUSES_TEXT:
                raise Unavailable(SERVICE, str(refusal)) from refusal
            raise InvalidInput(
                "query" if urgent else "document.text",
                f"the embedder refuses it: {refusal}",
                "ask something shorter" if urgent else "make the collection's chunks smaller",
            ) from refusal
        if vectors.shape[1] != self.dimension:
            raise Unavailable(
                SERVICE,
                f"its vectors changed from {self.dimension} to {vectors.shape[1]} dimensions;"
                " restart the retriever to embed all documents again",
            )
        return vectors

    @override
    async def close(self) -> None:
        await self._client.aclose()

    async def _embed(self, texts: Sequence[str], deadline_s: float) -> Vectors:
        problem = "no answer"
        backoff_s = FIRST_BACKOFF_S
        try:
            async with asyncio.timeout(deadline_s):
                while True:
                    try:
                        response = await self._post(texts, deadline_s)
                    except httpx.RequestError as error:
                        problem = f"{self._url}: {type(error).__name__}: {error}"
                    else:
                        if response.status_code not in _RETRIED:
                            return _vectors(response, len(texts))
                        problem = f"{self._url} answered {response.status_code}"
                    await asyncio.sleep(backoff_s)
                    backoff_s *= 2
        except TimeoutError as error:
            raise Unavailable(SERVICE, f"{problem} within {deadline_s:g} s") from error

    async def _post(self, texts: Sequence[str], timeout_s: float) -> httpx.Response:
        body = {"model": self._model, "input": list(texts), "encoding_format": "float"}
        return await self._client.post(self._url, json=body, timeout=timeout_s)


class _EndpointRefusal(Exception):
    """An answer that another attempt would not change."""

    def __init__(self, response: httpx.Response) -> None:
        super().__init__(f"{response.url} answered {response.status_code}: {response.text[:200]}")
        self.status = response.status_code


def _checked_url(url: str) -> str:
    try:
        return str(httpx.URL(url))
    except httpx.InvalidURL as error:
        raise InvalidInput(
            "RAGCACHE_EMBEDDER", f"{url!r} is not a URL: {error}", "set http(s)://host/v1"
        ) from error


def _vectors(response: httpx.Response, count: int) -> Vectors:
    """Return the vectors of a reply, in the order of the texts.

    Raises:
        _EndpointRefusal: The endpoint refused the request.
        Unavailable: The reply holds no embeddings of ``count`` texts.
    """
    if not response.is_success:
        raise _EndpointRefusal(response)
    try:
        entries: list[dict[str, Any]] = response.json()["data"]
        ordered = sorted(entries, key=lambda entry: int(entry["index"]))
        vectors = np.array([entry["embedding"] for entry in ordered], np.float32)
    except (ValueError, TypeError, KeyError) as error:
        raise Unavailable(
            SERVICE, f"{response.url} sent no embeddings: {response.text[:200]}"
        ) from error
    if vectors.shape[:1] != (count,) or vectors.ndim != 2 or vectors.shape[1] == 0:
        raise Unavailable(
            SERVICE, f"{response.url} sent vectors of shape {vectors.shape} for {count} texts"
        )
    return normalised(SERVICE, vectors)
