"""Models of a folder: their vectors are those of sentence-transformers."""

from __future__ import annotations

import contextlib
import json
import threading
from collections.abc import AsyncIterator, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from ragcache_core.errors import InvalidInput
from ragcache_retriever.concurrency.query_gate import QueryGate
from ragcache_retriever.embedding.computation import Computation
from ragcache_retriever.embedding.embedder import Tokens, Vectors
from ragcache_retriever.embedding.local_model import MAX_URGENT_TEXTS, LocalModel
from tests.kit.embedding_models import POOLING, write_model_files

TEXTS = [
    "The volcano erupts.",
    "Lava flows; bread is baked, and a satellite circles the planet.",
    "the moon " * 80,  # more than the model has positions for
    "?",
    "",
]
CLS = {"pooling_mode_cls_token": True, "pooling_mode_mean_tokens": False}
MAX = {"pooling_mode_max_tokens": True, "pooling_mode_mean_tokens": False}
PROMPTS = {"query": "query: ", "document": "doc: "}


@contextlib.asynccontextmanager
async def embedder(folder: Path, gate: QueryGate | None = None) -> AsyncIterator[LocalModel]:
    made = LocalModel(lambda: folder, gate or QueryGate(), 2, Computation(precision="float32"))
    await made.start()
    try:
        yield made
    finally:
        await made.close()


def reference(folder: Path, texts: Sequence[str], kind: str = "document") -> Vectors:
    from sentence_transformers import SentenceTransformer

    model = SentenceTransformer(str(folder), device="cpu", local_files_only=True)
    encode = model.encode_query if kind == "query" else model.encode_document
    return np.asarray(encode(list(texts), normalize_embeddings=True, show_progress_bar=False))


def write_dense(folder: Path, num_rows: int) -> None:
    """Write the layer of a Dense module after a pooling of 32 columns."""
    config = {
        "in_features": 32,
        "out_features": num_rows,
        "bias": False,
        "activation_function": "torch.nn.modules.linear.Identity",
    }
    (folder / "2_Dense/config.json").write_text(json.dumps(config))
    weight = np.random.default_rng(0).standard_normal((num_rows, 32), np.float32)
    save_file({"linear.weight": weight}, folder / "2_Dense/model.safetensors")


@pytest.mark.parametrize(
    ("modules", "pooling", "dimension"),
    [
        (["Transformer", "Pooling", "Normalize"], POOLING, 32),
        (["Transformer", "Pooling"], POOLING | CLS, 32),
        (["Transformer", "Pooling"], POOLING | MAX, 32),
        (["Transformer", "Pooling", "Dense"], POOLING, 24),
    ],
    ids=["mean", "first token", "maximum", "dense layer"],
)
async def test_vectors_are_those_of_sentence_transformers(
    tmp_path: Path, modules: list[str], pooling: dict[str, Any], dimension: int
) -> None:
    folder = write_model_files(tmp_path, modules=modules, pooling=pooling)
    if "Dense" in modules:
        write_dense(folder, dimension)
    settings = {"prompts": PROMPTS}
    (folder / "config_sentence_transformers.json").write_text(json.dumps(settings))
    async with embedder(folder) as made:
        assert made.dimension == dimension
        documents = await made.embed(TEXTS, urgent=False)
        queries = await made.embed(TEXTS, urgent=True)
    assert np.abs(documents - reference(folder, TEXTS)).max() < 1e-4
    assert np.abs(queries - reference(folder, TEXTS, "query")).max() < 1e-4
    assert np.abs(queries - documents).max() > 0.01, "their prompts differ"


class CountingGate(QueryGate):
    """Counts how often other work was paused."""

    def __init__(self) -> None:
        super().__init__()
        self.num_held = 0

    @contextlib.contextmanager
    def query(self) -> Iterator[None]:
        self.num_held += 1
        with super().query():
            yield


async def test_many_queries_of_one_call_pause_no_documents(tmp_path: Path) -> None:
    folder = write_model_files(tmp_path)
    settings = {"prompts": PROMPTS}
    (folder / "config_sentence_transformers.json").write_text(json.dumps(settings))
    gate = CountingGate()
    async with embedder(folder, gate) as made:
        few = (TEXTS * 4)[:MAX_URGENT_TEXTS]
        gate.num_held = 0
        alone = await made.embed(few, urgent=True)
        assert gate.num_held == 1
        many = await made.embed([*few, "one more"], urgent=True)
        assert gate.num_held == 1
    assert np.abs(many[:-1] - alone).max() < 1e-5


async def test_long_queries_are_tokenized_beside_the_event_loop(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = write_model_files(tmp_path)
    threads: list[str] = []
    tokens = LocalModel._tokens

    def recorded(model: LocalModel, text: str, *, is_query: bool) -> Tokens:
        threads.append(threading.current_thread().name)
        return tokens(model, text, is_query=is_query)

    async with embedder(folder) as made:
        monkeypatch.setattr(LocalModel, "_tokens", recorded)
        long = ["the moon " * 20_000, "lava"]
        vectors = await made.embed(long, urgent=True)
        assert set(threads) == {"embedder-query-tokenizer_0"}
        threads.clear()
        await made.embed(["lava"], urgent=True)
        assert threads == [threading.current_thread().name]
    assert np.abs(vectors - reference(folder, long, "query")).max() < 1e-4


async def test_texts_are_cut_and_lowered_as_the_model_wants(tmp_path: Path) -> None:
    modules = ["Transformer", "Pooling"]
    folder = write_model_files(tmp_path, modules=modules, pooling=POOLING)
    settings = {"max_seq_length": 8, "do_lower_case": True}
    (folder / "sentence_bert_config.json").write_text(json.dumps(settings))
    async with embedder(folder) as made:
        found = await made.embed(TEXTS, urgent=False)
        upper, cut = await made.embed([TEXTS[0].upper(), "the moon " * 3], urgent=False)
    assert np.abs(found - reference(folder, TEXTS)).max() < 1e-4
    assert np.abs(upper - found[0]).max() < 1e-6
    assert np.abs(cut - found[2]).max() < 1e-6


async def test_the_identity_is_that_of_the_files(tmp_path: Path) -> None:
    identities = set()
    for name, seed in (("a", 0), ("b", 0), ("c", 1)):
        async with embedder(write_model_files(tmp_path / name, seed=seed)) as made:
            identities.add(made.identity)
    assert len(identities) == 2
    assert all(identity.startswith("model:") for identity in identities)


async def test_a_model_that_cannot_be_loaded_is_refused(tmp_path: Path) -> None:
    folder = write_model_files(tmp_path)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"model_type": "unheard-of"}))
    made = LocalModel(lambda: folder, QueryGate(), 1)
    with pytest.raises(InvalidInput, match="cannot be loaded"):
        await made.start()
    await made.close()
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "model.safetensors").write_bytes(b"damaged")
    made = LocalModel(lambda: folder, QueryGate(), 1)
    with pytest.raises(InvalidInput, match="cannot be loaded"):
        await made.start()
    await made.close()
