"""Builders: environment, resources and permissions of each component."""

from __future__ import annotations

import json
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
from ragcache_operator.builders import build_children
from ragcache_operator.builders.autoscaling import REPLICA_RANGE, with_replicas
from ragcache_operator.builders.capabilities import OLDEST_MINOR, Capabilities, unsupported_features
from ragcache_operator.builders.keys import signing_secret
from ragcache_operator.builders.placement import ClusterPlacement
from ragcache_operator.spec import CacheStoreSpec
from ragcache_operator.spec.manifest import load_manifest
from ragcache_operator.spec.quantity import parse_quantity
from ragcache_wire.settings import CacheStoreSettings, GatewaySettings
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
    precise = store.precision
    given_precision = Precision.parse(f"{precise.key}/{precise.value}")
    assert given_precision.lossless
    assert told.precision == given_precision


def test_policies_exist_in_core() -> None:
    policy = CacheStoreSpec.model_fields["policy"]
    assert get_args(policy.annotation) == POLICY_NAMES
    assert policy.default == DEFAULT_POLICY


def without_mounts(env: dict[str, str]) -> dict[str, str]:
    """Return the environment without files, which the service reads at its start."""
    return {name: value for name, value in env.items() if name != "RAGCACHE_SIGNING_KEY_FILE"}


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


@pytest.mark.parametrize("example", ["quickstart.yaml", "huggingface.yaml"])
def test_the_examples_satisfy_current_kubernetes_schemas(example: str) -> None:
    cache = load_manifest(ROOT / "examples" / example)
    capabilities = replace(Capabilities.latest(), pod_monitors=False)  # of another project
    for child in build_children(cache, ClusterPlacement(cache, tag="1", capabilities=capabilities)):
        kubernetes_validate.validate(child, "1.37", strict=True)


def test_the_engine_is_vllms_server_with_our_connector() -> None:
    children = build(
        engines=[
            {
                "kvMemory": "1500Mi",
                "args": ["--max-num-seqs=4"],
                "unsafeArgs": ["--model-impl=vllm"],
            }
        ]
    )
    container = container_of(children, "engine-main")
    assert container["command"] == ["python", "-m", "ragcache_engine.start"]
    arguments = container["args"]
    connector = json.loads(arguments[arguments.index("--kv-transfer-config") + 1])
    assert connector == {
        "kv_connector": "RagCacheConnector",
        "kv_role": "kv_both",
        "kv_load_failure_policy": "recompute",
    }
    assert arguments[-2:] == ["--max-num-seqs=4", "--model-impl=vllm"]
    assert "--otlp-traces-endpoint" not in arguments
    assert env_of(children, "engine-main")["VLLM_CPU_KVCACHE_SPACE"] == "2"
    assert container["resources"]["requests"]["memory"] == f"{5 * 1024 + SMOLLM2_MIB}Mi"
    assert "RAGCACHE_HOST_TIER_BYTES" not in env_of(children, "engine-main")


def test_an_engine_has_memory_for_its_host_tier_and_its_queue() -> None:
    children = build(engines=[{"kvMemory": "2Gi", "hostTier": "4Gi"}])
    assert env_of(children, "engine-main")["RAGCACHE_HOST_TIER_BYTES"] == str(4 << 30)
    container = container_of(children, "engine-main")
    assert container["resources"]["requests"]["memory"] == f"{10 * 1024 + SMOLLM2_MIB}Mi"


