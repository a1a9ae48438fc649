"""What an engine measured of a chunk's attention to the chunks before it.

The engine measures it after it has computed a variant, and puts it into the store as a small
separate value whose key derives from the variant's. So a variant may be observed later than it is
stored, or never.
"""

from __future__ import annotations

import hashlib
import struct
from dataclasses import dataclass

import numpy as np

from ragcache_core.blend.fix_overhead import context_impact
from ragcache_core.blend.prefix_overlap import AttendedChunk
from ragcache_core.identity.keys import KEY_BYTES, VariantKey

OBSERVATION_FORMAT = 1
"""Version of the bytes. Another version is read as no observation."""

_LARGEST = float(np.finfo(np.float32).max)

_HEAD = struct.Struct("<BIIf")  # version, prefix chunks, tokens, intra
_ATTENDED = struct.Struct(f"<{KEY_BYTES}sIf")  # chunk, tokens, inter


@dataclass(frozen=True, slots=True)
class ChunkObservation:
    """Observation of one variant.

    Attributes:
        attended: The chunks before it and the attention paid to each (Cache-Craft eq. 3), first to
            last, without the template.
        intra: Attention within the chunk (eq. 4).
        influence: Of each token, 0 or more (``rank_tokens``).
    """

    attended: tuple[AttendedChunk, ...]
    intra: float
    influence: tuple[float, ...]

    def __post_init__(self) -> None:
        numbers = np.asarray([self.intra, *self.influence], dtype=np.float64)
        if not self.influence or not ((numbers >= 0) & (numbers <= _LARGEST)).all():
            raise ValueError(
                "attention and influence must be finite and 0 or more, of at least one token"
            )

    @property
    def cci(self) -> float:
        """Cache context impact (eq. 11), in [0.5, 1]."""
        return context_impact(len(self.influence), self.intra, self.attended).cci

    def to_bytes(self) -> bytes:
        """Return the bytes that ``from_bytes`` reads, with numbers rounded to float32."""
        head = _HEAD.pack(OBSERVATION_FORMAT, len(self.attended), len(self.influence), self.intra)
        attended = [_ATTENDED.pack(a.chunk, a.num_tokens, a.inter) for a in self.attended]
        return b"".join([head, *attended, np.asarray(self.influence, dtype="<f4").tobytes()])

    @classmethod
    def from_bytes(cls, raw: bytes | memoryview) -> ChunkObservation:
        """Return the inverse of to_bytes.

        Raises:
            ValueError: The bytes are not an observation.
        """
        try:
            version, num_attended, num_tokens, intra = _HEAD.unpack_from(raw)
            if version != OBSERVATION_FORMAT:
                raise ValueError(f"format {version} is not {OBSERVATION_FORMAT}")
            start = _HEAD.size + num_attended * _ATTENDED.size
            if len(raw) != start + 4 * num_tokens:
                raise ValueError(f"{len(raw)} bytes are not an observation of {num_tokens} tokens")
            attended = tuple(
                AttendedChunk(chunk, tokens, inter)
                for chunk, tokens, inter in _ATTENDED.iter_unpack(raw[_HEAD.size : start])
            )
        except struct.error as error:
            raise ValueError(str(error)) from error
        return cls(attended, intra, tuple(np.frombuffer(raw[start:], dtype="<f4").tolist()))


def observation_key(variant: VariantKey) -> VariantKey:
    """Return the key of a variant's observation in a store."""
    chunk = hashlib.blake2b(variant.chunk, digest_size=KEY_BYTES, person=b"ragcache-seen")
    return VariantKey(chunk.digest(), variant.prefix)
