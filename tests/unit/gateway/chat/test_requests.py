"""What the gateway accepts and refuses of a request, and what reaches the engine."""

from __future__ import annotations

import json
import time
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from ragcache_core.access.json_bounds import MAX_VALUES
from ragcache_core.errors import InvalidInput, TooLarge
from ragcache_core.identity.packed_ids import PackedIds
from ragcache_core.plan.prompt import assemble
from ragcache_core.plan.reuse_plan import ReusePlan
from ragcache_core.scheduling.priority import QueuePosition, compose
from ragcache_gateway.chat.completion_schema import CompletionRequest
from ragcache_gateway.chat.messages import question_field, read_conversation
from ragcache_gateway.chat.schema import MAX_DEPTH, MAX_PARTS, REFUSED_FIELDS, ChatRequest
from ragcache_gateway.engines.completion import (
    CONTROL_FIELDS,
    PROMPT_TEXT,
    client_body,
    endpoint_of,
    with_engine_controls,
    with_prompt,
)
from ragcache_gateway.http.errors import from_validation
from ragcache_gateway.prompts.builder import AnswerPrompt
from ragcache_gateway.prompts.prompt_text import PromptText
from ragcache_gateway.prompts.reuse_mode import ReuseMode, requested_reuse

ASK = {"messages": [{"role": "user", "content": "Where?"}]}
PLAN = ReusePlan("chatcmpl-1", "public", ())


def prompt_of(token_ids: list[int]) -> AnswerPrompt:
    """Return a prompt of these tokens, which has no text."""
    return AnswerPrompt(assemble((), (), token_ids), PromptText(None, "", ()), 1)


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


def body_of(request: ChatRequest | CompletionRequest) -> dict[str, Any]:
    fields = client_body(
        request.engine_fields(), model="m", max_tokens_field=request.MAX_TOKENS_FIELD, max_tokens=3
    )
    return with_prompt(fields, prompt_of([1, 2]), PLAN)


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"messages": []}, "messages"),
        ({"messages": "hi"}, "messages"),
        ({"messages": [{"role": "judge", "content": "x"}]}, "messages[0].role"),
        ({"messages": [{"role": "user", "content": None}]}, "messages[0].content"),
        ({"messages": [{"role": "system"}]}, "messages[0].content"),
        ({"tools": [{"function": {"description": "\0"}}]}, "tools[0].function.description"),
        ({"tools": [{"function": {"\0": 1}}]}, "tools[0].function"),
        ({"chat_template_kwargs": {"a": float("inf")}}, "chat_template_kwargs.a"),
        ({"user": "\ud800"}, "user"),
        ({"messages": [{"role": "user", "content": "\0"}]}, "messages[0].content"),
        ({"messages": [{"role": "user", "content": "\ud800"}]}, "messages[0].content"),
        (
            {"messages": [{"role": "user", "content": [{"type": "hologram"}]}]},
            "messages[0].content[0].type",
        ),
        (
            {"messages": [{"role": "user", "content": ["a", {"type": "text"}]}]},
            "messages[0].content[1].text",
        ),
        ({"ragcache": []}, "ragcache"),
        ({"ragcache": {"top_k": 0}}, "ragcache.top_k"),
        ({"ragcache": {"top_k": 51}}, "ragcache.top_k"),
        ({"ragcache": {"top_k": True}}, "ragcache.top_k"),
        ({"ragcache": {"collections": "x"}}, "ragcache.collections"),
        ({"ragcache": {"reuse": "some"}}, "ragcache.reuse"),
        ({"ragcache": {"order": "random"}}, "ragcache.order"),
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
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": 1e308}, "max_tokens"),
        ({"max_tokens": 1, "max_completion_tokens": 2}, "max_completion_tokens"),
        ({"stream_options": {"include_usage": True}}, "stream_options"),
    ],
)
def test_a_bad_field_is_named(changes: dict[str, Any], field: str) -> None:
    with pytest.raises(InvalidInput) as caught:
        read(**changes)
    assert caught.value.field == field
    assert caught.value.fix


def test_values_nested_too_deep_are_refused() -> None:
    deep: Any = 1
    for _ in range(MAX_DEPTH + 1):
        deep = [deep]
    with pytest.raises(InvalidInput, match="levels deep"):
        read(tools=[{"function": {"parameters": deep}}])


@pytest.mark.parametrize("name", sorted(REFUSED_FIELDS))
def test_a_field_on_which_no_engine_acts_is_refused_unless_it_has_no_effect(name: str) -> None:
    neutral, fix = REFUSED_FIELDS[name]
    for value in neutral:
        assert body_of(read(**{name: value})) == body_of(read())
    with pytest.raises(InvalidInput) as caught:
        read(**{name: {"some": "wish"}})
    assert (caught.value.field, caught.value.fix) == (name, fix)


