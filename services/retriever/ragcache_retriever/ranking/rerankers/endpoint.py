"""A reranker behind a /rerank endpoint, as Cohere, Jina, vLLM and others serve it."""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Callable, Sequence
from typing import Any

import httpx
import numpy as np

from ragcache_core.errors import InvalidInput
from ragcache_core.retrieval.fusion import Scores
from ragcache_retriever.ranking.candidate_text import CandidateText

log = logging.getLogger(__name__)

DEADLINE_S = 2.0
PAUSE_S = 10.0
"""Time after a failure in which the endpoint is not asked. Searches do not wait for it then."""
MAX_REPLY_BYTES = 1 << 20


class RerankEndpoint:
    """Reranks by POST {url}/rerank. After a failure the order stays, with a warning.

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

    @property
    def name(self) -> str:
        """See Reranker."""
        return self._model

    def scores(self, question: str, texts: Sequence[CandidateText]) -> Scores | None:
        """See Reranker. It returns before the deadline."""
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

    def close(self) -> None:
        """Close the connections."""
        self._client.close()

    def _post(self, question: str, texts: Sequence[CandidateText]) -> Any:
        """Return the reply. Raises httpx.HTTPError or ValueError."""
        began_s = self._clock()
        body = {
            "model": self._model,
            "query": question,
            "documents": [f"{one.heading}\n{one.text}" for one in texts],
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
