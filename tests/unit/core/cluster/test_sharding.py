"""All clients agree on the owner of a chunk, and a change moves as few chunks as possible."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ragcache_core.cluster.sharding import RendezvousHash
from ragcache_core.identity.keys import KEY_BYTES

CHUNKS = st.lists(st.binary(min_size=KEY_BYTES, max_size=KEY_BYTES), min_size=1, max_size=64)
MEMBERS = st.sets(st.text(min_size=1, max_size=40), min_size=1, max_size=12)


def real_members(count: int) -> list[str]:
    return [f"cache-cachestore-{i}.cache-cachestore-shards.rag.svc:50051" for i in range(count)]


def many_chunks(count: int) -> list[bytes]:
    """Keys that differ in a few bits only, the least random there could be."""
    return [number.to_bytes(8, "little") + bytes(8) for number in range(count)]


@given(chunks=CHUNKS, members=MEMBERS)
def test_all_clients_with_the_same_members_agree_on_the_owner(
    chunks: list[bytes], members: set[str]
) -> None:
    owners = RendezvousHash(members).owners(chunks)
    assert set(owners) <= members
    assert RendezvousHash(sorted(members, reverse=True)).owners(chunks) == owners
    assert [RendezvousHash(members).owners([chunk])[0] for chunk in chunks] == owners


@given(chunks=CHUNKS, members=MEMBERS, newcomer=st.text(min_size=1, max_size=40))
def test_a_joining_member_moves_only_chunks_to_itself(
    chunks: list[bytes], members: set[str], newcomer: str
) -> None:
    before = RendezvousHash(members).owners(chunks)
    after = RendezvousHash(members | {newcomer}).owners(chunks)
    for old, new in zip(before, after, strict=True):
        assert new in {old, newcomer}


@given(chunks=CHUNKS, members=MEMBERS, data=st.data())
def test_a_leaving_member_moves_only_its_own_chunks(
    chunks: list[bytes], members: set[str], data: st.DataObject
) -> None:
    gone = data.draw(st.sampled_from(sorted(members)))
    if members == {gone}:
        return
    before = RendezvousHash(members).owners(chunks)
    after = RendezvousHash(members - {gone}).owners(chunks)
    for old, new in zip(before, after, strict=True):
        assert old in {new, gone}


@pytest.mark.parametrize("count", [2, 3, 8, 64])
def test_shards_get_about_equal_shares(count: int) -> None:
    chunks = many_chunks(1000 * count)
    shares = Counter(RendezvousHash(real_members(count)).owners(chunks))
    assert len(shares) == count
    # Six standard deviations of a fair draw of 1000.
    assert all(abs(share - 1000) < 6 * 1000**0.5 for share in shares.values())


def test_owners_never_change_between_versions() -> None:
    """Another mapping would make every stored variant a miss."""
    owners = RendezvousHash(["a:1", "b:1", "c:1"]).owners(many_chunks(12))
    assert "".join(owner[0] for owner in owners) == "baaacaacaaaa"


@given(chunks=CHUNKS, members=MEMBERS, count=st.integers(1, 13))
def test_the_second_member_becomes_the_owner_when_the_first_leaves(
    chunks: list[bytes], members: set[str], count: int
) -> None:
    rendezvous = RendezvousHash(members)
    ranked = rendezvous.ranked(chunks, count)
    assert [row[0] for row in ranked] == rendezvous.owners(chunks)
    for chunk, row in zip(chunks, ranked, strict=True):
        assert len(row) == len(set(row)) == min(count, len(members))
        left = set(members)
        for name in row:
            assert RendezvousHash(left).owners([chunk]) == [name]
            left.remove(name)


def test_without_members_there_is_no_owner() -> None:
    with pytest.raises(ValueError, match="no members"):
        RendezvousHash([]).owners(many_chunks(1))
