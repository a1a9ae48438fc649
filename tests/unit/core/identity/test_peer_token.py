"""Tokens that admit the parts of a platform."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ragcache_core.identity.peer_token import (
    MAX_CLOCK_SKEW_S,
    NONCE_BYTES,
    TOKEN_LIFETIME_S,
    make_token,
    token_problem,
)

METHOD = "/ragcache.v1.Engine/Watch"
KEY, OTHER_KEY = bytes(range(32)), bytes(range(1, 33))
NONCE = bytes(NONCE_BYTES)
NOW_S = 1_800_000_000.5
TOKEN = make_token(METHOD, KEY, NOW_S, NONCE)


def test_a_token_is_valid_under_each_of_the_keys_while_they_rotate() -> None:
    assert token_problem(TOKEN, METHOD, [KEY], NOW_S) is None
    assert token_problem(TOKEN, METHOD, [OTHER_KEY, KEY], NOW_S) is None
    assert "not signed" in str(token_problem(TOKEN, METHOD, [OTHER_KEY], NOW_S))
    assert "not signed" in str(token_problem(TOKEN, METHOD, [], NOW_S))


def test_a_token_is_valid_for_one_method() -> None:
    assert "not signed" in str(token_problem(TOKEN, "/ragcache.v1.CacheStore/Watch", [KEY], NOW_S))


def test_a_token_that_is_sent_again_after_its_time_is_refused() -> None:
    end_s = NOW_S + TOKEN_LIFETIME_S + MAX_CLOCK_SKEW_S
    assert token_problem(TOKEN, METHOD, [KEY], end_s - 1) is None
    assert token_problem(TOKEN, METHOD, [KEY], end_s + 1) == "has expired"


def test_a_token_of_a_clock_that_is_far_ahead_is_refused() -> None:
    early_s = NOW_S - MAX_CLOCK_SKEW_S
    assert token_problem(TOKEN, METHOD, [KEY], early_s) is None
    assert token_problem(TOKEN, METHOD, [KEY], early_s - 2) == "is valid for too long"


def test_two_tokens_differ_by_their_nonce() -> None:
    assert make_token(METHOD, KEY, NOW_S, bytes(range(NONCE_BYTES))) != TOKEN


@given(index=st.integers(0, len(TOKEN) - 1), character=st.characters())
def test_a_changed_token_is_refused(index: int, character: str) -> None:
    changed = TOKEN[:index] + character + TOKEN[index + 1 :]
    if changed != TOKEN:
        assert token_problem(changed, METHOD, [KEY], NOW_S) is not None


@pytest.mark.parametrize("text", ["", ".", "..", "x", TOKEN + "0", TOKEN + "\n", "9" * 10_000])
def test_what_is_no_token_is_refused(text: str) -> None:
    assert token_problem(text, METHOD, [KEY], NOW_S) == "is malformed"
