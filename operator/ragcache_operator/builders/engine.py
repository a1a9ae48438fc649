"""Builds the engines: vLLM's OpenAI server with the RagCache connector."""

from __future__ import annotations

import json
import ssl
from collections.abc import Mapping
from dataclasses import replace
from typing import Final

from ragcache_core.cost.engine_memory import EngineMemory
from ragcache_operator.builders import autoscaling, cachestore
from ragcache_operator.builders.autoscaling import ReplicaRange
from ragcache_operator.builders.environment import EnvValue, FromResource, settings_environment
from ragcache_operator.builders.keys import signing_mount, store_key_mount
from ragcache_operator.builders.metadata import ENGINE_LABEL, Object, engine_workload
from ragcache_operator.builders.model import (
    model_cache_environment,
    model_cache_mounts,
    model_environment,
    model_mounts,
    weights_bytes,
)
from ragcache_operator.builders.part_tls import tls_dir, tls_mounts
from ragcache_operator.builders.placement import PORT_NUMBERS, Endpoint, PlatformPlacement
from ragcache_operator.builders.pod import DerivedResources, Mount, Probes, resources
from ragcache_operator.builders.precision import precision_setting
from ragcache_operator.builders.services import HEADLESS, service
from ragcache_operator.builders.watched_files import MEMBERS
from ragcache_operator.builders.workload import Workload, build_workload, metadata, selector
from ragcache_operator.spec.quantity import canonical
from ragcache_operator.spec.ragcache import EngineSpec, RagCache
from ragcache_wire.peers.certificates import AUTHORITIES_FILE, CERTIFICATE_FILE, KEY_FILE
from ragcache_wire.settings import EngineSettings

COMPONENT: Final = "engine"

_CONNECTOR: Final = {
    "kv_connector": "RagCacheConnector",
    "kv_role": "kv_both",
    # vLLM's default answers a failed load with an error 500.
    "kv_load_failure_policy": "recompute",
}
_START_S = 1800
"""Time to read the weights of a large model from a slow disk or a hub."""
_DRAIN_S = 120
"""Time for answers in flight after the last new request."""
_END_S = 30
"""Time for vLLM's processes to end after a signal."""
_GPU_IMAGE: Final = "engine-cuda"


def http(engine: EngineSpec) -> Endpoint:
    """Return the endpoint of the OpenAI server."""
    return Endpoint(engine_workload(engine), "http")


def records(engine: EngineSpec) -> Endpoint:
    """Return the endpoint of the request records (engine.proto)."""
    return Endpoint(engine_workload(engine), "grpc")


def metrics(engine: EngineSpec) -> Endpoint:
    """Return the endpoint that serves only /metrics."""
    return Endpoint(engine_workload(engine), "metrics")


