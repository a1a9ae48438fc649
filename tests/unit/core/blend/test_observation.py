"""An observation round-trips through bytes, and other bytes are rejected."""

from __future__ import annotations

import math
import struct

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ragcache_core.blend.observation import OBSERVATION_FORMAT, ChunkObservation, observation_key
from ragcache_core.blend.prefix_overlap import AttendedChunk
from ragcache_core.identity.keys import KEY_BYTES, VariantKey

keys = st.binary(min_size=KEY_BYTES, max_size=KEY_BYTES)
variants = st.builds(VariantKey, keys, keys)
attention = st.floats(0, 1e6)
observations = st.builds(
    ChunkObservation,
    st.lists(st.builds(AttendedChunk, keys, st.integers(1, 2**32 - 1), attention), max_size=4).map(
        tuple
    ),
    attention,
    st.lists(attention, min_size=1, max_size=20).map(tuple),
)


def rounded(seen: ChunkObservation) -> ChunkObservation:
    def to_float32(number: float) -> float:
        return float(np.float32(number))

    return ChunkObservation(
        tuple(AttendedChunk(a.chunk, a.num_tokens, to_float32(a.inter)) for a in seen.attended),
        to_float32(seen.intra),
        tuple(map(to_float32, seen.influence)),
    )


def is_refused_or_stays(raw: bytes) -> bool:
    """Whether raw is refused, or is just what the observation read from it would be written as."""
    try:
        seen = ChunkObservation.from_bytes(raw)
    except ValueError:
        return True
    return seen.to_bytes() == raw and 0.5 <= seen.cci <= 1


@given(observations)
def test_an_observation_round_trips_up_to_float32(seen: ChunkObservation) -> None:
    raw = seen.to_bytes()
    back = ChunkObservation.from_bytes(raw)
    assert back == rounded(seen)
    assert back.to_bytes() == raw
    assert ChunkObservation.from_bytes(memoryview(raw)) == back


@given(observations)
def test_truncated_bytes_are_rejected(seen: ChunkObservation) -> None:
    raw = seen.to_bytes()
    for length in range(len(raw)):
        with pytest.raises(ValueError):  # noqa: PT011 - what it says depends on where it is cut
            ChunkObservation.from_bytes(raw[:length])


@given(observations, st.binary(min_size=1, max_size=40))
def test_trailing_bytes_are_rejected(seen: ChunkObservation, more: bytes) -> None:
    with pytest.raises(ValueError, match="are not an observation"):
        ChunkObservation.from_bytes(seen.to_bytes() + more)


@given(observations, st.lists(st.tuples(st.integers(0), st.integers(0, 255)), max_size=4))
def test_corrupt_bytes_are_rejected_or_read_consistently(
    seen: ChunkObservation, changes: list[tuple[int, int]]
) -> None:
    raw = bytearray(seen.to_bytes())
    for index, byte in changes:
        raw[index % len(raw)] = byte
    assert is_refused_or_stays(bytes(raw))


@given(st.binary(max_size=80), st.booleans())
def test_no_bytes_break_the_reader(raw: bytes, has_format: bool) -> None:
    assert is_refused_or_stays(bytes([OBSERVATION_FORMAT]) + raw if has_format else raw)


@given(observations, st.integers(0, 255).filter(lambda number: number != OBSERVATION_FORMAT))
def test_another_format_is_rejected(seen: ChunkObservation, version: int) -> None:
    with pytest.raises(ValueError, match=f"format {version}"):
        ChunkObservation.from_bytes(bytes([version]) + seen.to_bytes()[1:])


def written(
    num_tokens: int = 7, inter: float = 1.0, intra: float = 1.0, influence: float = 1.0
) -> bytes:
    """An observation of one token after one chunk, field by field."""
    return struct.pack(
        f"<BIIf{KEY_BYTES}sIff",
        *(OBSERVATION_FORMAT, 1, 1, intra, bytes(KEY_BYTES), num_tokens, inter, influence),
    )


def test_the_byte_format_is_stable() -> None:
    seen = ChunkObservation((AttendedChunk(bytes(KEY_BYTES), 7, 1.0),), 1.0, (1.0,))
    assert seen.to_bytes() == written()


@pytest.mark.parametrize("wrong", [math.nan, math.inf, -1.0])
@pytest.mark.parametrize(
    ("field", "named"),
    [("inter", "inter must be finite"), ("intra", "attention"), ("influence", "influence")],
)
def test_invalid_numbers_are_rejected(field: str, named: str, wrong: float) -> None:
    with pytest.raises(ValueError, match=named):
        ChunkObservation.from_bytes(written(num_tokens=7, **{field: wrong}))


def test_chunks_without_tokens_are_rejected() -> None:
    with pytest.raises(ValueError, match="num_tokens must be at least 1"):
        ChunkObservation.from_bytes(written(num_tokens=0))
    with pytest.raises(ValueError, match="of at least one token"):
        ChunkObservation((), 1.0, ())


def test_more_attention_to_the_prefix_gives_a_higher_cci() -> None:
    def cci(*inter: float) -> float:
        attended = tuple(AttendedChunk(bytes(KEY_BYTES), 2, paid) for paid in inter)
        return ChunkObservation(attended, 1.0, (0.0, 0.0)).cci

    assert cci() == cci(0.0) == 0.5
    # 1 / (2 * 2) to the one before, as much within: the sigmoid of 1.
    assert cci(1.0) == pytest.approx(1 / (1 + math.exp(-1)))
    assert cci(1.0) < cci(1.0, 1.0) < 1


@given(variants, variants)
def test_an_observation_has_its_own_key_after_the_same_prefix(
    one: VariantKey, other: VariantKey
) -> None:
    assert observation_key(one).chunk != one.chunk
    assert observation_key(one).prefix == one.prefix
    assert (observation_key(one) == observation_key(other)) == (one == other)
    assert observation_key(one) != other
