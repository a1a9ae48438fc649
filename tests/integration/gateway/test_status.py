"""Health, readiness, metrics, the OpenAPI document, and routes that do not exist."""

from __future__ import annotations

import re
from pathlib import Path

import httpx

from ragcache_wire.watched.members import FixedMembers
from tests.kit.gateway import MODEL, World, serving, until_status, world


async def test_the_status_says_whether_an_engine_has_answered(gateway: World) -> None:
    response = await until_status(gateway.client, 200)
    engine = response.json()["parts"]["engine"]
    assert (engine["ready"], engine["problem"]) == (True, None)
    (endpoint,) = engine["endpoints"]
    port = gateway.config.engines[0].http_port
    assert endpoint.pop("name").startswith("server-")
    assert endpoint == {
        "address": f"127.0.0.1:{port}",
        "model": MODEL,
        "role": "both",
        "ready": True,
        "problem": None,
        "in_flight": 0,
        "queue_s": 0.0,
        "waiting": 0,
        "decoding": 0,
        "free_tokens": None,
    }
    assert gateway.engine.probes >= 1

    gateway.engine.refuse = (500, {"error": {"message": "out of blocks"}})
    await gateway.ask()
    response = await until_status(gateway.client, 503)
    assert "the engine is not ready" in response.json()["error"]["message"]
    assert response.json()["parts"]["retriever"]["ready"] is True
    assert int(response.headers["Retry-After"]) >= 1
    for path in ("/healthz", "/readyz"):
        assert (await gateway.client.get(path)).status_code == 200

    gateway.engine.refuse = None
    await until_status(gateway.client, 200)


async def test_an_unavailable_retriever_is_named(gateway: World) -> None:
    await until_status(gateway.client, 200)
    await gateway.servers["retriever"].stop()
    response = await until_status(gateway.client, 503)
    assert "the retriever is not ready" in response.json()["error"]["message"]
    assert response.json()["parts"]["engine"]["ready"] is True


async def test_metrics_count_what_happened(gateway: World) -> None:
    await gateway.ask()
    await gateway.ask(ragcache={"collection": "none"})
    await gateway.client.get("/nowhere")
    text = (await gateway.client.get("/metrics")).text
    for line in (
        'requests_total{code="200",route="/v1/chat/completions"} 1.0',
        'requests_total{code="404",route="/v1/chat/completions"} 1.0',
        'requests_total{code="404",route="unmatched"} 1.0',
        'answers_total{loaded="full",miss=""} 1.0',
        'stage_seconds_count{stage="load"} 1.0',
        'stage_seconds_count{stage="recompute"} 1.0',
        'prompt_tokens_total{source="loaded"} 40.0',
        'prompt_tokens_total{source="blended"} 15.0',
        'prompt_tokens_total{source="recomputed"} 5.0',
        'prompt_tokens_total{source="local"} 10.0',
        'prompt_tokens_total{source="computed"} 30.0',
        "loaded_bytes_total 61440.0",
    ):
        assert f"ragcache_gateway_{line}" in text
    chunks = [line for line in text.splitlines() if line.startswith("ragcache_gateway_chunks_t")]
    hits = gateway.retriever.hits
    num_chunks = sum(1 + len(hit.before) + len(hit.after) for hit in hits)
    assert sum(float(line.rpartition(" ")[2]) for line in chunks) == num_chunks
    first_token = [
        line for line in text.splitlines() if line.startswith("gen_ai_server_time_to_first_token")
    ]
    assert any("_seconds_count{" in line and line.endswith(" 1.0") for line in first_token)


