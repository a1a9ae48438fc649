"""Who may use a variant after another prefix, against a model of who may read what."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ragcache_core.access.caller import ANYONE, Caller
from ragcache_core.access.reader import EVERYONE, NO_READER, Reader, may_use, reader_of
from ragcache_core.identity.variant import Influence
from ragcache_core.plan.prompt import assemble
from ragcache_core.plan.reuse_plan import ReusePlan
from ragcache_core.quality.controller import AskedQuestion
from ragcache_core.retrieval.filters import And, Exists, In, Not

FILTERS = (None, Exists("a"), In("a", ("x",)), Not(Exists("a")), And((Exists("a"), Exists("b"))))
PATTERNS = ((), ("a",), ("b",), ("a", "b"))
chunks = st.binary(min_size=1, max_size=1).map(lambda one: one * 16)
readers = st.builds(
    reader_of, st.sampled_from("klm"), st.sampled_from(PATTERNS), st.sampled_from(FILTERS)
)
prefixes = st.lists(chunks, max_size=4).map(tuple)


@st.composite
def influences(draw: st.DrawFn) -> Influence:
    made_by: Reader = draw(readers)
    writer = draw(st.sampled_from([b"", made_by.key]))
    return Influence(made_by.rights, writer, draw(st.integers(0, 2)))


@given(readers, st.sets(chunks), influences(), prefixes, st.booleans())
def test_a_variant_is_used_only_where_all_before_it_may_be_read(
    reader: Reader,
    present: set[bytes],
    influence: Influence,
    prefix: tuple[bytes, ...],
    exact: bool,
) -> None:
    used = may_use(reader, present, influence, prefix, is_exact=exact)
    documents = prefix[influence.num_head :]
    same_rights = influence.rights == reader.rights
    reads = reader.reads_all or same_rights or (exact and present.issuperset(documents))
    head = prefix[: influence.num_head]
    wrote = influence.writer in (b"", reader.key) or (exact and present.issuperset(head))
    assert used == (reads and wrote)


@given(readers, st.sets(chunks), influences(), prefixes)
def test_what_the_prompt_lacks_is_never_used_without_rights(
    reader: Reader, present: set[bytes], influence: Influence, prefix: tuple[bytes, ...]
) -> None:
    hidden = b"\xff\xff" * 8
    present.discard(hidden)
    for exact in (False, True):
        used = may_use(reader, present, influence, (*prefix, hidden), is_exact=exact)
        if influence.num_head <= len(prefix) and influence.rights != reader.rights:
            assert used <= reader.reads_all


@given(readers, st.sets(chunks), prefixes, st.booleans(), st.integers(0, 4))
def test_readers_of_the_same_rights_share_all_after_the_platforms_text(
    reader: Reader, present: set[bytes], prefix: tuple[bytes, ...], exact: bool, num_head: int
) -> None:
    assert may_use(reader, present, Influence(reader.rights, b"", num_head), prefix, is_exact=exact)


@given(readers, influences(), prefixes, st.sets(chunks), st.booleans())
def test_more_chunks_in_a_prompt_never_take_a_variant_away(
    reader: Reader,
    influence: Influence,
    prefix: tuple[bytes, ...],
    present: set[bytes],
    exact: bool,
) -> None:
    few = may_use(reader, present, influence, prefix, is_exact=exact)
    many = may_use(reader, present | set(prefix), influence, prefix, is_exact=exact)
    assert few <= many
    assert many or not exact


def test_unknown_rights_and_inexact_variants_need_a_reader_of_all() -> None:
    some = reader_of("k", ("a",), None)
    unknown = Influence(num_head=1)
    prefix = (b"h" * 16, b"d" * 16)
    assert not may_use(some, set(), unknown, prefix, is_exact=True)
    assert may_use(some, {b"d" * 16}, unknown, prefix, is_exact=True)
    assert not may_use(some, set(prefix), unknown, prefix, is_exact=False)
    assert may_use(EVERYONE, set(), unknown, prefix, is_exact=False)


def test_a_text_of_another_key_is_used_only_by_who_has_written_it_too() -> None:
    one, other = Caller("one").reader, Caller("other").reader
    written = Influence(one.rights, one.key, 1)
    prefix = (b"h" * 16, b"d" * 16)
    assert may_use(one, set(), written, prefix, is_exact=False)
    assert not may_use(other, {b"d" * 16}, written, prefix, is_exact=True)
    assert may_use(other, {b"h" * 16}, written, prefix, is_exact=True)
    assert not may_use(other, {b"h" * 16}, written, prefix, is_exact=False)


@given(st.sampled_from(PATTERNS), st.sampled_from(FILTERS))
def test_rights_are_those_of_collections_and_filter(
    patterns: tuple[str, ...], wanted: object
) -> None:
    def rights(name: str, *given: Any) -> bytes:
        return reader_of(name, *given).rights

    one = rights("one", patterns, wanted)
    assert one == rights("other", patterns[::-1], wanted)
    others = [
        rights("one", p, f) for p in PATTERNS for f in FILTERS if (p, f) != (patterns, wanted)
    ]
    assert one not in others
    assert len({*others, one}) == len(PATTERNS) * len(FILTERS)


def test_a_caller_without_keys_reads_all() -> None:
    assert ANYONE.reader == EVERYONE
    assert EVERYONE.reads_all
    assert not Caller("k", collections=("a",)).reader.reads_all
    assert not Caller("k", filter=Exists("a")).reader.reads_all


@given(st.sets(chunks), influences(), prefixes)
def test_a_plan_without_a_reader_uses_only_what_the_prompt_has(
    present: set[bytes], influence: Influence, prefix: tuple[bytes, ...]
) -> None:
    """A plan has no more rights than it names."""
    assert ReusePlan("r", "d", ()).reader == NO_READER
    assert AskedQuestion(assemble([1], [], [2]), (), 0).reader == NO_READER
    for own in (influence, Influence(NO_READER.rights, NO_READER.key, influence.num_head)):
        assert not may_use(NO_READER, present, own, prefix, is_exact=False)
    assert may_use(NO_READER, {*prefix}, influence, prefix, is_exact=True)


def test_a_reader_has_two_digests() -> None:
    with pytest.raises(ValueError, match="16 bytes"):
        Reader(b"", bytes(16), reads_all=True)
    with pytest.raises(ValueError, match="no or 16 bytes"):
        Influence(b"short")
