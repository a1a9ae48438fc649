"""Names of chunks and of their variants: ChunkKey, PrefixKey, VariantKey.

A variant is the KV of one chunk computed after one prefix, so a pair of keys names it. Both keys
depend on a *KV space* (the model, tokenizer, KV layout, dtype and rope settings) and on an *access
domain* (who may share the KV). The same tokens in another space or domain have other keys, so they
are never served across.

The hashes are keyed with the platform's store key, if it has one. So a caller without it cannot
tell under which name the KV of a known text is stored.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import numpy.typing as npt

from ragcache_core.identity.packed_ids import PackedIds

KEY_BYTES = 16
"""Length of a ChunkKey and of a PrefixKey: with 128 bits, chance collisions are negligible."""

PUBLIC_DOMAIN = "public"
"""Access domain of callers without a tenant. No client can set a domain."""

ChunkKey = bytes
PrefixKey = bytes

TokenIds = Sequence[int] | npt.NDArray[np.uint32]


@dataclass(frozen=True, slots=True)
class KVSpace:
    """All properties that must be equal for KV to be interchangeable.

    Attributes:
        model: Fingerprint of weights, tokenizer and settings (``fingerprint.model_fingerprint``).
        num_layers: Number of layers.
        num_kv_heads: KV heads of one layer.
        head_dim: Numbers per head.
        dtype: Element type as stored, such as ``bfloat16``.
        name_key: Key of the hashes that name chunks and prefixes (``StoreKey.names``). Empty: the
            platform has none.
        num_ranks: Ranks that share the heads (tensor parallelism). Each stores a value of its own
            (``rank_key``), so engines with other numbers of ranks cannot read it.
    """

    model: str
    num_layers: int
    num_kv_heads: int
    head_dim: int
    dtype: str
    name_key: bytes = field(default=b"", repr=False)
    num_ranks: int = 1

    def digest(self) -> bytes:
        """Return the 128-bit digest that is part of every key of this space. It is no secret."""
        text = "|".join(
            (
                "kv-space-1",
                self.model,
                str(self.num_layers),
                str(self.num_kv_heads),
                str(self.head_dim),
                self.dtype,
                *((f"{self.num_ranks} ranks",) if self.num_ranks > 1 else ()),
            )
        )
        return hashlib.blake2b(text.encode(), digest_size=KEY_BYTES).digest()

    def of_rank(self) -> KVSpace:
        """Return the space with the heads that one rank has, for the layout of its values."""
        return replace(self, num_kv_heads=self.num_kv_heads // self.num_ranks)


def domain_salt(domain: str) -> str | None:
    """Return the ``cache_salt`` of prompts of an access domain. None: they have none.

    It keeps the blocks of a domain in an engine's own prefix cache from those of others. Gateways
    send it, and engines tell by it which blocks belong to a plan.
    """
    return None if domain == PUBLIC_DOMAIN else domain


def token_bytes(token_ids: TokenIds) -> bytes:
    """Return token ids as 32-bit little-endian numbers, as keys and signatures hash them."""
    if isinstance(token_ids, PackedIds):
        return token_ids.packed
    return np.asarray(token_ids, dtype="<u4").tobytes()


def common_tokens(one: TokenIds, other: TokenIds) -> int:
    """Return the length of the longest common beginning of two prompts."""
    equal, different = 0, min(len(one), len(other)) + 1
    while different - equal > 1:
        middle = (equal + different) // 2
        # Slices are compared without a loop in Python.
        if one[equal:middle] == other[equal:middle]:
            equal = middle
        else:
            different = middle
    return equal


def token_digest(token_ids: TokenIds) -> bytes:
    """Return the 128-bit digest of a chunk's tokens, which needs no KV space."""
    hasher = hashlib.blake2b(digest_size=KEY_BYTES, person=b"ragcache-tokens")
    hasher.update(token_bytes(token_ids))
    return hasher.digest()


def chunk_key(space: KVSpace, domain: str, token_ids: TokenIds) -> ChunkKey:
    """Return the key of a chunk, which depends on the chunk's own tokens only."""
    return chunk_key_of_digest(space, domain, token_digest(token_ids))


def chunk_key_of_digest(space: KVSpace, domain: str, digest: bytes) -> ChunkKey:
    """Return the key of a chunk whose ``token_digest`` is known."""
    hasher = _hasher(space, b"ragcache-chunk")
    hasher.update(space.digest())
    hasher.update(domain.encode() + b"\0")
    hasher.update(digest)
    return hasher.digest()


def _hasher(space: KVSpace, purpose: bytes) -> hashlib.blake2b:
    return hashlib.blake2b(digest_size=KEY_BYTES, person=purpose, key=space.name_key)


class PrefixHasher:
    """Hashes a prompt incrementally and names the prefix so far.

    The key depends on every token of the prefix and not on the bounds of its segments.
    """

    def __init__(self, space: KVSpace, domain: str) -> None:
        self._hasher = _hasher(space, b"ragcache-prefix")
        self._hasher.update(space.digest())
        self._hasher.update(domain.encode() + b"\0")

    def extend(self, token_ids: TokenIds) -> None:
        """Append token_ids to the prefix."""
        self._hasher.update(token_bytes(token_ids))

    def key(self) -> PrefixKey:
        """Return the key of the prefix so far. Before the first extend the prefix is empty."""
        return self._hasher.digest()


@dataclass(frozen=True, slots=True)
class VariantKey:
    """Name of a variant: which chunk, computed after which prefix."""

    chunk: ChunkKey
    prefix: PrefixKey

    def __post_init__(self) -> None:
        if len(self.chunk) != KEY_BYTES or len(self.prefix) != KEY_BYTES:
            raise ValueError(f"chunk and prefix keys have {KEY_BYTES} bytes each")

    def to_bytes(self) -> bytes:
        """Return the key as bytes, chunk first, so that the variants of a chunk are adjacent."""
        return self.chunk + self.prefix

    @classmethod
    def from_bytes(cls, raw: bytes) -> VariantKey:
        """Return the inverse of to_bytes.

        Raises:
            ValueError: The length is wrong.
        """
        if len(raw) != 2 * KEY_BYTES:
            raise ValueError(f"a variant key has {2 * KEY_BYTES} bytes, not {len(raw)}")
        return cls(raw[:KEY_BYTES], raw[KEY_BYTES:])


def rank_key(key: VariantKey, rank: int) -> VariantKey:
    """Return the name of a rank's part of a variant: its range of heads.

    The number of ranks is in the KV space, and so in ``key``. Rank 0 stores its part under the
    variant's own key: gateways use it to find and prefetch the variant.
    """
    return VariantKey(rank_chunk(key.chunk, rank), key.prefix)


def rank_chunk(chunk: ChunkKey, rank: int) -> ChunkKey:
    """Return the chunk key of a rank's part of a chunk's variants."""
    if not rank:
        return chunk
    hasher = hashlib.blake2b(chunk, digest_size=KEY_BYTES, person=b"ragcache-rank")
    hasher.update(rank.to_bytes(4, "little"))
    return hasher.digest()
