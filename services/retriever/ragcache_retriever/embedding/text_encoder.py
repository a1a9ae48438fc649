"""The interface of models that run in this process."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal, Protocol

from ragcache_retriever.embedding.embedder import Vectors

Tokens = Sequence[int]
Precision = Literal["bfloat16", "float32"]

_BFLOAT16_FEATURES = ("amx_bf16", "avx512_bf16", "bf16")


class TextEncoder(Protocol):
    """A model that turns the tokens of texts into vectors. Several threads call it at once."""

    @property
    def dimension(self) -> int:
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