@pytest.mark.parametrize(
    ("model", "weights_bytes"),
    [
        ({}, 269_060_552),
        ({"dtype": "float32"}, 2 * 269_060_552),
        ({"source": "bundled:tinyrag"}, 5_369_152),
        ({"source": "hf:meta-llama/Llama-3.1-8B-Instruct"}, 16 * 10**9),
        ({"source": "hf:Qwen/Qwen3-0.6B", "dtype": "float32"}, 24 * 10**8),
        ({"source": "hf:Qwen/Qwen3-30B-A3B"}, 60 * 10**9),
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


def test_an_engine_learns_the_memory_that_its_container_requests() -> None:
    container = container_of(build(), "engine-main")
    [variable] = [v for v in container["env"] if v["name"] == "RAGCACHE_MEMORY_REQUEST_BYTES"]
    found = {"resource": "requests.memory", "divisor": "1"}
    assert variable["valueFrom"] == {"resourceFieldRef": found}


def test_vllm_exports_spans_to_the_collector_and_starts_no_trace() -> None:
    children = build(telemetry={"otlp": {"endpoint": "http://collector:4318/"}})
    arguments = container_of(children, "engine-main")["args"]
    at = arguments.index("--otlp-traces-endpoint")
    assert arguments[at + 1] == "http://collector:4318/v1/traces"
    env = env_of(children, "engine-main")
    assert env["OTEL_EXPORTER_OTLP_TRACES_PROTOCOL"] == "http/protobuf"
    assert env["OTEL_TRACES_SAMPLER"] == "parentbased_always_off"


@pytest.mark.parametrize(
    ("engine", "surge"),
    [
        ({}, 1),
        ({"replicas": 2}, 0),
        ({"autoscaling": {"maxReplicas": 3}}, 0),
    ],
)
def test_only_a_single_engine_is_rolled_out_with_a_surge(engine: Object, surge: int) -> None:
    deployment = of(build(engines=[engine]), "Deployment", "docs-engine-main")
    rolling = deployment["spec"]["strategy"]["rollingUpdate"]
    assert rolling == {"maxSurge": surge, "maxUnavailable": 1 - surge}


def test_engines_are_resolved_separately_and_only_when_ready() -> None:
    service = of(build(), "Service", "docs-engine-main")
    assert service["spec"]["clusterIP"] == "None"
    assert "publishNotReadyAddresses" not in service["spec"]


def test_the_gateway_knows_every_engine() -> None:
    env = env_of(build(engines=[{"name": "a"}, {"name": "b"}]), "gateway")
    assert env["RAGCACHE_ENGINES"] == (
        "http://docs-engine-a.team.svc:8000;records=50051,"
        "http://docs-engine-b.team.svc:8000;records=50051"
    )


def test_an_engine_with_a_url_is_known_to_the_gateway_and_not_built() -> None:
    theirs = {"name": "theirs", "url": "http://vllm.models.svc:8000"}
    own, both = build(engines=[{"name": "own"}]), build(engines=[{"name": "own"}, theirs])
    assert [(c["kind"], c["metadata"]["name"]) for c in both] == [
        (c["kind"], c["metadata"]["name"]) for c in own
    ]
    assert env_of(both, "gateway")["RAGCACHE_ENGINES"] == (
        "http://docs-engine-own.team.svc:8000;records=50051,http://vllm.models.svc:8000"
    )
    alone = build(engines=[theirs])
    assert not [c for c in workloads_of(alone) if "engine" in c["metadata"]["name"]]
    assert env_of(alone, "gateway")["RAGCACHE_ENGINES"] == "http://vllm.models.svc:8000"


def test_shards_have_names_before_they_are_ready_and_start_in_parallel() -> None:
    children = build(cacheStore={"shards": 3})
    service = of(children, "Service", "docs-cachestore-shards")
    assert service["spec"]["clusterIP"] == "None"
    assert service["spec"]["publishNotReadyAddresses"] is True
    store = of(children, "StatefulSet", "docs-cachestore")
    assert store["spec"]["serviceName"] == "docs-cachestore-shards"
    assert store["spec"]["podManagementPolicy"] == "Parallel"
    assert store["spec"]["replicas"] == 3


def test_each_shard_has_its_member_name_and_two_ports() -> None:
    children = build(cacheStore={"shards": 2})
    store = of(children, "StatefulSet", "docs-cachestore")
    listed = container_of(children, "cachestore")["env"]
    [pod] = [variable for variable in listed if variable["name"] == "POD_NAME"]
    assert pod["valueFrom"]["fieldRef"] == {"apiVersion": "v1", "fieldPath": "metadata.name"}
    [own] = [variable for variable in listed if variable["name"] == "RAGCACHE_OWN_ADDRESS"]
    # The kubelet expands only variables that come earlier.
    assert listed.index(pod) < listed.index(own)
    members = of(children, "ConfigMap", "docs-members")
    names = [f"{store['metadata']['name']}-{shard}" for shard in range(2)]
    assert json.loads(members["data"]["cachestore.json"])["members"] == [
        own["value"].replace("$(POD_NAME)", name) for name in names
    ]
    mounted = {mount["name"] for mount in container_of(children, "cachestore")["volumeMounts"]}
    assert "members" in mounted
    env, service = env_of(children, "cachestore"), of(children, "Service", "docs-cachestore-shards")
    ports = {port["name"]: port["port"] for port in service["spec"]["ports"]}
    assert env["RAGCACHE_LISTEN"] == f"0.0.0.0:{ports['grpc']}"
    assert env["RAGCACHE_DATA_LISTEN"] == f"0.0.0.0:{ports['data']}"
    assert "RAGCACHE_DATA_SOCKET" not in env


def test_an_engine_publishes_no_events_of_its_cache() -> None:
    children = build()
    container = container_of(children, "engine-main")
    assert "--kv-events-config" not in container["args"]
    ports = {port["containerPort"] for port in container["ports"]}
    assert ports == {8000, 50051, 9464}
    service = of(children, "Service", "docs-engine-main")
    assert {port["port"] for port in service["spec"]["ports"]} == {8000, 50051}
    policy = of(children, "NetworkPolicy", "docs-engine")
    allowed = {port["port"] for rule in policy["spec"]["ingress"] for port in rule["ports"]}
    assert allowed == ports


def test_the_store_gets_the_settings_of_the_spec() -> None:
    env = env_of(build(), "cachestore")
    assert env["RAGCACHE_POLICY"] == "score"
    assert (env["RAGCACHE_PRECISION"], env["RAGCACHE_REPLICATION"]) == ("native", "on")
    assert "RAGCACHE_OTLP_ENDPOINT" not in env
    children = build(
        cacheStore={
            "policy": "pgdsf",
            "admission": "secondTouch",
            "precision": {"value": "packed"},
            "replication": {"enabled": False},
        },
        telemetry={"otlp": {"endpoint": "http://collector:4318"}},
    )
    env = env_of(children, "cachestore")
    assert (env["RAGCACHE_POLICY"], env["RAGCACHE_ADMISSION"]) == ("pgdsf", "second-touch")
    assert (env["RAGCACHE_PRECISION"], env["RAGCACHE_REPLICATION"]) == ("native/packed", "off")
    told = {
        name: env_of(children, name).get("RAGCACHE_OTLP_ENDPOINT")
        for name in ("cachestore", "gateway", "retriever", "engine-main")
    }
    assert told == dict.fromkeys(told, "http://collector:4318")


@pytest.mark.parametrize("size", ["64Mi", "100Mi", "255Mi"])
def test_a_small_volume_still_gives_a_valid_store(size: str) -> None:
    """Its size is immutable, so a user could not solve a rejection."""
    env = env_of(build(cacheStore={"disk": {"size": size}}), "cachestore")
    assert int(env["RAGCACHE_DISK_BYTES"]) >= 65536


def test_the_store_fits_its_volume_and_memory() -> None:
    children = build(cacheStore={"memory": "2Gi", "disk": {"size": "10Gi", "className": "fast"}})
    store = of(children, "StatefulSet", "docs-cachestore")
    [claim] = store["spec"]["volumeClaimTemplates"]
    assert claim["spec"] == {
        "accessModes": ["ReadWriteOnce"],
        "storageClassName": "fast",
        "resources": {"requests": {"storage": "10Gi"}},
    }
    env, container = env_of(children, "cachestore"), container_of(children, "cachestore")
    # The file system and a reserve for metadata take the rest.
    assert 0.85 * (10 << 30) < int(env["RAGCACHE_DISK_BYTES"]) < 0.9 * (10 << 30)
    limit = parse_quantity(container["resources"]["limits"]["memory"])
    assert limit > int(env["RAGCACHE_MEMORY_BYTES"]) == 2 << 30
    assert {"name": "data", "mountPath": env["RAGCACHE_DATA_DIR"]} in container["volumeMounts"]


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


def test_the_gateways_service_has_the_ports_of_the_spec() -> None:
    spec = {"port": 80, "adminPort": 81}
    service = of(build(gateway=spec), "Service", "docs-gateway")
    assert service["spec"]["ports"] == [
        {"name": "http", "port": 80, "targetPort": "http", "protocol": "TCP"},
        {"name": "admin", "port": 81, "targetPort": "admin", "protocol": "TCP"},
    ]
    cache = make_cache(gateway=spec)
    assert ClusterPlacement(cache, tag="1").admin_url == "http://docs-gateway.team.svc:81"
    assert ClusterPlacement(cache, tag="1").gateway_url == "http://docs-gateway.team.svc:80"


@pytest.mark.parametrize("part", ["gateway", "retriever", "engine-main"])
def test_a_hub_model_gets_the_users_token(part: str) -> None:
    children = build(model={"source": "hf:Qwen/Qwen3-0.6B", "tokenSecret": {"name": "hub"}})
    assert "HF_HUB_OFFLINE" not in env_of(children, part)
    assert ("HF_TOKEN", "hub", "token") in secrets_of(container_of(children, part))
    assert env_of(children, "gateway")["RAGCACHE_MODEL"] == "Qwen/Qwen3-0.6B"


@pytest.mark.parametrize("part", ["gateway", "retriever", "engine-main"])
@pytest.mark.parametrize(
    ("source", "volume", "folder"),
    [
        (
            "pvc:models/llama/8b",
            {"persistentVolumeClaim": {"claimName": "models", "readOnly": True}},
            "/model/llama/8b",
        ),
        (
            "pvc:models",
            {"persistentVolumeClaim": {"claimName": "models", "readOnly": True}},
            "/model",
        ),
        (
            "image:registry.example.com/llama:1",
            {
                "image": {
                    "reference": "registry.example.com/llama:1",
                    "pullPolicy": "IfNotPresent",
                }
            },
            "/model",
        ),
    ],
)
def test_a_model_on_a_volume_is_mounted_read_only(
    part: str, source: str, volume: Object, folder: str
) -> None:
    children = build(model={"source": source})
    assert {"name": "model", **volume} in pod_of(children, part)["volumes"]
    mount = {"name": "model", "mountPath": "/model", "readOnly": True}
    assert mount in container_of(children, part)["volumeMounts"]
    assert env_of(children, part)["HF_HUB_OFFLINE"] == "1"
    assert env_of(children, "gateway")["RAGCACHE_MODEL"] == folder


def test_the_store_has_no_model() -> None:
    children = build(model={"source": "pvc:models"})
    assert "model" not in {volume["name"] for volume in pod_of(children, "cachestore")["volumes"]}


def test_a_local_folder_is_rejected_in_a_cluster() -> None:
    with pytest.raises(InvalidInput, match=r"^spec\.model\.source: path:/m is a local folder"):
        build(model={"source": "path:/m"})


def test_an_image_model_needs_image_volumes() -> None:
    cache = make_cache(model={"source": "image:a/b:1"})
    children_of(cache, replace(LATEST, minor=35))
    with pytest.raises(InvalidInput, match=r"^spec\.model\.source: Kubernetes 1\.34 cannot mount"):
        children_of(cache, replace(LATEST, minor=34))


def test_an_endpoints_key_stays_in_its_secret() -> None:
    children = build(
        retriever={
            "embedder": {
                "source": "https://api.example.com/v1",
                "model": "e",
                "keySecret": {"name": "keys", "key": "embeddings"},
            }
        }
    )
    [secret] = secrets_of(container_of(children, "retriever"))
    assert secret == ("RAGCACHE_EMBEDDER_API_KEY", "keys", "embeddings")


@pytest.mark.parametrize(
    ("source", "folder"),
    [("pvc:models/e5/small/", "path:/embedder/e5/small"), ("pvc:models", "path:/embedder")],
)
def test_an_embedder_on_a_volume_is_mounted_in_the_retriever_alone(
    source: str, folder: str
) -> None:
    children = build(retriever={"embedder": {"source": source}})
    claim = {"claimName": "models", "readOnly": True}
    volume = {"name": "embedder", "persistentVolumeClaim": claim}
    mount = {"name": "embedder", "mountPath": "/embedder", "readOnly": True}
    assert volume in pod_of(children, "retriever")["volumes"]
    assert mount in container_of(children, "retriever")["volumeMounts"]
    assert env_of(children, "retriever")["RAGCACHE_EMBEDDER"] == folder
    assert volume not in pod_of(children, "gateway")["volumes"]


def test_only_the_retriever_asks_the_hub_for_an_embedder() -> None:
    children = build(retriever={"embedder": {"source": "hf:intfloat/e5-small-v2"}})
    assert env_of(children, "retriever")["RAGCACHE_EMBEDDER"] == "hf:intfloat/e5-small-v2"
    assert "HF_HUB_OFFLINE" not in env_of(children, "retriever")
    assert env_of(children, "gateway")["HF_HUB_OFFLINE"] == "1"


def test_a_local_embedder_is_rejected_in_a_cluster() -> None:
    with pytest.raises(
        InvalidInput, match=r"^spec\.retriever\.embedder\.source: path:/m is a local folder"
    ):
        build(retriever={"embedder": {"source": "path:/m"}})


@pytest.mark.parametrize(
    ("model", "folder"),
    [("pvc:models/ranker/", "/cross-encoder/ranker"), ("pvc:models", "/cross-encoder")],
)
def test_a_cross_encoder_on_a_volume_is_mounted_in_the_retriever_alone(
    model: str, folder: str
) -> None:
    reranker = {"source": "cross-encoder", "model": model}
    children = build(retriever={"reranker": reranker, "embedder": {"source": "pvc:models/e5"}})
    claim = {"claimName": "models", "readOnly": True}
    volume = {"name": "cross-encoder", "persistentVolumeClaim": claim}
    mount = {"name": "cross-encoder", "mountPath": "/cross-encoder", "readOnly": True}
    assert volume in pod_of(children, "retriever")["volumes"]
    assert mount in container_of(children, "retriever")["volumeMounts"]
    assert env_of(children, "retriever")["RAGCACHE_RERANKER_MODEL"] == folder
    assert env_of(children, "retriever")["RAGCACHE_EMBEDDER"] == "path:/embedder/e5"
    assert env_of(children, "retriever")["HF_HUB_OFFLINE"] == "1"
    assert volume not in pod_of(children, "gateway")["volumes"]


def test_only_the_retriever_asks_the_hub_for_a_cross_encoder() -> None:
    name = "cross-encoder/ms-marco-MiniLM-L6-v2"
    children = build(retriever={"reranker": {"source": "cross-encoder", "model": name}})
    assert env_of(children, "retriever")["RAGCACHE_RERANKER_MODEL"] == name
    assert "HF_HUB_OFFLINE" not in env_of(children, "retriever")
    assert env_of(children, "gateway")["HF_HUB_OFFLINE"] == "1"


def test_a_name_that_is_sent_to_an_endpoint_is_no_model_of_the_hub() -> None:
    children = build(retriever={"reranker": {"source": "http://e/v1", "model": "pvc:is/a-name"}})
    assert env_of(children, "retriever")["RAGCACHE_RERANKER_MODEL"] == "pvc:is/a-name"
    assert env_of(children, "retriever")["HF_HUB_OFFLINE"] == "1"
    names = {volume["name"] for volume in pod_of(children, "retriever")["volumes"]}
    assert "cross-encoder" not in names


def test_a_local_cross_encoder_is_rejected_in_a_cluster() -> None:
    with pytest.raises(
        InvalidInput, match=r"^spec\.retriever\.reranker\.model: path:/m is a local folder"
    ):
        build(retriever={"reranker": {"source": "cross-encoder", "model": "path:/m"}})


def test_clients_of_the_retriever_balance_between_ready_pods() -> None:
    backend = {"postgres": {"urlSecret": {"name": "db"}}}
    children = build(retriever={"replicas": 2, "backend": backend})
    service = of(children, "Service", "docs-retriever")
    assert service["spec"]["clusterIP"] == "None"
    assert "publishNotReadyAddresses" not in service["spec"]


@pytest.mark.parametrize("kind", ["postgres", "milvus"])
def test_an_index_of_another_backend_takes_no_memory_of_the_retriever(kind: str) -> None:
    backend = {kind: {"urlSecret": {"name": "db"}}}

    def memory(**spec: Any) -> int:
        resources = container_of(build(retriever=spec), "retriever")["resources"]
        return parse_quantity(resources["requests"]["memory"])

    index = {"expectedChunks": 1_000_000, "kind": "hnsw"}
    assert memory(backend=backend, index=index) == memory(backend=backend)
    assert memory(backend=backend) < memory() < memory(index=index)


@pytest.mark.parametrize("kind", ["postgres", "milvus"])
@pytest.mark.parametrize(("named", "key"), [({}, "url"), ({"key": "dsn"}, "dsn")])
def test_the_url_of_a_backend_stays_in_its_secret(
    kind: str, named: dict[str, str], key: str
) -> None:
    backend = {kind: {"urlSecret": {"name": "db"} | named}}
    children = build(retriever={"backend": backend})
    assert env_of(children, "retriever")["RAGCACHE_BACKEND"] == kind
    [found] = secrets_of(container_of(children, "retriever"))
    assert found == ("RAGCACHE_BACKEND_URL", "db", key)


def test_retrievers_share_a_database() -> None:
    database = {"postgres": {"urlSecret": {"name": "db"}}}
    shared = build(retriever={"replicas": 3, "backend": database})
    [workload] = [
        one
        for one in shared
        if one["metadata"]["name"].endswith("-retriever") and one["kind"] == "StatefulSet"
    ]
    assert workload["spec"]["replicas"] == 3


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


def test_scheduling_reaches_every_pod() -> None:
    toleration = {"key": "rag", "operator": "Exists", "effect": "NoSchedule"}
    children = build(
        scheduling={
            "priorityClassName": "high",
            "nodeSelector": {"pool": "rag"},
            "tolerations": [toleration],
            "imagePullSecrets": [{"name": "registry"}],
        }
    )
    for workload in workloads_of(children):
        pod = workload["spec"]["template"]["spec"]
        assert pod["priorityClassName"] == "high"
        assert pod["nodeSelector"] == {"pool": "rag"}
        assert pod["tolerations"] == [toleration]
        assert pod["imagePullSecrets"] == [{"name": "registry"}]


def test_a_group_of_engines_overrides_the_scheduling_it_gives() -> None:
    children = build(
        scheduling={
            "nodeSelector": {"pool": "rag"},
            "tolerations": [{"key": "rag", "operator": "Exists"}],
            "imagePullSecrets": [{"name": "registry"}],
        },
        engines=[
            {"name": "big", "scheduling": {"nodeSelector": {"pool": "big"}, "tolerations": []}},
            {"name": "small"},
        ],
    )
    big = pod_of(children, "engine-big")
    assert big["nodeSelector"] == {"pool": "big"}
    assert "tolerations" not in big
    assert big["imagePullSecrets"] == [{"name": "registry"}]
    for part in ("engine-small", "gateway", "cachestore", "retriever"):
        assert pod_of(children, part)["nodeSelector"] == {"pool": "rag"}


def test_every_component_logs_at_the_level_of_the_spec() -> None:
    children = build(telemetry={"logLevel": "debug"})
    for part in ("gateway", "retriever", "cachestore"):
        assert env_of(children, part)["RAGCACHE_LOG_LEVEL"] == "debug"
    assert env_of(children, "engine-main")["VLLM_LOGGING_LEVEL"] == "DEBUG"


def test_replicas_spread_over_nodes_and_zones_if_possible() -> None:
    children = build()
    for part in ("gateway", "retriever", "engine-main", "cachestore"):
        constraints = pod_of(children, part)["topologySpreadConstraints"]
        assert [c["topologyKey"] for c in constraints] == [
            "kubernetes.io/hostname",
            "topology.kubernetes.io/zone",
        ]
        assert {c["whenUnsatisfiable"] for c in constraints} == {"ScheduleAnyway"}


def test_a_drain_evicts_one_pod_of_a_workload_at_a_time() -> None:
    children = build(cacheStore={"shards": 3})
    budgets = kinds_of(children, "PodDisruptionBudget")
    assert len(budgets) == 4
    assert all(budget["spec"]["maxUnavailable"] == 1 for budget in budgets)


def test_an_ingress_routes_to_the_gateway() -> None:
    children = build(
        gateway={"ingress": {"host": "a.example.com", "className": "nginx", "tlsSecret": "tls"}}
    )
    [ingress] = kinds_of(children, "Ingress")
    assert ingress["spec"]["ingressClassName"] == "nginx"
    assert ingress["spec"]["tls"] == [{"hosts": ["a.example.com"], "secretName": "tls"}]
    assert ingress["spec"]["rules"][0]["host"] == "a.example.com"


def test_the_gateway_scales_by_cpu_and_engines_by_their_queues() -> None:
    cache = make_cache(
        gateway={"replicas": 2, "autoscaling": {"maxReplicas": 5, "cpuPercent": 60}},
        engines=[{"autoscaling": {"maxReplicas": 3, "queueDepth": 8}}],
    )
    children = children_of(cache)
    gateway = of(children, "HorizontalPodAutoscaler", "docs-gateway")
    assert gateway["apiVersion"] == "autoscaling/v2"
    assert (gateway["spec"]["minReplicas"], gateway["spec"]["maxReplicas"]) == (2, 5)
    [metric] = gateway["spec"]["metrics"]
    assert metric["resource"] == {
        "name": "cpu",
        "target": {"type": "Utilization", "averageUtilization": 60},
    }
    engine = of(children, "HorizontalPodAutoscaler", "docs-engine-main")
    [metric] = engine["spec"]["metrics"]
    assert metric["pods"] == {
        "metric": {"name": "vllm_num_requests_waiting"},
        "target": {"type": "AverageValue", "averageValue": "8"},
    }


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


def signing_key_volume(children: list[Object], part: str) -> Object | None:
    """Return the volume of the file with a component's signing keys."""
    path = env_of(children, part).get("RAGCACHE_SIGNING_KEY_FILE")
    if path is None:
        return None
    folder, _, _ = path.rpartition("/")
    [mount] = [m for m in container_of(children, part)["volumeMounts"] if m["mountPath"] == folder]
    # Kubernetes does not update a file that is mounted alone, so the folder is mounted.
    assert mount["readOnly"] is True
    assert "subPath" not in mount
    [volume] = [v for v in pod_of(children, part)["volumes"] if v["name"] == mount["name"]]
    found: Object = volume
    return found


def test_only_the_retriever_has_no_key() -> None:
    cache = make_cache(engines=[{"name": "one"}, {"name": "two"}])
    children = children_of(cache)
    site = ClusterPlacement(cache, tag="1", owner=UID)
    made = signing_secret(cache, site, bytes(range(32)))
    volumes = {
        signing_key_volume(children, part)["secret"]["secretName"]  # type: ignore[index]
        for part in ("gateway", "engine-one", "engine-two", "cachestore")
    }
    assert volumes == {made["metadata"]["name"]}
    assert signing_key_volume(children, "retriever") is None
    assert not [v for v in pod_of(children, "retriever")["volumes"] if "secret" in v]
    path = env_of(children, "gateway")["RAGCACHE_SIGNING_KEY_FILE"]
    [(file, content)] = made["stringData"].items()
    assert path.endswith(f"/{file}")
    assert parse_keys("keys", content.encode()) == (bytes(range(32)),)


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


@given(specs)
def test_no_built_object_contains_a_secret(spec: Object) -> None:
    assert not kinds_of(children_of(make_cache(**spec)), "Secret")


def allowed_hosts(**gateway: Any) -> list[str]:
    return env_of(build(gateway=gateway), "gateway")["RAGCACHE_ALLOWED_HOSTS"].split(",")


def test_the_gateway_knows_the_names_under_which_clients_reach_it() -> None:
    service = ["docs-gateway", "docs-gateway.team", "docs-gateway.team.svc"]
    names = [*service, "docs-gateway.team.svc.cluster.local"]
    assert allowed_hosts() == names
    assert allowed_hosts(ingress={"host": "rag.example.com"}) == [*names, "rag.example.com"]
    route = {"gateway": "edge", "hostnames": ["a.example.com"]}
    assert allowed_hosts(httpRoute=route) == [*names, "a.example.com"]
    assert allowed_hosts(httpRoute={"gateway": "edge"}) == names, "not every name"
    assert allowed_hosts(allowedHosts=["*.example.com"]) == ["*.example.com", *names]


def test_the_gateway_gets_its_allowed_origins() -> None:
    assert "RAGCACHE_ALLOWED_ORIGINS" not in env_of(build(), "gateway")
    origins = ["https://app.example.com", "chrome-extension://abc"]
    env = env_of(build(gateway={"allowedOrigins": origins}), "gateway")
    told = read_settings(GatewaySettings, without_mounts(env))
    assert told.allowed_origins == tuple(origins)
