"""The interface of embedders."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal, Protocol

import numpy as np
import numpy.typing as npt

from ragcache_core.errors import Unavailable

Vectors = npt.NDArray[np.float32]
Tokens = Sequence[int]
Precision = Literal["bfloat16", "float32"]
_BFLOAT16_FEATURES = ("amx_bf16", "avx512_bf16", "bf16")


class Embedder(Protocol):
    """Turns texts into vectors of length 1, so that their inner product is their cosine."""

    identity: str
    """Equal for embedders whose vectors are comparable. Known after ``start``."""
    dimension: int
    """Length of the vectors. Known after ``start``."""

    async def start(self) -> None:
        """Start the embedder, and return after it has embedded a first text.

        Raises:
            Unavailable: Another attempt may succeed.
            InvalidInput: No attempt can succeed with these settings.
        """

    def adopt(self, identities: Iterable[str]) -> None:
        """Take the one of some stored identities whose vectors are comparable, if there is one.

        Called after ``start``. Most embedders compute their identity and have nothing to do.
        """

    async def embed(self, texts: Sequence[str], *, urgent: bool) -> Vectors:
        """Return the embeddings of texts, shape (len(texts), dimension).

        The embedder divides the texts into batches. Concurrent calls may share them.

        Args:
            urgent: The texts are queries. A few go before documents; the embedder may have many of
                them wait as documents do.

        Raises:
            Unavailable: The embedder does not answer.
            InvalidInput: The embedder refuses a text.
        """

    async def close(self) -> None:
        """Stop the embedder. Running calls fail."""


def normalised(source: str, vectors: Vectors) -> Vectors:
    """Scale vectors to length 1.

    Raises:
        Unavailable: They hold values that are not finite. The error names ``source``.
    """
    lengths = np.linalg.norm(vectors, axis=1, keepdims=True)
    if not np.isfinite(lengths).all():
        raise Unavailable(source, "its vectors hold values that are not finite")
    # A vector of zeros has no direction. Unchanged, it scores 0 with every query.
    return np.ascontiguousarray(vectors / np.where(lengths == 0, 1, lengths), dtype=np.float32)


class TextEncoder(Protocol):
    """A model that turns the tokens of texts into vectors. Several threads call it at once."""

    dimension: int
    """Length of the vectors."""

    def embed(self, batch: Sequence[Tokens]) -> Vectors:
        """Return the embeddings of texts, shape (len(batch), dimension), of any length."""


def best_precision(on_gpu: bool, capabilities: Mapping[str, Any]) -> Precision:
    """Return the precision for a device.

    Args:
        capabilities: Features of the CPU. Without the instructions, bfloat16 would be slower.
    """
    fast = any(capabilities.get(feature, False) for feature in _BFLOAT16_FEATURES)
    return "bfloat16" if fast and not on_gpu else "float32"
