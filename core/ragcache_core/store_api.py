"""Requests and answers of a cache store, as plain values.

gRPC calls and every transport carry the same values. ``ragcache_kv.values.conversions`` converts
them to protobuf messages and back.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from ragcache_core.identity.keys import ChunkKey, PrefixKey, VariantKey
from ragcache_core.identity.variant import (
    NO_INFLUENCE,
    Influence,
    Miss,
    Origin,
    Tier,
    ValueShape,
    VariantInfo,
)

MAX_KEYS = 4096
"""Bound of the keys, lookup keys, or names of one kind in one call."""

MAX_VARIANTS = 32
"""Bound of the variants of one chunk that a lookup returns."""

MAX_PARTS = 1024
"""Bound of the parts of one value. No model has as many layers."""

MAX_PREFIX_CHUNKS = 4096
"""Bound of the chunks before a variant."""

MAX_TOKENS = 1_000_000
"""Bound of a chunk's tokens, and of the position of its first token."""

MAX_NAME_CHARS = 512
"""Bound of the name of a domain or a document."""

LEASE_S = 30.0
"""How long a store protects a value that is being read, and the space of a put in progress."""

ID_BYTES = 16
"""Length of a deletion's id, a store's id and a boot id."""


class Ack(StrEnum):
    """When a put is answered."""

    ACCEPTED = "accepted"  # visible in memory
    DURABLE = "durable"  # survives a crash of the process at any time


class PutOutcome(StrEnum):
    """The result of a put."""

    STORED = "stored"
    ALREADY_STORED = "already_stored"  # with the same precision or better
    DELETED = "deleted"  # a delete came first


@dataclass(frozen=True, slots=True)
class LookupKey:
    """What to look up of one chunk.

    Attributes:
        prefix: The variant after this prefix. None: variants after any prefix.
        others: With a prefix: variants after other prefixes, too.
    """

    chunk: ChunkKey
    prefix: PrefixKey | None = None
    others: bool = False

    @property
    def takes_any(self) -> bool:
        """Whether it asks for variants after any prefix."""
        return self.prefix is None or self.others

    @classmethod
    def for_variant(cls, key: VariantKey) -> LookupKey:
        """Return the lookup key of a single variant."""
        return cls(key.chunk, key.prefix)


@dataclass(frozen=True, slots=True)
class VariantUse:
    """How one request used a variant.

    Attributes:
        fix_overhead: Cache-Craft's CFO of this use, CCI * (1 - beta') in [0, 1]. 0: the prefix
            matches.
        token_s: The request computed the tokens although the variant is stored, and its prefill was
            predicted to take this many seconds per token. 0: the request reused the variant, or the
            time is not known.
    """

    fix_overhead: float = 0.0
    token_s: float = 0.0

    def __post_init__(self) -> None:
        if not (0.0 <= self.fix_overhead <= 1.0 and 0.0 <= self.token_s < float("inf")):
            raise ValueError(f"not a use: CFO {self.fix_overhead}, {self.token_s} s per token")


REUSE = VariantUse()
"""A use after the same prefix, for which nothing was computed."""


@dataclass(frozen=True, slots=True)
class ReportedUses:
    """Uses of one variant that needed no read from the store. All of them are alike."""

    key: VariantKey
    use: VariantUse = REUSE
    times: int = 1


@dataclass(frozen=True, slots=True)
class StoredVariant:
    """A stored variant, as a lookup returns it.

    Attributes:
        load_s: Predicted seconds to load it from its tier to the caller.
        prefix_chunks: Those of its origin. Given where variants after any prefix were looked up.
        copies: Other shards ("host:port") that store it.
        wants_higher_precision: It is read often and stored with less precision than the policy
            gives it. The next full computation should be put.
        influence: That of its origin, given with its prefix chunks.
    """

    key: VariantKey
    info: VariantInfo
    tier: Tier
    load_s: float = 0.0
    prefix_chunks: tuple[ChunkKey, ...] = ()
    copies: tuple[str, ...] = ()
    wants_higher_precision: bool = False
    influence: Influence = NO_INFLUENCE


@dataclass(frozen=True, slots=True)
class ChunkVariants:
    """The answer to one LookupKey.

    Attributes:
        stored: Of more than MAX_VARIANTS, the variant after the key's prefix and those that were
            used most.
        miss: Why no variant is stored; None if there is one.
    """

    stored: tuple[StoredVariant, ...] = ()
    miss: Miss | None = None


