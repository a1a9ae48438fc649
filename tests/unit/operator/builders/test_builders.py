"""Builders: environment, resources and permissions of each component."""

from __future__ import annotations

import functools
import itertools
import json
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any, get_args

import kubernetes_validate
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ragcache_cachestore.storage.disk_tier import FREE_RESERVE_BYTES
from ragcache_core.errors import InvalidInput
from ragcache_core.eviction.registry import DEFAULT_POLICY, POLICY_NAMES
from ragcache_core.identity.variant import Precision
from ragcache_core.plan.signature import parse_keys
from ragcache_core.tiering.precision_policy import PrecisionPolicy, Scheme
from ragcache_operator.builders import build_children
from ragcache_operator.builders.autoscaling import REPLICA_RANGE, with_replicas
from ragcache_operator.builders.capabilities import OLDEST_MINOR, Capabilities, unsupported_features
from ragcache_operator.builders.keys import (
    disk_key_secret,
    disk_key_secret_name,
    signing_secret,
    store_key_secret,
)
from ragcache_operator.builders.placement import ClusterPlacement
from ragcache_operator.spec.manifest import load_manifest
from ragcache_operator.spec.quantity import parse_quantity
from ragcache_operator.spec.ragcache import CacheStoreSpec
from ragcache_wire.settings import CacheStoreSettings, GatewaySettings
from tests.kit.certificates import issue, write
from tests.kit.operator import (
    UID,
    Object,
    build,
    children_of,
    container_of,
    env_of,
    kinds_of,
    make_cache,
    of,
    pod_of,
    secrets_of,
    specs,
    workloads_of,
)
from tests.kit.settings import read_settings

SMOLLM2_MIB = 257
"""Size of the default model's weights, rounded up."""

ROOT = Path(__file__).parents[4]
LATEST = Capabilities.latest()


@given(specs)
def test_the_store_accepts_its_environment(spec: Object) -> None:
    cache = make_cache(**spec)
    env = env_of(children_of(cache), "cachestore")
    own = env["RAGCACHE_OWN_ADDRESS"].replace("$(POD_NAME)", "docs-cachestore-0")
    told = read_settings(CacheStoreSettings, without_mounts({**env, "RAGCACHE_OWN_ADDRESS": own}))
    store = cache.spec.cache_store
    assert told.memory_bytes == store.memory_bytes
    assert told.disk_bytes + FREE_RESERVE_BYTES < store.disk.size_bytes
    assert told.policy == store.policy
    assert told.replication == store.replication.enabled
    assert told.reuse == cache.spec.reuse.mode
    assert told.data_listen == "0.0.0.0:50052"
    grades = [Precision.parse(f"{one.key}/{one.value}") for one in store.precision.grades]
    assert told.precision.encodings == tuple(one for one in grades if one != Precision())


def test_every_part_is_told_the_grades_of_precision() -> None:
    grades = [
        {"share": 0.1, "key": "native", "value": "packed"},
        {"share": 0.2, "key": "int8", "value": "e4m3"},
        {"share": 0.3, "key": "e5m2", "value": "int8"},
        {"key": "gse8", "value": "gse8"},
    ]
    cache = make_cache(
        reuse={"mode": "blend", "quality": 0.9}, cacheStore={"precision": {"grades": grades}}
    )
    wanted = PrecisionPolicy(
        Scheme.HARAG,
        tuple(map(Precision.parse, ("native/packed", "int8/e4m3", "e5m2/int8", "gse8"))),
        (0.1, 0.2, 0.3),
    )
    for part in ("cachestore", "engine-main", "gateway"):
        told = env_of(children_of(cache), part)["RAGCACHE_PRECISION"]
        assert PrecisionPolicy.parse(told) == wanted


def test_policies_exist_in_core() -> None:
    policy = CacheStoreSpec.model_fields["policy"]
    assert get_args(policy.annotation) == POLICY_NAMES
    assert policy.default == DEFAULT_POLICY


def without_mounts(env: dict[str, str]) -> dict[str, str]:
    """Return the environment without the keys, and with a certificate that there is.

    The service reads both at its start.
    """
    files = {"RAGCACHE_SIGNING_KEY_FILE", "RAGCACHE_STORE_KEY_FILE"}
    found = {name: value for name, value in env.items() if name not in files}
    return found | {"RAGCACHE_TLS_DIR": str(certificates())} if "RAGCACHE_TLS_DIR" in env else found


