"""The signature of a plan: what has one is believed, and nothing else is."""

from __future__ import annotations

import base64
import hashlib
import hmac

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from ragcache_core.errors import InvalidInput
from ragcache_core.identity.keys import TokenIds
from ragcache_core.plan.reuse_plan import Action, ReusePlan, Segment
from ragcache_core.plan.signature import (
    MAX_KEYS,
    MIN_KEY_BYTES,
    is_timely,
    parse_keys,
    sign,
    signed_until_s,
)

KEY, OTHER_KEY = bytes(range(32)), bytes(range(1, 33))
TOKENS = list(range(100, 160))
NOW_S = 1_700_000_000.5

anything = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(max_size=4),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3)
    ),
)
texts = st.text(st.characters(max_codepoint=127), max_size=40)
prompts = st.lists(st.integers(0, 2**32 - 1), max_size=20)
keys = st.binary(min_size=MIN_KEY_BYTES, max_size=80)
# HMAC fills a key up with zeros, so that of two lengths two may be one.
same_length_keys = st.binary(min_size=MIN_KEY_BYTES, max_size=MIN_KEY_BYTES)


def plan() -> str:
    segments = (
        Segment(bytes(16), 0, 20, Action.EXACT, "d/1"),
        Segment(bytes([1] * 16), 20, 50, Action.BLEND),
    )
    return ReusePlan("request-1", "public", segments, 1_700_000_000_000, 0.2).encode()


def is_signed(plan: object, prompt: TokenIds, given: object, keys: list[bytes]) -> bool:
    return signed_until_s(plan, prompt, given, keys) is not None


@given(texts, prompts, keys)
def test_a_signature_is_valid_for_any_form_of_the_tokens(
    plan: str, prompt: list[int], key: bytes
) -> None:
    signature = sign(plan, prompt, key, NOW_S)
    assert is_signed(plan, np.array(prompt, np.uint32), signature, [key])


@given(texts, texts, prompts, prompts, same_length_keys, same_length_keys)
def test_a_signature_is_for_one_plan_one_prompt_and_one_key(
    plan: str,
    other: str,
    prompt: list[int],
    other_prompt: list[int],
    key: bytes,
    other_key: bytes,
) -> None:
    assume(plan != other and prompt != other_prompt and key != other_key)
    signature = sign(plan, prompt, key, NOW_S)
    assert not is_signed(other, prompt, signature, [key])
    assert not is_signed(plan, other_prompt, signature, [key])
    assert not is_signed(plan, prompt, signature, [other_key])


def test_any_change_of_a_signed_plan_or_its_prompt_is_detected() -> None:
    signature = sign(plan(), TOKENS, KEY, NOW_S)
    assert is_signed(plan(), TOKENS, signature, [KEY])
    packed = base64.b64decode(plan())
    for at in range(len(packed)):
        changed = packed[:at] + bytes([packed[at] ^ 1]) + packed[at + 1 :]
        assert not is_signed(base64.b64encode(changed).decode(), TOKENS, signature, [KEY])
    for at in range(len(TOKENS)):
        prompt = [*TOKENS[:at], TOKENS[at] + 1, *TOKENS[at + 1 :]]
        assert not is_signed(plan(), prompt, signature, [KEY])
    for prompt in (TOKENS[:-1], [*TOKENS, 0], [], TOKENS[::-1]):
        assert not is_signed(plan(), prompt, signature, [KEY])
    for at in range(len(signature)):
        forged = signature[:at] + ("2" if signature[at] == "0" else "0") + signature[at + 1 :]
        assert not is_signed(plan(), TOKENS, forged, [KEY])


@given(anything | st.just("é" * 64) | st.text(max_size=80), anything, prompts)
def test_arbitrary_input_is_not_signed(signature: object, plan: object, prompt: list[int]) -> None:
    assert not is_signed(plan, prompt, signature, [KEY])


