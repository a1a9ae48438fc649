"""Builds the retriever, which has one pod with a volume."""

from __future__ import annotations

from typing import Final

from ragcache_operator.builders.components.model import model_environment, model_mounts
from ragcache_operator.builders.objects.ownership import Object
from ragcache_operator.builders.objects.service import service
from ragcache_operator.builders.pods import workload as workloads
from ragcache_operator.builders.pods.compute import DerivedResources, resources
from ragcache_operator.builders.pods.environment import EnvValue, settings_environment
from ragcache_operator.builders.pods.probes import Probes
from ragcache_operator.builders.pods.workload import Workload
from ragcache_operator.builders.site import PORT_NUMBERS, Endpoint, Site
from ragcache_operator.spec import RagCache
from ragcache_wire.settings import RetrieverSettings

COMPONENT: Final = "retriever"
GRPC: Final = Endpoint(COMPONENT, "grpc")
HEALTH: Final = Endpoint(COMPONENT, "health")


def build(cache: RagCache, site: Site) -> list[Object]:
    """Return the objects of the retriever."""
    model, retriever = cache.spec.model, cache.spec.retriever
    workload = Workload(
        component=COMPONENT,
        name=COMPONENT,
        command=("python", "-m", "ragcache_retriever"),
        env=_environment(cache, site),
        ports=(GRPC.port, HEALTH.port),
        # The retriever is alive once its modules are loaded. Embedding documents delays readiness
        # alone, and has no time limit.
        probes=Probes(site.bind_address(HEALTH).port, "/healthz", "/readyz", start_s=600),
        resources=resources(DerivedResources("250m", 1 << 30), retriever.resources),
        mounts=model_mounts(model),
        storage=retriever.storage,
        scales=False,
    )
    return [
        service(
            workloads.metadata(cache, workload),
            workloads.selector(cache, workload),
            [(port, PORT_NUMBERS[port]) for port in workload.ports],
        ),
        *workloads.build(cache, workload, site),
    ]


def _environment(cache: RagCache, site: Site) -> dict[str, EnvValue]:
    model = cache.spec.model
    return {
        **model_environment(model),
        **settings_environment(
            RetrieverSettings,
            cache,
            listen=str(site.bind_address(GRPC)),
            health_listen=str(site.bind_address(HEALTH)),
            data_dir=site.data_dir(COMPONENT),
            model=site.model(model.parsed_source),
        ),
    }
