"""What servers of OpenAI's API get, and the form of their answers."""

from __future__ import annotations

from typing import Any

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ragcache_gateway.engines.completion import PROMPT_TEXT, Usage, client_body, with_prompt
from ragcache_gateway.engines.openai_api import AnswerReader, openai_body, takes_token_ids
from ragcache_gateway.prompts.conversation import Turn
from ragcache_gateway.prompts.prompt_text import PromptText
from tests.unit.gateway.chat.test_requests import PLAN, json_values, prompt_of, read

READER = AnswerReader("tiny", "chatcmpl-1")


@pytest.mark.parametrize(
    ("version", "takes"),
    [
        (b'{"version": "0.32.0"}', True),
        (b'{"version": "0.40.1.dev7+cpu"}', True),
        (b'{"version": "1.0"}', True),
        (b'{"version": "0.31.9"}', False),
        (b'{"version": "v2"}', False),
        (b'{"version": 1}', False),
        (b"[]", False),
        (b"<html>", False),
    ],
)
def test_only_a_recent_vllm_gets_token_ids(version: bytes, takes: bool) -> None:
    assert takes_token_ids(version) == takes


@pytest.mark.parametrize("stream", [False, True])
def test_a_chat_has_messages_and_no_field_of_vllm(stream: bool) -> None:
    request = read(stream=stream, temperature=0.5, n=2)
    fields = client_body(
        request.engine_fields(), model="m", max_tokens_field="max_completion_tokens", max_tokens=3
    )
    body = with_prompt(fields, prompt_of([1, 2]), PLAN)
    text = PromptText("Be brief.\n\n", "", (Turn("user", "Where?"),))
    sent = openai_body({**body, PROMPT_TEXT: text, "cache_salt": "a", "priority": 3})
    usage = {"stream_options": {"include_usage": True}} if stream else {}
    assert sent == {
        "model": "m",
        "messages": [
            {"role": "system", "content": "Be brief.\n\n"},
            {"role": "user", "content": "Where?"},
        ],
        "max_tokens": 3,
        "temperature": 0.5,
        "n": 2,
        "stream": stream,
        **usage,
    }


def test_the_gateways_own_requests_have_the_tools_of_their_prompt() -> None:
    tools = [{"type": "function", "function": {"name": "look"}}]
    text = PromptText(None, "", (Turn("user", "Where?"),), {"tools": tools, "documents": []})
    sent = openai_body({"model": "m", "prompt": [1], "max_tokens": 1, PROMPT_TEXT: text})
    messages = [{"role": "user", "content": "Where?"}]
    assert sent == {"model": "m", "max_tokens": 1, "messages": messages, "tools": tools}


def test_a_text_of_a_client_stays_as_it_is() -> None:
    body = {"model": "m", "prompt": "Go on", "max_tokens": 3, "kv_transfer_params": {}}
    assert openai_body(body) == {"model": "m", "prompt": "Go on", "max_tokens": 3}


@pytest.mark.parametrize(
    ("given_reason", "reason"),
    [("stop", "stop"), ("eos_token", "stop"), ("", None), (None, None), ("odd", "odd")],
)
def test_a_chunk_gets_the_names_that_the_client_knows(
    given_reason: str | None, reason: str | None
) -> None:
    choice = {"delta": {"content": "a"}, "finish_reason": given_reason}
    event = READER.event(orjson.dumps({"id": "x", "model": "y", "choices": [choice, choice]}))
    assert event is not None
    chunk = orjson.loads(event)
    assert (chunk["id"], chunk["model"]) == ("chatcmpl-1", "tiny")
    assert [one["index"] for one in chunk["choices"]] == [0, 1]
    assert {one["finish_reason"] for one in chunk["choices"]} == {reason}


@pytest.mark.parametrize("event", [{"choices": []}, {"choices": None, "usage": None}, {}])
def test_an_event_with_nothing_for_a_client_is_left_out(event: dict[str, Any]) -> None:
    assert READER.event(orjson.dumps(event)) is None


@pytest.mark.parametrize("error", [{"message": "out of memory"}, "out of memory"])
def test_an_error_stays_as_it_is(error: object) -> None:
    event = orjson.dumps({"error": error})
    assert READER.event(event) == event


@given(event=st.binary(max_size=40) | json_values.map(lambda one: repr(one).encode()))
def test_any_event_is_read_or_stays_as_it_is(event: bytes) -> None:
    READER.event(event)


@given(usage=json_values | st.dictionaries(st.sampled_from(list(Usage.model_fields)), json_values))
def test_a_count_of_tokens_is_readable_or_left_out(usage: object) -> None:
    body: dict[str, Any] = {"choices": [{"text": "a"}], "usage": usage}
    READER.whole(body)
    if "usage" in body:
        Usage.model_validate(body["usage"])
