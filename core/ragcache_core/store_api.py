"""What is asked of a cache store and what it answers, as plain values.

The control face (gRPC) and every data lane carry the same values; ``ragcache_kv.values.conversions``
writes them as protobuf messages and reads them back.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from ragcache_core.identity.keys import ChunkKey, PrefixKey, VariantKey
from ragcache_core.identity.variant import Miss, Origin, Tier, ValueShape, VariantInfo

MAX_KEYS = 4096
"""Bound of the keys, wants, or names of one kind in one call."""

MAX_PARTS = 1024
"""Bound of the parts of one value: more layers than any model has."""

MAX_PREFIX_CHUNKS = 4096
"""Bound of the chunks before a variant."""

MAX_TOKENS = 1_000_000
"""Bound of a chunk's tokens, and of the position of its first one."""

MAX_NAME_CHARS = 512
"""Bound of the name of a domain or a document."""

LEASE_S = 30.0
"""How long a store keeps in its place what is being read, and room for what is being put."""

ID_BYTES = 16
"""Length of a deletion's id, a store's id and a boot id."""


@dataclass(frozen=True, slots=True)
class Hello:
    """Who a store is, and which data lanes it offers beside gRPC.

    boot: ID_BYTES, new at every start. store: ID_BYTES, of the data folder. data_socket: path of a
    Unix socket, or "". data_port: TCP, on the host of the control calls, or 0.
    """

    boot: bytes
    store: bytes
    max_value_bytes: int
    data_socket: str = ""
    data_port: int = 0


class Ack(StrEnum):
    """When a put is answered."""

    ACCEPTED = "accepted"  # visible in memory
    DURABLE = "durable"  # survives the end of the process at any instant


class PutOutcome(StrEnum):
    """What became of a put."""

    STORED = "stored"
    ALREADY_STORED = "already_stored"  # as good or better
    DELETED = "deleted"  # a delete overtook it


@dataclass(frozen=True, slots=True)
class LookupKey:
    """Variants asked for. prefix None: every variant of the chunk."""

    chunk: ChunkKey
    prefix: PrefixKey | None = None

    @classmethod
    def of(cls, key: VariantKey) -> LookupKey:
        """The one variant of key."""
        return cls(key.chunk, key.prefix)


@dataclass(frozen=True, slots=True)
class StoredVariant:
    """What a lookup says of one variant that is held.

    load_s: predicted seconds from its tier to the caller. prefix_chunks: those of its origin; given
    where every variant of a chunk was asked for. replicas: other shards ("host:port") that hold it.
    wants_higher_precision: hot, and held with less than the precision that it deserves, so that the next
    full computation of it is worth putting.
    """

    key: VariantKey
    info: VariantInfo
    tier: Tier
    load_s: float = 0.0
    prefix_chunks: tuple[ChunkKey, ...] = ()
    replicas: tuple[str, ...] = ()
    wants_higher_precision: bool = False


@dataclass(frozen=True, slots=True)
class ChunkVariants:
    """The answer to one Want. miss: why nothing is held; None where something is."""

    held: tuple[StoredVariant, ...] = ()
    miss: Miss | None = None


@dataclass(frozen=True, slots=True)
class AsOf:
    """The deletes that a computation may have missed.

    Those after sequence of the store, and those that it applied since planned_at_ms. store: id of a
    data folder (ID_BYTES). A put that was planned on a lookup carries the lookup's, so that a
    delete in between is not undone. planned_at_ms: Unix time at which the chunks were chosen, where
    that was before the lookup: one that was deleted in between is not brought back; 0: no such
    time.
    """

    store: bytes = b""
    sequence: int = 0
    planned_at_ms: int = 0


@dataclass(frozen=True, slots=True)
class LookupAnswer:
    """One Variants for each Want, in order."""

    variants: tuple[ChunkVariants, ...]
    as_of: AsOf


@dataclass(frozen=True, slots=True)
class NewVariant:
    """A variant that is to be put, before anybody need have computed all of it.

    origin: all but its cost, which a Completion tells. part_bytes: size of each part; they add up
    to info.num_bytes.
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
    """What is said of a value that is put, after its last byte.

    checksums: XXH3-64 of each part. cost_s: seconds that computing the value took; 0: unknown.
    """

    checksums: tuple[int, ...]
    cost_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Deletion:
    """What one delete names; a store applies an id once.

    documents: ids of documents of domain. domain with no documents: everything of it, and then
    nothing else is named; "" names no domain. Something is named. Everything computed after a chunk
    that is named goes too. made_at_ms: Unix time.
    """

    id: bytes
    chunks: tuple[ChunkKey, ...] = ()
    variants: tuple[VariantKey, ...] = ()
    documents: tuple[str, ...] = ()
    domain: str = ""
    made_at_ms: int = 0


@dataclass(frozen=True, slots=True)
class Tombstone:
    """A deletion as one store applied it. sequence: its place among that store's deletes."""

    sequence: int
    deletion: Deletion


class EventKind(StrEnum):
    """What an Event tells."""

    STORED = "stored"
    MOVED = "moved"  # to tier
    REPLACED = "replaced"  # by another precision
    DROPPED = "dropped"
    SNAPSHOT_BEGIN = "snapshot_begin"  # forget what was known; STORED follow
    SNAPSHOT_END = "snapshot_end"


@dataclass(frozen=True, slots=True)
class Event:
    """What happened to one variant in a store.

    boot: ID_BYTES, new at every start of the store. sequence: ascends by one within a boot; a gap
    means that events were lost, and a new snapshot is due. tier and info: where they make sense.
    """

    boot: bytes
    sequence: int
    kind: EventKind
    key: VariantKey | None = None
    tier: Tier | None = None
    info: VariantInfo | None = None