def build(cache: RagCache, engine: EngineSpec, placement: PlatformPlacement) -> list[Object]:
    """Return the objects of one group of engines."""
    on_gpu = engine.device == "cuda"
    derived = DerivedResources("1", _memory(cache, engine).request_bytes)
    gpus = {engine.gpu_or_default.resource: str(engine.tensor_parallel)} if on_gpu else {}
    replica_range = engine.autoscaling and ReplicaRange(
        engine.replicas, engine.autoscaling.max_replicas
    )
    shard = cachestore.beside_engine(cache, engine, placement)
    workload = Workload(
        component=COMPONENT,
        image=_GPU_IMAGE if on_gpu else COMPONENT,
        name=engine_workload(engine),
        command=("python", "-m", "ragcache_engine.start"),
        args=_arguments(cache, engine, placement),
        env=_environment(cache, engine, placement),
        ports=(http(engine).port, records(engine).port, metrics(engine).port),
        probes=Probes(
            placement.bind_address(http(engine)).port,
            "/health",
            "/health",
            start_s=_START_S,
            is_tls=cache.spec.tls.enabled,
        ),
        resources=resources(derived, engine.resources, gpus),
        replicas=replica_range or engine.replicas,
        mounts=(
            _shared_memory(engine),
            MEMBERS.mount(cache),
            signing_mount(cache, placement),
            *tls_mounts(cache, placement),
            store_key_mount(cache, placement),
            *model_mounts(cache.spec.model_of(engine)),
            *model_cache_mounts(cache.spec.model_of(engine)),
            *(() if shard is None else (replace(cachestore.SHARED_FOLDER, read_only=True),)),
        ),
        service=None if shard is None else shard.service,
        beside=shard,
        drain=("python", "-m", "ragcache_engine.drain", "--deadline-s", str(_DRAIN_S)),
        grace_s=_DRAIN_S + _END_S,
        own_labels={ENGINE_LABEL: engine.name},
        # A single engine would be missing while its successor loads the model. With several, a
        # surge would need spare memory for each rollout, and a spare GPU may never come.
        surge=engine.replicas == 1 and replica_range is None and not on_gpu,
        template=engine.pod_template,
    )
    meta = metadata(cache, workload)
    children = [
        *([] if shard is None else [cachestore.shards_service(cache, shard, workload)]),
        service(
            meta,
            selector(cache, workload),
            [(one.port, PORT_NUMBERS[one.port]) for one in (http(engine), records(engine))],
            # The gateway knows each engine and balances the load itself.
            HEADLESS,
        ),
        *build_workload(cache, workload, placement),
    ]
    if engine.autoscaling and replica_range and placement.capabilities.custom_metrics:
        depth = engine.autoscaling.queue_depth
        children.append(autoscaling.queue_autoscaler(meta, replica_range, depth))
    return children


def _memory(cache: RagCache, engine: EngineSpec) -> EngineMemory:
    if engine.device == "cuda":
        return EngineMemory.beside_gpu(engine.host_tier_bytes, engine.tensor_parallel)
    weights = weights_bytes(cache.spec.model_of(engine))
    return EngineMemory(
        weights, engine.host_kv_bytes, engine.host_tier_bytes, num_ranks=engine.tensor_parallel
    )


def _shared_memory(engine: EngineSpec) -> Mount:
    given = engine.gpu.shared_memory if engine.gpu is not None else None
    size = canonical(given or f"{engine.shared_memory_bytes >> 20}Mi")
    volume = {"emptyDir": {"medium": "Memory", "sizeLimit": size}}
    return Mount("shm", "/dev/shm", volume)


def _arguments(cache: RagCache, engine: EngineSpec, placement: PlatformPlacement) -> list[str]:
    model = cache.spec.model_of(engine)
    bind_address = placement.bind_address(http(engine))
    return [
        *_model_arguments(placement.model(model.parsed_source)),
        *("--served-model-name", model.served_name),
        *("--host", bind_address.host),
        *("--port", str(bind_address.port)),
        *("--dtype", model.dtype),
        *("--max-model-len", str(model.max_length)),
        "--enable-prompt-tokens-details",
        *_tls_arguments(tls_dir(cache, placement)),
        *("--middleware", "ragcache_engine.telemetry.health.HealthMiddleware"),
        *("--middleware", "ragcache_engine.peer_middleware.PeerMiddleware"),
        *("--kv-transfer-config", _json(_CONNECTOR)),
        # The gateway composes the priority of each request.
        *("--scheduling-policy", "priority"),
        *_device_arguments(engine),
        *_rank_arguments(engine),
        *vllm_arguments(cache),
        *engine.args,
        *engine.unsafe_args,
    ]


def _model_arguments(model: str) -> list[str]:
    """Return what names a model to vLLM, which takes the commit of a hub's model apart."""
    name, mark, commit = model.partition("@")
    if not mark or model.startswith("/"):
        return ["--model", model]
    return ["--model", name, "--revision", commit, "--tokenizer-revision", commit]


def _tls_arguments(folder: str | None) -> list[str]:
    if folder is None:
        return []
    return [
        *("--ssl-certfile", f"{folder}/{CERTIFICATE_FILE}"),
        *("--ssl-keyfile", f"{folder}/{KEY_FILE}"),
        *("--ssl-ca-certs", f"{folder}/{AUTHORITIES_FILE}"),
        # The kubelet's probes have no certificate. Paths that are not open need a token.
        *("--ssl-cert-reqs", str(int(ssl.CERT_OPTIONAL))),
    ]