@dataclass(frozen=True, slots=True)
class AsOf:
    """The deletes that a computation may have missed.

    These are the deletes after ``sequence`` of the store, and those that it applied since
    ``planned_at_ms``. A put carries the values of the lookup that it was planned with, so that a
    delete in between is not undone.

    Attributes:
        store: Id of a data folder (ID_BYTES).
        sequence: Sequence number of the last delete that the lookup saw.
        planned_at_ms: Unix time at which the chunks were selected, if that was before the lookup. A
            chunk that was deleted in between is not stored again. 0: unknown.
    """

    store: bytes = b""
    sequence: int = 0
    planned_at_ms: int = 0


@dataclass(frozen=True, slots=True)
class LookupAnswer:
    """One ChunkVariants for each LookupKey, in order."""

    variants: tuple[ChunkVariants, ...]
    as_of: AsOf


@dataclass(frozen=True, slots=True)
class NewVariant:
    """A variant to put. Its value need not be computed yet.

    Attributes:
        origin: Everything but the cost, which PutCompletion has.
        part_bytes: Size of each part; their sum is info.num_bytes.
    """

    key: VariantKey
    info: VariantInfo
    origin: Origin
    shape: ValueShape | None
    part_bytes: tuple[int, ...]
    value_format: int = 0
    as_of: AsOf = AsOf()


@dataclass(frozen=True, slots=True)
class PutCompletion:
    """What a client sends after the last byte of a put.

    Attributes:
        checksums: XXH3-64 of each part.
        cost_s: Seconds that computing the value took. 0: unknown.
        tag: What proves to other clients that one of them has computed the value (16 bytes). The
            store cannot check it. Empty: the client has no key.
    """

    checksums: tuple[int, ...]
    cost_s: float = 0.0
    tag: bytes = b""


@dataclass(frozen=True, slots=True)
class Deletion:
    """What one delete covers. A store applies each id once.

    A deletion that is sent names at least one thing. Everything computed after a named chunk is
    deleted too. In the log of one store, a deletion that names nothing covers everything before it.

    Attributes:
        documents: Ids of documents of domain.
        domain: Without documents: the whole domain, and then nothing else is named. "": no domain.
        made_at_ms: Unix time.
    """

    id: bytes
    chunks: tuple[ChunkKey, ...] = ()
    variants: tuple[VariantKey, ...] = ()
    documents: tuple[str, ...] = ()
    domain: str = ""
    made_at_ms: int = 0

    @property
    def num_names(self) -> int:
        """Number of the chunks, variants and documents that it names."""
        return len(self.chunks) + len(self.variants) + len(self.documents)

    @property
    def names_nothing(self) -> bool:
        """Whether it covers everything that was stored before it."""
        return not (self.num_names or self.domain)


@dataclass(frozen=True, slots=True)
class Remains:
    """What one store holds of what a deletion names.

    Attributes:
        in_memory: Variants with a copy in the memory tier.
        on_disk: Variants with a copy on disk.
        unfreed: Dropped copies on disk, of any variant, whose pages still have their bytes.
    """

    in_memory: int
    on_disk: int
    unfreed: int


@dataclass(frozen=True, slots=True)
class Tombstone:
    """A deletion as one store applied it. sequence: its number among the deletes of that store."""

    sequence: int
    deletion: Deletion


@dataclass(frozen=True, slots=True)
class ForgottenDeletes:
    """The last delete that a store has forgotten. All deletes before it are forgotten as well.

    Attributes:
        sequence: Its number among the deletes of that store; 0 if none is forgotten.
        applied_at_ms: Unix time at which the store applied it.
    """

    sequence: int = 0
    applied_at_ms: int = 0


@dataclass(frozen=True, slots=True)
class DeletionBatch:
    """Deletes that one store has applied, in order, as another store pulls them.

    Attributes:
        store: Id of the data folder (ID_BYTES).
        sequence: Sequence of the last delete that the batch covers. The next pull begins after it.
        incomplete: Deletes before this batch were forgotten, and the puller has not pulled them.
    """

    store: bytes
    sequence: int
    incomplete: bool
    deletions: tuple[Deletion, ...]
