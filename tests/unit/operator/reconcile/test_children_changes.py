"""Which children a change of each spec field updates, and which workloads it rolls out."""

from __future__ import annotations

from collections.abc import Iterator
from copy import deepcopy
from types import NoneType
from typing import Any, get_args

import pytest
from pydantic import BaseModel

from ragcache_operator.spec.ragcache import RagCacheSpec
from tests.kit.operator import Object, build, workloads_of

WHOLE: Object = {
    "tls": {"issuerRef": {"name": "one"}},
    "model": {"source": "hf:a/b", "tokenSecret": {"name": "one"}},
    "gateway": {
        "audit": {"claim": "audit"},
        "autoscaling": {"maxReplicas": 4},
        "ingress": {"host": "a.example.com"},
    },
    "retriever": {
        "embedder": {"source": "http://one/v1", "model": "one", "keySecret": {"name": "one"}},
        "reranker": {"source": "http://one/v1", "model": "one", "keySecret": {"name": "one"}},
    },
    "engines": [{"name": "main", "autoscaling": {"maxReplicas": 4}}],
    "telemetry": {"otlp": {"endpoint": "http://one.obs.svc:4318"}},
}
"""A spec in which every optional section is set."""

STORE, RETRIEVER = "StatefulSet/cachestore", "StatefulSet/retriever"
ENGINE, GATEWAY = "Deployment/engine-main", "Deployment/gateway"
WORKLOADS = f"{STORE} {RETRIEVER} {ENGINE} {GATEWAY}"
MODEL_READERS = f"{RETRIEVER} {ENGINE} {GATEWAY}"
GATEWAY_SCALER, ENGINE_SCALER = (
    f"HorizontalPodAutoscaler/{part}" for part in ("gateway", "engine-main")
)
ENGINE_OBJECTS = " ".join(
    f"{kind}/engine-{name}"
    for name in ("main", "other")
    for kind in (
        *("Service", "ServiceAccount", "PodDisruptionBudget"),
        *("Deployment", "HorizontalPodAutoscaler"),
    )
)
LIMITS = "ConfigMap/gateway-limits"
MONITOR = "PodMonitor/metrics"
POLICIES = " ".join(
    f"NetworkPolicy/{part}"
    for part in ("default-deny", "gateway", "retriever", "engine", "cachestore", "sync")
)
PART_POLICIES = " ".join(
    f"NetworkPolicy/{part}" for part in ("gateway", "retriever", "engine", "cachestore")
)
HUB_POLICIES = "NetworkPolicy/gateway NetworkPolicy/retriever NetworkPolicy/engine"
PROXY_POLICIES = f"{HUB_POLICIES} NetworkPolicy/cachestore NetworkPolicy/sync"

COLOCATION = " ".join(
    (
        *(f"{kind}/cachestore" for kind in ("ServiceAccount", "PodDisruptionBudget")),
        *(STORE, "Service/cachestore-shards", "Service/engine-main-shards", "ConfigMap/members"),
        *(ENGINE, "StatefulSet/engine-main"),
        *(f"NetworkPolicy/{part}" for part in ("gateway", "engine", "cachestore")),
    )
)
"""What is made or removed when the shards move beside the engines."""

ISSUER = {
    "name": "id",
    "issuer": "https://one.example.com:8443",
    "audiences": ["one"],
    "defaultScopes": ["ask"],
}

