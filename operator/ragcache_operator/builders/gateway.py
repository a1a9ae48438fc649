"""Builds the gateway, which serves REST and knows the addresses of all other services."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Final

from ragcache_operator.builders import autoscaling, engine, retriever
from ragcache_operator.builders.autoscaling import ReplicaRange
from ragcache_operator.builders.environment import EnvValue, settings_environment
from ragcache_operator.builders.keys import (
    READABLE_BY_GROUP,
    api_key_mounts,
    engine_key_mounts,
    signing_mount,
    store_key_mount,
    uses_keys,
)
from ragcache_operator.builders.metadata import Object
from ragcache_operator.builders.model import model_environment, model_mounts
from ragcache_operator.builders.part_tls import tls_dir, tls_mounts
from ragcache_operator.builders.placement import (
    AUDIT_FOLDER,
    GATEWAY_TLS_FOLDER,
    LIMITS_FILE,
    LIMITS_FOLDER,
    Endpoint,
    PlatformPlacement,
)
from ragcache_operator.builders.pod import DerivedResources, Mount, Probes, resources
from ragcache_operator.builders.precision import precision_setting
from ragcache_operator.builders.services import external_service, http_route, ingress, service
from ragcache_operator.builders.watched_files import LIMITS, MEMBERS, limits_config_map
from ragcache_operator.builders.workload import Workload, build_workload, metadata, selector
from ragcache_operator.spec.ragcache import EngineSpec, RagCache
from ragcache_wire.settings import GatewaySettings
from ragcache_wire.settings.gateway import (
    EngineAddress,
    ModelSettings,
    issuers_text,
    models_text,
)
from ragcache_wire.watched.server_certificate import CERTIFICATE_FILE, KEY_FILE

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
_MODEL_BYTES: Final = 128 << 20
"""Memory of the tokenizer and the prompts of each further model."""
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


def build(cache: RagCache, placement: PlatformPlacement) -> list[Object]:
    """Return the objects of the gateway."""
    models, gateway = cache.spec.models, cache.spec.gateway
    replica_range = gateway.autoscaling and ReplicaRange(
        gateway.replicas, gateway.autoscaling.max_replicas
    )
    endpoints = (HTTP, ADMIN) if placement.is_cluster else (HTTP,)
    workload = Workload(
        component=COMPONENT,
        name=COMPONENT,
        command=("python", "-m", "ragcache_gateway"),
        env=_environment(cache, placement),
        ports=(*(endpoint.port for endpoint in endpoints), METRICS.port),
        # Clients that fill the first port must not end the pod.
        probes=Probes(
            placement.bind_address(endpoints[-1]).port,
            "/healthz",
            "/readyz",
            start_s=_START_S,
            is_tls=gateway.tls is not None,
        ),
        resources=resources(
            DerivedResources("100m", _memory_bytes(len(models))), gateway.resources
        ),
        replicas=replica_range or gateway.replicas,
        mounts=(
            MEMBERS.mount(cache),
            LIMITS.mount(cache),
            signing_mount(cache, placement),
            *tls_mounts(cache, placement),
            *_certificate_mounts(cache),
            store_key_mount(cache, placement),
            *api_key_mounts(cache, placement),
            *engine_key_mounts(cache),
            *_audit_mounts(cache),
            *(mount for number, one in enumerate(models) for mount in model_mounts(one, number)),
        ),
        drain=("sleep", str(_ENDPOINT_REMOVAL_S)),
        grace_s=_ENDPOINT_REMOVAL_S + _STOP_GRACE_S + _END_S,
        template=gateway.pod_template,
    )
    meta = metadata(cache, workload)
    children = [
        service(
            meta,
            selector(cache, workload),
            [(endpoint.port, placement.address_of(endpoint).port) for endpoint in endpoints],
            is_tls=gateway.tls is not None,
        ),
        limits_config_map(cache, COMPONENT),
        *build_workload(cache, workload, placement),
    ]
    if gateway.autoscaling and replica_range:
        percent = gateway.autoscaling.cpu_percent
        children.append(autoscaling.cpu_autoscaler(meta, replica_range, percent))
    if gateway.service is not None:
        pods = selector(cache, workload)
        is_tls = gateway.tls is not None
        children.append(external_service(meta, pods, gateway.service, gateway.port, is_tls=is_tls))
    if gateway.ingress is not None:
        children.append(ingress(meta, gateway.ingress, HTTP.port))
    if gateway.http_route is not None and placement.capabilities.http_route:
        children.append(http_route(meta, gateway.http_route, gateway.port))
    return children


def _certificate_mounts(cache: RagCache) -> list[Mount]:
    """Return the mount of the certificate for clients, without other entries of its Secret."""
    tls = cache.spec.gateway.tls
    if tls is None:
        return []
    volume = {
        "secretName": tls.secret_name,
        "defaultMode": READABLE_BY_GROUP,
        "items": [{"key": name, "path": name} for name in (CERTIFICATE_FILE, KEY_FILE)],
    }
    return [Mount("gateway-tls", GATEWAY_TLS_FOLDER, {"secret": volume}, read_only=True)]


def _audit_mounts(cache: RagCache) -> list[Mount]:
    audit = cache.spec.gateway.audit
    if audit is None or audit.claim is None:
        return []
    volume = {"persistentVolumeClaim": {"claimName": audit.claim}}
    return [Mount("audit", AUDIT_FOLDER, volume)]


def _environment(cache: RagCache, placement: PlatformPlacement) -> dict[str, EnvValue]:
    model, *others = cache.spec.models
    has_keys, audit = uses_keys(cache, placement), cache.spec.gateway.audit
    issuers = cache.spec.gateway.oidc
    other_models = [
        ModelSettings(
            one.served_name,
            placement.model(one.parsed_source, number),
            one.dtype,
            one.max_length,
            cache.spec.ranks_of(one),
        )
        for number, one in enumerate(others, start=1)
    ]
    return {
        **model_environment(*cache.spec.models),
        **(placement.pod_identity() if audit is not None and audit.claim else {}),
        **settings_environment(
            GatewaySettings,
            cache,
            None,
            listen=str(placement.bind_address(HTTP)),
            metrics_listen=str(placement.bind_address(METRICS)),
            admin_listen=str(placement.bind_address(ADMIN)) if placement.is_cluster else None,
            api_keys_file=placement.api_keys_file() if has_keys else None,
            audit=None if audit is None else placement.audit_log(has_claim=audit.claim is not None),
            builtin_keys=placement.builtin_keys() if has_keys else None,
            oidc=issuers_text([one.rules for one in issuers]) if issuers else None,
            issuer_networks=",".join(placement.issuer_networks) or None if issuers else None,
            **(_LIMITS_FROM_FILE if placement.is_cluster else {}),
            retriever=str(placement.address_of(retriever.GRPC)),
            engines=",".join(
                str(_engine_address(cache, one, placement)) for one in cache.spec.engines
            ),
            cachestore=placement.cache_store_members(),
            precision=precision_setting(cache),
            signing_key_file=placement.signing_key_file(),
            tls_dir=tls_dir(cache, placement),
            server_tls_dir=placement.gateway_tls_dir() if cache.spec.gateway.tls else None,
            store_key_file=placement.store_key_file(),
            model=placement.model(model.parsed_source),
            model_name=model.served_name,
            model_ranks=str(ranks) if (ranks := cache.spec.ranks_of(model)) > 1 else None,
            other_models=models_text(other_models) if other_models else None,
            stop_grace_s=str(_STOP_GRACE_S),
            allowed_hosts=",".join(_allowed_hosts(cache, placement)) or None,
            allowed_origins=",".join(cache.spec.gateway.allowed_origins) or None,
        ),
    }


def _memory_bytes(num_models: int) -> int:
    """Return the memory of a pod."""
    max_nodes: int = GatewaySettings.model_fields["view_max_nodes"].default
    return _PROCESS_BYTES + max_nodes * _NODE_BYTES + (num_models - 1) * _MODEL_BYTES


def _allowed_hosts(cache: RagCache, placement: PlatformPlacement) -> tuple[str, ...]:
    """Return the host names of the spec, of the Service and of what exposes it."""
    gateway = cache.spec.gateway
    hosts = [*gateway.allowed_hosts, *placement.host_names(HTTP)]
    if gateway.ingress is not None:
        hosts.append(gateway.ingress.host)
    if gateway.http_route is not None:
        # A route without host names matches those of the Gateway object, which are not known here.
        hosts += gateway.http_route.hostnames
    return tuple(dict.fromkeys(hosts))


def _engine_address(
    cache: RagCache, group: EngineSpec, placement: PlatformPlacement
) -> EngineAddress:
    model = cache.spec.model_of(group)
    number = [one.served_name for one in cache.spec.models].index(model.served_name)
    if group.url is not None:
        has_key = group.key_secret is not None
        return EngineAddress.of_url(
            group.url,
            key_file=Path(placement.engine_key_file(group.name)) if has_key else None,
            served_name=group.served_name,
            model=number,
        )
    http, records = (
        placement.address_of(engine.http(group)),
        placement.address_of(engine.records(group)),
    )
    return EngineAddress(
        http.host,
        http.port,
        records.port,
        is_tls=cache.spec.tls.enabled,
        model=number,
        role=group.role,
    )
