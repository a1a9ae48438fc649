"""Requests about usage that no gateway sends."""

from __future__ import annotations

import pytest

from ragcache_core.errors import InvalidInput
from ragcache_retriever.messages.usage import MAX_COUNT, counted_of
from ragcache_wire.v1 import retriever_pb2 as pb

FIELDS = pb.UsageCounts.DESCRIPTOR.fields_by_name


def adding(**counts: int) -> pb.AddUsageRequest:
    return pb.AddUsageRequest(deltas=[pb.UsageDelta(counts=pb.UsageCounts(**counts))])


@pytest.mark.parametrize("name", FIELDS)
def test_a_count_that_the_database_cannot_add_up_is_refused(name: str) -> None:
    assert len(counted_of(adding(**{name: MAX_COUNT}))) == 1
    for count in (MAX_COUNT + 1, (1 << 63), (1 << 64) - 1):
        with pytest.raises(InvalidInput) as raised:
            counted_of(adding(**{name: count}))
        assert raised.value.field == f"deltas[0].counts.{name}"
