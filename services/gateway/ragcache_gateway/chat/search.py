"""One staged search of the retriever, read to its final stage."""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import aclosing
from dataclasses import dataclass

from ragcache_core.errors import Unavailable
from ragcache_wire.clients.retriever_client import RetrieverClient
from ragcache_wire.v1 import retriever_pb2 as pb


@dataclass(frozen=True, slots=True)
class SearchResult:
    """Hits of the final stage, best first.

    Args:
        num_stages: How many stages the search streamed, the final one included.
        kept_stages: All stages, if the caller wanted them.
        asked_at_ms: Unix time before the search began. The hits may contain text of a document
            that was deleted after it.
        retrieve_s: Time of the whole search as the gateway measures it.
        embed_s: The retriever's time for embedding the question.
        search_s: The retriever's time for searching the index.
    """

    hits: Sequence[pb.Hit]
    num_stages: int
    kept_stages: Sequence[pb.SearchStage]
    asked_at_ms: int
    retrieve_s: float
    embed_s: float
    search_s: float


async def search_to_final_stage(
    retriever: RetrieverClient, request: pb.SearchRequest, *, keeps_stages: bool = False
) -> SearchResult:
    """Search and wait for the final stage. Cancelling this cancels the search.

    Args:
        keeps_stages: Whether the result has every stage.

    Raises:
        RagCacheError: The retriever refused the search or failed.
    """
    asked_at_ms = time.time_ns() // 1_000_000
    start = time.perf_counter()
    num_stages = 0
    kept: list[pb.SearchStage] = []
    final: pb.SearchStage | None = None
    async with aclosing(retriever.search_stages(request)) as search:
        async for stage in search:
            num_stages += 1
            if keeps_stages:
                kept.append(stage)
            if stage.final:
                final = stage
                break
    if final is None:
        raise Unavailable("retriever", "the search ended before its final stage")
    return SearchResult(
        hits=final.hits,
        num_stages=num_stages,
        kept_stages=kept,
        asked_at_ms=asked_at_ms,
        retrieve_s=time.perf_counter() - start,
        embed_s=final.embed_us / 1e6,
        search_s=final.search_us / 1e6,
    )
