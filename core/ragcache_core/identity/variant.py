"""Metadata of a variant: origin, precision, provenance.

A *variant* is the KV of one chunk computed after one prefix. Its value is a sequence of *parts*,
one for each layer in the order that an engine computes them. So a reader may use the first layers
while the others are still loading. Each part has its own checksum.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Final

from ragcache_core.identity.keys import KEY_BYTES, ChunkKey, VariantKey

TAG_BYTES: Final = 16
"""Length of the authentication tag of a value in one precision."""

_CODE_BYTES: Final = 1
_MAX_ENCODINGS: Final = 4


class Codec(StrEnum):
    """How numbers of KV are stored. ``ragcache_kv.codecs`` encodes and decodes them."""

    NATIVE = "native"  # as computed, bit for bit
    PACKED = "packed"  # lossless compression
    INT8 = "int8"  # 8 bits and a scale per group
    E4M3 = "e4m3"  # FP8, 4 exponent and 3 fraction bits
    E5M2 = "e5m2"  # FP8, 5 exponent and 2 fraction bits
    GSE8 = "gse8"  # HA-RAG section II-B: sign, 4 bits of exponent index, 3 of fraction
    GSE8_125 = "gse8-125"
    GSE8_134 = "gse8-134"
    INT4 = "int4"  # 4 bits and a scale per group

    @property
    def lossless(self) -> bool:
        """Whether decoding returns the encoded numbers bit for bit."""
        return self in {Codec.NATIVE, Codec.PACKED}


@dataclass(frozen=True, slots=True)
class Precision:
    """The codecs of a variant's keys and values."""

    key: Codec = Codec.NATIVE
    value: Codec = Codec.NATIVE

    @property
    def lossless(self) -> bool:
        """Whether both codecs are lossless."""
        return self.key.lossless and self.value.lossless

    @classmethod
    def parse(cls, text: str) -> Precision:
        """Parse "key/value", or one name for both.

        Raises:
            ValueError: A name is unknown.
        """
        key, _, value = text.partition("/")
        return cls(Codec(key), Codec(value or key))

    def __str__(self) -> str:
        return self.key.value if self.key == self.value else f"{self.key}/{self.value}"


@dataclass(frozen=True, slots=True)
class PrecisionUse:
    """Which stored values a request may blend.

    Attributes:
        lossy: Also those that a store has re-encoded with a loss. Otherwise the engine computes
            them.
        rounding: Of a trial: the engine gives the lossless values that it loads this precision, as
            a store would. None: it leaves them as they are.
    """

    lossy: bool = False
    rounding: Precision | None = None

    def allows(self, precision: Precision) -> bool:
        """Tell whether a value that is stored in this precision may be used."""
        return precision.lossless or self.lossy or precision == self.rounding


LOSSLESS: Final = PrecisionUse()

_CODECS: Final = tuple(Codec)


@dataclass(frozen=True, slots=True)
class ValueTags:
    """The tags of one value: as it was put, and in each precision that the store may give it.

    The store keeps them as bytes, since it has no key to make others: the first tag, and then the
    code of a precision and its tag, for each further one.
    """

    put: bytes
    encodings: tuple[tuple[Precision, bytes], ...] = ()

    def of(self, precision: Precision) -> bytes:
        """Return the tag of the value in a precision, which is the put one if no other is."""
        return dict(self.encodings).get(precision, self.put)

    def to_bytes(self) -> bytes:
        """Return the bytes that ``from_bytes`` reads."""
        packed = [self.put]
        for precision, tag in self.encodings:
            key, value = _CODECS.index(precision.key), _CODECS.index(precision.value)
            packed += [bytes([len(_CODECS) * key + value]), tag]
        return b"".join(packed)

    @classmethod
    def from_bytes(cls, packed: bytes) -> ValueTags:
        """Parse the tags of a value. Raises ValueError; no bytes are no tags."""
        if not packed:
            return cls(b"")
        count, rest = divmod(len(packed) - TAG_BYTES, _CODE_BYTES + TAG_BYTES)
        if rest or not 0 <= count <= _MAX_ENCODINGS:
            raise ValueError(f"{len(packed)} bytes are no tags of a value")
        encodings = []
        for start in range(TAG_BYTES, len(packed), _CODE_BYTES + TAG_BYTES):
            key, value = divmod(packed[start], len(_CODECS))
            if key >= len(_CODECS):
                raise ValueError(f"{packed[start]} is no code of a precision")
            tag = packed[start + _CODE_BYTES : start + _CODE_BYTES + TAG_BYTES]
            encodings.append((Precision(_CODECS[key], _CODECS[value]), tag))
        return cls(packed[:TAG_BYTES], tuple(encodings))