# Field: its new value, the workloads that roll out, the other children that change.
CHANGES: dict[str, tuple[Any, str, str]] = {
    "model.source": ("hf:c/d", MODEL_READERS, ""),
    "model.tokenSecret.name": ("two", MODEL_READERS, ""),
    "model.tokenSecret.key": ("two", MODEL_READERS, ""),
    "model.name": ("two", f"{ENGINE} {GATEWAY}", ""),
    "model.maxLength": (1024, f"{ENGINE} {GATEWAY}", ""),
    "model.dtype": ("float16", f"{ENGINE} {GATEWAY}", ""),
    "model.weights": ("16Gi", ENGINE, ""),
    "model.cache.claim": ("two", ENGINE, ""),
    "tls.enabled": (False, f"{ENGINE} {GATEWAY} {RETRIEVER} {STORE}", "Certificate/tls"),
    "tls.issuerRef.name": ("two", "", "Certificate/tls"),
    "tls.issuerRef.kind": ("ClusterIssuer", "", "Certificate/tls"),
    "gateway.port": (80, "", "Service/gateway"),
    "gateway.replicas": (2, "", f"{GATEWAY} {GATEWAY_SCALER}"),
    "gateway.autoscaling.maxReplicas": (5, "", f"{GATEWAY} {GATEWAY_SCALER}"),
    "gateway.autoscaling.cpuPercent": (50, "", GATEWAY_SCALER),
    "gateway.resources.cpu": ("2", GATEWAY, ""),
    "gateway.resources.memory": ("2Gi", GATEWAY, ""),
    "gateway.resources.memoryLimit": ("2Gi", GATEWAY, ""),
    "gateway.order": ("cached", GATEWAY, ""),
    "gateway.maxDisplacement": (3, GATEWAY, ""),
    "gateway.reordering.windowMilliseconds": (500, GATEWAY, ""),
    "gateway.layout": ("documents-first", GATEWAY, ""),
    "gateway.rewrite": ("model", GATEWAY, ""),
    "gateway.speculation": ("auto", GATEWAY, ""),
    "gateway.audit.claim": ("other", GATEWAY, ""),
    "gateway.audit.maxSize": ("2Gi", GATEWAY, ""),
    "gateway.console": ("off", GATEWAY, ""),
    "gateway.slo.firstTokenMilliseconds": (900, GATEWAY, ""),
    "gateway.slo.nextTokenMilliseconds": (90, GATEWAY, ""),
    "gateway.limits.questions": (9, "", LIMITS),
    "gateway.limits.documentRequests": (9, "", LIMITS),
    "gateway.limits.firstTokenTimeoutSeconds": (9, "", LIMITS),
    "gateway.limits.nextTokenTimeoutSeconds": (9, "", LIMITS),
    "gateway.limits.connections": (99, "", LIMITS),
    "gateway.adminPort": (81, "", "Service/gateway"),
    "gateway.auth.enabled": (False, GATEWAY, ""),
    "gateway.auth.secretRef.name": ("own", GATEWAY, ""),
    "gateway.auth.secretRef.key": ("own", GATEWAY, ""),
    "gateway.oidc": ([ISSUER], GATEWAY, "NetworkPolicy/gateway"),
    "gateway.tls.secretName": ("two", GATEWAY, ""),
    "gateway.allowedHosts": (["b.example.com"], GATEWAY, ""),
    "gateway.allowedOrigins": (["https://b.example.com"], GATEWAY, ""),
    "gateway.ingress.host": ("b.example.com", GATEWAY, "Ingress/gateway"),
    "gateway.ingress.className": ("two", "", "Ingress/gateway"),
    "gateway.ingress.tlsSecret": ("two", "", "Ingress/gateway"),
    "gateway.httpRoute.gateway": ("two", "", "HTTPRoute/gateway"),
    "gateway.httpRoute.gatewayNamespace": ("two", "", "HTTPRoute/gateway"),
    "gateway.httpRoute.hostnames": (["b.example.com"], GATEWAY, "HTTPRoute/gateway"),
    "retriever.reranker.source": ("http://two.ml.svc/v1", RETRIEVER, "NetworkPolicy/retriever"),
    "retriever.reranker.model": ("two", RETRIEVER, ""),
    "retriever.reranker.keySecret.name": ("two", RETRIEVER, ""),
    "retriever.reranker.keySecret.key": ("two", RETRIEVER, ""),
    "retriever.index.kind": ("flat", RETRIEVER, ""),
    "retriever.index.recall": (0.95, RETRIEVER, ""),
    "retriever.index.precision": ("sq8", RETRIEVER, ""),
    "retriever.index.expectedChunks": (10_000_000, RETRIEVER, ""),
    "retriever.limits.searches": (9, RETRIEVER, ""),
    "retriever.limits.upsertBytes": ("1Gi", RETRIEVER, ""),
    "retriever.replicas": (3, "", RETRIEVER),
    "retriever.backend.postgres.urlSecret.name": ("two", RETRIEVER, ""),
    "retriever.backend.postgres.urlSecret.key": ("two", RETRIEVER, ""),
    "retriever.backend.milvus.urlSecret.name": ("two", RETRIEVER, ""),
    "retriever.backend.milvus.urlSecret.key": ("two", RETRIEVER, ""),
    "retriever.embedder.source": ("http://two.ml.svc/v1", RETRIEVER, "NetworkPolicy/retriever"),
    "retriever.embedder.model": ("two", RETRIEVER, ""),
    "retriever.embedder.keySecret.name": ("two", RETRIEVER, ""),
    "retriever.embedder.keySecret.key": ("two", RETRIEVER, ""),
    "retriever.gpu.resource": ("nvidia.com/mig-1g.10gb", RETRIEVER, ""),
    "retriever.chunking.size": (128, RETRIEVER, ""),
    "retriever.chunking.overlap": (16, RETRIEVER, ""),
    "retriever.chunking.window": (2, RETRIEVER, ""),
    "retriever.storage.size": ("1Gi", "", RETRIEVER),
    "retriever.storage.className": ("two", "", RETRIEVER),
    "retriever.resources.cpu": ("2", RETRIEVER, ""),
    "retriever.resources.memory": ("2Gi", RETRIEVER, ""),
    "retriever.resources.memoryLimit": ("2Gi", RETRIEVER, ""),
    "engines.name": ("other", GATEWAY, ENGINE_OBJECTS),
    "engines.url": ("http://two.ml.svc:8000", GATEWAY, "NetworkPolicy/gateway"),
    "engines.role": ("decode", GATEWAY, ""),
    "engines.keySecret.name": ("two", GATEWAY, ""),
    "engines.keySecret.key": ("two", GATEWAY, ""),
    "engines.servedName": ("two", GATEWAY, ""),
    "engines.model.source": ("hf:e/g", f"{ENGINE} {GATEWAY}", ""),
    "engines.model.tokenSecret.name": ("two", f"{ENGINE} {GATEWAY}", ""),
    "engines.model.tokenSecret.key": ("two", f"{ENGINE} {GATEWAY}", ""),
    "engines.model.name": ("two", f"{ENGINE} {GATEWAY}", ""),
    "engines.model.maxLength": (512, f"{ENGINE} {GATEWAY}", ""),
    "engines.model.dtype": ("float32", f"{ENGINE} {GATEWAY}", ""),
    "engines.model.weights": ("5Gi", ENGINE, ""),
    "engines.model.cache.claim": ("two", ENGINE, ""),
    "engines.replicas": (2, "", f"{ENGINE} {ENGINE_SCALER}"),
    "engines.device": ("cpu", ENGINE, ""),
    "engines.tensorParallel": (3, f"{ENGINE} {GATEWAY}", ""),
    "engines.gpu.resource": ("nvidia.com/mig-3g.40gb", ENGINE, ""),
    "engines.gpu.memoryShare": (0.8, ENGINE, ""),
    "engines.gpu.sharedMemory": ("4Gi", ENGINE, ""),
    "engines.kvMemory": ("1Gi", ENGINE, ""),
    "engines.hostTier": ("1Gi", ENGINE, ""),
    "engines.args": (["--seed=1"], ENGINE, ""),
    "engines.unsafeArgs": (["--seed-two=1"], ENGINE, ""),
    "engines.resources.cpu": ("2", ENGINE, ""),
    "engines.resources.memory": ("4Gi", ENGINE, ""),
    "engines.resources.memoryLimit": ("8Gi", ENGINE, ""),
    "engines.autoscaling.maxReplicas": (5, "", f"{ENGINE} {ENGINE_SCALER}"),
    "engines.autoscaling.queueDepth": (5, "", ENGINE_SCALER),
    "cacheStore.placement": ("colocated", "", COLOCATION),
    "cacheStore.shards": (2, "", f"{STORE} ConfigMap/members"),
    "cacheStore.memory": ("2Gi", STORE, ""),
    "cacheStore.disk.size": ("2Gi", STORE, ""),
    "cacheStore.disk.className": ("two", "", STORE),
    "cacheStore.encryption.secretRef.name": ("two", STORE, ""),
    "cacheStore.encryption.secretRef.key": ("two", STORE, ""),
    "cacheStore.policy": ("lru", STORE, ""),
    "cacheStore.admission": ("secondTouch", STORE, ""),
    "cacheStore.precision.scheme": ("score", f"{STORE} {ENGINE} {GATEWAY}", ""),
    "cacheStore.precision.grades": (
        [{"share": 0.1}, {"key": "int8", "value": "gse8"}],
        f"{STORE} {ENGINE} {GATEWAY}",
        "",
    ),
    "cacheStore.precision.maxError": (0.01, f"{STORE} {ENGINE} {GATEWAY}", ""),
    "cacheStore.replication.enabled": (False, STORE, ""),
    "cacheStore.resources.cpu": ("2", STORE, ""),
    "cacheStore.resources.memory": ("3Gi", STORE, ""),
    "cacheStore.resources.memoryLimit": ("3Gi", STORE, ""),
    "reuse.mode": ("blend", f"{STORE} {GATEWAY}", ""),
    "reuse.maxRecomputeShare": (0.5, GATEWAY, ""),
    "reuse.quality": (0.95, GATEWAY, ""),
    "reuse.precompute": (True, GATEWAY, ""),
    "env": ([{"name": "A", "value": "b"}], WORKLOADS, ""),
    "trustedCA.configMap": ("authorities", WORKLOADS, ""),
    "trustedCA.key": ("two", WORKLOADS, ""),
    "proxy.http": ("http://two.example.com:3128", WORKLOADS, PROXY_POLICIES),
    "proxy.https": ("http://two.example.com:3128", WORKLOADS, PROXY_POLICIES),
    "proxy.noProxy": ([".two.example.com"], WORKLOADS, ""),
    "dataPolicy": ("Delete", "", ""),
    "networkPolicy.enabled": (False, "", POLICIES),
    "networkPolicy.clients": ([{"podSelector": {}}], "", "NetworkPolicy/gateway"),
    "networkPolicy.adminClients": ([{"namespaceSelector": {}}], "", "NetworkPolicy/gateway"),
    "networkPolicy.metricsFrom": (
        [{"namespaceSelector": {"matchLabels": {"team": "other"}}}],
        "",
        PART_POLICIES,
    ),
    "telemetry.logs": ("json", f"{STORE} {RETRIEVER} {GATEWAY}", ""),
    "telemetry.content": ("on", f"{RETRIEVER} {GATEWAY}", ""),
    "telemetry.logLevel": ("debug", WORKLOADS, ""),
    "telemetry.podMonitor.enabled": (False, "", MONITOR),
    "telemetry.podMonitor.interval": ("1m", "", MONITOR),
    "telemetry.podMonitor.labels": ({"release": "other"}, "", MONITOR),
    "telemetry.otlp.endpoint": ("http://two.ml.svc:4318", WORKLOADS, PART_POLICIES),
    "telemetry.otlp.sampleRatio": (0.1, GATEWAY, ""),
}
# Field of a pod template: its new value.
TEMPLATE: dict[str, Any] = {
    "labels": {"team": "two"},
    "annotations": {"note": "two"},
    "serviceAccountAnnotations": {"role": "two"},
    "nodeSelector": {"a": "b"},
    "affinity.nodeAffinity": {"preferredDuringSchedulingIgnoredDuringExecution": [{"weight": 1}]},
    "affinity.podAffinity": {"preferredDuringSchedulingIgnoredDuringExecution": [{"weight": 1}]},
    "affinity.podAntiAffinity": {
        "preferredDuringSchedulingIgnoredDuringExecution": [{"weight": 1}]
    },
    "tolerations": [{"operator": "Exists"}],
    "topologySpreadConstraints": [],
    "priorityClassName": "two",
    "runtimeClassName": "two",
    "imagePullSecrets": [{"name": "two"}],
    "securityContext.runAsUser": 2,
    "securityContext.runAsGroup": 2,
    "securityContext.fsGroup": 2,
    "securityContext.supplementalGroups": [2],
    "securityContext.seLinuxOptions.level": "s0",
    "securityContext.seLinuxOptions.type": "container_t",
}
PARTS = {
    "gateway.": GATEWAY,
    "retriever.": RETRIEVER,
    "engines.": ENGINE,
    "cacheStore.": STORE,
    # No child: the template of Jobs, which RagCollections start.
    "syncJobs.": "",
    "": WORKLOADS,
}
for part, rolled in PARTS.items():
    for field, value in TEMPLATE.items():
        accounts = " ".join(f"ServiceAccount/{one.partition('/')[2]}" for one in rolled.split())
        of_account = field == "serviceAccountAnnotations"
        path = f"{part}podTemplate.{field}"
        CHANGES[path] = (value, "", accounts) if of_account else (value, rolled, "")
    for field in ("cpu", "cpuLimit", "memory", "memoryLimit") if part else ():
        CHANGES.setdefault(f"{part}resources.{field}", ("3Gi", rolled, ""))
