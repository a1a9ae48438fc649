"""Builds the retriever: a pod with a volume, or with PostgreSQL any number of them."""

from __future__ import annotations

from typing import Final

from ragcache_core.sizing import index_bytes, retriever_memory_bytes
from ragcache_operator.builders.environment import (
    EnvValue,
    FromSecret,
    settings_environment,
)
from ragcache_operator.builders.keys import signing_mount
from ragcache_operator.builders.metadata import Object
from ragcache_operator.builders.model import model_environment, model_mounts
from ragcache_operator.builders.part_tls import tls_dir, tls_mounts
from ragcache_operator.builders.placement import (
    CROSS_ENCODER_FOLDER,
    EMBEDDER_FOLDER,
    PORT_NUMBERS,
    Endpoint,
    PlatformPlacement,
)
from ragcache_operator.builders.pod import DerivedResources, Mount, Probes, resources
from ragcache_operator.builders.services import HEADLESS, HEADLESS_ALL_PODS, service
from ragcache_operator.builders.workload import Workload, build_workload, metadata, selector
from ragcache_operator.spec.ragcache import RagCache
from ragcache_operator.spec.retriever import BUNDLED_DIMENSION, BUNDLED_EMBEDDER, RetrieverSpec
from ragcache_wire.settings import RetrieverSettings

COMPONENT: Final = "retriever"
GRPC: Final = Endpoint(COMPONENT, "grpc")
HEALTH: Final = Endpoint(COMPONENT, "health")

_GPU_IMAGE: Final = "retriever-cuda"
_ENDPOINT_DIMENSION: Final = 1024
"""Numbers in a vector of an embeddings endpoint. The operator does not ask it."""


def build(cache: RagCache, placement: PlatformPlacement) -> list[Object]:
    """Return the objects of the retriever."""
    model, retriever = cache.spec.model, cache.spec.retriever
    derived = DerivedResources("250m", _memory_bytes(retriever))
    gpus = {} if retriever.gpu is None else {retriever.gpu.resource: "1"}
    workload = Workload(
        component=COMPONENT,
        image=_GPU_IMAGE if gpus else COMPONENT,
        name=COMPONENT,
        command=("python", "-m", "ragcache_retriever"),
        env=_environment(cache, placement),
        ports=(GRPC.port, HEALTH.port),
        # The retriever is alive once its modules are loaded. Embedding documents delays readiness
        # alone, and has no time limit.
        probes=Probes(placement.bind_address(HEALTH).port, "/healthz", "/readyz", start_s=600),
        resources=resources(derived, retriever.resources, gpus),
        replicas=retriever.replicas,
        mounts=[
            signing_mount(cache, placement),
            *tls_mounts(cache, placement),
            *model_mounts(model),
            *_search_model_mounts(retriever),
        ],
        storage=retriever.storage,
        template=retriever.pod_template,
    )
    meta = metadata(cache, workload)
    pods = selector(cache, workload)
    ports = [(port, PORT_NUMBERS[port]) for port in workload.ports]
    # Clients balance between all ready pods. A single pod also takes a restore while its documents
    # are damaged, and it is not ready then.
    addressing = HEADLESS if retriever.backend.kind == "postgres" else HEADLESS_ALL_PODS
    return [
        service(meta, pods, ports, addressing),
        *build_workload(cache, workload, placement),
    ]


def _environment(cache: RagCache, placement: PlatformPlacement) -> dict[str, EnvValue]:
    model, retriever = cache.spec.model, cache.spec.retriever
    url = retriever.backend.url_secret
    return {
        **_hub_environment(cache),
        **settings_environment(
            RetrieverSettings,
            cache,
            listen=str(placement.bind_address(GRPC)),
            health_listen=str(placement.bind_address(HEALTH)),
            signing_key_file=placement.signing_key_file(),
            tls_dir=tls_dir(cache, placement),
            data_dir=placement.data_dir(COMPONENT),
            model=placement.model(model.parsed_source),
            embedder=placement.embedder(retriever.embedder),
            reranker_model=placement.reranker_model(retriever.reranker),
            device="cpu" if retriever.gpu is None else "cuda",
            backend=retriever.backend.kind,
            backend_url=None if url is None else FromSecret.of(url),
        ),
    }


def _hub_environment(cache: RagCache) -> dict[str, EnvValue]:
    """Return variables for the Hugging Face libraries, which three models may need."""
    found = dict(model_environment(cache.spec.model))
    retriever = cache.spec.retriever
    if retriever.embedder.hub_name or retriever.reranker.hub_name:
        found.pop("HF_HUB_OFFLINE", None)
    return found


def _search_model_mounts(retriever: RetrieverSpec) -> list[Mount]:
    """Return the read-only mounts of an embedder and of a cross-encoder on volumes."""
    claims = (
        ("embedder", EMBEDDER_FOLDER, retriever.embedder.claim),
        ("cross-encoder", CROSS_ENCODER_FOLDER, retriever.reranker.claim),
    )
    return [
        Mount(
            name,
            folder,
            {"persistentVolumeClaim": {"claimName": claim, "readOnly": True}},
            read_only=True,
        )
        for name, folder, claim in claims
        if claim
    ]


def _memory_bytes(retriever: RetrieverSpec) -> int:
    """Return the memory of the process and of the index of the expected chunks, in whole MiB.

    Another backend has the index in its own memory.
    """
    if retriever.backend.kind != "embedded":
        return retriever_memory_bytes(0)
    is_bundled = retriever.embedder.source == BUNDLED_EMBEDDER
    dimension = BUNDLED_DIMENSION if is_bundled else _ENDPOINT_DIMENSION
    index = retriever.index
    return retriever_memory_bytes(
        index_bytes(
            index.expected_chunks, dimension, index.precision, has_graph=index.kind == "hnsw"
        )
    )
