"""Streamed and whole responses of the same answer."""

from __future__ import annotations

from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from ragcache_gateway.responses.request_schema import ResponseRequest
from ragcache_gateway.responses.response_events import ResponseEvents, failure_event
from ragcache_gateway.responses.response_object import head_of, response_of

HEAD = {"id": "chatcmpl-1", "created": 5, "model": "m"}
REQUEST = ResponseRequest(input="Where?")

texts = st.lists(st.text(min_size=1, max_size=4), max_size=3)
calls = st.lists(st.tuples(st.sampled_from(["look", "find"]), texts), max_size=3)


def chunk(delta: dict[str, Any], reason: str | None = None) -> dict[str, Any]:
    return {**HEAD, "choices": [{"index": 0, "delta": delta, "finish_reason": reason}]}


@given(reasoning=texts, content=texts, called=calls, reason=st.sampled_from(["stop", "length"]))
def test_a_stream_ends_with_the_response_of_the_whole_answer(
    reasoning: list[str], content: list[str], called: list[tuple[str, list[str]]], reason: str
) -> None:
    chunks = [chunk({"role": "assistant", "content": ""})]
    chunks += [chunk({"reasoning": text}) for text in reasoning]
    chunks += [chunk({"content": text}) for text in content]
    whole_calls = []
    for i, (name, parts) in enumerate(called):
        first = {"index": i, "id": f"c{i}", "function": {"name": name}}
        chunks.append(chunk({"tool_calls": [first]}))
        for part in parts:
            more = {"index": i, "function": {"arguments": part}}
            chunks.append(chunk({"tool_calls": [more]}))
        function = {"name": name, "arguments": "".join(parts)}
        whole_calls.append({"id": f"c{i}", "type": "function", "function": function})
    chunks.append(chunk({}, reason))
    stream = ResponseEvents(head_of(REQUEST, chunks[0]))
    events = stream.begin()
    for one in chunks:
        events += stream.add(one)
    events += stream.end(None, {})

    message = {
        "content": "".join(content),
        "reasoning": "".join(reasoning),
        "tool_calls": whole_calls,
    }
    completion = {
        **HEAD,
        "choices": [{"message": message, "finish_reason": reason}],
        "ragcache": {},
    }
    whole = response_of(REQUEST, completion)
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    assert events[-1]["response"] == whole
    assert whole["status"] == ("incomplete" if reason == "length" else "completed")
    deltas = [one["delta"] for one in events if one["type"] == "response.output_text.delta"]
    assert deltas == content
    opened = [one["item"]["id"] for one in events if one["type"] == "response.output_item.added"]
    ended = [one["item"]["id"] for one in events if one["type"] == "response.output_item.done"]
    assert opened == ended == [item["id"] for item in whole["output"]]


def test_a_failure_before_the_first_chunk_is_an_event_of_its_own() -> None:
    event = failure_event({"error": {"message": "the gateway is stopping"}})
    assert (event["type"], event["message"]) == ("error", "the gateway is stopping")
