"""Where and how a model in the retriever's process computes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from ragcache_core.errors import InvalidInput
from ragcache_retriever.embedding.embedder import Precision

Device = Literal["cpu", "cuda"]


@dataclass(frozen=True, slots=True)
class Computation:
    """Device and precision of a model.

    Args:
        precision: None: bfloat16 where the CPU multiplies it, else float32. Retrieval is equally
            good with both, and their vectors are comparable.
    """

    device: Device = "cpu"
    precision: Precision | None = None


def check_device(device: Device) -> None:
    """Check that torch computes on a device. It imports torch, which takes seconds.

    Raises:
        InvalidInput: It does not.
    """
    import torch  # noqa: PLC0415

    if device == "cuda" and not torch.cuda.is_available():
        raise InvalidInput(
            "RAGCACHE_DEVICE",
            f"is cuda, and torch {torch.__version__} finds no GPU",
            "run it on a node with a GPU, with ragcache[retriever-gpu] and torch's CUDA build, or "
            "leave out spec.retriever.gpu",
        )
