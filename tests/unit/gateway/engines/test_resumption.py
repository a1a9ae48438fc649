"""Which answers another engine can carry on, and how its events become those of the answer."""

from __future__ import annotations

from typing import Any

import orjson
import pytest

from ragcache_core.errors import Unavailable
from ragcache_core.identity.packed_ids import PackedIds
from ragcache_gateway.engines.completion import PROMPT_TOKEN_IDS, TRANSFER_PARAMS, Usage
from ragcache_gateway.engines.resumption import (
    ResumedStream,
    Resumption,
    SentAnswer,
    continued_body,
    resumption_of,
)

CONTINUE, REPEAT = Resumption.CONTINUE, Resumption.REPEAT
GREEDY: dict[str, Any] = {"model": "m", "messages": [{}], "temperature": 0, "stream": True}


def chunk(text: str, *ids: int, role: str | None = None, **more: Any) -> dict[str, Any]:
    delta = {"content": text} | ({"role": role} if role else {})
    choice = {"index": 0, "delta": delta, "finish_reason": None, "token_ids": list(ids)}
    return {"id": "b", "created": 2, "prompt_token_ids": None, "choices": [{**choice, **more}]}


def sent(way: Resumption, *chunks: dict[str, Any]) -> SentAnswer:
    answer = SentAnswer(way)
    answer.take([orjson.dumps({**one, "id": "a", "created": 1}) for one in chunks])
    return answer


def texts(events: list[bytes]) -> str:
    return "".join(orjson.loads(one)["choices"][0]["delta"]["content"] for one in events)


@pytest.mark.parametrize(
    ("more", "way"),
    [
        ({}, CONTINUE),
        ({"temperature": 0.7}, CONTINUE),
        ({"max_tokens": 9, "top_p": 0.5, "tools": None, "n": 1, "logprobs": False}, CONTINUE),
        ({"stop": ["."]}, REPEAT),
        ({"stop": ["."], "temperature": 0.7}, None),
        ({"temperature": 0.7, "seed": 3}, REPEAT),
        ({"presence_penalty": 1.0}, REPEAT),
        ({"response_format": {"type": "json_object"}}, REPEAT),
        ({"n": 2}, None),
        ({"logprobs": True}, None),
        ({"tools": [{}]}, None),
        ({"unknown": 1}, None),
    ],
)
def test_the_options_of_a_request_decide_how_its_answer_is_carried_on(
    more: dict[str, Any], way: Resumption | None
) -> None:
    assert resumption_of({**GREEDY, **more}, with_ids=True) is way


def test_without_ids_of_tokens_an_answer_is_generated_again_or_not_at_all() -> None:
    assert resumption_of(GREEDY, with_ids=False) is REPEAT
    assert resumption_of({**GREEDY, "temperature": 1}, with_ids=False) is None
    answer = sent(CONTINUE, chunk("", role="assistant"), chunk("a"))
    assert answer.has_more


def test_a_continued_prompt_ends_with_the_answer_so_far() -> None:
    params = {"ragcache": "plan", PROMPT_TOKEN_IDS: PackedIds.of([1, 2])}
    body = {**GREEDY, "max_tokens": 5, TRANSFER_PARAMS: params}
    continued = continued_body(body, [7, 8])
    assert continued is not None
    assert continued["max_tokens"] == 3
    assert list(continued[TRANSFER_PARAMS][PROMPT_TOKEN_IDS]) == [1, 2, 7, 8]
    assert list(body[TRANSFER_PARAMS][PROMPT_TOKEN_IDS]) == [1, 2], "the first body is unchanged"
    assert continued_body(body, range(5)) is None, "no token is left"


def test_tokens_without_text_are_generated_again() -> None:
    answer = sent(CONTINUE, chunk("", role="assistant"), chunk("a", 5), chunk("", 6))
    assert answer.token_ids == [5]
    ResumedStream(answer, same_text=True).take([orjson.dumps(chunk("é", 6, 7))])
    assert answer.token_ids == [5, 6, 7]


def test_a_client_gets_no_token_ids_that_it_did_not_ask_for() -> None:
    event = orjson.dumps({**chunk('say "token_ids":[1]', 5), "prompt_token_ids": [1, 2]})
    [shown] = SentAnswer(CONTINUE).take([event])
    found = orjson.loads(shown)
    assert (found["prompt_token_ids"], found["choices"][0]["token_ids"]) == (None, None)
    assert texts([shown]) == 'say "token_ids":[1]'
    assert SentAnswer(CONTINUE, shows_ids=True).take([event]) == [event]


def test_events_of_a_further_engine_continue_the_answer() -> None:
    answer = sent(CONTINUE, chunk("", role="assistant"), chunk("It is ", 5))
    stream = ResumedStream(answer, same_text=False)
    events = stream.take(
        [orjson.dumps(one) for one in (chunk("", role="assistant"), chunk("so", 6), chunk("!", 7))]
    )
    assert texts(events) == "so!"
    first, second = map(orjson.loads, events)
    assert first["ragcache"] == {"resumed": {"same_text": False}}
    assert "ragcache" not in second
    assert (first["id"], first["created"]) == ("a", 1)
    usage = stream.usage(Usage(prompt_tokens=11, completion_tokens=2, total_tokens=13))
    assert (usage.prompt_tokens, usage.completion_tokens, usage.total_tokens) == (10, 3, 13)


def test_what_a_client_has_of_a_repeated_answer_is_left_out() -> None:
    answer = sent(REPEAT, chunk("", role="assistant"), chunk("It "), chunk("is s"))
    stream = ResumedStream(answer, same_text=True)
    parts = ["It is", " so", "", "!"]
    assert texts(stream.take([orjson.dumps(chunk(part)) for part in parts])) == "o!"
    assert answer.text == "It is so!"
    with pytest.raises(Unavailable, match="did not repeat"):
        ResumedStream(answer, same_text=True).take([orjson.dumps(chunk("It was"))])


@pytest.mark.parametrize("delta", [{"reasoning": "So"}, {"tool_calls": [{"index": 0}]}])
def test_an_answer_with_more_than_text_is_not_carried_on(delta: dict[str, Any]) -> None:
    answer = sent(CONTINUE, chunk("a", 1))
    assert not answer.has_more
    answer.take([orjson.dumps(chunk("", 2, delta=delta))])
    assert answer.has_more
