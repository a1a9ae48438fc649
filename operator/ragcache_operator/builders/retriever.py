"""The retriever: documents on its volume, embeddings, search."""

from __future__ import annotations

from typing import Final

from ragcache_operator.builders.objects import Object, Probes, Workload, grpc, render
from ragcache_operator.builders.site import Place, Site
from ragcache_operator.spec import RagCache

PART: Final = "retriever"
GRPC: Final = Place(PART, "grpc")


def build(cache: RagCache, site: Site) -> list[Object]:
    """Its objects."""
    retriever = cache.spec.retriever
    env = {
        "RAGCACHE_LISTEN": str(site.listen(GRPC)),
        "RAGCACHE_DATA_DIR": site.data_dir(PART),
        "RAGCACHE_MODEL": site.model(cache.spec.model.parsed_source),
        "RAGCACHE_EMBEDDER": retriever.embedder.source,
        "RAGCACHE_CHUNK_TOKENS": str(retriever.chunking.size),
        "RAGCACHE_CHUNK_OVERLAP": str(retriever.chunking.overlap),
        "RAGCACHE_WINDOW": str(retriever.chunking.window),
    }
    if retriever.embedder.model is not None:
        env["RAGCACHE_EMBEDDER_MODEL"] = retriever.embedder.model
    health = grpc(site, GRPC)
    workload = Workload(
        component=PART,
        part=PART,
        command=("python", "-m", "ragcache_retriever"),
        env=env,
        ports=(GRPC.port,),
        # It embeds what an index lacks before it says SERVING.
        probes=Probes(alive=health, ready=health, start_s=600),
        cpu="250m",
        memory="1Gi",
        volume_size=retriever.storage.size,
    )
    return render(cache, workload, site)
