"""Every variant that is held, found by key, chunk, chunks before it, document and domain."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Hashable, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, TypeVar

from ragcache_cachestore.storage.tier_space import TierCopy
from ragcache_core.eviction import EvictionCandidate
from ragcache_core.identity.keys import ChunkKey, VariantKey
from ragcache_core.identity.variant import (
    Origin,
    Precision,
    Tier,
    ValuePart,
    ValueShape,
    VariantInfo,
)
from ragcache_core.store_api import Deletion

if TYPE_CHECKING:
    from ragcache_cachestore.background.write_back import WriteJob

HALF_LIFE_S = 600.0
"""After this long a use counts half in the score."""

MAX_WASTED_PROMOTIONS = 8
"""Bound of how patient a value becomes: after that it takes 256 reads to try once more."""

H = TypeVar("H", bound=Hashable)


@dataclass(slots=True, eq=False)
class CatalogVariant:
    """A variant as it is held. What it says of its value never changes: a better value is another.

    identity: names this very record, and orders records by when they came. delete_sequence: of the
    store when it came; no delete up to there covers it. memory, disk: its copies. superseded: what
    it replaced, kept on disk until it has a copy there of its own. job: its write to disk, while
    that is to come. reads: since the store started. put_at: on the store's clock.
    """

    key: VariantKey
    identity: int
    info: VariantInfo
    parts: tuple[ValuePart, ...]
    origin: Origin
    shape: ValueShape | None
    value_format: int
    delete_sequence: int
    put_at: float
    memory: TierCopy | None = None
    disk: TierCopy | None = None
    superseded: CatalogVariant | None = None
    job: WriteJob | None = None
    wants_higher_precision: bool = False
    reads: int = 0
    _promote_at_reads: int = 2
    _promoted_at_reads: int | None = None
    _wasted_promotions: int = 0
    _uses: float = 1.0
    _uses_at: float = field(init=False)

    def __post_init__(self) -> None:
        self._uses_at = self.put_at

    @property
    def tier(self) -> Tier:
        """The fastest tier that has a copy."""
        return Tier.DISK if self.memory is None else Tier.MEMORY

    @property
    def eviction_candidate(self) -> EvictionCandidate[VariantKey]:
        """What a policy is told of it."""
        return EvictionCandidate(
            self.info.num_bytes, self.info.num_tokens, self.origin.cost_s, self.origin.parent
        )

    def note_read(self, now: float) -> None:
        """Count a read."""
        self._uses = self._decayed_uses(now) + 1.0
        self._uses_at = now
        self.reads += 1

    @property
    def deserves_memory(self) -> bool:
        """Whether it is read often enough on disk to come into memory, for which others go.

        Twice is enough at first. Each time it was in vain, that is, it had to go before it was read
        from there, takes twice as many reads as the time before: a working set that memory cannot
        hold would else only be carried to and fro.
        """
        return self.reads >= self._promote_at_reads

    def note_promoted(self) -> None:
        """It was brought from disk into memory."""
        self._promoted_at_reads = self.reads

    def note_demoted(self) -> None:
        """Its copy in memory made room for others."""
        if self._promoted_at_reads is None:
            return
        in_vain = self._promoted_at_reads == self.reads
        self._wasted_promotions = min(self._wasted_promotions + 1, MAX_WASTED_PROMOTIONS) if in_vain else 0
        self._promote_at_reads = self.reads + (1 << self._wasted_promotions)
        self._promoted_at_reads = None

    def score(self, now: float) -> float:
        """Decayed saved seconds per byte (DESIGN §1): of the put and of the reads since."""
        return self._decayed_uses(now) * self.origin.cost_s / self.info.num_bytes

    def inherit_use(self, other: CatalogVariant) -> None:
        """Take over how hot other was, which this one replaces."""
        self.reads, self._uses, self._uses_at = other.reads, other._uses, other._uses_at
        self._promote_at_reads, self._wasted_promotions = other._promote_at_reads, other._wasted_promotions

    def _decayed_uses(self, now: float) -> float:
        return self._uses * math.exp2((self._uses_at - now) / HALF_LIFE_S)


def replaces(new: VariantInfo, held: CatalogVariant) -> bool:
    """Whether a new value is to take the place of the one held.

    It must be better in one of exactness and losslessness and worse in neither. One that deserves
    better than it is held with also gives way to more bytes of the same kind.
    """
    mine = (new.provenance.exact, new.precision.lossless)
    theirs = (held.info.provenance.exact, held.info.precision.lossless)
    if mine == theirs:
        return held.wants_higher_precision and new.num_bytes > held.info.num_bytes
    return mine[0] >= theirs[0] and mine[1] >= theirs[1]


@dataclass(slots=True)
class Catalog:
    """Holdings and the indexes over them. Under the store's lock.

    bytes_by_precision: of all values as held.
    """

    bytes_by_precision: Counter[Precision] = field(default_factory=Counter)
    _variants: dict[VariantKey, CatalogVariant] = field(default_factory=dict)
    _of_chunk: defaultdict[ChunkKey, set[VariantKey]] = field(
        default_factory=lambda: defaultdict(set)
    )
    _after_chunk: defaultdict[ChunkKey, set[VariantKey]] = field(
        default_factory=lambda: defaultdict(set)
    )
    _of_document: defaultdict[tuple[str, str], set[VariantKey]] = field(
        default_factory=lambda: defaultdict(set)
    )
    _of_domain: defaultdict[str, set[VariantKey]] = field(default_factory=lambda: defaultdict(set))

    def __len__(self) -> int:
        return len(self._variants)

    def __iter__(self) -> Iterator[CatalogVariant]:
        return iter(self._variants.values())

    def get(self, key: VariantKey) -> CatalogVariant | None:
        """What is held of key."""
        return self._variants.get(key)

    def contains(self, variant: CatalogVariant) -> bool:
        """Whether this very record is still held."""
        return self._variants.get(variant.key) is variant

    def variants_of(self, chunk: ChunkKey) -> list[CatalogVariant]:
        """Every variant of a chunk, in no order."""
        return [self._variants[key] for key in self._of_chunk.get(chunk, ())]

    def add(self, variant: CatalogVariant) -> None:
        """Hold a variant whose key is not held."""
        assert variant.key not in self._variants
        key, origin = variant.key, variant.origin
        self._variants[key] = variant
        self._of_chunk[key.chunk].add(key)
        for chunk in origin.prefix_chunks:
            self._after_chunk[chunk].add(key)
        if origin.document:
            self._of_document[origin.domain, origin.document].add(key)
        self._of_domain[origin.domain].add(key)
        self.bytes_by_precision[variant.info.precision] += variant.info.num_bytes

    def remove(self, variant: CatalogVariant) -> None:
        """Hold it no more."""
        key, origin = variant.key, variant.origin
        assert self._variants.pop(key) is variant
        _discard(self._of_chunk, key.chunk, key)
        for chunk in set(origin.prefix_chunks):
            _discard(self._after_chunk, chunk, key)
        if origin.document:
            _discard(self._of_document, (origin.domain, origin.document), key)
        _discard(self._of_domain, origin.domain, key)
        self.bytes_by_precision[variant.info.precision] -= variant.info.num_bytes
        if not self.bytes_by_precision[variant.info.precision]:
            del self.bytes_by_precision[variant.info.precision]

    def covered_by(self, deletion: Deletion) -> list[CatalogVariant]:
        """Everything that a delete removes."""
        keys: set[VariantKey] = set()
        for chunk in deletion.chunks:
            keys |= self._of_chunk.get(chunk, set())
            keys |= self._after_chunk.get(chunk, set())
        keys.update(key for key in deletion.variants if key in self._variants)
        for document in deletion.documents:
            keys |= self._of_document.get((deletion.domain, document), set())
        if deletion.domain and not deletion.documents:
            keys |= self._of_domain.get(deletion.domain, set())
        return [self._variants[key] for key in keys]

    def check(self) -> None:
        """Raise AssertionError if the indexes do not agree."""
        again = Catalog()
        for variant in self:
            again.add(variant)
        assert again == self


def _discard(index: defaultdict[H, set[VariantKey]], name: H, key: VariantKey) -> None:
    keys = index[name]
    keys.discard(key)
    if not keys:
        del index[name]