@functools.cache
def certificates() -> Path:
    return write(Path(tempfile.mkdtemp()), issue())


@given(specs)
def test_the_gateway_accepts_its_environment(spec: Object) -> None:
    cache = make_cache(**spec)
    told = read_settings(GatewaySettings, without_mounts(env_of(children_of(cache), "gateway")))
    assert (told.reuse, told.max_recompute_share) == (
        cache.spec.reuse.mode,
        cache.spec.reuse.max_recompute_share,
    )
    assert told.max_model_len == cache.spec.model.max_length


def test_the_gateway_gets_the_reuse_settings() -> None:
    env = env_of(build(), "gateway")
    assert (env["RAGCACHE_REUSE"], env["RAGCACHE_MAX_RECOMPUTE_SHARE"]) == ("exact", "0.2")
    env = env_of(build(reuse={"mode": "blend", "maxRecomputeShare": 1}), "gateway")
    assert (env["RAGCACHE_REUSE"], env["RAGCACHE_MAX_RECOMPUTE_SHARE"]) == ("blend", "1.0")
    # Without both, the defaults equal those of an empty spec.
    del env["RAGCACHE_REUSE"], env["RAGCACHE_MAX_RECOMPUTE_SHARE"]
    reuse, told = make_cache().spec.reuse, read_settings(GatewaySettings, without_mounts(env))
    assert (told.reuse, told.max_recompute_share) == (reuse.mode, reuse.max_recompute_share)


@given(specs)
def test_components_agree_on_the_model(spec: Object) -> None:
    cache = make_cache(**spec)
    children = children_of(cache)
    gateway, retriever = env_of(children, "gateway"), env_of(children, "retriever")
    for engine in cache.spec.engines:
        arguments = container_of(children, f"engine-{engine.name}")["args"]
        told = {name: arguments[arguments.index(name) + 1] for name in arguments[:10:2]}
        assert gateway["RAGCACHE_MODEL"] == retriever["RAGCACHE_MODEL"] == told["--model"]
        assert gateway["RAGCACHE_MODEL_NAME"] == told["--served-model-name"]
        assert gateway["RAGCACHE_MODEL_DTYPE"] == told["--dtype"]
    assert gateway["RAGCACHE_MAX_MODEL_LEN"] == str(cache.spec.model.max_length)


def test_a_commit_pins_the_model_of_gateway_retriever_and_engine() -> None:
    commit = "0123456789abcdef0123456789abcdef01234567"
    children = build(model={"source": f"hf:org/model@{commit}"})
    arguments = container_of(children, "engine-main")["args"]
    told = {name: arguments[arguments.index(name) + 1] for name in arguments[:8:2]}
    assert (told["--model"], told["--served-model-name"]) == ("org/model", "org/model")
    assert told["--revision"] == told["--tokenizer-revision"] == commit
    for part in ("gateway", "retriever"):
        assert env_of(children, part)["RAGCACHE_MODEL"] == f"org/model@{commit}"


@pytest.mark.parametrize("example", ["quickstart.yaml", "huggingface.yaml"])
def test_the_examples_satisfy_current_kubernetes_schemas(example: str) -> None:
    cache = load_manifest(ROOT / "examples" / example)
    capabilities = replace(Capabilities.latest(), pod_monitors=False)  # of another project
    for child in build_children(cache, ClusterPlacement(cache, tag="1", capabilities=capabilities)):
        kubernetes_validate.validate(child, "1.37", strict=True)


