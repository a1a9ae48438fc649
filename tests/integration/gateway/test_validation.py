"""A wrong value is answered with 400, which names the field, and reaches no other component."""

from __future__ import annotations

from typing import Any, Final

from tests.kit.gateway import World

CHAT, COMPLETIONS, RESPONSES = "/v1/chat/completions", "/v1/completions", "/v1/responses"
EVENTS: Final = {"ragcache": {"events": True}}
QUESTION: Final = {"messages": [{"role": "user", "content": "Where?"}]}
JSON: Final = "application/json"

BODIES: Final[list[tuple[str, dict[str, Any], str]]] = [
    *(
        ("/v1/documents", {"id": "a", "text": "Text.", **change}, param)
        for change, param in (
            ({"id": ""}, "id"),
            ({"text": " "}, "text"),
            ({"text": "a\0b"}, "text"),
            ({"content_type": "pdf"}, "content_type"),
            ({"metadata": {"a": {"b": 1}}}, "metadata.a"),
            ({"titel": "x"}, "titel"),
        )
    ),
    *(
        ("/v1/search", {"query": "x", **change}, param)
        for change, param in (
            ({"filter": {"must": [{"key": "a"}]}}, "filter.must[0]"),
            ({"filter": {"and": []}}, "filter.and"),
            ({"mode": "fast"}, "mode"),
            ({"diversity": 2}, "diversity"),
            ({"recall": 0}, "recall"),
            ({"filter": {"must": [{"key": "a", "match": {"any": ["x"] * 300}}]}}, "filter"),
        )
    ),
    ("/v1/rerank", {"query": "a", "documents": ["b", 3]}, "documents[1]"),
    ("/v1/rerank", {"query": "a", "documents": [{"text": ""}]}, "documents[0].text"),
    ("/v1/rerank", {"query": "a\0", "documents": ["b"]}, "query"),
    ("/v1/embeddings", {"input": 3}, "input"),
    ("/v1/embeddings", {"input": ["a", ""]}, "input[1]"),
    (CHAT, {**QUESTION, **EVENTS, "stream": False}, "ragcache.events"),
    (COMPLETIONS, {"prompt": "Where?", **EVENTS}, "ragcache.events"),
    (RESPONSES, {"input": "Where?", "stream": True, **EVENTS}, "ragcache.events"),
    *(
        (RESPONSES, {"input": "Where?", **change}, param)
        for change, param in (
            ({"previous_response_id": "resp_1"}, "previous_response_id"),
            ({"store": True}, "store"),
            ({"tools": [{"type": "web_search"}]}, "tools[0].type"),
            ({"input": [{"type": "item_reference", "id": "1"}]}, "input[0].type"),
            (
                {"input": [{"role": "user", "content": [{"type": "input_scent"}]}]},
                "input[0].content[0].type",
            ),
        )
    ),
    (CHAT, {"messages": [{"role": "user", "content": " "}]}, "messages[0].content"),
    (CHAT, {"messages": [{"role": "user", "content": "word " * 5000}]}, "messages"),
    (CHAT, {**QUESTION, "ragcache": {"top_k": 10_000}}, "ragcache.top_k"),
    (CHAT, {**QUESTION, "functions": [{"name": "look"}]}, "functions"),
    (CHAT, {**QUESTION, "echo": True}, "echo"),
    (CHAT, {"messages": [{"role": "user", "content": "word " * 900}]}, "messages"),
    (RESPONSES, {"input": " "}, "input"),
    (
        CHAT,
        {**QUESTION, "ragcache": {"filter": {"must": [{"key": "a"}]}}},
        "ragcache.filter.must[0]",
    ),
]

COLLECTIONS: Final[list[tuple[dict[str, Any], str]]] = [
    ({"index": "tree"}, "index"),
    ({"max_documents": -1}, "max_documents"),
    ({"max_text_bytes": 2**63}, "max_text_bytes"),
    ({"lexical_weight": 1.1}, "lexical_weight"),
    ({"lexical_weight": -0.1}, "lexical_weight"),
    ({"lexical_weight": "0.5"}, "lexical_weight"),
    ({"labels": "no"}, "labels"),
    ({"window": 2**32}, "window"),
    ({"window": 1.5}, "window"),
    ({"chunking": {"size_tokens": 2**32}}, "chunking.size_tokens"),
    ({"chunking": {"size_tokens": 8, "overlap_tokens": 2**32}}, "chunking.overlap_tokens"),
    ({"quota": 1}, "quota"),
]

CONTENTS: Final[list[tuple[str, bytes, str, str]]] = [
    *(
        (path, content, JSON, "body")
        for path in ("/v1/documents", CHAT)
        for content in (b"{", b"[]", b"\xff", b"[" * 200)
    ),
    ("/v1/documents", b"{}", "text/csv", "Content-Type"),
    ("/v1/documents", b"{}", "multipart/form-data", "body"),
    (CHAT, b"", JSON, "body"),
    (CHAT, b"{}", "application/x-www-form-urlencoded", "body"),
    ("/v1/search", b"{}", JSON, "query"),
]

QUERIES: Final[list[tuple[str, str]]] = [
    *((f"/v1/cache/tree?limit={limit}", "limit") for limit in ("0", "501", "-1", "many")),
    ("/v1/documents?limit=many", "limit"),
    ("/v1/documents?colection=a", "colection"),
    ("/v1/collections?limit=1", "limit"),
    ("/v1/models?kind=chat&page=2", "page"),
    ("/v1/models?kind=speech", "kind"),
    ("/healthz?verbose", "verbose"),
]


async def test_a_wrong_value_is_named_with_a_fix_and_goes_nowhere(gateway: World) -> None:
    client = gateway.client
    replies = [(await client.post(path, json=body), param) for path, body, param in BODIES]
    replies += [(await client.put("/v1/collections/a", json=one), p) for one, p in COLLECTIONS]
    replies += [(await client.get(path), param) for path, param in QUERIES]
    for path, content, kind, param in CONTENTS:
        headers = {"content-type": kind}
        replies.append((await client.post(path, content=content, headers=headers), param))
    for reply, param in replies:
        assert reply.status_code == 400, (reply.request.url, param, reply.text)
        error = reply.json()["error"]
        assert (error["param"], error["type"]) == (param, "invalid_request_error"), reply.text
        assert ";" in error["message"], "a problem and its fix"
    assert gateway.engine.requests == []
    assert gateway.retriever.documents == {}
    assert "a" not in gateway.retriever.collections