def _rank_arguments(engine: EngineSpec) -> list[str]:
    if engine.tensor_parallel == 1:
        return []
    return ["--tensor-parallel-size", str(engine.tensor_parallel)]


def _device_arguments(engine: EngineSpec) -> list[str]:
    if engine.device == "cpu":
        # Compiling would make each start longer. Its benefit on a CPU has not been measured.
        return ["--enforce-eager"]
    if engine.rank_kv_gib is not None:
        return ["--kv-cache-memory-bytes", str(engine.rank_kv_gib << 30)]
    return ["--gpu-memory-utilization", str(engine.gpu_or_default.memory_share)]


def _json(config: Mapping[str, object]) -> str:
    return json.dumps(config, separators=(",", ":"))


def _environment(
    cache: RagCache, engine: EngineSpec, placement: PlatformPlacement
) -> dict[str, EnvValue]:
    model = cache.spec.model_of(engine)
    return {
        **model_environment(model),
        **(model_cache_environment(model) if placement.is_cluster else {}),
        **settings_environment(
            EngineSettings,
            cache,
            engine,
            cachestore=placement.cache_store_members(),
            signing_key_file=placement.signing_key_file(),
            tls_dir=tls_dir(cache, placement),
            store_key_file=placement.store_key_file(),
            records_listen=str(placement.bind_address(records(engine))),
            metrics_listen=str(placement.bind_address(metrics(engine))),
            memory_request_bytes=FromResource("requests.memory"),
            precision=precision_setting(cache),
        ),
        **(_CPU_ENVIRONMENT | _cpu_sizes(engine) if engine.device == "cpu" else {}),
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_LOGGING_LEVEL": cache.spec.telemetry.log_level.upper(),
        "DO_NOT_TRACK": "1",
        **vllm_environment(cache),
    }


_CPU_ENVIRONMENT: Final = {
    # With a connector, vLLM reserves two cores for other work, or uses both of two cores. The
    # connector's threads need little.
    "VLLM_CPU_NUM_OF_RESERVED_CPU": "1",
    # The sampler compiles in spite of --enforce-eager, and fails without a C++ compiler.
    "TORCH_COMPILE_DISABLE": "1",
}


def _cpu_sizes(engine: EngineSpec) -> dict[str, str]:
    """Return the size of the KV cache, and as many threads as the CPU limit has cores.

    Otherwise vLLM starts one thread for each core of the node, and the kernel stops them all when
    they have used the limit. Both are of each rank.
    """
    sizes = {"VLLM_CPU_KVCACHE_SPACE": str(engine.rank_kv_gib)}
    limit = engine.resources.cpu_limit_millis
    if limit is not None:
        sizes["VLLM_CPU_OMP_THREADS_BIND"] = "nobind"
        sizes["OMP_NUM_THREADS"] = str(max(1, limit // 1000 // engine.tensor_parallel))
    return sizes


def vllm_environment(cache: RagCache) -> Mapping[str, str]:
    """Return variables for tracing by vLLM. They also hold for the connector in its processes."""
    if cache.spec.telemetry.otlp is None:
        return {}
    return {
        # The default is gRPC.
        "OTEL_EXPORTER_OTLP_TRACES_PROTOCOL": "http/protobuf",
        "OTEL_SERVICE_NAME": "ragcache-engine",
        # The caller decides about tracing, so that probes begin no traces.
        "OTEL_TRACES_SAMPLER": "parentbased_always_off",
    }


def vllm_arguments(cache: RagCache) -> list[str]:
    """Return vLLM's arguments for tracing.

    Without them, vLLM drops the trace context of a request before the connector sees it. With them,
    vLLM also makes its own span of each request (``llm_request``).
    """
    otlp = cache.spec.telemetry.otlp
    return ["--otlp-traces-endpoint", f"{otlp.endpoint.rstrip('/')}/v1/traces"] if otlp else []
