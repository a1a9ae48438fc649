"""The stages of a search, and several searches of one answer."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from typing import cast

from ragcache_gateway.chat.search import SearchResult, search_to_final_stage
from ragcache_gateway.explain.schema import ExplainedStage
from ragcache_wire.clients.retriever_client import RetrieverClient
from ragcache_wire.v1 import retriever_pb2 as pb


def search(query: str, *chunks: str, took_s: float) -> SearchResult:
    hits = [pb.Hit(chunk=pb.Chunk(id=one)) for one in chunks]
    stage = ExplainedStage(
        elapsed_ms=1e3 * took_s, hits=len(hits), progress=1, final_probability=1, final=True
    )
    return SearchResult(hits, 1, (), 7, took_s, took_s / 2, took_s / 4, (query,), (stage,))


def test_the_time_of_a_later_search_includes_the_model_that_wrote_its_query() -> None:
    first = search("where", "a", "b", took_s=1.0)
    both = first.extended(search("who", "b", "c", took_s=2.0), began_s=5.0)
    assert [hit.chunk.id for hit in both.hits] == ["a", "b", "c"]
    assert both.retrieve_s == 7.0
    assert [one.elapsed_ms for one in both.arrivals] == [1000.0, 7000.0]
    assert (both.embed_s, both.search_s) == (1.5, 0.75)
    assert (both.queries, both.asked_at_ms) == (("where", "who"), 7)


class Stages:
    """A retriever with a search of two stages."""

    async def search_stages(
        self, request: pb.SearchRequest
    ) -> AsyncGenerator[pb.SearchStage, None]:
        yield pb.SearchStage(hits=[pb.Hit()], progress=1 / 3, final_probability=0.61234567)
        yield pb.SearchStage(hits=[pb.Hit()] * 2, progress=1, final=True)


async def test_each_stage_of_a_search_is_kept_in_its_order() -> None:
    retriever = cast("RetrieverClient", Stages())
    found = await search_to_final_stage(retriever, pb.SearchRequest())
    early, final = found.arrivals
    assert 0 < early.elapsed_ms <= final.elapsed_ms
    assert early.model_dump(exclude={"elapsed_ms"}) == {
        "hits": 1,
        "progress": 0.3333,
        "final_probability": 0.6123,
        "final": False,
    }
    assert (final.hits, final.final_probability, final.final) == (2, 1.0, True)