@pytest.mark.parametrize(
    ("model", "weights_bytes"),
    [
        ({}, 269_060_552),
        ({"dtype": "float32"}, 2 * 269_060_552),
        ({"source": "bundled:tinyrag"}, 5_369_152),
        ({"source": "hf:meta-llama/Llama-3.1-8B-Instruct"}, 16 * 10**9),
        ({"source": "hf:Qwen/Qwen3-0.6B", "dtype": "float32"}, 24 * 10**8),
        ({"source": "hf:Qwen/Qwen3-30B-A3B"}, 60 * 10**9),
        ({"source": f"hf:Qwen/Qwen3-30B-A3B@{'8' * 40}"}, 60 * 10**9),
        ({"source": "hf:mistralai/Mixtral-8x7B-Instruct-v0.1"}, 112 * 10**9),
        ({"source": "pvc:models/llama-70b"}, 140 * 10**9),
        ({"source": "image:registry.example.com/models/smollm-135m:1"}, 27 * 10**7),
        ({"source": "hf:internlm/internlm2-chat-1_8b"}, 36 * 10**8),
        ({"source": "hf:stabilityai/stablelm-2-1_6b"}, 32 * 10**8),
        ({"source": "hf:org/llama-8B-1000B-tokens"}, 16 * 10**9),
        ({"source": "hf:org/1000B_tokens-900m-steps-llama-8B"}, 16 * 10**9),
        ({"source": "hf:TinyLlama/TinyLlama-1.1B-step-50K-105b"}, 22 * 10**8),
        ({"source": "hf:Qwen/Qwen2.5-7B-Instruct-1M"}, 14 * 10**9),
        ({"source": "pvc:models/llama-70b/ours"}, 0),
        ({"source": "pvc:models-70b/llama-8b/"}, 16 * 10**9),
        ({"source": "pvc:models/ours"}, 0),
        ({"source": "hf:org/v2b3c"}, 0),
        ({"source": "hf:meta-llama/Llama-3.1-8B-Instruct", "weights": "5Gi"}, 5 * 2**30),
    ],
)
def test_an_engine_requests_memory_for_the_weights(
    model: dict[str, Any], weights_bytes: int
) -> None:
    container = container_of(build(model=model), "engine-main")
    requested = parse_quantity(container["resources"]["requests"]["memory"])
    assert 0 <= requested - (5 * 2**30 + weights_bytes) < 2**20


@pytest.mark.parametrize("size", ["64Mi", "100Mi", "255Mi"])
def test_a_small_volume_still_gives_a_valid_store(size: str) -> None:
    """Its size is immutable, so a user could not solve a rejection."""
    env = env_of(build(cacheStore={"disk": {"size": size}}), "cachestore")
    assert int(env["RAGCACHE_DISK_BYTES"]) >= 65536


@pytest.mark.parametrize(
    ("resources", "rendered"),
    [
        ({}, {"requests": {"cpu": "100m", "memory": "2024Mi"}, "limits": {"memory": "2024Mi"}}),
        # A component that bounds its memory has its request as the limit.
        (
            {"cpu": "0.5", "memory": "4096Mi"},
            {"requests": {"cpu": "500m", "memory": "4Gi"}, "limits": {"memory": "4Gi"}},
        ),
        (
            {"memoryLimit": "3Gi"},
            {"requests": {"cpu": "100m", "memory": "2024Mi"}, "limits": {"memory": "3Gi"}},
        ),
        # A server rejects a request above the limit.
        (
            {"memoryLimit": "1Gi"},
            {"requests": {"cpu": "100m", "memory": "1Gi"}, "limits": {"memory": "1Gi"}},
        ),
    ],
)
def test_resources_are_derived_and_may_be_overridden(resources: Object, rendered: Object) -> None:
    children = build(cacheStore={"memory": "1Gi", "resources": resources})
    assert container_of(children, "cachestore")["resources"] == rendered


@pytest.mark.parametrize(
    ("spec", "admission"),
    [
        ({}, "always"),
        ({"reuse": {"mode": "blend"}}, "score"),
        ({"reuse": {"mode": "blend"}, "cacheStore": {"policy": "lru"}}, "always"),
        ({"reuse": {"mode": "blend"}, "cacheStore": {"admission": "always"}}, "always"),
        ({"cacheStore": {"admission": "secondTouch"}}, "second-touch"),
    ],
)
def test_the_store_of_a_platform_has_the_admission_that_did_best(
    spec: Object, admission: str
) -> None:
    env = {**env_of(build(**spec), "cachestore"), "RAGCACHE_OWN_ADDRESS": "docs-0:50051"}
    assert read_settings(CacheStoreSettings, without_mounts(env)).admission == admission


def test_an_image_model_needs_image_volumes() -> None:
    cache = make_cache(model={"source": "image:a/b:1"})
    children_of(cache, replace(LATEST, minor=35))
    with pytest.raises(InvalidInput, match=r"^spec\.model\.source: Kubernetes 1\.34 cannot mount"):
        children_of(cache, replace(LATEST, minor=34))


@pytest.mark.parametrize("kind", ["postgres", "milvus"])
def test_an_index_of_another_backend_takes_no_memory_of_the_retriever(kind: str) -> None:
    backend = {kind: {"urlSecret": {"name": "db"}}}

    def memory(**spec: Any) -> int:
        resources = container_of(build(retriever=spec), "retriever")["resources"]
        return parse_quantity(resources["requests"]["memory"])

    index = {"expectedChunks": 1_000_000, "kind": "hnsw"}
    assert memory(backend=backend, index=index) == memory(backend=backend)
    assert memory(backend=backend) < memory() < memory(index=index)


