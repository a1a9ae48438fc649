"""What the gateway accepts and refuses of a request, and what reaches the engine."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from ragcache_core.errors import InvalidInput
from ragcache_core.plan.reuse_plan import ReusePlan
from ragcache_gateway.chat.messages import read_conversation
from ragcache_gateway.chat.schema import IGNORED_FIELDS, REFUSED_FIELDS, ChatRequest
from ragcache_gateway.engines.completion import (
    completion_body,
)
from ragcache_gateway.http.errors import from_validation
from ragcache_gateway.prompts.reuse_mode import ReuseMode, requested_reuse

ASK = {"messages": [{"role": "user", "content": "Where?"}]}
PLAN = ReusePlan("chatcmpl-1", "public", ())

json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    max_leaves=8,
)


def read(**changes: Any) -> ChatRequest:
    try:
        return ChatRequest.model_validate({**ASK, **changes})
    except ValidationError as error:
        raise from_validation([dict(e) for e in error.errors()]) from error


def body_of(request: ChatRequest, cache_salt: str | None = None) -> dict[str, Any]:
    return completion_body(
        request.sampling(),
        model="m",
        token_ids=(1, 2),
        max_tokens=3,
        plan=PLAN,
        plan_keys=None,
        cache_salt=cache_salt,
    )


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"messages": []}, "messages"),
        ({"messages": "hi"}, "messages"),
        ({"messages": [{"role": "tool", "content": "x"}]}, "messages[0].role"),
        ({"messages": [{"role": "user", "content": None}]}, "messages[0].content"),
        ({"messages": [{"role": "user", "content": "\0"}]}, "messages[0].content"),
        ({"messages": [{"role": "user", "content": "\ud800"}]}, "messages[0].content"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]},
            "messages[0].content[0].type",
        ),
        ({"ragcache": []}, "ragcache"),
        ({"ragcache": {"top_k": 0}}, "ragcache.top_k"),
        ({"ragcache": {"top_k": 51}}, "ragcache.top_k"),
        ({"ragcache": {"top_k": True}}, "ragcache.top_k"),
        ({"ragcache": {"collections": "x"}}, "ragcache.collections"),
        ({"ragcache": {"reuse": "some"}}, "ragcache.reuse"),
        (
            {"ragcache": {"reuse": "blend", "max_recompute_share": 1.5}},
            "ragcache.max_recompute_share",
        ),
        (
            {"ragcache": {"reuse": "blend", "max_recompute_share": -0.1}},
            "ragcache.max_recompute_share",
        ),
        (
            {"ragcache": {"reuse": "blend", "max_recompute_share": "0.2"}},
            "ragcache.max_recompute_share",
        ),
        (
            {"ragcache": {"reuse": "blend", "max_recompute_share": True}},
            "ragcache.max_recompute_share",
        ),
        (
            {"ragcache": {"reuse": "blend", "max_recompute_share": float("nan")}},
            "ragcache.max_recompute_share",
        ),
        ({"temperature": float("nan")}, "temperature"),
        ({"temperature": 2.5}, "temperature"),
        ({"top_p": 0}, "top_p"),
        ({"seed": 2**63}, "seed"),
        ({"stop": ""}, "stop"),
        ({"stop": ["a"] * 5}, "stop"),
        ({"stop": 3}, "stop"),
        ({"n": 2}, "n"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": 1, "max_completion_tokens": 2}, "max_completion_tokens"),
        ({"stream_options": {"include_usage": True}}, "stream_options"),
        ({"temprature": 1}, "temprature"),
    ],
)
def test_a_bad_field_is_named(changes: dict[str, Any], field: str) -> None:
    with pytest.raises(InvalidInput) as caught:
        read(**changes)
    assert caught.value.field == field
    assert caught.value.fix


@pytest.mark.parametrize("name", sorted(REFUSED_FIELDS))
def test_a_field_that_would_change_the_answer_is_refused_unless_it_has_no_effect(name: str) -> None:
    for neutral in REFUSED_FIELDS[name]:
        assert body_of(read(**{name: neutral})) == body_of(read())
    with pytest.raises(InvalidInput) as caught:
        read(**{name: {"some": "wish"}})
    assert caught.value.field == name


@given(name=st.sampled_from(sorted(IGNORED_FIELDS)), value=json_values)
def test_a_field_that_controls_a_cache_is_ignored_with_any_value(name: str, value: object) -> None:
    assert body_of(read(**{name: value})) == body_of(read())


@given(
    settings=st.fixed_dictionaries(
        {},
        optional={
            "temperature": st.floats(0, 2),
            "top_p": st.floats(0.01, 1),
            "presence_penalty": st.floats(-2, 2),
            "frequency_penalty": st.floats(-2, 2),
            "seed": st.integers(-(2**63), 2**63 - 1),
            "stop": st.text("ab", min_size=1) | st.lists(st.text("ab", min_size=1), max_size=4),
        },
    )
)
def test_sampling_reaches_the_engine_as_it_was_sent(settings: dict[str, Any]) -> None:
    body = body_of(read(**settings))
    assert {name: body[name] for name in settings} == settings
    fixed = {"model", "prompt", "max_tokens", "stream", "stream_options", "kv_transfer_params"}
    assert set(body) == fixed | set(settings)


def test_null_means_that_a_field_is_left_out() -> None:
    names = (
        *REFUSED_FIELDS,
        "temperature",
        "stop",
        "seed",
        "max_tokens",
        "stream_options",
        "ragcache",
        "n",
    )
    assert body_of(read(**dict.fromkeys(names))) == body_of(read())


def test_only_the_gateway_sets_a_salt() -> None:
    assert "cache_salt" not in body_of(read(cache_salt="mine"))
    assert body_of(read(), cache_salt="ours")["cache_salt"] == "ours"


@pytest.mark.parametrize("default", [ReuseMode("exact", 0.2), ReuseMode("blend", 0.3)])
def test_a_request_reuses_kv_as_the_platform_is_set_unless_it_chooses(default: ReuseMode) -> None:
    def wanted(**options: Any) -> ReuseMode:
        asked = read(ragcache=options).ragcache
        return requested_reuse(asked.reuse, asked.max_recompute_share, default)

    assert wanted() == wanted(reuse=None, max_recompute_share=None) == default
    for mode in ("exact", "blend", "off"):
        assert wanted(reuse=mode).mode == mode
    assert wanted(reuse="blend") == ReuseMode("blend", default.max_recompute_share)
    assert wanted(reuse="blend", max_recompute_share=1) == ReuseMode("blend", 1.0)


def test_a_recompute_share_is_refused_without_blend() -> None:
    assert requested_reuse(None, 0.1, ReuseMode("blend", 0.3)) == ReuseMode("blend", 0.1)
    with pytest.raises(InvalidInput) as caught:
        requested_reuse(None, 0.1, ReuseMode("exact", 0.3))
    assert caught.value.field == "ragcache.max_recompute_share"
    with pytest.raises(InvalidInput):
        requested_reuse("off", 0.0, ReuseMode("blend", 1))


def test_a_conversation_is_split_into_system_history_and_question() -> None:
    request = read(
        messages=[
            {"role": "system", "content": "Be brief."},
            {"role": "developer", "content": [{"type": "text", "text": "In French."}]},
            {"role": "user", "content": "Hello"},
            {"role": "assistant", "content": "Bonjour"},
            {"role": "user", "content": [{"type": "text", "text": "Where"}] * 2},
        ]
    )
    conversation = read_conversation(request.messages)
    assert conversation.system == "Be brief.\n\nIn French."
    assert [(turn.role, turn.content) for turn in conversation.history] == [
        ("user", "Hello"),
        ("assistant", "Bonjour"),
    ]
    assert conversation.question == "Where\nWhere"


def test_an_answer_can_be_sent_back_as_history() -> None:
    empty: dict[str, object] = {
        "refusal": None,
        "annotations": [],
        "audio": None,
        "tool_calls": None,
    }
    answer = {"role": "assistant", "content": "eu-north", **empty}
    ask = {"role": "user", "content": "Why?"}
    assert len(read(messages=[ask, answer, ask]).messages) == 3
    with pytest.raises(InvalidInput, match=r"messages\[0\]\.tool_calls"):
        read(messages=[{**answer, "tool_calls": [{"id": "1"}]}, ask])


@pytest.mark.parametrize(
    ("roles", "field"),
    [
        (["system"], "messages[0].role"),
        (["user", "assistant"], "messages[1].role"),
        (["user", "system", "user"], "messages[1].role"),
    ],
)
def test_a_conversation_ends_with_the_question(roles: list[str], field: str) -> None:
    request = read(messages=[{"role": role, "content": "x"} for role in roles])
    with pytest.raises(InvalidInput) as caught:
        read_conversation(request.messages)
    assert caught.value.field == field


def test_a_stable_prefix_longer_than_the_system_prompt_is_refused() -> None:
    messages = [{"role": "system", "content": "Be kind."}, {"role": "user", "content": "Why?"}]
    request = read(messages=messages)
    assert read_conversation(request.messages, 8).stable_prefix == 8
    with pytest.raises(InvalidInput, match="has 8 characters") as refused:
        read_conversation(request.messages, 9)
    assert refused.value.field == "ragcache.stable_prefix"


def test_an_empty_question_is_refused() -> None:
    with pytest.raises(InvalidInput, match=r"messages\[0\].content: is empty"):
        read_conversation(read(messages=[{"role": "user", "content": " \n"}]).messages)
