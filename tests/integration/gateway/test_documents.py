"""Documents, collections and search through real sockets, and the limits of requests."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator
from pathlib import Path
from typing import Any

import httpx
import pytest

from ragcache_core.identity.keys import PUBLIC_DOMAIN, chunk_key
from ragcache_kv.model.folder import load_model_folder
from ragcache_wire.server import GrpcServer
from ragcache_wire.v1 import cachestore_pb2_grpc
from tests.kit.gateway import World, world

MIB = 1 << 20


async def put(gateway: World, **fields: Any) -> httpx.Response:
    body = {"id": "a/b.md", "text": "# A\n\nText.", **fields}
    return await gateway.client.post("/v1/documents", json=body)


async def test_a_document_can_be_written_read_listed_and_deleted(gateway: World) -> None:
    response = await put(gateway, metadata={"team": "core"})
    assert response.status_code == 200
    written = response.json()
    assert written["changed"] is True
    assert (written["content_type"], written["chunks"]) == ("markdown", 1)
    assert written["metadata"] == {"team": "core"}

    response = await gateway.client.get("/v1/documents/a/b.md?collection=default")
    assert response.json()["text"] == "# A\n\nText."
    listed = (await gateway.client.get("/v1/documents")).json()
    assert [document["id"] for document in listed["data"]] == ["a/b.md"]
    assert "text" not in listed["data"][0]

    deleted = (await gateway.client.delete("/v1/documents/a%2Fb.md")).json()
    assert (deleted["id"], deleted["deleted"], deleted["removed_variants"]) == ("a/b.md", True, 2)
    response = await gateway.client.get("/v1/documents/a/b.md")
    assert response.status_code == 404
    assert response.json()["error"]["code"] == "document_not_found"


async def test_pages_follow_each_other(gateway: World) -> None:
    for name in "abc":
        await put(gateway, id=name)
    page = (await gateway.client.get("/v1/documents?limit=2")).json()
    assert ([d["id"] for d in page["data"]], page["has_more"]) == (["a", "b"], True)
    page = (await gateway.client.get("/v1/documents", params={"after": page["next"]})).json()
    assert ([d["id"] for d in page["data"]], page["has_more"], page["next"]) == (["c"], False, None)


async def test_replacing_a_document_deletes_the_variants_of_removed_chunks(gateway: World) -> None:
    await put(gateway, text="old text")
    assert gateway.store.deleted == []
    written = (await put(gateway, text="new text")).json()
    assert written["removed_variants"] == 2
    space = load_model_folder(gateway.config.model).space("auto")
    ids = gateway.prompts().encode_chunk("old text")
    assert gateway.store.deleted == [chunk_key(space, PUBLIC_DOMAIN, ids)]
    # The delete does not name the document, as other chunks of it may be unchanged.
    (deletion,) = gateway.store.deletions
    assert (list(deletion.documents), deletion.domain) == ([], "")
    assert len(deletion.id) == 16


async def test_a_deleted_document_is_deleted_from_the_store_by_name_too(gateway: World) -> None:
    await put(gateway)
    await gateway.client.delete("/v1/documents/a/b.md")
    (deletion,) = gateway.store.deletions
    assert (list(deletion.documents), deletion.domain) == (["default/a/b.md"], PUBLIC_DOMAIN)
    assert len(deletion.chunks) == 1


async def test_an_unacknowledged_delete_is_sent_again(gateway: World) -> None:
    await put(gateway)
    shard = gateway.servers["cachestore"]
    await shard.stop()
    await gateway.client.delete("/v1/documents/a/b.md")
    await until_waiting(gateway, 1)
    back = GrpcServer(
        f"127.0.0.1:{shard.port}",
        ["ragcache.v1.CacheStore"],
        lambda server: cachestore_pb2_grpc.add_CacheStoreServicer_to_server(gateway.store, server),
    )
    await back.start()
    try:
        await until_waiting(gateway, 0)
    finally:
        await back.stop()
    (deletion,) = gateway.store.deletions
    assert list(deletion.documents) == ["default/a/b.md"]


async def until_waiting(gateway: World, count: int) -> None:
    async with asyncio.timeout(30):
        while True:
            text = (await gateway.client.get("/metrics")).text
            if f"ragcache_gateway_deletes_waiting {count:.1f}" in text:
                return
            await asyncio.sleep(0.05)


async def test_an_unavailable_store_does_not_fail_a_delete(gateway: World) -> None:
    await put(gateway)
    await gateway.servers["cachestore"].stop()
    response = await gateway.client.delete("/v1/documents/a/b.md")
    assert response.status_code == 200
    assert response.json()["removed_variants"] is None
    metrics = (await gateway.client.get("/metrics")).text
    assert 'upstream_failures_total{part="cachestore"} 1.0' in metrics


async def test_a_file_is_written_from_a_form(gateway: World) -> None:
    large = "# Handbook\n\n" + "word " * (3 * MIB // 5)  # more than a parser would keep in memory
    response = await gateway.client.post(
        "/v1/documents",
        files={"file": ("docs/handbook.md", large.encode())},
        data={"collection": "default", "metadata": '{"team": "core"}', "title": ""},
    )
    assert response.status_code == 200
    assert response.json()["id"] == "docs/handbook.md"
    stored = gateway.retriever.documents["docs/handbook.md"]
    assert stored.text == large
    assert dict(stored.metadata) == {"team": "core"}


async def test_a_bad_form_names_the_field(gateway: World) -> None:
    cases: list[tuple[str, bytes, dict[str, str], str]] = [
        ("a.pdf", b"%PDF-1.7", {}, "file"),
        ("a.txt", b"\xff\xfe\x00", {}, "file"),
        ("a.txt", b"a\0b", {}, "file"),
        ("a.txt", b" ", {}, "file"),
        ("a.txt", b"x", {"metadata": "[]"}, "metadata"),
        ("a.txt", b"x", {"metadata": '{"a": 1}'}, "metadata.a"),
        ("a.txt", b"x", {"colection": "x"}, "colection"),
        ("a.txt", b"x", {"content_type": "rtf"}, "content_type"),
        ("a.rtf", b"x", {}, "file"),
    ]
    for name, content, fields, param in cases:
        response = await gateway.client.post(
            "/v1/documents", files={"file": (name, content)}, data=fields
        )
        assert response.status_code == 400
        assert response.json()["error"]["param"] == param
    response = await gateway.client.post("/v1/documents", files={"other": ("a.txt", b"x")})
    assert response.json()["error"]["param"] == "other"


async def test_bad_documents_name_the_field(gateway: World) -> None:
    for change, param in (
        ({"id": ""}, "id"),
        ({"text": " "}, "text"),
        ({"text": "a\0b"}, "text"),
        ({"content_type": "pdf"}, "content_type"),
        ({"metadata": {"a": 1}}, "metadata.a"),
        ({"titel": "x"}, "titel"),
    ):
        response = await put(gateway, **change)
        assert response.status_code == 400
        assert response.json()["error"]["param"] == param


async def test_a_body_that_is_not_json_is_400(gateway: World) -> None:
    for path, body, content_type, param in (
        ("/v1/documents", b"{", "application/json", "body"),
        ("/v1/documents", b"[]", "application/json", "body"),
        ("/v1/documents", b"\xff", "application/json", "body"),
        ("/v1/documents", b"[" * 100_000, "application/json", "body"),
        ("/v1/documents", b"{}", "text/csv", "Content-Type"),
        ("/v1/documents", b"{}", "multipart/form-data", "body"),
        ("/v1/chat/completions", b"{", "application/json", "body"),
        ("/v1/chat/completions", b"", "application/json", "body"),
        ("/v1/chat/completions", b"\xff", "application/json", "body"),
        ("/v1/chat/completions", b"[" * 100_000, "application/json", "body"),
        ("/v1/chat/completions", b"[]", "application/json", "body"),
        ("/v1/chat/completions", b"{}", "application/x-www-form-urlencoded", "body"),
        ("/v1/search", b"{}", "application/json", "query"),
    ):
        response = await gateway.client.post(
            path, content=body, headers={"content-type": content_type}
        )
        assert response.status_code == 400
        assert response.json()["error"]["param"] == param


@pytest.mark.parametrize("announced", [True, False])
@pytest.mark.parametrize("path", ["/v1/documents", "/v1/chat/completions"])
async def test_a_large_body_is_413_and_the_client_gets_the_error(
    gateway: World, announced: bool, path: str
) -> None:
    body = json.dumps({"id": "a", "text": "x" * (50 * MIB)}).encode()

    async def parts() -> AsyncGenerator[bytes, None]:
        for start in range(0, len(body), MIB):
            yield body[start : start + MIB]

    content = body if announced else parts()
    headers = {"content-type": "application/json"}
    response = await gateway.client.post(path, content=content, headers=headers)
    assert response.status_code == 413
    error = response.json()["error"]
    assert (error["param"], error["code"]) == ("body", "too_large")


async def test_all_bodies_together_are_limited(tiny_model: Path) -> None:
    async with world(tiny_model, bodies_max_bytes=MIB) as gateway:
        for _ in range(2):
            assert (await put(gateway, text="x" * MIB)).status_code == 429
        for n in range(4):
            assert (await put(gateway, text=f"{n}" * (MIB // 2))).status_code == 200


async def test_a_body_that_never_ends_times_out(tiny_model: Path) -> None:
    async with world(tiny_model, body_timeout_s=0.1) as gateway:
        url = httpx.URL(gateway.base_url)
        reader, writer = await asyncio.open_connection(url.host, url.port)
        head = "POST /v1/search HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        writer.write(f"{head}Content-Length: 100\r\nConnection: close\r\n\r\n{{".encode())
        answer = await asyncio.wait_for(reader.read(), 10)
        writer.close()
        assert answer.startswith(b"HTTP/1.1 400")
        assert b"did not arrive within 0.1 s" in answer


async def test_collections_are_set_and_read(gateway: World) -> None:
    settings = {"chunking": {"size_tokens": 128, "overlap_tokens": 16}, "window": 2}
    response = await gateway.client.put("/v1/collections/guides", json=settings)
    assert response.status_code == 200
    read = (await gateway.client.get("/v1/collections/guides")).json()
    assert (read["chunking"], read["window"]) == (settings["chunking"], 2)
    listed = (await gateway.client.get("/v1/collections")).json()
    assert [collection["name"] for collection in listed["data"]] == ["default", "guides"]
    response = await gateway.client.get("/v1/collections/none")
    assert response.json()["error"]["code"] == "collection_not_found"
    response = await gateway.client.put("/v1/collections/guides", json={"chunk": {}})
    assert response.json()["error"]["param"] == "chunk"


async def test_search_gives_the_hits_of_the_final_stage(gateway: World) -> None:
    response = await gateway.client.post("/v1/search", json={"query": "billing?", "top_k": 2})
    found = response.json()
    assert [hit["chunk"] for hit in found["data"]] == ["billing.md#1", "search.md#0"]
    assert [chunk["chunk"] for chunk in found["data"][0]["before"]] == ["billing.md#0"]
    assert found["timing_ms"]["stages"] == 2
    response = await gateway.client.post("/v1/search", json={"query": "x", "collection": "none"})
    assert response.status_code == 404
