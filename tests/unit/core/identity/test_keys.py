"""Keys: equal exactly when KV is interchangeable."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ragcache_core.identity.keys import KEY_BYTES, KVSpace, PrefixHasher, VariantKey, chunk_key

SPACE = KVSpace("model", num_layers=2, num_kv_heads=1, head_dim=8, dtype="bfloat16")
token_lists = st.lists(st.integers(0, 2**32 - 1), max_size=20)
keys = st.binary(min_size=KEY_BYTES, max_size=KEY_BYTES)


def prefix_key(*parts: list[int], space: KVSpace = SPACE, domain: str = "public") -> bytes:
    hasher = PrefixHasher(space, domain)
    for part in parts:
        hasher.extend(part)
    return hasher.key()


@given(token_lists, token_lists)
def test_chunks_share_a_key_exactly_when_their_tokens_are_equal(a: list[int], b: list[int]) -> None:
    assert (chunk_key(SPACE, "public", a) == chunk_key(SPACE, "public", b)) == (a == b)


@given(token_lists, st.integers(0, 20))
def test_a_prefix_key_does_not_depend_on_how_the_prefix_was_cut(
    tokens: list[int], cut: int
) -> None:
    assert prefix_key(tokens) == prefix_key(tokens[:cut], tokens[cut:])


@given(token_lists, token_lists)
def test_a_prefix_key_depends_on_every_token(a: list[int], b: list[int]) -> None:
    assert (prefix_key(a) == prefix_key(b)) == (a == b)


@given(st.lists(st.integers(0, 2**32 - 1), min_size=2, max_size=20, unique=True))
def test_a_prefix_key_depends_on_the_order(tokens: list[int]) -> None:
    assert prefix_key(tokens) != prefix_key(tokens[::-1])


def test_a_prefix_can_be_extended_after_its_key_is_read() -> None:
    hasher = PrefixHasher(SPACE, "public")
    hasher.extend([1])
    hasher.key()
    hasher.extend([2])
    assert hasher.key() == prefix_key([1, 2])


@pytest.mark.parametrize(
    "other",
    [
        replace(SPACE, model="another"),
        replace(SPACE, num_layers=3),
        replace(SPACE, num_kv_heads=2),
        replace(SPACE, head_dim=16),
        replace(SPACE, dtype="float16"),
    ],
)
def test_another_space_has_other_keys(other: KVSpace) -> None:
    assert chunk_key(other, "public", [1]) != chunk_key(SPACE, "public", [1])
    assert prefix_key([1], space=other) != prefix_key([1])


@given(st.text(max_size=5), st.text(max_size=5), token_lists)
def test_another_domain_has_other_keys(a: str, b: str, tokens: list[int]) -> None:
    same = a == b
    assert (chunk_key(SPACE, a, tokens) == chunk_key(SPACE, b, tokens)) == same
    assert (prefix_key(tokens, domain=a) == prefix_key(tokens, domain=b)) == same


@given(token_lists)
def test_a_chunk_key_is_not_a_prefix_key(tokens: list[int]) -> None:
    assert chunk_key(SPACE, "public", tokens) != prefix_key(tokens)


@given(keys, keys)
def test_a_variant_key_round_trips_and_starts_with_the_chunk(chunk: bytes, prefix: bytes) -> None:
    key = VariantKey(chunk, prefix)
    assert VariantKey.from_bytes(key.to_bytes()) == key
    assert key.to_bytes().startswith(chunk)


@given(st.binary(max_size=40).filter(lambda raw: len(raw) != 2 * KEY_BYTES))
def test_a_variant_key_of_another_length_is_rejected(raw: bytes) -> None:
    with pytest.raises(ValueError, match="32 bytes"):
        VariantKey.from_bytes(raw)


@given(keys, st.binary(max_size=40).filter(lambda raw: len(raw) != KEY_BYTES))
def test_keys_of_another_length_are_rejected(good: bytes, bad: bytes) -> None:
    with pytest.raises(ValueError, match="16 bytes"):
        VariantKey(good, bad)
    with pytest.raises(ValueError, match="16 bytes"):
        VariantKey(bad, good)


@given(token_lists)
def test_names_are_unknown_without_the_store_key(tokens: list[int]) -> None:
    one, other = (replace(SPACE, name_key=bytes([n]) * 32) for n in (1, 2))
    assert len({chunk_key(space, "public", tokens) for space in (SPACE, one, other)}) == 3
    assert len({prefix_key(tokens, space=space) for space in (SPACE, one, other)}) == 3
    assert SPACE.digest() == one.digest()  # it is published
    assert (b"\1" * 32).hex() not in repr(one)
