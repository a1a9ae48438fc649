"""One staged search, consumed to its end."""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import aclosing
from dataclasses import dataclass

from ragcache_core.errors import Unavailable
from ragcache_wire.clients.retriever_client import RetrieverClient
from ragcache_wire.v1 import retriever_pb2 as pb


@dataclass(frozen=True, slots=True)
class Retrieved:
    """Hits of the final stage, best first. stages: how many there were, this one included.

    asked_at_ms: Unix time before the search began. What is deleted after it may be among the hits.
    """

    hits: Sequence[pb.Hit]
    stages: int
    asked_at_ms: int
    retrieve_s: float
    embed_s: float
    search_s: float


async def retrieve(
    retriever: RetrieverClient, collection: str, query: str, top_k: int
) -> Retrieved:
    """Search and take the final stage; cancelling cancels the search. Raises core errors."""
    asked_at_ms = time.time_ns() // 1_000_000
    start = time.perf_counter()
    stages = 0
    final: pb.SearchStage | None = None
    async with aclosing(retriever.search(collection, query, top_k)) as search:
        async for stage in search:
            stages += 1
            if stage.final:
                final = stage
                break
    if final is None:
        raise Unavailable("retriever", "the search ended before its final stage")
    return Retrieved(
        hits=final.hits,
        stages=stages,
        asked_at_ms=asked_at_ms,
        retrieve_s=time.perf_counter() - start,
        embed_s=final.embed_us / 1e6,
        search_s=final.search_us / 1e6,
    )
