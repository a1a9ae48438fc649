"""What is known of a chunk-cache beside its bytes (DESIGN §1): origin, precision, provenance.

A *variant* is the KV of one chunk computed after one prefix. Its value is a sequence of *parts*,
one for each layer in the order an engine computes them, so that a reader may use the first layers
while the others are on their way; each part has a checksum of its own.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from ragcache_core.identity.keys import ChunkKey, VariantKey


class Codec(StrEnum):
    """How numbers of KV are held. ``ragcache_kv.codecs`` encodes and decodes them."""

    NATIVE = "native"  # as computed, bit for bit
    PACKED = "packed"  # as computed, bit for bit, in fewer bytes (lossless compression)
    INT8 = "int8"  # 8 bits and a scale per group
    E4M3 = "e4m3"  # FP8, 4 exponent and 3 fraction bits
    E5M2 = "e5m2"  # FP8, 5 exponent and 2 fraction bits
    GSE8 = "gse8"  # HA-RAG §II-B: 1 sign bit, 4 of a shared exponent's index, 3 of fraction
    GSE8_125 = "gse8-125"
    GSE8_134 = "gse8-134"
    INT4 = "int4"  # 4 bits and a scale per group

    @property
    def lossless(self) -> bool:
        """Whether decoding gives back what was encoded, bit for bit."""
        return self in {Codec.NATIVE, Codec.PACKED}


@dataclass(frozen=True, slots=True)
class Precision:
    """How a variant's keys and values are held, each in its own way."""

    key: Codec = Codec.NATIVE
    value: Codec = Codec.NATIVE

    @property
    def lossless(self) -> bool:
        """Whether both are held losslessly."""
        return self.key.lossless and self.value.lossless

    @classmethod
    def parse(cls, text: str) -> Precision:
        """From "key/value" or one name for both. Raises ValueError."""
        key, _, value = text.partition("/")
        return cls(Codec(key), Codec(value or key))

    def __str__(self) -> str:
        return self.key.value if self.key == self.value else f"{self.key}/{self.value}"


@dataclass(frozen=True, slots=True)
class Provenance:
    """How a variant's KV came to be.

    exact: computed in full, over a prefix that was itself exact. Anything computed after a blended
    or lossy prefix is tainted and never serves ``exact`` (DESIGN §5.3).
    """

    exact: bool


@dataclass(frozen=True, slots=True)
class ValueShape:
    """Shape of one token's KV, and the dtype of its numbers; None where a value is opaque bytes.

    A native value is [num_layers, 2, num_tokens, num_kv_heads, head_dim] in C order, keys first.
    """

    num_layers: int
    num_kv_heads: int
    head_dim: int
    dtype: str


@dataclass(frozen=True, slots=True)
class ValuePart:
    """One layer of a value as it is held. checksum: XXH3-64."""

    num_bytes: int
    checksum: int


@dataclass(frozen=True, slots=True)
class VariantInfo:
    """What a store says of a variant it holds.

    num_tokens: length of the chunk. num_bytes: size of the value as held. base_position: position
    of the chunk's first token when it was computed, to which its keys are rotated.
    """

    num_tokens: int
    num_bytes: int
    base_position: int
    provenance: Provenance
    precision: Precision = Precision()

    @property
    def serves_exact(self) -> bool:
        """Whether it may stand for a computation: computed exactly, and held losslessly."""
        return self.provenance.exact and self.precision.lossless


@dataclass(frozen=True, slots=True)
class Origin:
    """Where a variant comes from; given when it is put, kept with it.

    prefix_chunks: the chunks before it, first to last; deleting one of them deletes it too.
    parent: the variant right before it, whose loss makes it unreachable in ``exact``; None at the
    start of a prompt.
    domain: access domain that its keys were made in. document: id of the document, or "".
    cost_s: seconds that computing it took; 0 if unknown.
    """

    prefix_chunks: tuple[ChunkKey, ...] = ()
    parent: VariantKey | None = None
    domain: str = "public"
    document: str = ""
    cost_s: float = 0.0


class Tier(StrEnum):
    """Where a store holds a variant."""

    MEMORY = "memory"
    DISK = "disk"


class Miss(StrEnum):
    """Why a variant that was asked for is not served."""

    NEVER_STORED = "never_stored"
    EVICTED = "evicted"
    DELETED = "deleted"
    CORRUPT = "corrupt"  # a checksum did not hold; it has been dropped
    APPROXIMATE = "approximate"  # held, but asked for as exact and not computed so
    OTHER_PRECISION = "other_precision"  # held, but asked for as exact and held with a loss
    OTHER_DOMAIN = "other_domain"
    TIMED_OUT = "timed_out"  # did not come in time
    LOST = "lost"  # its shard does not answer