def test_the_retrievers_memory_follows_from_the_index() -> None:
    def memory(**retriever: Any) -> int:
        container = container_of(build(retriever=retriever), "retriever")
        return int(parse_quantity(container["resources"]["requests"]["memory"]))

    small = memory(index={"expectedChunks": 1})
    million = memory(index={"expectedChunks": 1_000_000}) - small
    assert million == pytest.approx(2 * 1_000_000 * (384 * 4 + 24), rel=0.01)
    quantized = memory(index={"expectedChunks": 1_000_000, "precision": "sq8"}) - small
    assert quantized == pytest.approx(2 * 1_000_000 * (384 + 24), rel=0.01)
    endpoint = {"source": "http://e/v1", "model": "m"}
    assert memory(index={"expectedChunks": 1_000_000}, embedder=endpoint) > small + 2 * million


def test_no_engine_is_built_if_each_one_has_a_url() -> None:
    children = build(engines=[{"name": "theirs", "url": "http://vllm.models.svc:8000"}])
    assert not [one for one in workloads_of(children) if "engine" in one["metadata"]["name"]]
    assert env_of(children, "gateway")["RAGCACHE_ENGINES"] == "http://vllm.models.svc:8000"


def test_each_group_of_engines_serves_its_model_and_the_gateway_reads_all() -> None:
    hub = {"name": "hub"}
    children = build(
        model={"source": "hf:org/one-1B", "tokenSecret": hub, "weights": "2Gi"},
        engines=[
            {"name": "a"},
            {"name": "b", "model": {"source": "pvc:models/two", "name": "two", "maxLength": 512}},
            {"name": "c", "model": {"source": "image:registry/three:1", "name": "three"}},
            {"name": "d", "model": {"source": "pvc:models/two", "name": "two", "maxLength": 512}},
        ],
    )
    gateway = env_of(children, "gateway")
    others = json.loads(gateway["RAGCACHE_OTHER_MODELS"])
    assert [(one["name"], one["source"], one["max_length"]) for one in others] == [
        ("two", "/model-1/two", 512),
        ("three", "/model-2", 4096),
    ]
    numbers = [one.partition(";model=")[2] for one in gateway["RAGCACHE_ENGINES"].split(",")]
    assert numbers == ["", "1", "2", "1"]
    mounts = container_of(children, "gateway")["volumeMounts"]
    assert {"/model-1", "/model-2"} <= {mount["mountPath"] for mount in mounts}
    names = {}
    for group in "abcd":
        words = container_of(children, f"engine-{group}")["args"]
        named = dict(itertools.pairwise(words))
        names[group] = (named["--model"], named["--served-model-name"], named["--max-model-len"])
    assert names == {
        "a": ("org/one-1B", "org/one-1B", "4096"),
        "b": ("/model/two", "two", "512"),
        "c": ("/model", "three", "4096"),
        "d": ("/model/two", "two", "512"),
    }
    assert ("HF_TOKEN", "hub", "token") in secrets_of(container_of(children, "gateway"))


def scaled() -> list[Object]:
    """A gateway of two to five replicas."""
    return build(gateway={"replicas": 2, "autoscaling": {"maxReplicas": 5}})


@given(st.integers(0, 10))
def test_the_replicas_of_an_autoscaled_deployment_are_kept(replicas: int) -> None:
    desired = of(scaled(), "Deployment", "docs-gateway")
    assert "replicas" not in desired["spec"]
    live = {**desired, "spec": {**desired["spec"], "replicas": replicas}}
    assert with_replicas(desired, live)["spec"]["replicas"] == min(max(replicas, 2), 5)


def test_an_autoscaled_deployment_starts_with_the_minimum() -> None:
    desired = of(scaled(), "Deployment", "docs-gateway")
    assert desired["metadata"]["annotations"][REPLICA_RANGE] == "2-5"
    assert with_replicas(desired, None)["spec"]["replicas"] == 2


def test_without_autoscaling_the_spec_sets_the_replicas() -> None:
    for child in build(gateway={"replicas": 3}, engines=[{"replicas": 2}]):
        assert with_replicas(child, None) == child
    assert of(build(gateway={"replicas": 3}), "Deployment", "docs-gateway")["spec"]["replicas"] == 3


