"""Answers with markers after the sentences that a chunk supports."""

from __future__ import annotations

import json
from typing import Any

import openai
import pytest

from ragcache_wire.v1 import retriever_pb2
from tests.kit.gateway import MODEL, World, chunk

PUMPS = "The pump P-12 costs 36 euros. It was made in Oslo."
BILLING = "Billing runs in eu-north."
WORDS = ["Billing runs", " in eu-north. P-12 ", "costs 36 euros", ". I hope so", "."]
WANTED = "Billing runs in eu-north. [2] P-12 costs 36 euros. [1] I hope so."
ASK: list[Any] = [{"role": "user", "content": "Where does billing run, and what is P-12?"}]
INLINE: dict[str, Any] = {"ragcache": {"cite": "inline"}}


@pytest.fixture(autouse=True)
def found(gateway: World) -> None:
    gateway.retriever.hits = [
        retriever_pb2.Hit(chunk=chunk("pumps.md", 0, PUMPS), score=0.9),
        retriever_pb2.Hit(chunk=chunk("https://example.com/b", 0, BILLING), score=0.5),
    ]
    gateway.engine.words = WORDS


def check(text: str, ragcache: dict[str, Any]) -> None:
    assert text == WANTED
    cited = ragcache["inline_citations"]
    assert [one["marker"] for one in cited] == ["[2]", "[1]"]
    assert [one["quote"] for one in cited] == [BILLING, "The pump P-12 costs 36 euros."]
    for one in cited:
        number = int(one["marker"].strip("[]"))
        assert ragcache["citations"][number - 1]["chunk"] == one["chunk"]
        assert text[one["end"] :].startswith(f" {one['marker']}")
        source = PUMPS if one["chunk"] == "pumps.md#0" else BILLING
        assert source[one["quote_start"] : one["quote_end"]] == one["quote"]
    sentences = [text[one["start"] : one["end"]] for one in cited]
    assert sentences == ["Billing runs in eu-north.", "P-12 costs 36 euros."]


async def test_a_whole_answer_has_markers_and_annotations_of_urls(gateway: World) -> None:
    body = {"messages": ASK, **INLINE}
    answer = (await gateway.client.post("/v1/chat/completions", json=body)).json()
    message = answer["choices"][0]["message"]
    check(message["content"], answer["ragcache"])
    (annotation,) = message["annotations"]
    url = annotation["url_citation"]
    assert (annotation["type"], url["url"]) == ("url_citation", "https://example.com/b")
    assert message["content"][url["start_index"] : url["end_index"]] == "[2]"


@pytest.mark.parametrize("count", [1, 2])
async def test_a_stream_has_markers_in_its_text(gateway: World, count: int) -> None:
    body = {"messages": ASK, "stream": True, "n": count, **INLINE}
    text = (await gateway.client.post("/v1/chat/completions", json=body)).text
    events = [json.loads(one[6:]) for one in text.split("\n\n") if one.startswith("data: {")]
    for choice in range(count):
        parts = [
            one["delta"].get("content") or ""
            for event in events
            for one in event["choices"]
            if one["index"] == choice
        ]
        first, last = events[0]["ragcache"], events[-1]["ragcache"]
        own = [one for one in last["inline_citations"] if one["choice"] == choice]
        check("".join(parts), {**first, "inline_citations": own})


async def test_a_response_has_annotations(gateway: World) -> None:
    async with openai.AsyncOpenAI(base_url=f"{gateway.base_url}/v1", api_key="none") as client:
        whole = await client.responses.create(model=MODEL, input=ASK, extra_body=INLINE)
        check(whole.output_text, whole.to_dict()["ragcache"])  # type: ignore[arg-type]
        async with client.responses.stream(model=MODEL, input=ASK, extra_body=INLINE) as stream:
            kinds = [event.type async for event in stream]
            streamed = await stream.get_final_response()
    check(streamed.output_text, streamed.to_dict()["ragcache"])  # type: ignore[arg-type]
    assert kinds.count("response.output_text.annotation.added") == 2
    for response in (whole, streamed):
        message: Any = response.output[0].to_dict()
        url, file = message["content"][0]["annotations"]
        assert (url["type"], file["type"]) == ("url_citation", "file_citation")
        assert response.output_text[url["start_index"] : url["end_index"]] == "[2]"
        assert (file["file_id"], file["filename"]) == ("pumps.md", "Title of pumps.md")


async def test_a_neighbour_of_a_hit_can_be_cited(gateway: World) -> None:
    hit = retriever_pb2.Hit(
        chunk=chunk("pumps.md", 1, "More."), score=0.9, before=[chunk("pumps.md", 0, PUMPS)]
    )
    gateway.retriever.hits = [hit]
    gateway.engine.words = ["36 euros."]
    answer = (await gateway.ask(**INLINE)).json()
    assert answer["choices"][0]["message"]["content"] == "36 euros. [2]"
    scores = [one["score"] for one in answer["ragcache"]["citations"]]
    assert scores == [0.9, None]
    assert len((await gateway.ask()).json()["ragcache"]["citations"]) == 1


async def test_without_support_there_is_no_marker(gateway: World) -> None:
    gateway.engine.words = ["The documents do not say where ", "the moon is."]
    answer = (await gateway.ask(**INLINE)).json()
    assert answer["choices"][0]["message"]["content"] == "".join(gateway.engine.words)
    assert answer["ragcache"]["inline_citations"] == []
    assert (await gateway.ask()).json()["ragcache"]["inline_citations"] is None


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/completions", {"prompt": "Where?"}),
        (
            "/v1/chat/completions",
            {"messages": ASK, "response_format": {"type": "json_object"}},
        ),
        ("/v1/responses", {"input": ASK, "text": {"format": {"type": "json_object"}}}),
    ],
)
async def test_answers_that_are_no_texts_of_a_chat_have_no_markers(
    gateway: World, path: str, body: dict[str, Any]
) -> None:
    response = await gateway.client.post(path, json={**body, **INLINE})
    assert response.status_code == 400
    assert response.json()["error"]["param"] == "ragcache.cite"
