"""Requests in the shapes that clients of OpenAI's and of vLLM send: answered, or told why not."""

from __future__ import annotations

import json
from typing import Any

import pytest

from ragcache_wire.v1 import retriever_pb2
from tests.kit.gateway import MAX_MODEL_LEN, World, chunk

PICTURE = {"type": "image_url", "image_url": {"url": "data:image/png;base64,aGk="}}
ASK = {"role": "user", "content": "Where does billing run?"}


async def test_instructions_alone_are_answered_without_documents(gateway: World) -> None:
    messages = [{"role": "developer", "content": "Write a title of three words about pumps."}]
    answer = (await gateway.client.post("/v1/chat/completions", json={"messages": messages})).json()
    assert answer["choices"][0]["message"]["content"] == "It runs in eu-north."
    assert answer["ragcache"]["citations"] == []
    assert "no documents were searched" in answer["ragcache"]["warnings"][0]
    assert not gateway.retriever.searches


async def test_instructions_alone_cannot_search(gateway: World) -> None:
    body = {"messages": [{"role": "system", "content": "Be."}], "ragcache": {"retrieve": True}}
    response = await gateway.client.post("/v1/chat/completions", json=body)
    assert response.status_code == 400
    assert response.json()["error"]["param"] == "messages[0].content"


async def test_a_picture_is_left_out_of_chats_and_responses_with_a_warning(gateway: World) -> None:
    parts = [{"type": "text", "text": ASK["content"]}, PICTURE]
    chat = {"messages": [{"role": "user", "content": parts}]}
    inputs = [
        {"type": "input_text", "text": ASK["content"]},
        {"type": "input_image", "file_id": ""},
    ]
    response = {"input": [{"role": "user", "content": inputs}]}
    for path, body in (("/v1/chat/completions", chat), ("/v1/responses", response)):
        answer = (await gateway.client.post(path, json=body)).json()
        assert answer["ragcache"]["warnings"][0].startswith("messages: 1 image left out")
        assert answer["ragcache"]["citations"]
    sent = [request["messages"][-1]["content"] for request in gateway.engine.requests]
    assert sent == [ASK["content"]] * 2
    first, second = (request["prompt"] for request in gateway.engine.requests)
    assert first == second


async def test_a_question_of_pictures_alone_is_refused(gateway: World) -> None:
    body = {"messages": [{"role": "user", "content": [PICTURE]}]}
    error = (await gateway.client.post("/v1/chat/completions", json=body)).json()["error"]
    assert error["param"] == "messages[0].content"
    assert "send a question" in error["message"]


@pytest.mark.parametrize(
    "fields",
    [
        {"prediction": {"type": "content", "content": "It runs"}},
        {"stream": True, "stream_options": {"include_usage": False}},
        {"reasoning_effort": "low", "verbosity": "low", "service_tier": "auto"},
        {"metadata": {"a": "b"}, "store": True, "user": "u", "safety_identifier": "s"},
        {"messages": [{**ASK, "name": "ann"}]},
        {"messages": [{"role": "user", "content": [{**PICTURE, "cache_control": {}}, "Where?"]}]},
        {"messages": [{"role": "assistant", "content": None, "audio": {"id": "a"}}, ASK]},
    ],
)
async def test_other_fields_of_clients_are_answered(gateway: World, fields: dict[str, Any]) -> None:
    body = {"messages": [ASK], **fields}
    assert (await gateway.client.post("/v1/chat/completions", json=body)).status_code == 200


async def test_a_response_takes_refusals_thoughts_and_empty_results(gateway: World) -> None:
    items = [
        {"role": "user", "content": "Where?"},
        {"type": "reasoning", "summary": []},
        {"role": "assistant", "content": [{"type": "refusal", "refusal": "I cannot say."}]},
        {"type": "function_call", "call_id": "1", "name": "look", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "1", "output": []},
        {"type": "function_call", "call_id": "2", "name": "look", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "2", "output": None},
    ]
    body = {"input": items, "include": ["reasoning.encrypted_content"], "store": False}
    assert (await gateway.client.post("/v1/responses", json=body)).status_code == 200
    sent = gateway.engine.requests[0]["messages"]
    assert [one["content"] for one in sent] == ["Where?", "I cannot say.", None, "", None, ""]


@pytest.mark.parametrize("limit", [MAX_MODEL_LEN - 100, 10 * MAX_MODEL_LEN])
async def test_a_large_limit_of_the_answer_leaves_the_passages_and_is_lowered(
    gateway: World, limit: int
) -> None:
    gateway.retriever.hits = [
        retriever_pb2.Hit(chunk=chunk(f"{n}.md", 0, "a " * 100), score=0.9) for n in range(4)
    ]
    body = {"messages": [ASK], "max_completion_tokens": limit}
    answer = (await gateway.client.post("/v1/chat/completions", json=body)).json()
    assert len(answer["ragcache"]["citations"]) == 4
    (sent,) = gateway.engine.requests
    left = MAX_MODEL_LEN - len(sent["prompt"])
    assert sent["max_completion_tokens"] == left
    (warning,) = answer["ragcache"]["warnings"]
    assert warning.startswith(f"max_tokens: lowered from {limit} to {left}")


async def test_a_stream_says_in_its_first_event_what_was_left_out(gateway: World) -> None:
    gateway.retriever.hits = [
        retriever_pb2.Hit(chunk=chunk(f"{n}.md", 0, "a " * 300), score=0.9) for n in range(3)
    ]
    body = {"messages": [ASK], "max_tokens": 50_000, "stream": True}
    text = (await gateway.client.post("/v1/chat/completions", json=body)).text
    first = json.loads(text.split("\n")[0].removeprefix("data: "))
    left_out, lowered = first["ragcache"]["warnings"]
    assert left_out.startswith(f"passages: {3 - len(first['ragcache']['citations'])} of 3 left out")
    assert lowered.startswith("max_tokens: lowered from 50000")