for field, value in {
    "type": "NodePort",
    "annotations": {"a": "b"},
    "loadBalancerClass": "two",
    "loadBalancerSourceRanges": ["10.0.0.0/8"],
    "externalTrafficPolicy": "Local",
    "nodePort": 30080,
}.items():
    CHANGES[f"gateway.service.{field}"] = (value, "", "Service/gateway-external")


def base_of(path: str) -> Object:
    spec = deepcopy(WHOLE)
    change_gateway(path, spec["gateway"])
    if path == "cacheStore.placement":
        del spec["engines"][0]["autoscaling"]
    if path.startswith("cacheStore.encryption"):
        spec.setdefault("cacheStore", {})["encryption"] = {"secretRef": {"name": "one"}}
    if path.startswith("cacheStore.precision"):
        spec["reuse"] = {"mode": "blend", "quality": 0.9}
        precision: Object = {"grades": [{"key": "packed", "value": "int8"}]}
        if path == "cacheStore.precision.maxError":
            precision["scheme"] = "score"
        spec.setdefault("cacheStore", {})["precision"] = precision
    if path == "trustedCA.key":
        spec["trustedCA"] = {"configMap": "one"}
    if path == "proxy.noProxy":
        spec["proxy"] = {"https": "http://one.example.com:3128"}
    if path.startswith(("engines.device", "engines.gpu", "engines.tensorParallel")):
        spec["engines"][0]["device"] = "cuda"
    if path.startswith("retriever.gpu"):
        spec["retriever"] = {"gpu": {}}
    if path == "engines.role":
        spec["engines"].append({"name": "more"})
    if path.startswith(("engines.url", "engines.keySecret", "engines.servedName")):
        url = "http://one.obs.svc:8000"
        spec["engines"] = [{"name": "main", "url": url, "keySecret": {"name": "one"}}]
    if path.startswith("engines.model"):
        model = {"source": "hf:e/f", "name": "one", "tokenSecret": {"name": "one"}}
        spec["model"] = {"source": "hf:a/b"}
        spec["engines"] = [{"name": "main", "model": model}, {"name": "other"}]
    if path.startswith(("retriever.backend", "retriever.replicas")):
        kind = (path + ".postgres").split(".")[2]
        spec["retriever"]["backend"] = {kind: {"urlSecret": {"name": "one"}}}
    return spec


