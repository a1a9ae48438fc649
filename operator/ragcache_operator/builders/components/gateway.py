"""Builds the gateway, which serves REST and knows the addresses of all other services."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from ragcache_operator.builders.access import api_keys, signing_key
from ragcache_operator.builders.components import engine, gateway_limits, retriever
from ragcache_operator.builders.components.model import HUB_START_S, model_environment, model_mounts
from ragcache_operator.builders.objects import autoscaling, ingress, members
from ragcache_operator.builders.objects.autoscaling import ReplicaRange
from ragcache_operator.builders.objects.ownership import Object
from ragcache_operator.builders.objects.service import service
from ragcache_operator.builders.pods import workload as workloads
from ragcache_operator.builders.pods.compute import DerivedResources, resources
from ragcache_operator.builders.pods.environment import EnvValue, settings_environment
from ragcache_operator.builders.pods.probes import Probes
from ragcache_operator.builders.pods.workload import Workload
from ragcache_operator.builders.site import LIMITS_FILE, LIMITS_FOLDER, Endpoint, Site
from ragcache_operator.spec import EngineSpec, RagCache
from ragcache_wire.settings import GatewaySettings
from ragcache_wire.settings.gateway import EngineAddress

COMPONENT: Final = "gateway"
HTTP: Final = Endpoint(COMPONENT, "http")
METRICS: Final = Endpoint(COMPONENT, "metrics")
"""Serves only /metrics, so that Prometheus needs no access to the API."""
ADMIN: Final = Endpoint(COMPONENT, "admin")

_START_S = 120
_ENDPOINT_REMOVAL_S = 5
"""Time for Services and proxies to stop sending requests to a pod that ends."""
_STOP_GRACE_S = 60
"""Time for answers in flight after that."""
_END_S = 5
"""Time to close connections."""

_PROCESS_BYTES: Final = 512 << 20
"""Memory of the gateway besides its knowledge tree."""
_NODE_BYTES: Final = 800
"""Memory of a node of the knowledge tree."""

_LIMITS_FROM_FILE: Final[Mapping[str, EnvValue | None]] = {
    "limits_file": f"{LIMITS_FOLDER}/{LIMITS_FILE}",
    "max_questions": None,
    "max_document_requests": None,
    "first_token_timeout_s": None,
    "next_token_timeout_s": None,
    "max_connections": None,
}
"""Settings of a gateway that reads its limits from a file. As variables they would be part of the
pod, so a change would restart it."""


def build(cache: RagCache, site: Site) -> list[Object]:
    """Return the objects of the gateway."""
    model, gateway = cache.spec.model, cache.spec.gateway
    replica_range = gateway.autoscaling and ReplicaRange(
        gateway.replicas, gateway.autoscaling.max_replicas
    )
    endpoints = (HTTP, ADMIN) if site.is_cluster else (HTTP,)
    # The gateway reads the weights for their fingerprint. From the hub, it downloads them first.
    start_s = HUB_START_S if model.parsed_source.kind == "hf" else _START_S
    workload = Workload(
        component=COMPONENT,
        name=COMPONENT,
        command=("python", "-m", "ragcache_gateway"),
        env=_environment(cache, site),
        ports=(*(endpoint.port for endpoint in endpoints), METRICS.port),
        # Clients that fill the first port must not end the pod.
        probes=Probes(
            site.bind_address(endpoints[-1]).port, "/healthz", "/readyz", start_s=start_s
        ),
        resources=resources(DerivedResources("100m", _memory_bytes()), gateway.resources),
        replicas=replica_range or gateway.replicas,
        mounts=(
            members.mount(cache),
            gateway_limits.mount(cache),
            signing_key.mount(cache, site),
            *api_keys.mounts(cache, site),
            *model_mounts(model),
        ),
        drain=("sleep", str(_ENDPOINT_REMOVAL_S)),
        grace_s=_ENDPOINT_REMOVAL_S + _STOP_GRACE_S + _END_S,
    )
    meta = workloads.metadata(cache, workload)
    children = [
        service(
            meta,
            workloads.selector(cache, workload),
            [(endpoint.port, site.address_of(endpoint).port) for endpoint in endpoints],
        ),
        gateway_limits.config_map(cache, COMPONENT),
        *workloads.build(cache, workload, site),
    ]
    if gateway.autoscaling and replica_range:
        percent = gateway.autoscaling.cpu_percent
        children.append(autoscaling.cpu_autoscaler(meta, replica_range, percent))
    if gateway.ingress is not None:
        children.append(ingress.ingress(meta, gateway.ingress, HTTP.port))
    if gateway.http_route is not None and site.capabilities.http_route:
        children.append(ingress.http_route(meta, gateway.http_route, gateway.port))
    return children


def _environment(cache: RagCache, site: Site) -> dict[str, EnvValue]:
    model, has_keys = cache.spec.model, api_keys.uses_keys(cache, site)
    return {
        **model_environment(model),
        **settings_environment(
            GatewaySettings,
            cache,
            None,
            listen=str(site.bind_address(HTTP)),
            metrics_listen=str(site.bind_address(METRICS)),
            admin_listen=str(site.bind_address(ADMIN)) if site.is_cluster else None,
            api_keys_file=site.api_keys_file() if has_keys else None,
            builtin_keys=site.builtin_keys() if has_keys else None,
            **(_LIMITS_FROM_FILE if site.is_cluster else {}),
            retriever=str(site.address_of(retriever.GRPC)),
            engines=",".join(str(_engine_address(one, site)) for one in cache.spec.engines),
            cachestore=site.cache_store_members(),
            signing_key_file=site.signing_key_file(),
            model=site.model(model.parsed_source),
            model_name=model.served_name,
            stop_grace_s=str(_STOP_GRACE_S),
            allowed_hosts=",".join(_allowed_hosts(cache, site)) or None,
            allowed_origins=",".join(cache.spec.gateway.allowed_origins) or None,
        ),
    }


def _memory_bytes() -> int:
    """Return the memory of a pod."""
    max_nodes: int = GatewaySettings.model_fields["view_max_nodes"].default
    return _PROCESS_BYTES + max_nodes * _NODE_BYTES


def _allowed_hosts(cache: RagCache, site: Site) -> tuple[str, ...]:
    """Return the host names of the spec, of the Service and of what exposes it."""
    gateway = cache.spec.gateway
    hosts = [*gateway.allowed_hosts, *site.host_names(HTTP)]
    if gateway.ingress is not None:
        hosts.append(gateway.ingress.host)
    if gateway.http_route is not None:
        # A route without host names matches those of the Gateway object, which are not known here.
        hosts += gateway.http_route.hostnames
    return tuple(dict.fromkeys(hosts))


def _engine_address(group: EngineSpec, site: Site) -> EngineAddress:
    if group.url is not None:
        return EngineAddress.of_url(group.url)
    http, records = site.address_of(engine.http(group)), site.address_of(engine.records(group))
    return EngineAddress(http.host, http.port, records.port)
