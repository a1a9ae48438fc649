"""Several searches of one answer."""

from __future__ import annotations

from ragcache_gateway.chat.search import SearchResult, StageArrival
from ragcache_wire.v1 import retriever_pb2 as pb


def search(query: str, *chunks: str, took_s: float) -> SearchResult:
    hits = [pb.Hit(chunk=pb.Chunk(id=one)) for one in chunks]
    arrival = StageArrival(took_s, len(hits), 1.0, 1.0, is_final=True)
    return SearchResult(hits, 1, (), 7, took_s, took_s / 2, took_s / 4, (query,), (arrival,))


def test_the_time_of_a_later_search_includes_the_model_that_wrote_its_query() -> None:
    first = search("where", "a", "b", took_s=1.0)
    both = first.extended(search("who", "b", "c", took_s=2.0), began_s=5.0)
    assert [hit.chunk.id for hit in both.hits] == ["a", "b", "c"]
    assert both.retrieve_s == 7.0
    assert [one.elapsed_s for one in both.arrivals] == [1.0, 7.0]
    assert (both.embed_s, both.search_s) == (1.5, 0.75)
    assert (both.queries, both.asked_at_ms) == (("where", "who"), 7)
