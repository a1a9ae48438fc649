"""Generated RagCaches, and functions that read their children."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from hypothesis import strategies as st

from ragcache_operator.builders import build_children
from ragcache_operator.builders.capabilities import OLDEST_MINOR, Capabilities
from ragcache_operator.builders.metadata import WORKLOADS
from ragcache_operator.builders.placement import ClusterPlacement
from ragcache_operator.spec.manifest import parse_manifest
from ragcache_operator.spec.ragcache import GatewaySpec, RagCache
from tests.kit import manifests

Object = dict[str, Any]

NAMESPACE = "team"
OPERATOR_NAMESPACE = "ragcache-system"
UID = "7f0c3b1e-0000-4000-8000-000000000001"


def make_cache(name: str = "docs", namespace: str = NAMESPACE, **spec: Any) -> RagCache:
    return parse_manifest(manifests.cache(name, namespace, **spec))


def children_of(
    cache: RagCache,
    capabilities: Capabilities | None = None,
    owner: str = UID,
    operator_namespace: str | None = OPERATOR_NAMESPACE,
) -> list[Object]:
    site = ClusterPlacement(
        cache,
        tag="1",
        capabilities=capabilities or Capabilities.latest(),
        owner=owner,
        operator_namespace=operator_namespace,
    )
    return build_children(cache, site)


def build(name: str = "docs", **spec: Any) -> list[Object]:
    return children_of(make_cache(name, **spec))


def of(children: list[Object], kind: str, name: str) -> Object:
    [found] = [c for c in children if (c["kind"], c["metadata"]["name"]) == (kind, name)]
    return found


def kinds_of(children: list[Object], kind: str) -> list[Object]:
    return [child for child in children if child["kind"] == kind]


def workloads_of(children: list[Object]) -> list[Object]:
    return [child for child in children if child["kind"] in WORKLOADS]


def pod_of(children: list[Object], part: str, cache_name: str = "docs") -> Object:
    """Return the pod spec of a workload."""
    [workload] = [
        w for w in workloads_of(children) if w["metadata"]["name"] == f"{cache_name}-{part}"
    ]
    spec: Object = workload["spec"]["template"]["spec"]
    return spec


def container_of(children: list[Object], part: str) -> Object:
    [container] = pod_of(children, part)["containers"]
    found: Object = container
    return found


def env_of(children: list[Object], part: str) -> dict[str, str]:
    """Return the plain environment variables of a workload."""
    variables = container_of(children, part)["env"]
    return {variable["name"]: variable["value"] for variable in variables if "value" in variable}


def secrets_of(container: Object) -> Iterator[tuple[str, str, str]]:
    """Yield (variable, Secret, key) of every variable from a Secret."""
    for variable in container["env"]:
        reference = variable.get("valueFrom", {}).get("secretKeyRef")
        if reference is not None:
            yield variable["name"], reference["name"], reference["key"]


def selects(selector: Object, labels: Object) -> bool:
    """Whether a label selector of Kubernetes matches labels."""
    if not selector.get("matchLabels", {}).items() <= labels.items():
        return False
    return all(_holds(term, labels) for term in selector.get("matchExpressions", ()))


def _holds(term: Object, labels: Object) -> bool:
    value = labels.get(term["key"])
    match term["operator"]:
        case "In":
            return value in term["values"]
        case "NotIn":
            return value not in term["values"]
        case "Exists":
            return value is not None
    return value is None


def _maybe(**fields: st.SearchStrategy[Any]) -> st.SearchStrategy[Object]:
    return st.fixed_dictionaries({}, optional=fields)


_names = st.sampled_from(["a", "model-keys", "x.y"])
_bytes = st.sampled_from(["1", "512Mi", "1024Mi", "1.5Gi", "2G", "1e9", 3221225472])
_resources = st.sampled_from(
    [
        {},
        {"cpu": "0.5"},
        {"cpu": "1000m", "memory": "2048Mi"},
        {"memory": "1e9", "memoryLimit": "1.5Gi"},
        {"cpu": 2, "memory": "3G"},
        {"memoryLimit": "100Mi"},
        {"cpuLimit": "0.05"},
        {"cpu": "1", "cpuLimit": "1.5"},
    ]
)
_storage = _maybe(size=_bytes, className=_names)
_secret = st.builds(lambda name: {"name": name}, _names)
_selector = st.sampled_from(
    [
        {},
        {"matchLabels": {"team": "search"}},
        {"matchExpressions": [{"key": "team", "operator": "In", "values": ["search", "ask"]}]},
        {"matchExpressions": [{"key": "team", "operator": "Exists"}]},
    ]
)
_model = st.one_of(
    st.just({}),
    st.just({"name": "m", "maxLength": 128, "dtype": "float16"}),
    st.builds(lambda more: {"source": "hf:Qwen/Qwen3-0.6B", **more}, _maybe(tokenSecret=_secret)),
    st.just({"source": "pvc:models"}),
    st.just({"source": "pvc:models/llama/8b"}),
)
_image_model = st.just({"source": "image:registry.example.com/models/llama:1"})
_way_in = st.one_of(
    st.just({}),
    st.builds(
        lambda more: {"ingress": {"host": "rag.example.com", **more}},
        _maybe(className=_names, tlsSecret=_names),
    ),
    st.builds(
        lambda more: {"httpRoute": {"gateway": "public", **more}},
        _maybe(gatewayNamespace=st.just("edge"), hostnames=st.just(["rag.example.com"])),
    ),
)
_gateway = st.builds(
    lambda way_in, more: {**way_in, **more},
    _way_in,
    _maybe(
        # The other port of the gateway has its default here, and the two have to differ.
        port=st.integers(1, 65535).filter(lambda port: port != GatewaySpec().admin_port),
        replicas=st.integers(1, 5),
        autoscaling=_maybe(cpuPercent=st.just(50)).map(lambda more: {"maxReplicas": 5, **more}),
        resources=_resources,
        service=_maybe(
            type=st.sampled_from(["LoadBalancer", "NodePort"]), annotations=st.just({"a": "b"})
        ),
        podTemplate=_maybe(nodeSelector=st.just({}), labels=st.just({"size": "small"})),
    ),
)
_POSTGRES: Object = {"postgres": {"urlSecret": {"name": "db"}}}


def _shares_documents(retriever: Object) -> Object:
    """Give several replicas the database that they need, and its kind of index."""
    if retriever.get("replicas", 1) == 1:
        return retriever
    index = {name: value for name, value in retriever.get("index", {}).items() if name == "kind"}
    return retriever | {"backend": _POSTGRES, "index": index}


_retriever = _maybe(
    replicas=st.integers(1, 5),
    index=_maybe(kind=st.sampled_from(["auto", "hnsw"]), precision=st.just("sq8")),
    reranker=st.sampled_from([{}, {"source": "https://rerank.example.com/v1", "model": "r"}]),
    embedder=st.sampled_from(
        [
            {},
            {"source": "http://embeddings/v1", "model": "e"},
            {"source": "https://api.example.com/v1", "model": "e", "keySecret": {"name": "k"}},
        ]
    ),
    storage=_storage,
    resources=_resources,
).map(_shares_documents)
_engine = _maybe(
    replicas=st.integers(1, 4),
    kvMemory=_bytes,
    hostTier=_bytes,
    args=st.lists(st.sampled_from(["--max-num-seqs=8", "--no-async-scheduling"]), max_size=3),
    unsafeArgs=st.lists(
        st.sampled_from(["--model-impl=vllm", "--pooler-config.a=b c"]), max_size=3
    ),
    resources=_resources,
    autoscaling=_maybe(queueDepth=st.just(7)).map(lambda more: {"maxReplicas": 4, **more}),
)
_engine_names = st.from_regex(r"[a-z][a-z0-9]{0,14}", fullmatch=True)


def _named(names: list[str]) -> st.SearchStrategy[list[Object]]:
    def named(name: str) -> st.SearchStrategy[Object]:
        return _engine.map(lambda more: {"name": name, **more})

    return st.tuples(*map(named, names)).map(list)


_engines = st.lists(_engine_names, min_size=1, max_size=3, unique=True).flatmap(_named)
_store_bytes = st.sampled_from(["512Mi", "1024Mi", "1.5Gi", "2G", "1e9", 3221225472])
_store = _maybe(
    shards=st.integers(1, 64),
    memory=_store_bytes,
    disk=_maybe(size=_store_bytes, className=_names),
    policy=st.sampled_from(["score", "lru"]),
    admission=st.sampled_from(["always", "secondTouch"]),
    precision=st.sampled_from(
        [{}, {"grades": [{"share": 0.2}, {"key": "packed"}]}, {"scheme": "score"}]
    ),
    replication=_maybe(enabled=st.booleans()),
    resources=_resources,
)
_reuse = _maybe(
    mode=st.sampled_from(["exact", "blend"]),
    maxRecomputeShare=st.floats(0, 1),
    quality=st.floats(0, 1),
    precompute=st.booleans(),
)
_NOT_TOGETHER: Object = {
    "requiredDuringSchedulingIgnoredDuringExecution": [
        {"topologyKey": "kubernetes.io/hostname", "labelSelector": {"matchLabels": {"a": "b"}}}
    ]
}
_pod_template = _maybe(
    priorityClassName=_names,
    nodeSelector=st.just({"pool": "rag"}),
    tolerations=st.just(
        [
            {"key": "rag", "operator": "Exists", "effect": "NoSchedule"},
            {"key": "old", "value": "yes", "effect": "NoExecute", "tolerationSeconds": 60},
        ]
    ),
    imagePullSecrets=st.just([{"name": "registry"}]),
    labels=st.just({"team": "search"}),
    annotations=st.just({"example.com/note": "a b"}),
    serviceAccountAnnotations=st.just({"example.com/role": "reader"}),
    runtimeClassName=_names,
    affinity=st.just({"podAntiAffinity": _NOT_TOGETHER}),
    topologySpreadConstraints=st.sampled_from([[], [{"topologyKey": "rack"}]]),
    securityContext=st.sampled_from([{}, {"runAsUser": 1001, "supplementalGroups": [5]}]),
)
_env = st.just(
    [
        {"name": "HF_ENDPOINT", "value": "https://hub.example.com"},
        {"name": "EMPTY"},
        {"name": "TOKEN", "valueFrom": {"secretKeyRef": {"name": "team", "key": "token"}}},
    ]
)
_network = _maybe(
    enabled=st.booleans(),
    clients=st.lists(
        _maybe(namespaceSelector=_selector, podSelector=_selector).filter(bool), max_size=2
    ),
)


def _spec(model: st.SearchStrategy[Object]) -> st.SearchStrategy[Object]:
    return _maybe(
        model=model,
        gateway=_gateway,
        retriever=_retriever,
        engines=_engines,
        cacheStore=_store,
        reuse=_reuse,
        podTemplate=_pod_template,
        env=_env,
        trustedCA=st.just({"configMap": "authorities"}),
        proxy=_maybe(https=st.just("http://proxy.example.com:3128"), noProxy=st.just(["a.b"])),
        dataPolicy=st.sampled_from(["Retain", "Delete"]),
        networkPolicy=_network,
        telemetry=_maybe(otlp=st.just({"endpoint": "http://collector:4318"})),
    )


specs = _spec(_model)
"""Specs that every cluster supports."""
specs_of_today = _spec(st.one_of(_model, _image_model))
"""Specs that a current cluster supports."""
names = st.from_regex(r"[a-z]([-a-z0-9]{0,38}[a-z0-9])?", fullmatch=True)
capabilities = st.one_of(
    st.just(Capabilities.latest()),
    st.just(Capabilities(OLDEST_MINOR)),
    st.builds(
        Capabilities,
        minor=st.integers(OLDEST_MINOR, 40),
        http_route=st.booleans(),
        pod_monitors=st.booleans(),
        certificates=st.booleans(),
        custom_metrics=st.booleans(),
    ),
)
