"""The interface of embedders."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Protocol

import numpy as np
import numpy.typing as npt

from ragcache_core.errors import Unavailable

Vectors = npt.NDArray[np.float32]


class Embedder(Protocol):
    """Turns texts into vectors of length 1, so that their inner product is their cosine."""

    @property
    def identity(self) -> str:
        """Equal for embedders whose vectors are comparable. Known after ``start``."""

    @property
    def dimension(self) -> int:
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