def change_gateway(path: str, gateway: Object) -> None:
    if path.startswith("gateway.httpRoute"):
        del gateway["ingress"]
        gateway["httpRoute"] = {"gateway": "one"}
    if path.startswith("gateway.tls"):
        del gateway["ingress"]
        gateway["tls"] = {"secretName": "one"}
    if path.startswith("gateway.service"):
        gateway["service"] = {}
    if path.startswith("gateway.auth.secretRef"):
        gateway["auth"] = {"secretRef": {"name": "one"}}


def with_value(spec: Object, path: str, value: Any) -> Object:
    changed = deepcopy(spec)
    at = changed
    *outer, last = path.split(".")
    for name in outer:
        at = at.setdefault(name, {})
        at = at[0] if isinstance(at, list) else at
    at[last] = value
    return changed


def by_name(children: list[Object]) -> dict[str, Object]:
    return {f"{c['kind']}/{c['metadata']['name'].removeprefix('docs-')}": c for c in children}


def differing(before: dict[str, Object], after: dict[str, Object]) -> set[str]:
    return {name for name in before.keys() | after.keys() if before.get(name) != after.get(name)}


@pytest.mark.parametrize("path", CHANGES)
def test_a_change_updates_and_rolls_out_only_what_depends_on_it(path: str) -> None:
    value, rolled, also = CHANGES[path]
    before = build(**base_of(path))
    after = build(**with_value(base_of(path), path, value))
    touched = differing(by_name(before), by_name(after))
    assert touched == {*rolled.split(), *also.split()}

    def templates(children: list[Object]) -> dict[str, Object]:
        workloads = by_name(workloads_of(children))
        return {name: workload["spec"]["template"] for name, workload in workloads.items()}

    old, new = templates(before), templates(after)
    assert {name for name in old.keys() & new.keys() if old[name] != new[name]} == set(
        rolled.split()
    )


