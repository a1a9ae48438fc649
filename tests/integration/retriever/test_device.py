"""Models of the retriever on the device of its settings. No GPU is here."""

from __future__ import annotations

from pathlib import Path

import pytest

from ragcache_core.errors import InvalidInput
from ragcache_retriever.__main__ import make_embedder, make_reranker
from ragcache_retriever.concurrency.query_gate import QueryGate
from ragcache_wire.settings import RetrieverSettings
from tests.kit.embedding_models import write_model_files
from tests.kit.settings import read_settings

torch = pytest.importorskip("torch")


@pytest.fixture
def settings(tmp_path: Path) -> RetrieverSettings:
    """Settings of a retriever on a GPU, with an embedder and a cross-encoder of a folder."""
    folder = write_model_files(tmp_path / "model")
    (tmp_path / "keys").write_text(f"{bytes(32).hex()}\n")
    given = {
        "LISTEN": "127.0.0.1:0",
        "DATA_DIR": str(tmp_path),
        "MODEL": str(folder),
        "SIGNING_KEY_FILE": str(tmp_path / "keys"),
        "EMBEDDER": f"path:{folder}",
        "RERANKER": "cross-encoder",
        "RERANKER_MODEL": str(folder),
        "DEVICE": "cuda",
    }
    variables = {f"RAGCACHE_{name}": value for name, value in given.items()}
    return read_settings(RetrieverSettings, variables)


async def test_without_a_gpu_both_models_are_refused(
    settings: RetrieverSettings, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    embedder = make_embedder(settings, QueryGate())
    with pytest.raises(InvalidInput, match=r"RAGCACHE_DEVICE.*finds no GPU.*retriever-gpu"):
        await embedder.start()
    await embedder.close()
    with pytest.raises(InvalidInput, match=r"RAGCACHE_DEVICE.*finds no GPU"):
        make_reranker(settings)


@pytest.mark.skipif(torch.cuda.is_available(), reason="its models would load on the GPU")
async def test_with_a_gpu_both_models_load_there(
    settings: RetrieverSettings, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A torch without CUDA says so where a model is moved to the GPU that it was told of."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    embedder = make_embedder(settings, QueryGate())
    with pytest.raises((AssertionError, RuntimeError, InvalidInput), match=r"(?i)cuda|nvidia"):
        await embedder.start()
    await embedder.close()
    with pytest.raises((AssertionError, RuntimeError), match=r"(?i)cuda|nvidia"):
        make_reranker(settings)
