"""The catalog of stored variants, with their indexes, and why others are no longer stored."""

from __future__ import annotations

import math
from collections import Counter, OrderedDict, defaultdict
from collections.abc import Hashable, Iterator
from concurrent.futures import CancelledError, Future
from dataclasses import dataclass, field
from typing import TypeVar

from ragcache_cachestore.storage.tier_space import TierCopy
from ragcache_core.errors import Unavailable
from ragcache_core.eviction import EvictionCandidate
from ragcache_core.identity.keys import ChunkKey, VariantKey
from ragcache_core.identity.variant import (
    Miss,
    Origin,
    Precision,
    Tier,
    ValuePart,
    ValueShape,
    VariantInfo,
)
from ragcache_core.store_api import Deletion

HALF_LIFE_S = 600.0
"""Time after which a use counts half in the score."""

MAX_WASTED_PROMOTIONS = 8
"""Bound of the promotion back-off: a value needs at most 256 reads before the next promotion."""

MISS_REASONS = 65_536
"""Number of reasons kept, in about 10 MiB."""

H = TypeVar("H", bound=Hashable)


@dataclass(slots=True, eq=False)
class WriteJob:
    """The write of one variant to disk.

    Attributes:
        urgent: A caller waits for the write.
        queued_at: On the clock of the idle window.
    """

    variant: CatalogVariant
    urgent: bool
    queued_at: float
    done: Future[None] = field(default_factory=Future)

    def wait(self, timeout_s: float) -> None:
        """Wait until the variant is written.

        Raises:
            Unavailable: The write failed, was cancelled, or takes too long.
        """
        try:
            self.done.result(timeout_s)
        except TimeoutError:
            raise Unavailable(
                "cachestore", "its disk is slow: the write did not finish in time"
            ) from None
        except CancelledError:
            raise Unavailable(
                "cachestore", "the value was dropped, or the store closed, before the write"
            ) from None


