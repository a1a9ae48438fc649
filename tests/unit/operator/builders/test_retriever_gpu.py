"""Retrievers on GPUs, by spec.retriever.gpu."""

from __future__ import annotations

from typing import Any

import pytest

from ragcache_core.errors import InvalidInput
from tests.kit.operator import build, container_of, env_of, make_cache


def retriever(**fields: Any) -> list[Any]:
    return build(retriever=fields)


def test_a_retriever_computes_on_the_processor_by_default() -> None:
    children = retriever()
    assert env_of(children, "retriever")["RAGCACHE_DEVICE"] == "cpu"
    container = container_of(children, "retriever")
    assert "/retriever:" in container["image"]
    assert not [name for name in container["resources"]["requests"] if "/" in name]


@pytest.mark.parametrize("resource", ["nvidia.com/gpu", "nvidia.com/mig-1g.10gb"])
def test_with_a_gpu_its_models_compute_there(resource: str) -> None:
    children = retriever(gpu={"resource": resource})
    assert env_of(children, "retriever")["RAGCACHE_DEVICE"] == "cuda"
    container = container_of(children, "retriever")
    assert "/retriever-cuda:" in container["image"]
    assert container["resources"]["requests"][resource] == "1"
    assert container["resources"]["limits"][resource] == "1"


def test_a_gpu_without_a_model_is_refused() -> None:
    theirs = {"source": "http://embeddings/v1", "model": "e"}
    with pytest.raises(InvalidInput, match=r"spec\.retriever\.gpu"):
        make_cache(retriever={"gpu": {}, "embedder": theirs})
    ranker = {"source": "cross-encoder", "model": "a/b"}
    make_cache(retriever={"gpu": {}, "embedder": theirs, "reranker": ranker})
