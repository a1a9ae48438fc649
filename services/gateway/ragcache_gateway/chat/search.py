"""Staged searches of the retriever, read to their final stage."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass

from ragcache_core.errors import Unavailable
from ragcache_gateway.explain.progress import NO_PROGRESS, Progress
from ragcache_gateway.explain.schema import ExplainedStage
from ragcache_gateway.speculation.interim_stage import InterimStage
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
        retrieve_s: Time of the whole search as the gateway measures it. It includes the time in
            which the model writes the queries of later searches.
        embed_s: The retriever's time for embedding the question.
        search_s: The retriever's time for searching the index.
        queries: What was searched for.
        arrivals: Each stage without its hits.
    """

    hits: Sequence[pb.Hit]
    num_stages: int
    kept_stages: Sequence[pb.SearchStage]
    asked_at_ms: int
    retrieve_s: float
    embed_s: float
    search_s: float
    queries: tuple[str, ...] = ()
    arrivals: tuple[ExplainedStage, ...] = ()

    def extended(self, later: SearchResult, began_s: float) -> SearchResult:
        """Add the hits of a later search after these, and its times.

        The order of these hits stays, so that KV that was computed for them stays valid.

        Args:
            began_s: When the later search began, since this one did. The model wrote its query.
        """
        known = {hit.chunk.id for hit in self.hits}
        return SearchResult(
            hits=[*self.hits, *(hit for hit in later.hits if hit.chunk.id not in known)],
            num_stages=self.num_stages + later.num_stages,
            kept_stages=[*self.kept_stages, *later.kept_stages],
            asked_at_ms=self.asked_at_ms,
            retrieve_s=began_s + later.retrieve_s,
            embed_s=self.embed_s + later.embed_s,
            search_s=self.search_s + later.search_s,
            queries=(*self.queries, *later.queries),
            arrivals=(
                *self.arrivals,
                *(one.shifted(1e3 * began_s) for one in later.arrivals),
            ),
        )


def no_search() -> SearchResult:
    """Return the result of an answer without retrieval."""
    return SearchResult((), 0, (), time.time_ns() // 1_000_000, 0.0, 0.0, 0.0)


async def search_to_final_stage(
    retriever: RetrieverClient,
    request: pb.SearchRequest,
    *,
    keeps_stages: bool = False,
    on_interim_stage: Callable[[InterimStage], None] | None = None,
    progress: Progress = NO_PROGRESS,
) -> SearchResult:
    """Search and wait for the final stage. Cancelling this cancels the search.

    Args:
        keeps_stages: Whether the result has every stage.
        on_interim_stage: Gets every stage before the final one as it arrives.
        progress: Reports to the client each stage, without its hits.

    Raises:
        RagCacheError: The retriever refused the search or failed.
    """
    asked_at_ms = time.time_ns() // 1_000_000
    start = time.perf_counter()
    arrivals: list[ExplainedStage] = []
    kept: list[pb.SearchStage] = []
    final: pb.SearchStage | None = None
    progress.search_begun()
    async with aclosing(retriever.search_stages(request)) as search:
        async for stage in search:
            elapsed_s = time.perf_counter() - start
            arrival = _arrival(stage, elapsed_s)
            arrivals.append(arrival)
            progress.search_advanced(arrival)
            if keeps_stages:
                kept.append(stage)
            if stage.final:
                final = stage
                break
            if on_interim_stage is not None:
                on_interim_stage(_interim_stage(stage, elapsed_s, asked_at_ms))
    if final is None:
        raise Unavailable("retriever", "the search ended before its final stage")
    return SearchResult(
        hits=final.hits,
        num_stages=len(arrivals),
        kept_stages=kept,
        asked_at_ms=asked_at_ms,
        retrieve_s=time.perf_counter() - start,
        embed_s=final.embed_us / 1e6,
        search_s=final.search_us / 1e6,
        queries=(request.query,),
        arrivals=tuple(arrivals),
    )


def _arrival(stage: pb.SearchStage, elapsed_s: float) -> ExplainedStage:
    return ExplainedStage(
        elapsed_ms=round(1e3 * elapsed_s, 3),
        hits=len(stage.hits),
        progress=round(stage.progress, 4),
        final_probability=1.0 if stage.final else round(stage.final_probability, 4),
        final=stage.final,
    )


def _interim_stage(stage: pb.SearchStage, elapsed_s: float, asked_at_ms: int) -> InterimStage:
    return InterimStage(
        hits=stage.hits,
        final_probability=stage.final_probability,
        progress=stage.progress,
        search_s=stage.search_us / 1e6,
        elapsed_s=elapsed_s,
        asked_at_ms=asked_at_ms,
    )
