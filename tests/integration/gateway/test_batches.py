"""Batches of documents through real sockets: events, failures, bounds and disconnects."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

import httpx

from ragcache_gateway.http.batch import CONCURRENCY
from tests.kit.gateway import World
from tests.kit.pdf_file import SCAN, PdfPage, lines, pdf_file
from tests.kit.sources import HTML, pdf
from tests.kit.wait import until

JSON_LINES = {"Content-Type": "application/jsonl"}
PATH = "/v1/documents:batch"


def line(name: str, text: str = "Some text.", **fields: Any) -> bytes:
    return json.dumps({"id": name, "text": text, **fields}).encode() + b"\n"


def events_of(response: httpx.Response) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """Return the events of the documents, and the summary."""
    assert response.status_code == 200, response.text
    assert response.headers["content-type"].startswith("text/event-stream")
    data = [one.removeprefix("data: ") for one in response.text.split("\n\n") if one]
    assert data[-1] == "[DONE]"
    *documents, summary = map(json.loads, data[:-1])
    return documents, summary


def ends(documents: list[dict[str, Any]]) -> dict[str, str]:
    return {one["id"]: one["state"] for one in documents if one["state"] != "accepted"}


async def test_each_document_of_a_form_has_events(gateway: World) -> None:
    files = [
        ("file", ("a.md", b"# A\n\nText.")),
        ("file", ("docs/b.html", HTML)),
        ("file", ("c.pdf", pdf(["Page one."], title="C"))),
        ("file", ("d.pdf", pdf(["x"], encrypted=True))),
        ("file", ("more.jsonl", line("e") + line("f", " "))),
    ]
    documents, summary = events_of(await gateway.client.post(PATH, files=files))
    assert ends(documents) == {
        "a.md": "done",
        "docs/b.html": "done",
        "c.pdf": "done",
        "d.pdf": "failed",
        "e": "done",
        "f": "failed",
    }
    assert [one["index"] for one in documents if one["state"] == "accepted"] == [0, 1, 2, 3, 4, 5]
    (failed,) = [one for one in documents if one["id"] == "d.pdf" and one["state"] == "failed"]
    assert failed["error"]["param"] == "file"
    assert "encrypted" in failed["error"]["message"]
    assert summary == {
        "object": "batch.summary",
        "documents": 6,
        "written": 4,
        "unchanged": 0,
        "failed": 2,
        "submitted": 0,
        "chunks": 4,
    }
    stored = gateway.retriever.documents
    assert stored["docs/b.html"].text.startswith("# Billing")
    assert (stored["c.pdf"].text, stored["c.pdf"].title) == ("Page one.", "C")


async def test_what_was_not_read_is_in_the_event(gateway: World) -> None:
    content = pdf_file([PdfPage(lines("Page one.")), PdfPage(SCAN)])
    files = [("file", ("a.pdf", content)), ("file", ("b.txt", b"\xef\xbb\xbfText."))]
    documents, _ = events_of(await gateway.client.post(PATH, files=files))
    done = {one["id"]: one for one in documents if one["state"] == "done"}
    assert "page 2 (images)" in done["a.pdf"]["warnings"][0]
    assert "warnings" not in done["b.txt"]


async def test_a_repeated_batch_changes_nothing(gateway: World) -> None:
    body = b"".join(line(f"d{i}") for i in range(30))
    _, first = events_of(await gateway.client.post(PATH, content=body, headers=JSON_LINES))
    assert (first["written"], first["unchanged"]) == (30, 0)
    documents, second = events_of(await gateway.client.post(PATH, content=body, headers=JSON_LINES))
    assert (second["written"], second["unchanged"], second["chunks"]) == (0, 30, 0)
    assert {one["changed"] for one in documents if one["state"] == "done"} == {False}


async def test_the_last_of_two_documents_with_one_id_stays(gateway: World) -> None:
    body = b"".join(line("same", f"text {i}") for i in range(20))
    _, summary = events_of(await gateway.client.post(PATH, content=body, headers=JSON_LINES))
    assert summary["written"] == 20
    assert gateway.retriever.documents["same"].text == "text 19"


async def test_few_documents_of_a_long_batch_are_in_work_at_once(gateway: World) -> None:
    gateway.retriever.hold_upserts = asyncio.Event()
    sent = 0

    async def body() -> AsyncIterator[bytes]:
        nonlocal sent
        for i in range(400):
            sent += 1
            yield line(f"d{i}", "word " * 20_000)  # 40 MB: more than sockets take
        await asyncio.sleep(0)

    posting = asyncio.create_task(gateway.client.post(PATH, content=body(), headers=JSON_LINES))
    await until(lambda: gateway.retriever.upserts == CONCURRENCY)
    before = -1
    while sent != before:  # until the gateway reads no further
        before = sent
        await asyncio.sleep(0.3)
    assert sent < 300
    gateway.retriever.hold_upserts.set()
    _, summary = events_of(await posting)
    assert summary["written"] == 400
    assert gateway.retriever.most_upserts <= CONCURRENCY


async def test_a_client_that_disconnects_stops_its_batch(gateway: World) -> None:
    gateway.retriever.hold_upserts = asyncio.Event()
    body = b"".join(line(f"d{i}") for i in range(40))
    async with gateway.client.stream("POST", PATH, content=body, headers=JSON_LINES) as response:
        assert response.status_code == 200
        await until(lambda: gateway.retriever.upserts == CONCURRENCY)
    await until(lambda: not gateway.retriever.upserts)
    gateway.retriever.hold_upserts.set()
    metrics = (await gateway.client.get("/metrics")).text
    assert 'ragcache_gateway_requests_in_flight{pool="batch"} 0.0' in metrics
    assert gateway.retriever.documents == {}


async def test_what_is_wrong_with_the_body_ends_the_batch_with_a_summary(gateway: World) -> None:
    body = b'--X\r\nContent-Disposition: form-data; name="file"; filename="a.txt"\r\n\r\ntext'
    headers = {"Content-Type": "multipart/form-data; boundary=X"}
    whole = body + b"\r\n--X\r\nContent-Disp"
    documents, summary = events_of(await gateway.client.post(PATH, content=whole, headers=headers))
    assert ends(documents) == {"a.txt": "done"}
    assert summary["error"]["param"] == "body"
    assert (summary["documents"], summary["written"]) == (1, 1)


async def test_a_batch_is_refused_before_it_begins(gateway: World) -> None:
    response = await gateway.client.post(PATH, content=line("a"))
    assert (response.status_code, response.json()["error"]["param"]) == (400, "Content-Type")
    response = await gateway.client.post(
        f"{PATH}?collection=none", content=line("a"), headers=JSON_LINES
    )
    assert response.status_code == 404
    assert response.json()["error"]["code"] == "collection_not_found"


async def test_a_large_document_fails_alone(gateway: World) -> None:
    large = line("large", "x" * (9 << 20))
    documents, summary = events_of(
        await gateway.client.post(PATH, content=large + line("b"), headers=JSON_LINES)
    )
    assert ends(documents) == {"": "failed", "b": "done"}
    assert documents[0]["error"]["code"] == "too_large"
    assert (summary["failed"], summary["written"]) == (1, 1)


async def test_an_unavailable_retriever_fails_documents_with_its_error(gateway: World) -> None:
    async def body() -> AsyncIterator[bytes]:
        yield line("a")
        await until(lambda: bool(gateway.retriever.documents))
        await gateway.servers["retriever"].stop()
        yield line("b")

    documents, summary = events_of(
        await gateway.client.post(PATH, content=body(), headers=JSON_LINES)
    )
    assert ends(documents) == {"a": "done", "b": "failed"}
    [failed] = [one for one in documents if one["state"] == "failed"]
    assert failed["error"]["type"] == "service_unavailable_error"
    assert summary["failed"] == 1
