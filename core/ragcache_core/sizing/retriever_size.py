"""The memory and the volume of one replica of the retriever.

The operator derives the pod's resources from them.
"""

from __future__ import annotations

from typing import Final, Literal

_PROCESS_BYTES: Final = 768 << 20
"""Memory of the process with the bundled embedder, besides the index."""
_NUMBER_BYTES: Final = {"float32": 4, "sq8": 1}
_GRAPH_BYTES: Final = 272
"""Memory of the links of one vector in an HNSW graph."""
_ROW_BYTES: Final = 24
"""Memory of the row number of a vector, its number in its cell, and its place there."""
_TEXT_TOKEN_BYTES: Final = 18
"""Bytes on the volume for each token: its text, its words for the lexical search, and its id. A
chunk of 256 tokens with a vector of 384 numbers takes 6 KiB."""


def index_bytes(
    num_vectors: int, dimension: int, precision: Literal["float32", "sq8"], *, has_graph: bool
) -> int:
    """Return the memory of a vector index.

    Args:
        dimension: Numbers of a vector.
        has_graph: Whether the index is an HNSW graph.
    """
    vector_bytes = dimension * _NUMBER_BYTES[precision] + _ROW_BYTES
    return num_vectors * (vector_bytes + (_GRAPH_BYTES if has_graph else 0))


def retriever_memory_bytes(index: int) -> int:
    """Return the memory of the process with an index of this size, in whole MiB.

    It holds the index twice while the next one is built beside it.
    """
    return -(-(_PROCESS_BYTES + 2 * index) >> 20) << 20


def documents_bytes(num_chunks: int, chunk_tokens: int, dimension: int) -> int:
    """Return the size of the documents, chunks and vectors on the volume."""
    return num_chunks * (chunk_tokens * _TEXT_TOKEN_BYTES + dimension * _NUMBER_BYTES["float32"])
