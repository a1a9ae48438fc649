"""Documents that are accepted at once and written later."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import httpx
import pytest

from ragcache_core.errors import TooLarge
from ragcache_gateway.http.operation_schema import LATER_CHARS
from ragcache_gateway.http.prefer import prefers_async
from ragcache_wire.v1 import retriever_pb2 as pb
from tests.kit.gateway import bearer, data_of, world, write_keys

ASYNC = {"Prefer": "respond-async"}
DOCUMENT = {"id": "a.md", "text": "# Pager\n\nIt is on the desk."}
ENTRIES = {
    "red": 'scopes = ["write"]\ntenant = "red"',
    "red-too": 'scopes = ["write"]\ntenant = "red"',
    "red-other": 'scopes = ["write"]\ntenant = "red"\ncollections = ["other"]',
    "blue": 'scopes = ["write"]\ntenant = "blue"',
    "reader": 'scopes = ["ask"]\ntenant = "red"',
}


async def test_a_document_is_accepted_and_its_operation_is_at_the_location(
    tiny_model: Path,
) -> None:
    async with world(tiny_model) as gateway:
        sent = await gateway.client.post("/v1/documents", json=DOCUMENT, headers=ASYNC)
        assert sent.status_code == 202, sent.text
        operation = sent.json()
        assert operation["state"] == "pending"
        assert (operation["collection"], operation["document_id"]) == ("default", "a.md")
        assert sent.headers["Location"] == f"/v1/operations/{operation['id']}"
        assert sent.headers["Preference-Applied"] == "respond-async"
        assert int(sent.headers["Retry-After"]) > 0
        assert [one.id for one in gateway.retriever.submitted] == ["a.md"]
        assert not gateway.retriever.documents
        # The same content is the same operation.
        again = await gateway.client.post("/v1/documents", json=DOCUMENT, headers=ASYNC)
        assert again.json()["id"] == operation["id"]
        found = await gateway.client.get(sent.headers["Location"])
        assert found.status_code == 200
        assert found.json()["state"] == "pending"
        assert "Retry-After" in found.headers


def failed(fields: dict[str, Any]) -> pb.Operation:
    return pb.Operation(state=pb.OPERATION_STATE_FAILED, error=json.dumps(fields))


@pytest.mark.parametrize(
    ("change", "wanted"),
    [
        (
            pb.Operation(state=pb.OPERATION_STATE_DONE, changed=True, num_chunks=3),
            {"state": "done", "changed": True, "chunks": 3, "error": None},
        ),
        (
            pb.Operation(state=pb.OPERATION_STATE_CANCELLED),
            {"state": "cancelled", "changed": None, "chunks": None},
        ),
        (
            failed(
                {"type": "too_large", "field": "document.text", "problem": "is long", "fix": "cut"}
            ),
            {
                "state": "failed",
                "error": {
                    "message": "text: is long; cut",
                    "type": "invalid_request_error",
                    "param": "text",
                    "code": "too_large",
                },
            },
        ),
        (
            failed({"type": "internal", "message": "a defect"}),
            {
                "state": "failed",
                "error": {
                    "message": "a defect",
                    "type": "server_error",
                    "param": None,
                    "code": "internal",
                },
            },
        ),
    ],
    ids=["done", "cancelled", "too large", "internal"],
)
async def test_an_operation_says_how_it_ended(
    tiny_model: Path, change: pb.Operation, wanted: dict[str, Any]
) -> None:
    async with world(tiny_model) as gateway:
        sent = await gateway.client.post("/v1/documents", json=DOCUMENT, headers=ASYNC)
        (operation,) = gateway.retriever.operations.values()
        operation.MergeFrom(change)
        found = await gateway.client.get(sent.headers["Location"])
        assert found.json().items() >= wanted.items()
        assert "Retry-After" not in found.headers


async def test_only_the_own_tenant_and_collections_see_an_operation(
    tiny_model: Path, tmp_path: Path
) -> None:
    keys = write_keys(tmp_path / "keys.toml", ENTRIES)
    async with world(tiny_model, api_keys_file=keys) as gateway:

        async def get(path: str, name: str) -> httpx.Response:
            return await gateway.client.get(path, headers=bearer(name))

        sent = await gateway.client.post(
            "/v1/documents", json=DOCUMENT, headers=ASYNC | bearer("red")
        )
        path = sent.headers["Location"]
        statuses = {name: (await get(path, name)).status_code for name in ENTRIES}
        assert statuses == {
            "red": 200,
            "red-too": 200,
            "red-other": 403,
            "blue": 404,
            "reader": 403,
        }
        unknown = await get("/v1/operations/no", "blue")
        theirs = (await get(path, "blue")).text
        assert unknown.text.replace("no", "X", 1) == theirs.replace(sent.json()["id"], "X", 1)
        assert "send the document again" in theirs


async def test_long_documents_of_a_batch_are_submitted_if_the_client_prefers_it(
    tiny_model: Path,
) -> None:
    documents = [{"id": "short", "text": "x"}, {"id": "long", "text": "word " * LATER_CHARS}]
    lines = "\n".join(map(json.dumps, documents))
    headers = {"Content-Type": "application/jsonl"}
    async with world(tiny_model) as gateway:
        for prefer, wanted in ((ASYNC, "submitted"), ({}, "done")):
            sent = await gateway.client.post(
                "/v1/documents:batch", content=lines, headers=headers | prefer
            )
            *events, summary = data_of(sent.text)[:-1]
            states = {one["id"]: one for one in events if one["state"] != "accepted"}
            assert states["short"]["state"] == "done"
            assert states["long"]["state"] == wanted
            assert summary["submitted"] == (wanted == "submitted")
            if wanted == "submitted":
                path = f"/v1/operations/{states['long']['operation']}"
                assert (await gateway.client.get(path)).json()["document_id"] == "long"


async def test_a_document_that_cannot_be_embedded_in_time_is_413_with_its_fix(
    tiny_model: Path,
) -> None:
    async with world(tiny_model) as gateway:

        async def refuse(document: Any) -> Any:
            fix = "send it with `Prefer: respond-async`, or divide the document"
            raise TooLarge("document.text", "of document 'a.md' takes too long", fix)

        gateway.retriever._upsert = refuse  # type: ignore[method-assign]
        answer = await gateway.client.post("/v1/documents", json=DOCUMENT)
        assert answer.status_code == 413, answer.text
        error = answer.json()["error"]
        assert (error["param"], error["code"]) == ("text", "too_large")
        assert "respond-async" in error["message"]


@pytest.mark.parametrize(
    ("header", "wanted"),
    [
        (None, False),
        ("", False),
        ("respond-async", True),
        ("Respond-Async", True),
        ("wait=10, respond-async", True),
        ("respond-async; x=1", True),
        ("return=minimal", False),
        ("respond-asynchronously", False),
    ],
)
def test_the_preference_is_one_of_a_list(header: str | None, *, wanted: bool) -> None:
    assert prefers_async(header) is wanted
