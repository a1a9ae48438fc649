"""Hand-encoded messages equal those of the generated code, byte for byte."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ragcache_wire.v1 import cachestore_pb2 as pb
from ragcache_wire.value_part import data_of, encode_data

sizes = st.sampled_from([0, 1, 127, 128, 16_383, 16_384, 1 << 20, (1 << 21) + 1])
pieces = st.binary(max_size=40) | sizes.map(bytes)


@pytest.mark.parametrize("message", [pb.PutPart, pb.GetPart])
@given(piece=pieces)
def test_the_encoding_is_that_of_generated_code(
    message: type[pb.PutPart | pb.GetPart], piece: bytes
) -> None:
    encoded = encode_data(memoryview(piece))
    assert encoded == message(data=piece).SerializeToString()
    assert data_of(encoded) == piece


@given(st.binary(max_size=40))
def test_no_bytes_are_misread(message: bytes) -> None:
    data = data_of(message)
    if data is not None:
        assert pb.PutPart.FromString(message).data == data


@given(pieces, st.binary(min_size=1, max_size=3))
def test_a_message_with_more_in_it_is_left_to_generated_code(piece: bytes, more: bytes) -> None:
    assert data_of(encode_data(piece) + more) is None
    assert data_of(encode_data(piece)[:-1]) is None


def test_a_header_is_left_to_generated_code() -> None:
    assert data_of(pb.PutPart(header=pb.PutHeader()).SerializeToString()) is None
    assert data_of(b"") is None
