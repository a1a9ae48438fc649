"""``ragcache size``: its rows, what it reads of a model, and its refusals."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file
from typer.testing import CliRunner, Result

from ragcache_cli.main import app
from ragcache_cli.models.cache import find_model
from ragcache_cli.models.catalog import SMOLLM2
from ragcache_operator.spec.quantity import parse_quantity
from tests.kit.operator import build, container_of

LLAMA_8B = {
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "hidden_size": 4096,
    "torch_dtype": "bfloat16",
}
GIB = 1 << 30


def size(model: object, *words: object, chunks: int = 100_000, rate: float = 2) -> Result:
    given = ("size", "--model", model, "--chunks", chunks, "--rate", rate, *words)
    return CliRunner().invoke(app, [str(word) for word in given])


def sizes(
    model: object = "smollm2", gpu_memory: str = "", weights: str = "", **demand: Any
) -> dict[str, Any]:
    words = ["--gpu-memory", gpu_memory] if gpu_memory else []
    words += ["--weights", weights] if weights else []
    result = size(model, "--output", "json", *words, **demand)
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout)
    assert isinstance(found, dict)
    return found


def folder_with(config: object, folder: Path) -> Path:
    (folder / "config.json").write_text(config if isinstance(config, str) else json.dumps(config))
    return folder


def test_people_get_a_row_for_each_size_with_its_rule() -> None:
    result = size("smollm2")
    assert result.exit_code == 0
    rows = [" ".join(line.split()) for line in result.stdout.splitlines()]
    assert any(row.startswith("KV of a token 22.50 KiB 2 x layers x KV heads") for row in rows)
    assert "KV of all chunks 549.32 GiB once each" in rows


def test_the_store_holds_its_shares_of_the_chunks() -> None:
    found = sizes()
    assert found["chunk_bytes"] == 256 * found["token_bytes"]
    all_bytes = found["all_chunks_bytes"]
    assert found["store_memory_bytes"] == pytest.approx(0.03 * all_bytes / 0.9, rel=0.01)
    assert found["store_disk_bytes"] == pytest.approx(0.5 * all_bytes / 0.9 / 0.9, rel=0.01)
    # The memory tier passes each value on, however few there are.
    assert sizes(chunks=1)["store_memory_bytes"] >= 4 * found["chunk_bytes"]


def test_traffic_sizes_gateways_searches_and_engines() -> None:
    few, many = sizes(rate=2), sizes(rate=2000)
    assert (few["gateway_replicas"], many["gateway_replicas"]) == (1, 4)
    assert many["engine_tokens_per_s"] == pytest.approx(1000 * few["engine_tokens_per_s"])
    assert few["engine_tokens_per_s"] == pytest.approx(2 * 3072 / 0.7)
    assert few["retriever_cores"] == pytest.approx(0.112)
    assert sizes(rate=0)["gateway_replicas"] == 1


def test_the_operator_requests_the_same_memory() -> None:
    found = sizes()
    children = build(
        retriever={
            "index": {"expectedChunks": 100_000},
            "storage": {"size": str(found["retriever_volume_bytes"])},
        },
        cacheStore={
            "memory": str(found["store_memory_bytes"]),
            "disk": {"size": str(found["store_disk_bytes"])},
        },
    )
    for component, size_name in (
        ("cachestore", "store_pod_bytes"),
        ("retriever", "retriever_pod_bytes"),
    ):
        requests = container_of(children, component)["resources"]["requests"]
        assert parse_quantity(requests["memory"]) == found[size_name]


def test_a_folder_needs_its_configuration_alone(tmp_path: Path) -> None:
    found = sizes(folder_with(LLAMA_8B, tmp_path))
    assert found["token_bytes"] == 2 * 32 * 8 * 128 * 2
    assert found["kv_memory_bytes"] == 4 * GIB
    assert sizes("bundled:tinyrag")["token_bytes"] == 2 * 5 * 6 * 32 * 2


def test_the_catalog_knows_the_configuration_of_a_fetched_model() -> None:
    folder = find_model(SMOLLM2.name)
    if folder is None:
        pytest.skip("smollm2 is not fetched")
    config = json.loads((folder / "config.json").read_text())
    assert SMOLLM2.kv_config.items() <= config.items()


@pytest.mark.parametrize("config", ["[]", "{", {"hidden_size": 64}, {**LLAMA_8B, "dtype": "int4"}])
def test_a_model_without_sizes_is_reported(config: object, tmp_path: Path) -> None:
    result = size(folder_with(config, tmp_path))
    assert result.exit_code == 2
    assert "Traceback" not in result.stderr


def test_mistakes_name_the_option() -> None:
    assert "none of smollm2, tinyrag" in size("gpt").stderr
    for refused in (size("smollm2", chunks=0), size("smollm2", rate=float("nan"))):
        assert refused.exit_code == 2
        assert "--chunks" in refused.stderr or "--rate" in refused.stderr


def test_a_gpu_has_room_for_weights_and_kv(tmp_path: Path) -> None:
    model = folder_with(LLAMA_8B, tmp_path)
    found = sizes(model, gpu_memory="80Gi", weights="15Gi")
    assert found["gpu"] == {
        "engine_bytes": int(80 * GIB * 0.9),
        "weights_bytes": 15 * GIB,
        "kv_bytes": int(80 * GIB * 0.9) - 15 * GIB,
        "requests_at_once": (int(80 * GIB * 0.9) - 15 * GIB) // (3328 * found["token_bytes"]),
        "fits": True,
    }
    assert "gpu" not in {name for name, value in sizes(model).items() if value is not None}


@pytest.mark.parametrize(
    ("memory", "kv_bytes", "requests", "verdict"),
    [
        ("24Gi", int(24 * GIB * 0.9) - 15 * GIB, 16, "fits: KV of 16 requests"),
        ("16Gi", 0, 0, "TOO SMALL for 8 requests at once: KV of 0 requests"),
    ],
)
def test_a_gpu_that_is_too_small_is_named(
    tmp_path: Path, memory: str, kv_bytes: int, requests: int, verdict: str
) -> None:
    model = folder_with(LLAMA_8B, tmp_path)
    found = sizes(model, gpu_memory=memory, weights="15Gi")["gpu"]
    assert (found["kv_bytes"], found["requests_at_once"]) == (kv_bytes, requests)
    assert found["fits"] is verdict.startswith("fits")
    said = " ".join(size(model, "--gpu-memory", memory, "--weights", "15Gi").stdout.split())
    assert verdict in said


def test_weights_are_read_from_the_files_of_a_model(tmp_path: Path) -> None:
    model = folder_with(LLAMA_8B, tmp_path)
    without = size(model, "--gpu-memory", "24Gi")
    assert "give --weights" in without.output
    save_file({"w": np.zeros((1024, 512), np.float16)}, model / "model.safetensors")
    assert sizes(model, gpu_memory="24Gi")["gpu"]["weights_bytes"] == 1024 * 512 * 2
    assert sizes("smollm2", gpu_memory="1Gi")["gpu"]["weights_bytes"] == SMOLLM2.num_bytes


def test_a_memory_that_is_no_size_is_refused() -> None:
    assert "--gpu-memory" in size("smollm2", "--gpu-memory", "large").output
