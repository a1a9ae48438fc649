"""Engines on GPUs: what their pods ask for, and what vLLM is told."""

from __future__ import annotations

import pytest

from ragcache_operator.spec.quantity import parse_quantity
from tests.kit.operator import Object, build, container_of, env_of, of, pod_of

GIB = 1 << 30


def engine(**fields: object) -> list[Object]:
    return build(
        model={"source": "hf:meta-llama/Llama-3.1-70B-Instruct"},
        engines=[{"name": "main", "device": "cuda", **fields}],
    )


def option(children: list[Object], flag: str) -> str | None:
    args = container_of(children, "engine-main")["args"]
    return args[args.index(flag) + 1] if flag in args else None


def test_an_engine_takes_one_gpu_and_host_memory_without_weights() -> None:
    resources = container_of(engine(), "engine-main")["resources"]
    assert resources["limits"]["nvidia.com/gpu"] == "1"
    assert resources["requests"]["nvidia.com/gpu"] == "1"
    assert parse_quantity(resources["requests"]["memory"]) == 8 * GIB
    tiered = container_of(engine(hostTier="4Gi"), "engine-main")["resources"]
    assert parse_quantity(tiered["requests"]["memory"]) == 13 * GIB


def test_another_resource_is_a_part_of_a_gpu() -> None:
    given = {"resource": "nvidia.com/mig-3g.40gb", "sharedMemory": "4Gi"}
    children = engine(gpu=given)
    assert container_of(children, "engine-main")["resources"]["limits"] == {
        "nvidia.com/mig-3g.40gb": "1"
    }
    [memory] = [one for one in pod_of(children, "engine-main")["volumes"] if one["name"] == "shm"]
    assert memory["emptyDir"]["sizeLimit"] == "4Gi"


def test_vllm_compiles_and_captures_graphs_on_a_gpu() -> None:
    children = engine()
    assert "--enforce-eager" not in container_of(children, "engine-main")["args"]
    env = env_of(children, "engine-main")
    assert env["RAGCACHE_DEVICE"] == "cuda"
    assert not [name for name in env if name.startswith("VLLM_CPU") or "COMPILE" in name]


def test_the_kv_cache_is_a_share_of_the_gpu_or_a_size() -> None:
    assert option(engine(gpu={"memoryShare": 0.8}), "--gpu-memory-utilization") == "0.8"
    sized = engine(kvMemory="20Gi")
    assert option(sized, "--kv-cache-memory-bytes") == str(20 * GIB)
    assert option(sized, "--gpu-memory-utilization") is None


@pytest.mark.parametrize("replicas", [1, 3])
def test_a_rollout_needs_no_further_gpu(replicas: int) -> None:
    strategy = of(engine(replicas=replicas), "Deployment", "docs-engine-main")["spec"]["strategy"]
    assert strategy["rollingUpdate"] == {"maxSurge": 0, "maxUnavailable": 1}


def test_the_image_is_the_one_with_cuda() -> None:
    assert "/engine-cuda:" in container_of(engine(), "engine-main")["image"]
    assert "/engine:" in container_of(build(), "engine-main")["image"]


def test_each_rank_takes_a_gpu_and_its_share_of_memory() -> None:
    children = engine(tensorParallel=4, kvMemory="80Gi", gpu={"resource": "nvidia.com/gpu"})
    resources = container_of(children, "engine-main")["resources"]
    assert resources["limits"]["nvidia.com/gpu"] == "4"
    assert parse_quantity(resources["requests"]["memory"]) == (8 + 3 * 3) * GIB
    assert option(children, "--tensor-parallel-size") == "4"
    assert option(children, "--kv-cache-memory-bytes") == str(20 * GIB)
    [memory] = [one for one in pod_of(children, "engine-main")["volumes"] if one["name"] == "shm"]
    assert memory["emptyDir"]["sizeLimit"] == "2Gi"
    assert env_of(children, "gateway")["RAGCACHE_MODEL_RANKS"] == "4"
    assert option(engine(), "--tensor-parallel-size") is None


def test_ranks_on_a_processor_share_its_cores_and_memory() -> None:
    children = build(
        model={"source": "bundled:tinyrag"},
        engines=[{"name": "main", "tensorParallel": 2, "resources": {"cpuLimit": "6"}}],
    )
    env = env_of(children, "engine-main")
    assert (env["VLLM_CPU_OMP_THREADS_BIND"], env["OMP_NUM_THREADS"]) == ("nobind", "3")
    assert env["VLLM_CPU_KVCACHE_SPACE"] == "1"
