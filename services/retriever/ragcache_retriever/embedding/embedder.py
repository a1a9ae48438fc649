"""What the service asks of an embedder, and what text of a chunk is embedded."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np
import numpy.typing as npt

from ragcache_core.errors import Unavailable
from ragcache_retriever.documents.chunking import Chunk

Vectors = npt.NDArray[np.float32]

EMBEDDED_TEXT_VERSION = 1
"""Counts up when embedded_text changes: stored chunks are then embedded anew."""


class Embedder(Protocol):
    """Turns texts into vectors of length 1, so that their inner product is their cosine."""

    @property
    def identity(self) -> str:
        """Equal for embedders whose vectors can be compared. Known once started."""

    @property
    def dimension(self) -> int:
        """Length of its vectors. Known once started."""

    @property
    def batch_size(self) -> int:
        """How many texts of a document to embed at once."""

    async def start(self) -> None:
        """Make ready; returns when it has embedded something.

        Raises Unavailable if trying again may help, InvalidInput if it cannot.
        """

    async def embed(self, texts: Sequence[str], *, urgent: bool) -> Vectors:
        """Embeddings of texts, shape (len(texts), dimension).

        urgent: a query, that somebody waits for; it goes before documents. Raises Unavailable, or
        InvalidInput if it takes no such text.
        """

    async def close(self) -> None:
        """Stop; calls in flight fail."""


def embedded_text(title: str, chunk: Chunk) -> str:
    """Text that stands for a chunk: where it belongs, then what it says."""
    path = chunk.heading_path
    places = path if path[:1] == (title,) else (title, *path)
    return "\n".join((*places, chunk.text))


def normalised(part: str, vectors: Vectors) -> Vectors:
    """Vectors scaled to length 1. Raises Unavailable naming part if they are no numbers."""
    lengths = np.linalg.norm(vectors, axis=1, keepdims=True)
    if not np.isfinite(lengths).all():
        raise Unavailable(part, "its vectors hold values that are no numbers")
    # A vector of zeros has no direction; left alone it scores 0 with everything.
    return np.ascontiguousarray(vectors / np.where(lengths == 0, 1, lengths), dtype=np.float32)
