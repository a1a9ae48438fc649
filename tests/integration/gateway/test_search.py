"""Searches with filters, modes, legs and stages; citations tell versions apart."""

from __future__ import annotations

import pytest

from ragcache_wire.v1 import retriever_pb2 as pb
from tests.kit.gateway import World

FILTER = {"must": [{"key": "team", "match": {"value": "core"}}]}


async def test_the_options_of_a_search_reach_the_retriever(gateway: World) -> None:
    body = {
        "query": "billing",
        "top_k": 7,
        "filter": FILTER,
        "mode": "lexical",
        "min_score": 0.25,
        "diversity": 0.5,
        "recall": 0.95,
    }
    assert (await gateway.client.post("/v1/search", json=body)).status_code == 200
    (sent,) = gateway.retriever.searches
    assert (sent.query, sent.top_k, sent.mode) == ("billing", 7, pb.SEARCH_MODE_LEXICAL)
    assert (sent.min_score, sent.diversity) == (0.25, 0.5)
    assert sent.recall == pytest.approx(0.95)
    assert sent.filter.field.name == "team"


async def test_a_plain_search_leaves_everything_to_the_retriever(gateway: World) -> None:
    await gateway.client.post("/v1/search", json={"query": "billing"})
    (sent,) = gateway.retriever.searches
    assert sent == pb.SearchRequest(collection="default", query="billing", top_k=4)


async def test_a_hit_shows_legs_duplicates_and_its_version(gateway: World) -> None:
    hit = gateway.retriever.hits[0]
    hit.legs.CopyFrom(pb.LegScores(dense=0.5, dense_rank=2, lexical=7.25, lexical_rank=1))
    hit.duplicates.append("old.md#1")
    hit.chunk.content_hash = "abc"
    hit.chunk.updated_unix_ms = 1_764_000_000_123
    reply = (await gateway.client.post("/v1/search", json={"query": "billing"})).json()
    first, second = reply["data"]
    assert first["legs"] == {
        "dense": {"score": 0.5, "rank": 2},
        "lexical": {"score": 7.25, "rank": 1},
        "reranked": None,
    }
    assert first["duplicates"] == ["old.md#1"]
    assert (first["version"], first["updated"]) == ("abc", "2025-11-24T16:00:00.123Z")
    assert second["legs"] == {"dense": None, "lexical": None, "reranked": None}
    assert reply["stages"] is None


async def test_a_search_returns_its_stages_if_they_are_wanted(gateway: World) -> None:
    body = {"query": "billing", "stages": True}
    reply = (await gateway.client.post("/v1/search", json=body)).json()
    early, final = reply["stages"]
    assert (early["progress"], early["final"]) == (0.5, False)
    assert early["hits"] == [{"chunk": "billing.md#1", "score": 0.9}]
    assert (final["progress"], final["final"]) == (1, True)
    assert [hit["chunk"] for hit in final["hits"]] == [hit["chunk"] for hit in reply["data"]]
    assert reply["timing_ms"]["stages"] == 2
    assert [chunk["chunk"] for chunk in reply["data"][0]["before"]] == ["billing.md#0"]


async def test_a_question_takes_the_options_of_a_search(gateway: World) -> None:
    gateway.retriever.hits[0].chunk.content_hash = "abc"
    gateway.retriever.hits[0].chunk.updated_unix_ms = 1_764_000_000_000
    options = {"filter": FILTER, "mode": "hybrid", "min_score": 0.1, "diversity": 0.2}
    body = {"messages": [{"role": "user", "content": "Where?"}], "ragcache": options}
    reply = (await gateway.client.post("/v1/chat/completions", json=body)).json()
    (sent,) = gateway.retriever.searches
    assert (sent.query, sent.mode) == ("Where?", pb.SEARCH_MODE_HYBRID)
    assert sent.filter.field.name == "team"
    cited = {one["chunk"]: one for one in reply["ragcache"]["citations"]}["billing.md#1"]
    assert (cited["version"], cited["updated"]) == ("abc", "2025-11-24T16:00:00.000Z")
