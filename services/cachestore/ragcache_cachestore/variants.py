"""Access to single variants for the background tasks: the re-encoder and the replicator."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from ragcache_cachestore.background.re_encoder import ReEncodingCandidate
from ragcache_cachestore.background.tier_mover import TierMover
from ragcache_cachestore.state.store_state import StoreState
from ragcache_core.identity.keys import VariantKey
from ragcache_core.store_api import NewVariant
from ragcache_kv.values.outgoing_value import ReadyValue


class VariantAccess:
    """Reads and annotates variants. Its reads count neither as hits nor as misses."""

    def __init__(self, state: StoreState, mover: TierMover) -> None:
        self._state = state
        self._mover = mover

    def candidates(self, now: float) -> Iterator[ReEncodingCandidate]:
        """Yield every stored variant, as it is when the iterator reaches it."""
        for variant in self._state.in_batches():
            yield ReEncodingCandidate(
                key=variant.key,
                identity=variant.identity,
                info=variant.info,
                shape=variant.shape,
                parts=variant.parts,
                value_format=variant.value_format,
                tier=variant.tier,
                reads=variant.reads,
                score=variant.score(now),
                wants_higher_precision=variant.wants_higher_precision,
            )

    def children(self, min_age_s: float) -> Iterator[tuple[VariantKey, VariantKey]]:
        """Yield each variant of this age that has a parent, with the parent."""
        put_before = self._state.clock() - min_age_s
        for variant in self._state.in_batches():
            if variant.origin.parent is not None and variant.put_at <= put_before:
                yield variant.key, variant.origin.parent

    def read(self, key: VariantKey, identity: int) -> bytearray | None:
        """Return a copy of a value, or None if the variant was replaced or is corrupt."""
        with self._state.lock:
            variant = self._state.catalog.get(key)
        if variant is None or variant.identity != identity:
            return None
        return self._mover.read_copy(variant)

    def export(self, key: VariantKey) -> tuple[NewVariant, ReadyValue] | None:
        """Return a copy of a value and what a put of it needs, or None if it is not stored."""
        with self._state.lock:
            variant = self._state.catalog.get(key)
        value = None if variant is None else self._mover.read_copy(variant)
        if variant is None or value is None:
            return None
        new = NewVariant(
            key=key,
            info=variant.info,
            part_bytes=tuple([part.num_bytes for part in variant.parts]),
            origin=replace(variant.origin, cost_s=0.0),
            shape=variant.shape,
            value_format=variant.value_format,
        )
        checksums = [part.checksum for part in variant.parts]
        return new, ReadyValue(memoryview(value), checksums, variant.origin.cost_s)

    def set_wants_higher_precision(self, key: VariantKey, wanted: bool) -> None:
        """Set whether lookups report that a variant wants a higher precision."""
        with self._state.lock:
            variant = self._state.catalog.get(key)
            if variant is not None:
                variant.wants_higher_precision = wanted

    def set_copies(self, key: VariantKey, shards: tuple[str, ...]) -> None:
        """Set the other shards that lookups report, until the variant is dropped."""
        with self._state.lock:
            if shards and self._state.catalog.get(key) is not None:
                self._state.copies[key] = shards
            else:
                self._state.copies.pop(key, None)
