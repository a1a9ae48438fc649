"""Names of chunks and of their chunk-caches (DESIGN §1): ChunkKey, PrefixKey, VariantKey.

A variant is the KV of one chunk computed after one prefix, so its name is the pair of both. Both
keys live in a *KV space* (which model, tokenizer, KV layout, dtype and rope settings made the KV)
and an *access domain* (who may share it): the same tokens in another space or domain have other
keys, so they can never be served across.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

KEY_BYTES = 16
"""Length of a ChunkKey and of a PrefixKey: 128 bits, where chance collisions stay out of reach."""

ChunkKey = bytes
PrefixKey = bytes

TokenIds = Sequence[int] | npt.NDArray[np.uint32]


@dataclass(frozen=True, slots=True)
class KVSpace:
    """Everything that must be equal for KV to be interchangeable.

    model: fingerprint of weights, tokenizer and rope settings (``fingerprint.model_fingerprint``).
    num_layers, num_kv_heads, head_dim: shape of one token's KV.
    dtype: element type as stored, e.g. ``bfloat16``.
    """

    model: str
    num_layers: int
    num_kv_heads: int
    head_dim: int
    dtype: str

    def digest(self) -> bytes:
        """128-bit digest that seeds every key of this space."""
        text = "|".join(
            (
                "kv-space-1",
                self.model,
                str(self.num_layers),
                str(self.num_kv_heads),
                str(self.head_dim),
                self.dtype,
            )
        )
        return hashlib.blake2b(text.encode(), digest_size=KEY_BYTES).digest()


def _token_bytes(token_ids: TokenIds) -> bytes:
    return np.asarray(token_ids, dtype="<u4").tobytes()


def chunk_key(space: KVSpace, domain: str, token_ids: TokenIds) -> ChunkKey:
    """Key of a chunk: its own tokens and nothing around them."""
    hasher = hashlib.blake2b(digest_size=KEY_BYTES, person=b"ragcache-chunk")
    hasher.update(space.digest())
    hasher.update(domain.encode() + b"\0")
    hasher.update(_token_bytes(token_ids))
    return hasher.digest()


class PrefixHasher:
    """Walks along a prompt and names the prefix reached.

    The key depends on every token before it and not on how they were cut into segments.
    """

    def __init__(self, space: KVSpace, domain: str) -> None:
        self._hasher = hashlib.blake2b(digest_size=KEY_BYTES, person=b"ragcache-prefix")
        self._hasher.update(space.digest())
        self._hasher.update(domain.encode() + b"\0")

    def extend(self, token_ids: TokenIds) -> None:
        """Append token_ids to the prefix."""
        self._hasher.update(_token_bytes(token_ids))

    def key(self) -> PrefixKey:
        """Key of the prefix walked so far; that of the empty prefix before the first extend."""
        return self._hasher.digest()


@dataclass(frozen=True, slots=True)
class VariantKey:
    """Name of a chunk-cache: which chunk, computed after which prefix."""

    chunk: ChunkKey
    prefix: PrefixKey

    def __post_init__(self) -> None:
        if len(self.chunk) != KEY_BYTES or len(self.prefix) != KEY_BYTES:
            raise ValueError(f"chunk and prefix keys have {KEY_BYTES} bytes each")

    def to_bytes(self) -> bytes:
        """Chunk key first, so that all variants of a chunk are neighbours in an ordered store."""
        return self.chunk + self.prefix

    @classmethod
    def from_bytes(cls, raw: bytes) -> VariantKey:
        """Inverse of to_bytes. Raises ValueError for any other length."""
        if len(raw) != 2 * KEY_BYTES:
            raise ValueError(f"a variant key has {2 * KEY_BYTES} bytes, not {len(raw)}")
        return cls(raw[:KEY_BYTES], raw[KEY_BYTES:])
