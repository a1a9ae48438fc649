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
from tests.kit.gateway import World, world
from tests.kit.pdf_file import SCAN, PdfPage, lines, pdf_file

MIB = 1 << 20


async def put(gateway: World, **fields: Any) -> httpx.Response:
    body = {"id": "a/b.md", "text": "# A\n\nText.", **fields}
    return await gateway.client.post("/v1/documents", json=body)


async def test_a_document_can_be_written_read_listed_and_deleted(gateway: World) -> None:
    metadata = {"team": "core", "year": 2024, "draft": False, "tags": ["a", 1.5]}
    response = await put(gateway, metadata=metadata | {"owner": None})
    assert response.status_code == 200
    written = response.json()
    assert written["changed"] is True
    assert (written["content_type"], written["chunks"]) == ("markdown", 1)
    assert written["metadata"] == metadata

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


async def test_a_query_names_the_collection_of_documents_that_name_none(gateway: World) -> None:
    for name in ("a", "b"):
        await gateway.client.put(f"/v1/collections/{name}", json={})
    path = "/v1/documents?collection=a"
    for fields, collection in (({}, "a"), ({"collection": "b"}, "b")):
        body = {"id": "x.md", "text": "Text.", **fields}
        written = (await gateway.client.post(path, json=body)).json()
        assert written["collection"] == collection
        form = {"file": ("x.md", b"Text.")}
        written = (await gateway.client.post(path, files=form, data=fields)).json()
        assert written["collection"] == collection
    unknown = await gateway.client.post("/v1/documents?colection=a", json=body)
    assert unknown.status_code == 400
    assert unknown.json()["error"]["message"] == (
        "colection: is no query parameter of /v1/documents; send collection"
    )


async def test_a_parameter_of_azures_clients_is_ignored(gateway: World) -> None:
    assert (await gateway.client.get("/v1/models?api-version=2026-01-01")).status_code == 200


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
    assert json.loads(stored.metadata) == {"team": "core"}


async def test_what_was_not_read_is_in_the_answer_and_in_the_metadata(gateway: World) -> None:
    content = pdf_file([PdfPage(lines("Page one.")), PdfPage(SCAN)])
    form: dict[str, Any] = {"files": {"file": ("a.pdf", content)}, "data": {"metadata": "{}"}}
    for changed in (True, False):
        written = (await gateway.client.post("/v1/documents", **form)).json()
        assert written["changed"] is changed
        (warning,) = written["warnings"]
        assert "page 2 (images)" in warning
        assert written["metadata"] == {"ragcache-warnings": warning}
    assert (await put(gateway)).json()["warnings"] == []


async def test_the_encoding_of_a_file_is_named_marked_or_assumed(gateway: World) -> None:
    text = "Das Gerät ist groß und läuft über Nacht für alle Räume."

    async def sent(used: str, **fields: str) -> dict[str, Any]:
        file = {"file": ("a.txt", text.encode(used))}
        reply = await gateway.client.post("/v1/documents", files=file, data=fields)
        assert reply.status_code == 200, reply.text
        assert gateway.retriever.documents["a.txt"].text == text
        return dict(reply.json())

    assert (await sent("utf-16"))["warnings"] == []
    assert (await sent("utf-8-sig"))["warnings"] == []
    assert (await sent("cp850", encoding="cp850"))["warnings"] == []
    assert "taken to be cp1252" in (await sent("cp1252"))["warnings"][0]


async def test_replacement_characters_are_reported(gateway: World) -> None:
    written = (await put(gateway, text="K\ufffdse")).json()
    assert "1 replacement characters" in written["warnings"][0]


async def test_a_bad_form_names_the_field(gateway: World) -> None:
    cases: list[tuple[str, bytes, dict[str, str], str]] = [
        ("a.pdf", b"%PDF-1.7", {}, "file"),
        ("a.txt", b"\xff\xfe\x00", {}, "file"),
        ("a.txt", b"a\0b", {}, "file"),
        ("a.txt", b" ", {}, "file"),
        ("a.txt", b"x", {"metadata": "[]"}, "metadata"),
        ("a.txt", b"x", {"metadata": '{"a": {"b": 1}}'}, "metadata.a"),
        ("a.txt", b"x", {"colection": "x"}, "colection"),
        ("a.txt", b"x", {"content_type": "rtf"}, "content_type"),
        ("a.rtf", b"x", {}, "file"),
        ("a.txt", b"x", {"encoding": "base64"}, "encoding"),
        ("a.txt", b"\xff", {"encoding": "ascii"}, "file"),
        ("a.pdf", b"x", {"encoding": "ascii"}, "encoding"),
    ]
    for name, content, fields, param in cases:
        response = await gateway.client.post(
            "/v1/documents", files={"file": (name, content)}, data=fields
        )
        assert response.status_code == 400
        assert response.json()["error"]["param"] == param
    response = await gateway.client.post("/v1/documents", files={"other": ("a.txt", b"x")})
    assert response.json()["error"]["param"] == "other"


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
        answer = await asyncio.wait_for(reader.read(), 60)
        writer.close()
        assert answer.startswith(b"HTTP/1.1 408")
        assert b"did not arrive within 0.1 s" in answer
