"""Events, errors and plans in the engines' completions API."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ragcache_core.errors import InvalidInput, Unavailable
from ragcache_core.identity.packed_ids import PackedIds
from ragcache_core.plan.signature import signed_until_s
from ragcache_core.scheduling.priority import GUESS_BAND, QueuePosition
from ragcache_gateway.engines.completion import (
    PROMPT_TEXT,
    TextDelta,
    Usage,
    error_from_response,
    parse_event,
    plan_of,
    prefill_body,
    with_prompt,
    with_signature,
    without_plan,
    without_reuse,
    without_text,
)
from tests.kit.gateway import band_of
from tests.unit.gateway.chat.test_requests import PLAN, json_values, prompt_of


def test_events_of_the_engine_are_parsed() -> None:
    event = b'{"choices":[{"text":"a","finish_reason":null}],"usage":null}'
    assert parse_event(event) == [TextDelta("a", None)]
    event = (
        b'{"choices":[],"usage":{"prompt_tokens":3,"completion_tokens":1,"total_tokens":4,'
        b'"prompt_tokens_details":{"cached_tokens":2}}}'
    )
    (usage,) = parse_event(event)
    assert isinstance(usage, Usage)
    assert usage.model_dump()["prompt_tokens_details"] == {"cached_tokens": 2}


@given(data=st.binary(max_size=40) | json_values.map(lambda v: repr(v).encode()))
def test_an_unreadable_event_makes_the_engine_unavailable(data: bytes) -> None:
    with contextlib.suppress(Unavailable):
        assert all(isinstance(found, TextDelta | Usage) for found in parse_event(data))


@pytest.mark.parametrize("body", [b"", b"<html>", b"[]", b'"x"', b'{"error": "x"}', b"\xff"])
def test_any_response_but_200_is_an_error(body: bytes) -> None:
    assert isinstance(error_from_response(500, body), Unavailable)
    assert isinstance(error_from_response(404, body), Unavailable)
    assert isinstance(error_from_response(400, body), InvalidInput)


def test_a_refusal_has_the_engines_message_and_field() -> None:
    body = b'{"error":{"message":"top_k must be -1 or more","param":"body.top_k","code":400}}'
    error = error_from_response(400, body)
    assert isinstance(error, InvalidInput)
    assert error.field == "top_k"
    assert "top_k must be -1 or more" in str(error)


@pytest.mark.parametrize("fields", [{}, {"messages": []}])
def test_a_plan_is_signed_for_the_prompt_of_its_body(fields: dict[str, Any]) -> None:
    key = bytes(32)
    body = with_signature(with_prompt(fields, prompt_of([1, 2]), PLAN), key, now_s=1000)
    params = body["kv_transfer_params"]
    assert params["ragcache"] == PLAN.encode()
    signature = params["ragcache_signature"]
    assert signed_until_s(params["ragcache"], [1, 2], signature, [key]) == 1030
    later = with_signature(body, key, now_s=2000)["kv_transfer_params"]["ragcache_signature"]
    assert signed_until_s(params["ragcache"], [1, 2], later, [key]) == 2030
    for unplanned in ({"prompt": "text"}, without_reuse({"prompt": "text"})):
        assert with_signature(unplanned, key, now_s=1000) == unplanned


def test_a_body_for_an_engine_without_ragcache_has_the_prompt_and_no_controls_of_ours() -> None:
    chat = {"messages": [], "cache_salt": "tenant:a", "priority": -7}
    body = with_prompt(chat, prompt_of([1, 2]), PLAN)
    assert without_plan(without_text(body)) == {
        "messages": [],
        "cache_salt": "tenant:a",
        "kv_transfer_params": {"prompt_token_ids": PackedIds.of([1, 2])},
    }


def test_a_prefill_has_the_prompt_and_the_plan_and_nothing_of_the_answer() -> None:
    body = {
        "model": "tiny",
        "prompt": [1, 2],
        "max_tokens": 50,
        "n": 3,
        "logprobs": 5,
        "temperature": 0.7,
        "stream": True,
        "kv_transfer_params": {"ragcache": {"v": 1}},
        "cache_salt": "tenant",
        PROMPT_TEXT: prompt_of([1, 2]).text,
    }
    prefill = prefill_body(body, QueuePosition(GUESS_BAND))
    same = ("model", "prompt", "stream", "kv_transfer_params", "cache_salt", PROMPT_TEXT)
    assert {name: prefill.pop(name) for name in same} == {name: body[name] for name in same}
    assert prefill.pop("stream_options") == {"include_usage": True}
    assert band_of(prefill) == GUESS_BAND
    assert prefill.pop("priority")
    assert prefill == {"max_tokens": 1, "temperature": 0.0}
    assert plan_of(body) == {"v": 1}
