"""One staged search, consumed to its end."""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import aclosing
from dataclasses import dataclass

from ragcache_core.errors import Unavailable
from ragcache_wire.retriever_client import RetrieverClient
from ragcache_wire.v1 import retriever_pb2 as pb


@dataclass(frozen=True, slots=True)
class Retrieved:
    """Hits of the final stage, best first. stages: how many there were, this one included."""

    hits: Sequence[pb.Hit]
    stages: int
    retrieve_s: float
    embed_s: float
    search_s: float


async def retrieve(
    retriever: RetrieverClient, collection: str, query: str, top_k: int
) -> Retrieved:
    """Search and take the final stage; cancelling cancels the search. Raises core errors."""
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
        retrieve_s=time.perf_counter() - start,
        embed_s=final.embed_us / 1e6,
        search_s=final.search_us / 1e6,
    )