@given(name=st.sampled_from(sorted(CONTROL_FIELDS)), value=json_values)
def test_a_field_that_controls_a_cache_is_ignored_with_any_value(name: str, value: object) -> None:
    assert body_of(read(**{name: value})) == body_of(read())


passed_values = st.recursive(
    st.booleans() | st.integers() | st.text(st.characters(codec="utf-8", exclude_characters="\0")),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text("ab"), inner, max_size=3),
    max_leaves=5,
)


@given(
    settings=st.fixed_dictionaries(
        {},
        optional={
            "temperature": st.floats(allow_nan=False, allow_infinity=False),
            "stop": passed_values,
            "n": passed_values,
            "logit_bias": passed_values,
            "response_format": passed_values,
            "top_k": passed_values,
            "tool_choice": passed_values,
            "some_field_of_tomorrow": passed_values,
        },
    )
)
def test_every_other_field_reaches_the_engine_as_it_was_sent(settings: dict[str, Any]) -> None:
    body = body_of(read(**settings))
    assert {name: body[name] for name in settings} == settings
    fixed = {"model", "messages", "max_completion_tokens", "kv_transfer_params", PROMPT_TEXT}
    assert set(body) == fixed | set(settings)


def test_messages_reach_the_engine_as_they_were_sent() -> None:
    call = {"id": "c1", "type": "function", "function": {"name": "look", "arguments": "{}"}}
    messages = [
        {"role": "user", "content": [{"type": "text", "text": "a", "cache_control": {}}]},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c1", "content": "b", "name": "look"},
    ]
    assert body_of(read(messages=messages))["messages"] == messages


@pytest.mark.parametrize(
    ("message", "text"),
    [
        ({"role": "assistant", "content": [{"type": "refusal", "refusal": "No."}]}, "No."),
        ({"role": "assistant", "content": None, "refusal": "I may not."}, "I may not."),
        (
            {
                "role": "assistant",
                "content": [
                    {"type": "thinking", "thinking": "Hm.", "signature": "x"},
                    {"type": "reasoning", "text": "So."},
                    {"type": "text", "text": "Oslo."},
                ],
            },
            "Oslo.",
        ),
        ({"role": "tool", "tool_call_id": "c", "content": []}, ""),
        ({"role": "tool", "tool_call_id": "c", "content": ""}, ""),
        ({"role": "tool", "tool_call_id": "c"}, ""),
        ({"role": "user", "content": ["Which", {"text": "pump?"}]}, "Which\npump?"),
        # vLLM would take the second field for an image, and ignore the token ids.
        ({"role": "user", "content": [{"type": "text", "text": "a", "image_url": "b"}]}, "a"),
    ],
)
def test_content_of_any_shape_reaches_template_and_engine_as_text(
    message: dict[str, Any], text: str
) -> None:
    request = read(messages=[message, *ASK["messages"]])
    assert read_conversation(request).turns[0].to_template()["content"] == text
    assert (body_of(request)["messages"][0].get("content") or "") == text
    assert not request.warnings()


@pytest.mark.parametrize(
    ("part", "named"),
    [
        ({"type": "image_url", "image_url": {"url": "data:image/png;base64,aGk="}}, "1 image "),
        ({"type": "input_image", "image_url": "https://example.com/a.png"}, "1 image "),
        ({"type": "input_audio", "input_audio": {"data": "", "format": "wav"}}, "1 audio record"),
        ({"type": "video_url", "video_url": {"url": "https://example.com/a"}}, "1 video "),
        ({"type": "file", "file": {"file_id": "f"}}, "1 file "),
    ],
)
def test_a_part_that_is_no_text_is_left_out_with_a_warning(
    part: dict[str, Any], named: str
) -> None:
    request = read(messages=[{"role": "user", "content": [{"type": "text", "text": "a"}, part]}])
    assert read_conversation(request).question == "a"
    assert body_of(request)["messages"] == [{"role": "user", "content": "a"}]
    (warning,) = request.warnings()
    assert warning.startswith(f"messages: {named}")
    twice = read(messages=[{"role": "user", "content": ["a", part]}] * 2)
    assert twice.warnings()[0].startswith("messages: 2 ")


def test_messages_without_a_user_retrieve_nothing_unless_they_say_so() -> None:
    alone = [{"role": "system", "content": "Write a title about pumps."}]
    request = read(messages=alone)
    assert not request.retrieves()
    assert "no documents were searched" in request.warnings()[0]
    assert read(messages=alone, ragcache={"retrieve": True}).retrieves()
    off = read(messages=alone, ragcache={"retrieve": False})
    assert not off.retrieves()
    assert not off.warnings()


