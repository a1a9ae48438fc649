"""A cross-encoder is loaded from safetensors alone: other formats run code when they are loaded."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from ragcache_core.errors import InvalidInput
from ragcache_retriever.ranking.rerankers import CrossEncoderReranker
from tests.kit.embedding_models import write_model_files

torch = pytest.importorskip("torch")


def test_weights_in_a_pickle_are_refused_and_not_run(tmp_path: Path) -> None:
    model, trace = write_model_files(tmp_path / "model"), tmp_path / "has-run"

    class Hostile:
        def __reduce__(self) -> tuple[Any, ...]:
            return Path.touch, (trace,)

    CrossEncoderReranker(str(model))
    (model / "model.safetensors").unlink()
    torch.save({"bert.pooler.dense.bias": torch.zeros(32)}, model / "pytorch_model.bin")
    with pytest.raises(InvalidInput, match="safetensors"):
        CrossEncoderReranker(str(model))
    torch.save(Hostile(), model / "pytorch_model.bin")
    with pytest.raises(InvalidInput, match="safetensors"):
        CrossEncoderReranker(str(model))
    assert not trace.exists()
