"""Events, errors and plans in the engines' completions API."""

from __future__ import annotations

import contextlib
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ragcache_core.errors import InvalidInput, Unavailable
from ragcache_core.plan.signature import is_signed
from ragcache_gateway.engines.completion import (
    TextDelta,
    Usage,
    error_from_response,
    parse_event,
    transfer_params,
)
from ragcache_wire.watched.signing_keys import SigningKeys
from tests.unit.gateway.chat.test_requests import PLAN, json_values


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


def test_plans_are_signed_where_there_is_a_file_of_keys(tmp_path: Path) -> None:
    path = tmp_path / "keys"
    path.write_text("ab" * 32 + "\n")
    keys = SigningKeys(path)
    params = transfer_params(PLAN, (1, 2), keys)
    assert params["ragcache"] == PLAN.to_json()
    assert is_signed(params["ragcache"], [1, 2], params["ragcache_signature"], keys.current())
    assert transfer_params(PLAN, (1, 2), None) == {"ragcache": PLAN.to_json()}