def test_messages_without_any_text_are_refused() -> None:
    with pytest.raises(InvalidInput, match="messages: have no text"):
        read_conversation(read(messages=[{"role": "system", "content": ""}]))


def test_a_call_in_the_old_form_is_a_tool_call() -> None:
    old = {"role": "assistant", "function_call": {"name": "look", "arguments": '{"a": 1}'}}
    result = {"role": "function", "name": "look", "content": "ice"}
    called, turn, _ = read_conversation(read(messages=[old, result, *ASK["messages"]])).turns
    assert called.fields["tool_calls"][0]["function"] == {"name": "look", "arguments": {"a": 1}}
    assert turn.role == "tool"


def test_a_message_with_endless_parts_is_refused() -> None:
    with pytest.raises(InvalidInput) as caught:
        read(messages=[{"role": "user", "content": ["a"] * (MAX_PARTS + 1)}])
    assert caught.value.field == "messages[0].content"


def test_a_chat_has_its_tokens_in_the_transfer_parameters_and_a_completion_as_prompt() -> None:
    chat = body_of(read())
    assert endpoint_of(chat) == "/v1/chat/completions"
    assert chat["kv_transfer_params"] == {
        "ragcache": PLAN.encode(),
        "prompt_token_ids": PackedIds.of([1, 2]),
    }
    completion = body_of(CompletionRequest(prompt="Where?"))
    assert endpoint_of(completion) == "/v1/completions"
    assert completion["prompt"] == PackedIds.of([1, 2])
    assert completion["kv_transfer_params"] == {"ragcache": PLAN.encode()}


def test_a_stream_always_asks_the_engine_for_its_usage() -> None:
    options = {"continuous_usage_stats": True}
    body = body_of(read(stream=True, stream_options=options))
    assert body["stream_options"] == {**options, "include_usage": True}
    assert body_of(read(stream=True))["stream_options"] == {"include_usage": True}
    assert "stream_options" not in body_of(read(stream=False))


def test_null_means_that_a_field_is_left_out() -> None:
    names = (
        *REFUSED_FIELDS,
        *("temperature", "stop", "seed", "max_tokens", "stream_options", "ragcache", "n", "tools"),
    )
    assert body_of(read(**dict.fromkeys(names))) == body_of(read())


def test_only_the_gateway_sets_a_salt_and_a_priority() -> None:
    body = body_of(read(cache_salt="mine", priority=-9))
    assert {"cache_salt", "priority"}.isdisjoint(body)
    assert with_engine_controls(body) == body
    before_ms = time.time_ns() // 1_000_000
    controlled = with_engine_controls(body, cache_salt="ours", position=QueuePosition(7, 500, 0.9))
    after_ms = time.time_ns() // 1_000_000
    priority = controlled.pop("priority")
    assert compose(7, before_ms, 50) <= priority <= compose(7, after_ms, 50)
    assert controlled == {**body, "cache_salt": "ours"}


@pytest.mark.parametrize(
    ("prompt", "n", "choices"),
    [("a", 1, 1), ("a", 3, 3), (["a", "b"], 2, 4), ([1, 2, 3], 2, 2), ([[1], [2, 3]], 1, 2)],
)
def test_a_completion_has_an_answer_for_each_prompt(prompt: Any, n: int, choices: int) -> None:
    request = CompletionRequest.model_validate({"prompt": prompt, "n": n})
    assert request.num_choices() == choices
    assert not request.retrieves()
    assert request.engine_fields() == {"prompt": prompt, "n": n}