def test_unsupported_features_are_omitted_and_reported() -> None:
    cache = make_cache(
        gateway={"autoscaling": {"maxReplicas": 2}, "httpRoute": {"gateway": "public"}},
        engines=[{"name": "a"}, {"name": "b", "autoscaling": {"maxReplicas": 2}}],
    )
    nothing = Capabilities(OLDEST_MINOR)
    found = unsupported_features(cache, nothing)
    assert {refusal.reason for refusal in found} == {"QueueMetricsNotServed", "HTTPRouteNotServed"}
    [queue] = [refusal for refusal in found if refusal.reason == "QueueMetricsNotServed"]
    assert queue.message.startswith("spec.engines[1].autoscaling: ")
    assert all("; " in refusal.message for refusal in found)
    children = children_of(cache, nothing)
    assert kinds_of(children, "HTTPRoute") == []
    [autoscaler] = kinds_of(children, "HorizontalPodAutoscaler")
    assert autoscaler["metadata"]["name"] == "docs-gateway"
    assert unsupported_features(cache, LATEST) == []


@given(specs)
def test_unused_features_are_not_reported(spec: Object) -> None:
    cache = make_cache(**spec)
    served = Capabilities(OLDEST_MINOR)
    for refusal in unsupported_features(cache, served):
        assert refusal.message.startswith("spec.")
    kinds = [child["kind"] for child in children_of(cache, served)]
    wanted = sum(engine.autoscaling is not None for engine in cache.spec.engines)
    refused = [
        r for r in unsupported_features(cache, served) if r.reason == "QueueMetricsNotServed"
    ]
    assert len(refused) == wanted
    assert kinds.count("HorizontalPodAutoscaler") == (cache.spec.gateway.autoscaling is not None)


def test_the_key_belongs_to_one_object() -> None:
    cache = make_cache()

    def of_uid(uid: str) -> Object:
        return signing_secret(cache, ClusterPlacement(cache, tag="1", owner=uid), bytes(32))

    one, other = of_uid(UID), of_uid("f" + UID[1:])
    [owner] = one["metadata"]["ownerReferences"]
    assert (owner["kind"], owner["name"], owner["uid"]) == ("RagCache", "docs", UID)
    assert one["metadata"]["name"] != other["metadata"]["name"]
    assert one == of_uid(UID)
    assert one["metadata"]["labels"]["app.kubernetes.io/instance"] == "docs"


def test_a_generated_key_is_one_that_services_read() -> None:
    cache = make_cache()
    made = signing_secret(cache, ClusterPlacement(cache, tag="1", owner=UID), bytes(range(32)))
    [content] = made["stringData"].values()
    assert parse_keys("keys", content.encode()) == (bytes(range(32)),)


@pytest.mark.parametrize("component", ["gateway", "engine", "retriever", "cachestore"])
def test_gateways_and_engines_alone_get_the_store_key(component: str) -> None:
    cache = make_cache()
    placement = ClusterPlacement(cache, tag="1", owner=UID)
    secret = store_key_secret(cache, placement, bytes(range(32)))["metadata"]["name"]
    [pod] = [
        one["spec"]["template"]["spec"]
        for one in build_children(cache, placement)
        if one["kind"] in {"Deployment", "StatefulSet"}
        and one["metadata"]["labels"]["app.kubernetes.io/component"] == component
    ]
    mounted = [one["secret"]["secretName"] for one in pod["volumes"] if "secret" in one]
    assert (secret in mounted) == (component in {"gateway", "engine"})


@pytest.mark.parametrize("component", ["gateway", "engine", "retriever", "cachestore"])
@pytest.mark.parametrize("own", [None, {"name": "team-disk", "key": "two"}])
def test_shards_alone_get_the_keys_of_the_disk(component: str, own: dict[str, str] | None) -> None:
    cache = make_cache(cacheStore={"encryption": {} if own is None else {"secretRef": own}})
    placement = ClusterPlacement(cache, tag="1", owner=UID)
    made = disk_key_secret_name(cache, placement)
    assert (made is None) == (own is not None)
    name = made or "team-disk"
    part = "engine-main" if component == "engine" else component
    children = build_children(cache, placement)
    volumes = [one["secret"] for one in pod_of(children, part)["volumes"] if "secret" in one]
    found = [one for one in volumes if one["secretName"] == name]
    assert bool(found) == (component == "cachestore")
    if component == "cachestore":
        env = env_of(children, part)
        assert env["RAGCACHE_DISK_KEY_FILE"] == "/etc/ragcache/disk-key/keys"
        if own is not None:
            assert found[0]["items"] == [{"key": "two", "path": "keys"}]


