"""Settings, quotas, progress and deletion of collections over REST."""

from __future__ import annotations

from ragcache_core.identity.keys import PUBLIC_DOMAIN
from ragcache_wire.v1 import retriever_pb2 as pb
from tests.kit.gateway import World


async def test_settings_of_a_collection_reach_the_retriever(gateway: World) -> None:
    body = {
        "chunking": {"size_tokens": 64, "overlap_tokens": 8},
        "window": 0,
        "index": "hnsw",
        "max_documents": 100,
        "max_text_bytes": 1 << 30,
        "lexical_weight": 0.7,
        "labels": False,
    }
    reply = await gateway.client.put("/v1/collections/docs", json=body)
    assert reply.status_code == 200
    assert {name: reply.json()[name] for name in body} == body
    stored = gateway.retriever.collections["docs"]
    assert (stored.index, stored.max_documents) == (pb.INDEX_KIND_HNSW, 100)
    assert (stored.lexical_weight, stored.labels) == (0.7, False)
    await gateway.client.put("/v1/collections/plain", json={})
    assert gateway.retriever.collections["plain"] == pb.Collection(name="plain")


async def test_a_collection_tells_its_size_and_the_progress_of_a_remake(gateway: World) -> None:
    gateway.retriever.collections["docs"] = pb.Collection(
        name="docs",
        documents=3,
        text_bytes=1234,
        remake=pb.Remake(documents_done=1, documents=3, reason="embedder"),
    )
    found = (await gateway.client.get("/v1/collections/docs")).json()
    assert (found["text_bytes"], found["index"]) == (1234, "auto")
    assert found["remake"] == {"documents_done": 1, "documents": 3, "reason": "embedder"}
    listed = (await gateway.client.get("/v1/collections")).json()["data"]
    assert [(one["name"], one["remake"] is None) for one in listed] == [
        ("default", True),
        ("docs", False),
    ]


async def test_a_whole_number_may_have_a_decimal_point(gateway: World) -> None:
    response = await gateway.client.put("/v1/collections/docs", json={"window": 2.0})
    assert response.json()["window"] == 2


async def test_a_collection_is_deleted_with_the_kv_of_its_documents(gateway: World) -> None:
    for name in "ab":
        body = {"id": name, "text": f"Text of {name}."}
        await gateway.client.post("/v1/documents", json=body)
    reply = await gateway.client.delete("/v1/collections/default")
    assert reply.json() == {
        "object": "collection.deleted",
        "name": "default",
        "deleted": True,
        "documents": 2,
        "removed_variants": 4,
    }
    names = {name for one in gateway.store.deletions for name in one.documents}
    assert names == {"default/a", "default/b"}
    assert {one.domain for one in gateway.store.deletions} == {PUBLIC_DOMAIN}
    response = await gateway.client.delete("/v1/collections/default")
    assert response.json()["error"]["code"] == "collection_not_found"