def leaves(model: type[BaseModel], above: str = "") -> Iterator[str]:
    """Yield the path of every field of a model that has no subfields."""
    for name, field in model.model_fields.items():
        path = f"{above}{field.alias or name}"
        within = list(_models(field.annotation))
        if not within:
            yield path
        for inner in within:
            yield from leaves(inner, f"{path}.")


def _models(annotation: Any) -> Iterator[type[BaseModel]]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation
    elif annotation is not NoneType:
        for argument in get_args(annotation):
            yield from _models(argument)


_SELECTORS = tuple(f"networkPolicy.{name}." for name in ("clients", "adminClients", "metricsFrom"))


def test_every_field_is_covered() -> None:
    for path in leaves(RagCacheSpec):
        # A list counts as one field.
        above = {".".join(path.split(".")[:n]) for n in range(1, path.count(".") + 2)}
        assert CHANGES.keys() & above or path.startswith(_SELECTORS), path


def test_an_engine_that_gets_a_url_is_no_longer_run() -> None:
    own, theirs = (
        by_name(build(engines=[{"name": "main", **more}]))
        for more in ({}, {"url": "http://two.ml.svc:8000"})
    )
    assert own.keys() - theirs.keys() == {
        f"{kind}/engine-main"
        for kind in ("Service", "ServiceAccount", "PodDisruptionBudget", "Deployment")
    }
    assert not theirs.keys() - own.keys()


def test_a_model_without_the_hub_closes_the_connection_to_it() -> None:
    before, after = (
        by_name(build(model={"source": source})) for source in ("hf:a/b", "bundled:tinyrag")
    )
    assert differing(before, after) == {*MODEL_READERS.split(), *HUB_POLICIES.split()}
