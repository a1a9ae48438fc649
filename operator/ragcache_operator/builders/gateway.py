"""The gateway: the REST door, which knows where every other part is."""

from __future__ import annotations

from typing import Final

from ragcache_operator.builders import cachestore, engine, retriever
from ragcache_operator.builders.objects import Object, Probes, Workload, http_get, render
from ragcache_operator.builders.site import Place, Site
from ragcache_operator.spec import RagCache

PART: Final = "gateway"
HTTP: Final = Place(PART, "http")


def build(cache: RagCache, site: Site) -> list[Object]:
    """Its objects."""
    model = cache.spec.model
    first_engine = cache.spec.engines[0]
    workload = Workload(
        component=PART,
        part=PART,
        command=("python", "-m", "ragcache_gateway"),
        env={
            "RAGCACHE_LISTEN": str(site.listen(HTTP)),
            "RAGCACHE_RETRIEVER": str(site.reach(retriever.GRPC)),
            "RAGCACHE_ENGINE_URL": f"http://{site.reach(engine.http(first_engine))}",
            "RAGCACHE_ENGINE_RECORDS": str(site.reach(engine.records(first_engine))),
            "RAGCACHE_CACHESTORE": str(site.reach(cachestore.GRPC)),
            "RAGCACHE_MODEL": site.model(model.parsed_source),
            "RAGCACHE_MODEL_NAME": model.served_name,
            "RAGCACHE_MODEL_DTYPE": model.dtype,
            "RAGCACHE_MAX_MODEL_LEN": str(model.max_length),
        },
        ports=(HTTP.port,),
        probes=Probes(
            alive=http_get(site, HTTP, "/healthz"),
            ready=http_get(site, HTTP, "/readyz"),
            start_s=120,
        ),
        cpu="100m",
        memory="512Mi",
    )
    return render(cache, workload, site)