async def test_the_shards_of_the_cache_store_are_summed(gateway: World) -> None:
    (shard,) = gateway.config.cachestore.current()
    gateway.store.stats.reset_at_ms, gateway.store.stats.reset_reason = 5, "Corruption"
    response = await gateway.client.get("/v1/cache")
    summary = response.json()
    sources = summary.pop("sources")
    assert {one["source"].partition(":")[0] for one in sources} == {"engine", "store"}
    assert summary["shards"][0].pop("name").startswith("server-")
    assert summary == {
        "variants": 3,
        "disk_bytes": 300,
        "disk_capacity_bytes": 0,
        "memory_bytes": 200,
        "memory_capacity_bytes": 0,
        "bytes_by_precision": {},
        "hits": 0,
        "misses": 0,
        "misses_by_reason": {},
        "evictions": {},
        "corrupt": 0,
        "hit_rate": None,
        "shards": [{"address": shard, "up": True, "reset_at_ms": 5, "reset_reason": "Corruption"}],
    }
    gateway.store.stats.hits_memory, gateway.store.stats.hits_disk = 4, 2
    gateway.store.stats.misses = 2
    gateway.store.stats.misses_by_reason.update({"evicted": 2, "timed_out": 0})
    gateway.store.stats.bytes_by_precision.update({"native": 200, "int8/int4": 100})
    gateway.store.stats.evictions.update({"memory": 5})
    answer = (await gateway.client.get("/v1/cache")).json()
    assert (answer["hits"], answer["misses"], answer["hit_rate"]) == (6, 2, 0.75)
    assert answer["misses_by_reason"] == {"evicted": 2}
    assert answer["bytes_by_precision"] == {"int8/int4": 100, "native": 200}
    assert answer["evictions"] == {"memory": 5}
    await gateway.servers["cachestore"].stop()
    response = await gateway.client.get("/v1/cache")
    assert response.status_code == 503
    assert response.json()["error"]["code"] == "cachestore_unavailable"


async def test_an_unreachable_shard_is_named_and_the_others_are_summed(tiny_model: Path) -> None:
    async with world(tiny_model) as gateway:
        (up,) = gateway.config.cachestore.current()
        members = FixedMembers((up, "127.0.0.1:9"))
        gateway.config = gateway.config.replace(cachestore=members)
        async with (
            serving(gateway.app()) as port,
            httpx.AsyncClient(
                base_url=f"http://127.0.0.1:{port}", trust_env=False, timeout=60
            ) as client,
        ):
            answer = (await client.get("/v1/cache")).json()
            document = {"id": "a", "text": "Old."}
            assert (await client.post("/v1/documents", json=document)).status_code == 200
            changed = await client.post("/v1/documents", json=document | {"text": "New."})
    assert answer["variants"] == 3
    shards = {shard["address"]: shard["up"] for shard in answer["shards"]}
    assert shards == {up: True, "127.0.0.1:9": False}
    # The shard that is up has deleted its variants; it tells the other one later.
    assert changed.json()["removed_variants"] == 2
    assert len(gateway.store.deleted) == 1


async def test_errors_of_unknown_routes_have_openais_shape(gateway: World) -> None:
    for method, path, status in (
        ("GET", "/nowhere", 404),
        ("GET", "/v1/chat/completions", 405),
        ("PATCH", "/v1/documents", 405),
        ("GET", "/docs", 404),
    ):
        response = await gateway.client.request(method, path)
        assert response.status_code == status
        assert set(response.json()["error"]) == {"message", "type", "param", "code"}
        if status == 405:
            assert response.headers["allow"]
    response = await gateway.client.get("/v1/documents/")
    assert response.json()["error"]["param"] == "id"


async def test_the_openapi_document_is_consistent(gateway: World) -> None:
    response = await gateway.client.get("/openapi.json")
    document = response.json()
    schemas = document["components"]["schemas"]
    for name in re.findall(r"#/components/schemas/(\w+)", response.text):
        assert name in schemas
    assert "HTTPValidationError" not in schemas
    for path, methods in document["paths"].items():
        for operation in methods.values():
            assert operation["summary"]
            assert "422" not in operation["responses"]
            if path.startswith("/v1/"):
                error = operation["responses"]["400"]["content"]["application/json"]["schema"]
                assert error == {"$ref": "#/components/schemas/ErrorBody"}
    answer = document["paths"]["/v1/chat/completions"]["post"]["responses"]["200"]["content"]
    assert set(answer) == {"application/json", "text/event-stream"}
