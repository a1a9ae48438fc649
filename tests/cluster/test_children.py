"""Children as a real API server takes them in and gives them back."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from contextlib import ExitStack
from dataclasses import replace
from typing import Any

import pytest

from harness.availability import Unavailable, skip
from harness.cluster.control_plane import ControlPlane, start_control_plane
from ragcache_operator.builders.autoscaling import with_replicas
from ragcache_operator.builders.capabilities import Capabilities
from ragcache_operator.kube.api import Api
from ragcache_operator.kube.discovery import discover
from ragcache_operator.kube.drift import difference
from ragcache_operator.kube.resources import NAMESPACES, Resource, resource_of
from ragcache_operator.spec.quantity import canonical
from tests.kit.operator import Object, children_of, make_cache, of

LIMIT_RANGES = Resource("", "v1", "limitranges", "LimitRange")

SPECS: dict[str, Object] = {
    "default": {},
    "whole": {
        "model": {"source": "pvc:models/llama"},
        "gateway": {
            "port": 80,
            "replicas": 2,
            "autoscaling": {"maxReplicas": 5},
            "resources": {"cpu": "0.5", "memory": "1024Mi", "memoryLimit": "2048Mi"},
            "ingress": {"host": "a.example.com", "className": "nginx", "tlsSecret": "tls"},
        },
        "retriever": {
            "embedder": {
                "source": "http://embeddings.ml:80/v1",
                "model": "e",
                "keySecret": {"name": "keys"},
            },
            "storage": {"size": "1.5Gi", "className": "fast"},
            "resources": {"memory": "1000000000"},
        },
        "engines": [
            {
                "name": "a",
                "replicas": 3,
                "autoscaling": {"maxReplicas": 4},
                "kvMemory": "3G",
                "resources": {"cpu": "1000m"},
            },
            {"name": "b", "args": ["--seed=1"]},
        ],
        "cacheStore": {
            "shards": 3,
            "memory": "99999999",
            "disk": {"size": "1e10", "className": "fast"},
            "policy": "pgdsf",
            "admission": "secondTouch",
            "precision": {"grades": [{"key": "packed"}]},
            "replication": {"enabled": False},
        },
        "telemetry": {"otlp": {"endpoint": "http://collector.monitoring:4318"}},
        "podTemplate": {
            "priorityClassName": "high",
            "nodeSelector": {"pool": "rag"},
            "tolerations": [
                {"key": "x", "operator": "Exists", "effect": "NoSchedule"},
                {"key": "y", "value": "z", "effect": "NoExecute", "tolerationSeconds": 5},
            ],
            "imagePullSecrets": [{"name": "registry"}],
        },
        "networkPolicy": {
            "clients": [
                {"namespaceSelector": {}},
                {"podSelector": {"matchLabels": {"a": "b"}}},
                {
                    "namespaceSelector": {
                        "matchExpressions": [{"key": "k", "operator": "In", "values": ["v"]}]
                    },
                    "podSelector": {},
                },
            ]
        },
    },
    "hub": {
        "model": {"source": "hf:a/b", "tokenSecret": {"name": "hub"}},
        "retriever": {"embedder": {"source": "https://192.0.2.4/v1", "model": "e"}},
        "networkPolicy": {"clients": [{"podSelector": {}}]},
    },
}


@pytest.fixture(scope="module")
def plane(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ControlPlane]:
    """An API server alone: what an object says is what this test wrote."""
    with ExitStack() as stack:
        try:
            plane = stack.enter_context(start_control_plane(tmp_path_factory.mktemp("plane")))
        except Unavailable as reason:
            skip(reason)
        yield plane


@pytest.fixture
async def api(plane: ControlPlane) -> AsyncIterator[Api]:
    api = await Api.connect(plane.kubeconfig)
    try:
        yield api
    finally:
        await api.close()


async def namespace(api: Api, name: str) -> str:
    meta = {"name": name}
    await api.create(NAMESPACES, {"apiVersion": "v1", "kind": "Namespace", "metadata": meta})
    return name


async def served(api: Api) -> Capabilities:
    # An adapter would serve them; the objects that need them are the server's own kind.
    return replace(await discover(api), custom_metrics=True)


def built(spec: Object, where: str, capabilities: Capabilities) -> list[Object]:
    # Its owner would have to be there, and of a kind that this server knows.
    return children_of(make_cache(namespace=where, **spec), capabilities, owner="")


async def live(api: Api, child: Object) -> Any:
    meta = child["metadata"]
    return await api.get(resource_of(child), meta["name"], meta["namespace"])


def _said(obj: Object) -> Object:
    """An object without its bookkeeping: old servers note the time of every apply."""
    own = ("managedFields", "resourceVersion")
    return {**obj, "metadata": {k: v for k, v in obj["metadata"].items() if k not in own}}


@pytest.mark.parametrize("name", SPECS)
async def test_the_server_keeps_what_is_written_and_a_second_apply_changes_nothing(
    api: Api, name: str
) -> None:
    where = await namespace(api, f"children-{name}")
    for child in built(SPECS[name], where, await served(api)):
        applied = await api.apply(with_replicas(child, None))
        assert difference(child, applied) is None
        again = await api.apply(with_replicas(child, applied))
        assert _said(again) == _said(applied)


async def test_a_deployment_that_others_scale_keeps_its_replicas(api: Api) -> None:
    where = await namespace(api, "children-scaled")

    capabilities = await served(api)

    def gateway(**spec: Any) -> Object:
        return of(built({"gateway": spec}, where, capabilities), "Deployment", "docs-gateway")

    fixed = gateway(replicas=3)
    await api.apply(with_replicas(fixed, None))
    scaling = gateway(replicas=2, autoscaling={"maxReplicas": 8})
    # From a fixed number to an autoscaler's: without a dip.
    applied = await api.apply(with_replicas(scaling, await live(api, scaling)))
    assert applied["spec"]["replicas"] == 3
    await api.merge(resource_of(scaling), "docs-gateway", where, {"spec": {"replicas": 6}})
    assert difference(scaling, await live(api, scaling)) is None
    narrower = gateway(replicas=2, autoscaling={"maxReplicas": 4})
    assert difference(narrower, await live(api, narrower)) is not None
    applied = await api.apply(with_replicas(narrower, await live(api, narrower)))
    assert applied["spec"]["replicas"] == 4


async def test_quantities_are_canonical_as_the_server_sees_it(api: Api) -> None:
    where = await namespace(api, "children-quantities")
    given = [
        *("0.5", "1", "1.0", "1000m", "1500m", "1024Mi", "1.5Gi", "512Mi", "0.5Ki", "1Ki", "1000"),
        *("1e9", "1500000", "2G", "1000M", "3221225472", "1e3", "1.5e3", ".5", "1e-3", "0"),
        *(
            "0.0000000001",
            "1023",
            "1024",
            "1048576",
            "12345678",
            "1e10",
            "7Ti",
            "1.25",
            "999999999",
        ),
    ]
    most = {f"example.com/{i}": quantity for i, quantity in enumerate(given)}
    # A point with nothing behind it the server leaves, if it ever gets one.
    most["example.com/point"] = canonical("2.")
    body = {
        "apiVersion": "v1",
        "kind": "LimitRange",
        "metadata": {"name": "quantities", "namespace": where},
        "spec": {"limits": [{"type": "Container", "max": most}]},
    }
    kept = await api.create(LIMIT_RANGES, body)
    assert kept["spec"]["limits"][0]["max"] == {
        name: canonical(quantity) for name, quantity in most.items()
    }
