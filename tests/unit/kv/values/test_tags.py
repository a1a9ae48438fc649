"""A tag holds for one value under one name, and for nothing else."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ragcache_cachestore.background.re_encoder import re_encode_value
from ragcache_core.identity.store_key import StoreKey
from ragcache_core.identity.variant import (
    TAG_BYTES,
    Codec,
    Precision,
    Provenance,
    Tier,
    ValueShape,
    ValueTags,
)
from ragcache_core.store_api import NewVariant
from ragcache_kv.values.buffers import checksummed_parts
from ragcache_kv.values.layout import FORMAT, value_parts
from ragcache_kv.values.stored_value import StoredValue
from ragcache_kv.values.tags import TaggedValue, is_authentic
from tests.kit.store import key, value, variant, whole

KEY, OTHER = StoreKey.of_secret(b"one" * 16), StoreKey.of_secret(b"two" * 16)
SHAPE = ValueShape(2, 1, 4, "bfloat16")
SIZES = (60, 40)
RAW = value(sum(SIZES))
NEW = replace(variant(key(1), RAW, shape=SHAPE), part_bytes=SIZES)


def tag_of(new: NewVariant, raw: bytes, store_key: StoreKey = KEY) -> bytes:
    return TaggedValue(store_key, new, whole(new, raw)).tag()


def stored(new: NewVariant = NEW, raw: bytes = RAW, tag: bytes | None = None) -> StoredValue:
    parts = checksummed_parts(memoryview(raw), new.part_bytes)
    given = tag_of(NEW, RAW) if tag is None else tag
    view = memoryview(bytearray(raw))
    return StoredValue(new.info, parts, new.shape, new.value_format, view, Tier.MEMORY, given)


def test_a_value_is_authentic_under_its_name() -> None:
    assert len(tag_of(NEW, RAW)) == TAG_BYTES
    assert is_authentic(KEY, NEW.key, stored())
    assert not is_authentic(OTHER, NEW.key, stored())
    assert not is_authentic(KEY, key(2), stored())
    assert not is_authentic(KEY, key(1, 1), stored())
    assert not is_authentic(KEY, NEW.key, stored(tag=b""))


CHANGES: dict[str, Callable[[NewVariant], NewVariant]] = {
    "exact": lambda n: replace(n, info=replace(n.info, provenance=Provenance(False))),
    "position": lambda n: replace(n, info=replace(n.info, base_position=18)),
    "tokens": lambda n: replace(n, info=replace(n.info, num_tokens=255)),
    "precision": lambda n: replace(n, info=replace(n.info, precision=Precision(Codec.INT8))),
    "sizes": lambda n: replace(n, part_bytes=SIZES[::-1]),
    "one part": lambda n: replace(n, part_bytes=(100,)),
    "format": lambda n: replace(n, value_format=2),
    "no shape": lambda n: replace(n, shape=None),
    "heads": lambda n: replace(n, shape=replace(SHAPE, num_kv_heads=2)),
    "dtype": lambda n: replace(n, shape=replace(SHAPE, dtype="float16")),
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_the_tag_covers_what_a_reader_is_told(change: Callable[[NewVariant], NewVariant]) -> None:
    assert not is_authentic(KEY, NEW.key, stored(change(NEW)))


@given(st.integers(0, len(RAW) - 1), st.integers(1, 255))
def test_no_changed_byte_is_authentic(index: int, change: int) -> None:
    forged = bytearray(RAW)
    forged[index] ^= change
    assert not is_authentic(KEY, NEW.key, stored(raw=bytes(forged)))


@given(st.lists(st.integers(0, 40), min_size=1, max_size=8), st.data())
def test_a_tag_does_not_depend_on_how_parts_came(sizes: list[int], data: st.DataObject) -> None:
    raw = value(sum(sizes))
    new = replace(variant(key(1), raw), part_bytes=tuple(sizes))
    one, again = (TaggedValue(KEY, new, whole(new, raw)) for _ in range(2))
    for done in sorted(data.draw(st.lists(st.integers(0, len(sizes) - 1)))):
        one.wait_for_parts(done, 0.0)
    one.wait_for_parts(0, 0.0)  # as a client that begins again on another connection
    assert one.tag() == again.tag() == tag_of(new, raw)


def test_the_keys_of_names_and_tags_tell_nothing_of_each_other() -> None:
    assert len({KEY.names, KEY.tags, OTHER.names, OTHER.tags}) == 4
    assert "names" not in repr(KEY)


NATIVE_SHAPE = ValueShape(2, 2, 8, "bfloat16")
ENCODINGS = tuple(map(Precision.parse, ("packed", "int8", "e4m3/e5m2", "gse8")))


def native_value() -> tuple[NewVariant, bytes]:
    sizes = value_parts(NATIVE_SHAPE, 16)
    raw = np.random.default_rng(1).standard_normal(sum(sizes) // 2).astype(np.float32)
    bits = (raw.view(np.uint32) >> 16).astype(np.uint16).tobytes()
    new = variant(key(1), bits, shape=NATIVE_SHAPE)
    info = replace(new.info, num_tokens=16)
    return replace(new, info=info, part_bytes=sizes, value_format=FORMAT), bits


@pytest.mark.parametrize("precision", ENCODINGS, ids=str)
def test_a_value_that_a_store_re_encodes_is_authentic(precision: Precision) -> None:
    new, raw = native_value()
    tag = TaggedValue(KEY, new, whole(new, raw), ENCODINGS).tag()
    assert is_authentic(KEY, new.key, stored(new, raw, tag))
    parts = list(checksummed_parts(memoryview(raw), new.part_bytes))
    views = re_encode_value(bytearray(raw), parts, NATIVE_SHAPE, 16, Precision(), precision)
    encoded = b"".join(views)
    info = replace(new.info, num_bytes=len(encoded), precision=precision)
    sizes = tuple(view.nbytes for view in views)
    changed = replace(new, info=info, part_bytes=sizes)
    assert is_authentic(KEY, new.key, stored(changed, encoded, tag))
    assert not is_authentic(OTHER, new.key, stored(changed, encoded, tag))
    forged = bytes([encoded[0] ^ 1]) + encoded[1:]
    assert not is_authentic(KEY, new.key, stored(changed, forged, tag))
    # Without a tag of this precision, a client refuses it.
    untagged = TaggedValue(KEY, new, whole(new, raw)).tag()
    assert not is_authentic(KEY, new.key, stored(changed, encoded, untagged))


@given(
    st.lists(
        st.tuples(
            st.builds(Precision, st.sampled_from(Codec), st.sampled_from(Codec)),
            st.binary(min_size=16, max_size=16),
        ),
        max_size=4,
    )
)
def test_tags_survive_as_bytes(encodings: list[tuple[Precision, bytes]]) -> None:
    tags = ValueTags(bytes(16), tuple(encodings))
    assert ValueTags.from_bytes(tags.to_bytes()) == tags


@pytest.mark.parametrize(
    "packed", [bytes(15), bytes(17), bytes(16 + 5 * 17), bytes(16) + b"\xff" * 17]
)
def test_bytes_that_are_no_tags_are_refused(packed: bytes) -> None:
    with pytest.raises(ValueError, match=r"no tags|no code"):
        ValueTags.from_bytes(packed)