def test_a_completion_retrieves_for_one_text_only() -> None:
    asked = {"prompt": "Where?", "ragcache": {"top_k": 2}}
    assert CompletionRequest.model_validate(asked).retrieves()
    off = {"prompt": ["a"], "ragcache": {"retrieve": False}}
    assert not CompletionRequest.model_validate(off).retrieves()
    for wrong, field in (
        ({"prompt": ["a", "b"]}, "prompt"),
        ({"echo": True}, "echo"),
        ({"suffix": "x"}, "suffix"),
    ):
        with pytest.raises(InvalidInput) as caught:
            CompletionRequest.model_validate(asked | wrong)
        assert caught.value.field == field


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
    assert str(caught.value) == (
        "ragcache.max_recompute_share: is given, and ragcache.reuse is exact; "
        "set ragcache.reuse to blend or leave it out"
    )
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
    conversation = read_conversation(request)
    assert conversation.system == "Be brief.\n\nIn French."
    assert [(turn.role, turn.content) for turn in conversation.turns] == [
        ("user", "Hello"),
        ("assistant", "Bonjour"),
        ("user", "Where\nWhere"),
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
    request = read(messages=[ask, answer, ask])
    turns = read_conversation(request).turns
    assert [dict(turn.fields) for turn in turns] == [{}, {}, {}], "nothing empty is rendered"
    assert body_of(request)["messages"] == [ask, answer, ask]


def test_the_question_of_an_agents_turn_is_the_users_last_message() -> None:
    call = {"id": "c1", "type": "function", "function": {"name": "look", "arguments": '{"a": 1}'}}
    request = read(
        messages=[
            {"role": "user", "content": "Where?"},
            {"role": "assistant", "tool_calls": [call]},
            {"role": "tool", "tool_call_id": "c1", "content": "There."},
        ],
        tools=[{"type": "function", "function": {"name": "look"}}],
        reasoning_effort="none",
        chat_template_kwargs={"style": "brief"},
    )
    conversation = read_conversation(request)
    assert conversation.question == "Where?"
    assert question_field(request.messages) == "messages[0].content"
    called, result = conversation.turns[1:]
    # Templates expect an object.
    assert called.to_template()["tool_calls"][0]["function"]["arguments"] == {"a": 1}
    assert result.to_template() == {"role": "tool", "content": "There.", "tool_call_id": "c1"}
    assert conversation.template == {
        "tools": request.tools,
        "reasoning_effort": "none",
        "enable_thinking": False,
        "style": "brief",
    }


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        ('{"a": ' * 100 + "1" + "}" * 100, "levels deep"),
        ("[" * 200, "levels deep"),
        ("[" * 100_000, "values"),
        ('{"a": [' + "1," * 5000 + "1]}", "values"),
        ('{"a": "\\u0000"}', "NUL character"),
    ],
)
def test_arguments_that_no_prompt_can_have_are_refused(arguments: str, problem: str) -> None:
    call = {"id": "c1", "function": {"name": "look", "arguments": arguments}}
    request = read(messages=[{"role": "assistant", "tool_calls": [call]}])
    with pytest.raises(InvalidInput, match=problem) as caught:
        read_conversation(request)
    assert caught.value.field.startswith("messages[0].tool_calls[0].function.arguments")


def test_the_arguments_of_all_tool_calls_together_are_bounded() -> None:
    def asked(num_calls: int, arguments: str) -> ChatRequest:
        calls = [{"id": "c", "function": {"name": "look", "arguments": arguments}}]
        turn = {"role": "assistant", "content": None, "tool_calls": calls}
        return read(messages=[{"role": "user", "content": "Why?"}, *[turn] * num_calls])

    many = json.dumps({"a": [0] * 900})
    assert read_conversation(asked(5, many))
    with pytest.raises(TooLarge, match=f"with those before it, over {MAX_VALUES} values") as caught:
        read_conversation(asked(6, many))
    assert caught.value.field == "messages[6].tool_calls[0].function.arguments"
    # Signs within texts are no values.
    assert read_conversation(asked(6, json.dumps({"code": "f(a, [b], {c})," * 900})))


@pytest.mark.parametrize("arguments", ["{not json", "[1]", "", None])
def test_arguments_that_are_no_object_do_not_end_a_conversation(arguments: object) -> None:
    call = {"id": "c1", "function": {"name": "look", "arguments": arguments}}
    request = read(messages=[{"role": "assistant", "tool_calls": [call]}])
    (turn,) = read_conversation(request).turns
    assert turn.fields["tool_calls"][0]["function"]["arguments"] == {}


def test_a_call_without_a_function_is_refused() -> None:
    request = read(messages=[{"role": "assistant", "tool_calls": [{"id": "c1"}]}])
    with pytest.raises(InvalidInput) as caught:
        read_conversation(request)
    assert caught.value.field == "messages[0].tool_calls[0].function"


def test_arguments_of_the_template_that_the_gateway_sets_are_refused() -> None:
    with pytest.raises(InvalidInput) as caught:
        read_conversation(read(chat_template_kwargs={"tokenize": True}))
    assert caught.value.field == "chat_template_kwargs.tokenize"


def test_a_stable_prefix_longer_than_the_system_prompt_is_refused() -> None:
    messages = [{"role": "system", "content": "Be kind."}, {"role": "user", "content": "Why?"}]
    fits = read(messages=messages, ragcache={"stable_prefix": 8})
    assert read_conversation(fits).stable_prefix == 8
    with pytest.raises(InvalidInput, match="has 8 characters") as refused:
        read_conversation(read(messages=messages, ragcache={"stable_prefix": 9}))
    assert refused.value.field == "ragcache.stable_prefix"