def test_every_key_verifies_in_any_order() -> None:
    signature = sign(plan(), TOKENS, KEY, NOW_S)
    assert is_signed(plan(), TOKENS, signature, [OTHER_KEY, KEY])
    assert is_signed(plan(), TOKENS, signature, [KEY, OTHER_KEY])
    assert not is_signed(plan(), TOKENS, signature, [OTHER_KEY])
    assert not is_signed(plan(), TOKENS, signature, [])


def test_the_signature_is_the_documented_hmac() -> None:
    encoded = plan().encode()
    tokens = b"".join(token.to_bytes(4, "little") for token in TOKENS)
    message = b"ragcache-plan-signature-3\0" + b"1700000030\0"
    message += len(encoded).to_bytes(8, "little") + encoded + tokens
    digest = hmac.new(KEY, message, hashlib.sha256).hexdigest()
    assert sign(plan(), TOKENS, KEY, NOW_S) == f"1700000030.{digest}"


def test_a_signature_has_its_time_for_clocks_that_differ_by_a_minute() -> None:
    until_s = signed_until_s(plan(), TOKENS, sign(plan(), TOKENS, KEY, NOW_S), [KEY])
    assert until_s == int(NOW_S) + 30
    timely = [later for later in range(-120, 180) if is_timely(until_s, int(NOW_S) + later)]
    assert timely == list(range(-60, 90))


@given(st.integers(0, 10**12 - 1))
def test_no_other_expiry_is_signed(expiry: int) -> None:
    signature = sign(plan(), TOKENS, KEY, NOW_S)
    own, _, digest = signature.partition(".")
    assume(str(expiry) != own)
    for text in (f"{expiry}.{digest}", f"0{own}.{digest}", f"{own}.{digest}\n", digest):
        assert not is_signed(plan(), TOKENS, text, [KEY])


written = keys.flatmap(
    lambda key: st.sampled_from(
        [key.hex(), key.hex().upper(), base64.b64encode(key).decode(), f"  {key.hex()}\t"]
    ).map(lambda text: (key, text))
)


@given(st.lists(written, min_size=1, max_size=MAX_KEYS), st.sampled_from(["\n", "\r\n", "\n\n"]))
def test_keys_are_read_in_the_order_of_their_lines(
    lines: list[tuple[bytes, str]], end: str
) -> None:
    content = end.join(text for _, text in lines).encode()
    assert parse_keys("F", content) == tuple(dict.fromkeys(key for key, _ in lines))


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        (b"", "holds 0 keys"),
        (b"\n \n", "holds 0 keys"),
        (b"\n".join(bytes([n] * 32).hex().encode() for n in range(MAX_KEYS + 1)), "holds 9 keys"),
        (KEY.hex().encode() + b"\n" + b"ab" * 31, "line 2 is a key of 31 bytes"),
        (base64.b64encode(bytes(31)), "line 1 is a key of 31 bytes"),
        (b"correct horse battery staple, which is long", "line 1 is neither hex nor base64"),
        (base64.b64encode(KEY).rstrip(b"="), "line 1 is neither hex nor base64"),
        (b"\xff" * 40, "line 1 is neither hex nor base64"),
        ("é".encode() * 40, "line 1 is neither hex nor base64"),
    ],
)
def test_an_invalid_key_file_is_rejected_with_a_reason(content: bytes, problem: str) -> None:
    with pytest.raises(InvalidInput, match=problem) as error:
        parse_keys("RAGCACHE_SIGNING_KEY_FILE", content)
    assert str(error.value).startswith("RAGCACHE_SIGNING_KEY_FILE: ")


@given(st.binary(max_size=31).map(bytes.hex) | st.text(alphabet="xyz +/=", max_size=40))
def test_no_error_contains_a_line_of_the_key_file(line: str) -> None:
    with pytest.raises(InvalidInput) as error:
        parse_keys("F", line.encode())
    assert len(line.strip()) < 8 or line.strip() not in str(error.value)