@dataclass(frozen=True, slots=True)
class Provenance:
    """How a variant's KV was computed.

    Attributes:
        exact: Computed in full, after a prefix that was itself exact. KV computed after a blended
            or lossy prefix is approximate and never serves ``exact`` reuse.
    """

    exact: bool


@dataclass(frozen=True, slots=True)
class ValueShape:
    """Shape of one token's KV, and the dtype of its numbers.

    A native value is [num_layers, 2, num_tokens, num_kv_heads, head_dim] in C order, keys first.
    """

    num_layers: int
    num_kv_heads: int
    head_dim: int
    dtype: str


@dataclass(frozen=True, slots=True)
class ValuePart:
    """One layer of a stored value. checksum: XXH3-64."""

    num_bytes: int
    checksum: int


@dataclass(frozen=True, slots=True)
class VariantInfo:
    """What a store knows of a variant's value.

    Attributes:
        num_tokens: Length of the chunk.
        num_bytes: Stored size of the value.
        base_position: Position of the chunk's first token when it was computed. The rotation of the
            keys belongs to it.
    """

    num_tokens: int
    num_bytes: int
    base_position: int
    provenance: Provenance
    precision: Precision = Precision()

    @property
    def serves_exact(self) -> bool:
        """Whether it may replace a computation: computed exactly and stored losslessly."""
        return self.provenance.exact and self.precision.lossless


@dataclass(frozen=True, slots=True)
class Influence:
    """What a variant depends on besides the tokens of its chunk.

    Attributes:
        rights: Of the reader whose request has computed it; it could read all documents before the
            chunk, and all that these depend on. Empty: unknown.
        writer: Key whose text is before the chunk. Empty: nothing but the platform's own text.
        num_head: How many of the chunks before it are no documents.
    """

    rights: bytes = b""
    writer: bytes = b""
    num_head: int = 0

    def __post_init__(self) -> None:
        if not {len(self.rights), len(self.writer)} <= {0, KEY_BYTES}:
            raise ValueError(f"a digest of an influence has no or {KEY_BYTES} bytes")


NO_INFLUENCE: Final = Influence()
"""Of a variant whose reader is unknown."""


@dataclass(frozen=True, slots=True)
class Origin:
    """Where a variant comes from. The client passes it with the put, and the store keeps it.

    Attributes:
        prefix_chunks: The chunks before it, first to last. Deleting one of them deletes the
            variant.
        parent: The variant right before it, without which it is unreachable in ``exact`` reuse.
            None at the start of a prompt.
        domain: Access domain of its keys.
        document: Id of the document, or "".
        cost_s: Seconds that computing it took. 0: unknown.
        token_s: Predicted seconds per token of the prefill that computed it, T(cached, computed) /
            computed of its request. 0: unknown.
        influence: Who may use it after other chunks than these.
    """

    prefix_chunks: tuple[ChunkKey, ...] = ()
    parent: VariantKey | None = None
    domain: str = "public"
    document: str = ""
    cost_s: float = 0.0
    token_s: float = 0.0
    influence: Influence = NO_INFLUENCE


class Tier(StrEnum):
    """Where a store keeps the value of a variant."""

    MEMORY = "memory"
    DISK = "disk"


@dataclass(frozen=True, slots=True)
class ValueHeader:
    """What a store tells of a value before its bytes.

    Attributes:
        parts: The layers of the value, one after another.
        value_format: Version of the value's layout (``ragcache_kv.values.layout``).
        tag: As the put had it (``PutCompletion``).
    """

    info: VariantInfo
    parts: tuple[ValuePart, ...]
    shape: ValueShape | None
    value_format: int
    tier: Tier
    tag: bytes = b""


class Miss(StrEnum):
    """Why a requested variant is not served."""

    NEVER_STORED = "never_stored"
    EVICTED = "evicted"
    DELETED = "deleted"
    CORRUPT = "corrupt"  # a checksum did not match, so the store removed it.
    FORGED = "forged"  # a client found a tag that the platform's key did not make
    APPROXIMATE = "approximate"  # stored, but not exact as requested
    OTHER_PRECISION = "other_precision"  # stored, but not lossless as requested
    OTHER_DOMAIN = "other_domain"
    TIMED_OUT = "timed_out"  # missed the deadline
    LOST = "lost"  # the shard does not answer
