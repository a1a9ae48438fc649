"""Models that order the best candidates of a search again, and score texts for clients."""

from __future__ import annotations

import asyncio
import json
import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import httpx
import numpy as np
from typing_extensions import override

from ragcache_core.errors import InvalidInput
from ragcache_core.retrieval.fusion import Scores
from ragcache_retriever.embedding.computation import Device, check_device
from ragcache_retriever.embedding.embedder import Embedder
from ragcache_retriever.embedding.model_files import hub_reference

log = logging.getLogger(__name__)

MAX_RERANKED = 50
"""Most candidates of a search that are reranked. More of them cost time and lose quality."""
MAX_READ = 20
"""Best candidates that a cross-encoder reads. On a CPU each takes tens of milliseconds."""
BATCH_SIZE = 8
DEADLINE_S = 2.0
PAUSE_S = 10.0
"""Time after a failure in which the endpoint is not asked. Searches do not wait for it then."""
MAX_REPLY_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class CandidateText:
    """The text of a candidate. ``heading``: its title and headings."""

    heading: str
    text: str

    def __str__(self) -> str:
        return f"{self.heading}\n{self.text}"


class Reranker(Protocol):
    """Scores candidates by their texts. Any number of threads may call it."""

    def scores(self, question: str, texts: Sequence[CandidateText]) -> Scores | None:
        """Return a score for each candidate, shape (len(texts),). None: the order stays.

        Args:
            texts: Of the best candidates of a search, best first.
        """

    def close(self) -> None:
        """Release connections."""


class CrossEncoderReranker(Reranker):
    """Reads question and text together by a model of sentence-transformers.

    Candidates that it does not read stay behind the others.

    Args:
        source: A folder, or a name on the hub like ``ORGANISATION/NAME@COMMIT``. The constructor
            loads the model, from safetensors alone and without code of the model's.
    """

    def __init__(self, source: str, device: Device = "cpu") -> None:
        # Importing torch takes seconds, and only this reranker needs it.
        from sentence_transformers import CrossEncoder  # noqa: PLC0415

        check_device(device)
        try:
            name, commit = source, None
            if not Path(source).is_absolute():
                name, commit = hub_reference(source, "RAGCACHE_RERANKER_MODEL")
            self._model: Any = CrossEncoder(
                name,
                revision=commit,
                device=device,
                trust_remote_code=False,
                # Other formats are pickles, which run code when they are loaded.
                model_kwargs={"use_safetensors": True},
            )
        except (OSError, ValueError) as error:
            raise InvalidInput(
                "RAGCACHE_RERANKER_MODEL",
                f"{source!r} cannot be loaded: {error}",
                "name a folder or a cross-encoder of the hub with safetensors",
            ) from error

    @override
    def scores(self, question: str, texts: Sequence[CandidateText]) -> Scores:
        read = texts[:MAX_READ]
        pairs = [(question, str(one)) for one in read]
        found = np.asarray(
            self._model.predict(pairs, batch_size=BATCH_SIZE, show_progress_bar=False), np.float64
        ).reshape(len(read), -1)[:, -1]
        return np.concatenate([found, _behind(found, len(texts) - len(read))])

    @override
    def close(self) -> None:
        pass


class RerankEndpoint(Reranker):
    """Reranks by POST {url}/rerank, as Cohere, Jina, vLLM and others serve it.

    After a failure the order stays, with a warning.

    Args:
        url: Base URL, such as ``http://host/v1``.
        model: Model that requests name.
        api_key: Sent as a bearer token, unless it is empty.
        clock: Ascending seconds.
    """

    def __init__(
        self,
        url: str,
        model: str,
        api_key: str = "",
        *,
        deadline_s: float = DEADLINE_S,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        try:
            self._url = str(httpx.URL(f"{url}/rerank"))
        except httpx.InvalidURL as error:
            raise InvalidInput(
                "RAGCACHE_RERANKER", f"{url!r} is not a URL: {error}", "set http(s)://host/v1"
            ) from error
        headers = {"authorization": f"Bearer {api_key}"} if api_key else {}
        self._client = httpx.Client(headers=headers, timeout=deadline_s)
        self._model = model
        self._deadline_s = deadline_s
        self._clock = clock
        self._paused_until_s = -np.inf

    @override
    def scores(self, question: str, texts: Sequence[CandidateText]) -> Scores | None:
        if self._clock() < self._paused_until_s:
            return None
        try:
            reply = self._post(question, texts)
            return _scores(reply, len(texts))
        except (httpx.HTTPError, ValueError, KeyError, TypeError, IndexError) as error:
            self._paused_until_s = self._clock() + PAUSE_S
            log.warning(
                "reranker: failed, the order stays url=%s pause_s=%g error=%s: %s",
                self._url,
                PAUSE_S,
                type(error).__name__,
                error,
            )
            return None

    @override
    def close(self) -> None:
        self._client.close()

    def _post(self, question: str, texts: Sequence[CandidateText]) -> Any:
        """Return the reply. Raises httpx.HTTPError or ValueError."""
        began_s = self._clock()
        body = {
            "model": self._model,
            "query": question,
            "documents": [str(one) for one in texts],
            "top_n": len(texts),
            "return_documents": False,
        }
        content = b""
        with self._client.stream("POST", self._url, json=body) as response:
            response.raise_for_status()
            # httpx bounds the time between two parts of a reply, and not that of all of them.
            for part in response.iter_bytes():
                content += part
                if self._clock() - began_s > self._deadline_s:
                    raise ValueError(f"no complete reply within {self._deadline_s:g} s")
                if len(content) > MAX_REPLY_BYTES:
                    raise ValueError(f"the reply has more than {MAX_REPLY_BYTES} bytes")
        return json.loads(content)


def _scores(reply: Any, count: int) -> Scores:
    """Return the scores of a reply in the order of the request.

    Raises:
        ValueError, KeyError, TypeError: The reply does not score each text once.
    """
    found = {int(one["index"]): float(one["relevance_score"]) for one in reply["results"]}
    if sorted(found) != list(range(count)):
        raise ValueError(f"the reply scores {len(found)} of {count} texts")
    scores: Scores = np.array([found[i] for i in range(count)])
    if not np.isfinite(scores).all():
        raise ValueError("the reply has scores that are no numbers")
    return scores


async def score_texts(
    embedder: Embedder, reranker: Reranker | None, query: str, texts: Sequence[str]
) -> Scores:
    """Return how well each text answers a query, shape (len(texts),).

    Args:
        reranker: Reads the texts that are nearest to the query; the others come after them. None:
            the cosine is the score.

    Raises:
        Unavailable: The embedder does not answer.
        InvalidInput: The embedder refuses a text.
    """
    vectors = await embedder.embed([query, *texts], urgent=True)
    cosines: Scores = (vectors[1:] @ vectors[0]).astype(np.float64)
    if reranker is None:
        return cosines
    order = np.argsort(-cosines, kind="stable")
    read = [CandidateText("", texts[i]) for i in order[:MAX_RERANKED].tolist()]
    scores = await asyncio.to_thread(reranker.scores, query, read)
    if scores is None:
        return cosines
    found = np.empty(len(texts))
    found[order] = np.concatenate([scores, _behind(scores, len(texts) - len(read))])
    return found


def _behind(scores: Scores, count: int) -> Scores:
    """Return descending scores, below all of these and below 0, for texts that were not read."""
    behind: Scores = scores.min(initial=0.0) - np.arange(1.0, count + 1)
    return behind