@dataclass(slots=True, eq=False)
class CatalogVariant:
    """A stored variant and its copies.

    The description of the value never changes. A put or a swap of the same key makes a new one.

    Attributes:
        identity: Unique within the store. It ascends with every put and swap.
        delete_sequence: The store's last delete when the variant was put. No delete up to this
            one covers the variant.
        put_at: On the store's clock.
        tag: As the client put it, for the value in each precision (``ValueTags``).
        memory: The copy in memory.
        disk: The copy on disk.
        superseded: The variant that this one replaced. Its copy stays on disk until this variant
            has its own copy there.
        job: The pending write to disk.
        wants_higher_precision: The re-encoder would store it with a higher precision.
        reads: Number of reads since the store started.
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
    tag: bytes = b""
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
        """The properties that an eviction policy needs."""
        info, origin = self.info, self.origin
        return EvictionCandidate(
            info.num_bytes, info.num_tokens, origin.cost_s, origin.parent, origin.token_s
        )

    def note_read(self, now: float) -> None:
        """Count a read, which is a use."""
        self.note_use(now)
        self.reads += 1

    def note_use(self, now: float) -> None:
        """Count a use in the score."""
        self._uses = self.decayed_uses(now) + 1.0
        self._uses_at = now

    @property
    def deserves_memory(self) -> bool:
        """Whether the variant is read often enough on disk to evict other variants from memory.

        The first promotion needs two reads. A promotion that is evicted before its first hit
        doubles the reads needed for the next one. Without this back-off, a working set larger
        than memory would only move back and forth.
        """
        return self.reads >= self._promote_at_reads

    def note_promoted(self) -> None:
        """Note that the value was copied from disk into memory."""
        self._promoted_at_reads = self.reads

    def note_demoted(self) -> None:
        """Note that the copy in memory was evicted, and adjust the promotion back-off."""
        if self._promoted_at_reads is None:
            return
        wasted = self._promoted_at_reads == self.reads
        self._wasted_promotions = (
            min(self._wasted_promotions + 1, MAX_WASTED_PROMOTIONS) if wasted else 0
        )
        self._promote_at_reads = self.reads + (1 << self._wasted_promotions)
        self._promoted_at_reads = None

    def score(self, now: float) -> float:
        """Return the decayed saved seconds per byte, over the put and the reads since."""
        return self.decayed_uses(now) * self.origin.cost_s / self.info.num_bytes

    def decayed_uses(self, now: float) -> float:
        """Return the number of uses, each halved with every HALF_LIFE_S since. A put is one."""
        return self._uses * math.exp2((self._uses_at - now) / HALF_LIFE_S)

    def inherit_use(self, other: CatalogVariant) -> None:
        """Take over the read counts of the variant that this one replaces."""
        self.reads, self._uses, self._uses_at = other.reads, other._uses, other._uses_at
        self._promote_at_reads = other._promote_at_reads
        self._wasted_promotions = other._wasted_promotions


def replaces(new: VariantInfo, stored: CatalogVariant) -> bool:
    """Return whether a new value replaces the stored one.

    The new value must be better in exactness or losslessness, and worse in neither. If the stored
    variant wants a higher precision, more bytes of the same kind replace it as well.
    """
    new_quality = (new.provenance.exact, new.precision.lossless)
    stored_quality = (stored.info.provenance.exact, stored.info.precision.lossless)
    if new_quality == stored_quality:
        return stored.wants_higher_precision and new.num_bytes > stored.info.num_bytes
    return new_quality[0] >= stored_quality[0] and new_quality[1] >= stored_quality[1]


@dataclass(slots=True)
class Catalog:
    """The stored variants and their indexes. The store's lock guards it.

    Attributes:
        bytes_by_precision: Bytes of all values, each counted once.
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
        """Return the variant of key, if it is stored."""
        return self._variants.get(key)

    def contains(self, variant: CatalogVariant) -> bool:
        """Return whether this very variant is stored, and no other one replaced it."""
        return self._variants.get(variant.key) is variant

    def variants_of(self, chunk: ChunkKey) -> list[CatalogVariant]:
        """Return every variant of a chunk, in no order."""
        return [self._variants[key] for key in self._of_chunk.get(chunk, ())]

    def add(self, variant: CatalogVariant) -> None:
        """Add a variant whose key is not in the catalog."""
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
        """Remove a variant."""
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

    def covered_by(self, deletion: Deletion) -> set[VariantKey]:
        """Return the key of every variant that a delete removes."""
        if deletion.names_nothing:
            return set(self._variants)
        keys: set[VariantKey] = set()
        for chunk in deletion.chunks:
            keys |= self._of_chunk.get(chunk, set())
            keys |= self._after_chunk.get(chunk, set())
        keys.update(key for key in deletion.variants if key in self._variants)
        for document in deletion.documents:
            keys |= self._of_document.get((deletion.domain, document), set())
        if deletion.domain and not deletion.documents:
            keys |= self._of_domain.get(deletion.domain, set())
        return keys

    def check(self) -> None:
        """Raise AssertionError if the indexes do not agree with the variants."""
        rebuilt = Catalog()
        for variant in self:
            rebuilt.add(variant)
        assert rebuilt == self


def _discard(index: defaultdict[H, set[VariantKey]], name: H, key: VariantKey) -> None:
    keys = index[name]
    keys.discard(key)
    if not keys:
        del index[name]


class MissReasons:
    """Miss reasons by 64 bits of a key. The oldest are dropped. The store's lock guards it."""

    def __init__(self, capacity: int = MISS_REASONS) -> None:
        self._capacity = capacity
        self._reasons: OrderedDict[bytes, Miss] = OrderedDict()

    def __len__(self) -> int:
        return len(self._reasons)

    def note(self, key: VariantKey, reason: Miss) -> None:
        """Note why a variant was dropped. This also becomes the reason of its chunk."""
        for name in (_variant_name(key), _chunk_name(key.chunk)):
            self._reasons[name] = reason
            self._reasons.move_to_end(name)
        while len(self._reasons) > self._capacity:
            self._reasons.popitem(last=False)

    def of_variant(self, key: VariantKey) -> Miss:
        """Return why a variant is not stored."""
        return self._reasons.get(_variant_name(key), Miss.NEVER_STORED)

    def of_chunk(self, chunk: ChunkKey) -> Miss:
        """Return why no variant of a chunk is stored."""
        return self._reasons.get(_chunk_name(chunk), Miss.NEVER_STORED)


def _variant_name(key: VariantKey) -> bytes:
    # Both keys are hashes, so any of their bytes will do.
    return key.chunk[-5:] + key.prefix[-4:]


def _chunk_name(chunk: ChunkKey) -> bytes:
    return chunk[-8:]
