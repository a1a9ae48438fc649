"""An engine: vLLM's own OpenAI server with our connector."""

from __future__ import annotations

import json
from typing import Final

from ragcache_operator.builders import cachestore
from ragcache_operator.builders.objects import Object, Probes, Workload, http_get, render
from ragcache_operator.builders.site import Place, Site
from ragcache_operator.quantity import format_bytes
from ragcache_operator.spec import GROUP, EngineSpec, RagCache

COMPONENT: Final = "engine"

_CONNECTOR: Final = {
    "kv_connector": "RagCacheConnector",
    "kv_role": "kv_both",
    # vLLM's default answers a lost chunk-cache with an error 500.
    "kv_load_failure_policy": "recompute",
}
_PROCESS_BYTES = 3 << 30
"""What an engine needs beside its KV: vLLM's processes, a small model's weights."""


def http(engine: EngineSpec) -> Place:
    """Its OpenAI server."""
    return Place(part(engine), "http")


def records(engine: EngineSpec) -> Place:
    """Its records of requests (engine.proto)."""
    return Place(part(engine), "grpc")


def part(engine: EngineSpec) -> str:
    """Its name within the RagCache."""
    return f"{COMPONENT}-{engine.name}"


def build(cache: RagCache, engine: EngineSpec, site: Site) -> list[Object]:
    """Its objects."""
    model = cache.spec.model
    source = model.parsed_source
    listen = site.listen(http(engine))
    args = [
        *("--model", site.model(source)),
        *("--served-model-name", model.served_name),
        *("--host", listen.host),
        *("--port", str(listen.port)),
        *("--dtype", model.dtype),
        *("--max-model-len", str(model.max_length)),
        "--enable-prompt-tokens-details",
        *("--kv-transfer-config", json.dumps(_CONNECTOR, separators=(",", ":"))),
        # Compiling would make every start longer; whether it pays on a CPU has not been measured.
        "--enforce-eager",
        *engine.args,
    ]
    env = {
        "RAGCACHE_CACHESTORE": str(site.reach(cachestore.GRPC)),
        "RAGCACHE_RECORDS_LISTEN": str(site.listen(records(engine))),
        "VLLM_CPU_KVCACHE_SPACE": str(engine.kv_memory_gib),
        # With a connector vLLM keeps two cores for other work and takes one less for itself, or on
        # two cores all of both; the connector's threads need little.
        "VLLM_CPU_NUM_OF_RESERVED_CPU": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "DO_NOT_TRACK": "1",
    }
    if source.kind != "hf":
        # A folder is whole; without this every start asks the hub about it.
        env["HF_HUB_OFFLINE"] = "1"
    health = http_get(site, http(engine), "/health")
    workload = Workload(
        component=COMPONENT,
        part=part(engine),
        command=("python", "-m", "vllm.entrypoints.openai.api_server"),
        args=args,
        env=env,
        ports=(http(engine).port, records(engine).port),
        # A large model's weights take long from a slow disk, longer from a hub.
        probes=Probes(alive=health, ready=health, start_s=1800),
        cpu="1",
        memory=format_bytes((engine.kv_memory_gib << 30) + _PROCESS_BYTES),
        labels={f"{GROUP}/engine": engine.name},
        surge=False,
        shared_memory="1Gi",
    )
    return render(cache, workload, site)