def test_without_the_field_values_on_disk_are_plain() -> None:
    assert "RAGCACHE_DISK_KEY_FILE" not in env_of(build(), "cachestore")
    placement = ClusterPlacement(make_cache(), tag="1", owner=UID)
    assert disk_key_secret_name(make_cache(), placement) is None


def test_a_generated_disk_key_is_one_that_shards_read() -> None:
    cache = make_cache(cacheStore={"encryption": {}})
    placement = ClusterPlacement(cache, tag="1", owner=UID)
    made = disk_key_secret(cache, placement, "name", bytes(range(32)))
    [content] = made["stringData"].values()
    assert parse_keys("keys", content.encode()) == (bytes(range(32)),)


@given(specs)
def test_no_built_object_contains_a_secret(spec: Object) -> None:
    assert not kinds_of(children_of(make_cache(**spec)), "Secret")


def test_the_gateway_gets_its_allowed_origins() -> None:
    assert "RAGCACHE_ALLOWED_ORIGINS" not in env_of(build(), "gateway")
    origins = ["https://app.example.com", "chrome-extension://abc"]
    env = env_of(build(gateway={"allowedOrigins": origins}), "gateway")
    told = read_settings(GatewaySettings, without_mounts(env))
    assert told.allowed_origins == tuple(origins)


def test_a_route_without_host_names_allows_no_other_ones() -> None:
    env = env_of(build(gateway={"httpRoute": {"gateway": "edge"}}), "gateway")
    assert env["RAGCACHE_ALLOWED_HOSTS"] == env_of(build(), "gateway")["RAGCACHE_ALLOWED_HOSTS"]


def test_the_gateways_urls_have_the_ports_of_the_spec() -> None:
    placement = ClusterPlacement(make_cache(gateway={"port": 80, "adminPort": 81}), tag="1")
    assert placement.gateway_url == "http://docs-gateway.team.svc:80"
    assert placement.admin_url == "http://docs-gateway.team.svc:81"


@pytest.mark.parametrize(
    ("spec", "variable", "folder"),
    [
        ({"model": {"source": "pvc:models"}}, "RAGCACHE_MODEL", "/model"),
        ({"model": {"source": "image:a/b:1"}}, "RAGCACHE_MODEL", "/model"),
        (
            {"retriever": {"embedder": {"source": "pvc:models"}}},
            "RAGCACHE_EMBEDDER",
            "path:/embedder",
        ),
        (
            {"retriever": {"reranker": {"source": "cross-encoder", "model": "pvc:models"}}},
            "RAGCACHE_RERANKER_MODEL",
            "/cross-encoder",
        ),
    ],
)
def test_a_model_can_be_the_root_of_its_volume(spec: Object, variable: str, folder: str) -> None:
    assert env_of(build(**spec), "retriever")[variable] == folder


def test_an_image_model_is_mounted_from_its_image() -> None:
    volumes = pod_of(build(model={"source": "image:a/b:1"}), "engine-main")["volumes"]
    image = {"reference": "a/b:1", "pullPolicy": "IfNotPresent"}
    assert {"name": "model", "image": image} in volumes


@pytest.mark.parametrize(
    "retriever",
    [
        {"embedder": {"source": "hf:intfloat/e5-small-v2"}},
        {"reranker": {"source": "cross-encoder", "model": "cross-encoder/ms-marco-MiniLM-L6-v2"}},
    ],
)
def test_only_the_retriever_asks_the_hub_for_its_models(retriever: Object) -> None:
    children = build(retriever=retriever)
    assert "HF_HUB_OFFLINE" not in env_of(children, "retriever")
    assert env_of(children, "gateway")["HF_HUB_OFFLINE"] == "1"


@pytest.mark.parametrize(
    ("field", "spec"),
    [
        ("model.source", {"model": {"source": "path:/m"}}),
        ("retriever.embedder.source", {"retriever": {"embedder": {"source": "path:/m"}}}),
        (
            "retriever.reranker.model",
            {"retriever": {"reranker": {"source": "cross-encoder", "model": "path:/m"}}},
        ),
    ],
)
def test_a_local_folder_is_rejected_in_a_cluster(field: str, spec: Object) -> None:
    with pytest.raises(InvalidInput, match=rf"^spec\.{field}: path:/m is a local folder"):
        build(**spec)
