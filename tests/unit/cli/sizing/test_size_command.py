"""``ragcache size``: its forms, what it reads of a model, and its refusals."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.testing import CliRunner, Result

from ragcache_cli.local.site import checkout_model
from ragcache_cli.main import app
from ragcache_cli.models.cache import find_model
from ragcache_cli.models.catalog import SMOLLM2
from ragcache_cli.sizing.model_size import read_model
from ragcache_core.cost.prefill_profile import PrefillProfile
from ragcache_kv.model_weights import read_weights_bytes
from ragcache_operator.spec.manifest import parse_manifest
from ragcache_operator.spec.quantity import parse_quantity

LLAMA_8B = {
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "hidden_size": 4096,
    "torch_dtype": "bfloat16",
}
REQUIRED = ("--chunks", "100000", "--requests-per-second", "2")


def size(*words: object, model: object = "smollm2") -> Result:
    words = ("size", "--model", model, *REQUIRED, *words)
    return CliRunner().invoke(app, [str(word) for word in words])


def sizes(*words: object, model: object = "smollm2") -> dict[str, Any]:
    result = size(*words, "--output", "json", model=model)
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout)
    assert isinstance(found, dict)
    return found


def manifest(*words: object, model: object = "smollm2") -> dict[str, Any]:
    result = size(*words, "--output", "yaml", model=model)
    assert result.exit_code == 0, result.output
    found = yaml.safe_load(result.stdout)
    assert isinstance(found, dict)
    return found


@pytest.fixture
def llama(tmp_path: Path) -> Path:
    """A folder with the configuration of a model and without its weights."""
    (tmp_path / "config.json").write_text(json.dumps(LLAMA_8B))
    return tmp_path


def test_people_get_a_row_for_each_size_and_what_is_left_out() -> None:
    result = size()
    assert result.exit_code == 0
    rows = [" ".join(line.split()) for line in result.stdout.splitlines()]
    assert "KV, native one token 22.50 KiB" in rows
    assert "all chunks 549.32 GiB" in rows
    assert any("engines are not counted" in row for row in rows)
    assert any("give a measured --reuse-share" in row for row in rows)
    complete = size(
        *("--reuse-share", 0.6, "--prefill-tokens-per-second", 900, "--decode-seconds", 1)
    )
    assert "give" not in complete.stdout
    assert "replicas without reuse" in complete.stdout


def test_programs_get_the_same_sizes() -> None:
    found = sizes("--reuse", "blend", "--prefill-tokens-per-second", 1000)
    assert found["kv"]["native"]["token_bytes"] == 23_040
    assert found["store"]["hit_share"] >= 0.9
    engines = found["engines"]
    # All tokens of the prompt are of chunks, and 0.2 of the loaded ones are computed again.
    assert engines["reused_share"] == pytest.approx(found["store"]["hit_share"])
    assert engines["computed_tokens"] == pytest.approx(3_072 * (1 - 0.9 * 0.8), rel=0.02)
    assert engines["prefill_s"] == pytest.approx(engines["computed_tokens"] / 1000)
    assert (engines["replicas"], engines["replicas_without_reuse"]) == (3, 9)


@pytest.mark.parametrize(
    "words",
    [
        (),
        ("--reuse", "blend", "--precision", "packed", "--prefill-tokens-per-second", 900),
        ("--shards", 3, "--host-tier", "2Gi", "--dtype", "float32", "--name", "small"),
        ("--dimension", 1024, "--index-kind", "hnsw", "--index-precision", "sq8"),
        ("--prompt-tokens", 6000, "--answer-tokens", 2000),
        ("--chunk-tokens", 16, "--prompt-tokens", 500, "--store-disk", "500Gi"),
    ],
)
def test_render_accepts_the_manifest(words: tuple[object, ...], tmp_path: Path) -> None:
    file = tmp_path / "sized.yaml"
    file.write_text(yaml.safe_dump(manifest(*words)))
    rendered = CliRunner().invoke(app, ["render", "-f", str(file), "--output", "json"])
    assert rendered.exit_code == 0, rendered.output
    found = sizes(*words)
    requests = {
        child["metadata"]["name"].rpartition("-")[2]: child["spec"]["template"]["spec"][
            "containers"
        ][0]["resources"]["requests"]["memory"]
        for child in json.loads(rendered.stdout)["items"]
        if child["kind"] in {"Deployment", "StatefulSet"}
    }
    # The operator requests what the command says.
    assert parse_quantity(requests["cachestore"]) == found["store"]["pod_memory_bytes"]
    assert parse_quantity(requests["main"]) == found["engines"]["memory_request_bytes"]
    assert parse_quantity(requests["retriever"]) == found["retriever"]["memory_request_bytes"]


def test_a_manifest_has_the_sizes_and_the_choices() -> None:
    words = ("--store-memory", "3Gi", "--store-disk", "70Gi", "--reuse", "blend", "--shards", 2)
    spec = parse_manifest(manifest(*words)).spec
    store = spec.cache_store
    assert (store.shards, store.memory, store.disk.size) == (2, "3Gi", "70Gi")
    assert (spec.reuse.mode, spec.reuse.max_recompute_share) == ("blend", 0.2)
    assert spec.retriever.index.expected_chunks == 100_000
    assert spec.engines[0].replicas == 1


def test_a_folder_needs_weights_or_their_size(llama: Path) -> None:
    refused = size(model=llama)
    assert refused.exit_code == 2
    assert "--weights" in refused.stderr
    found = sizes("--weights", "16Gi", model=llama)
    assert found["kv"]["native"]["token_bytes"] == 2 * 32 * 8 * 128 * 2
    assert found["engines"]["memory_request_bytes"] >= 16 << 30
    doubled = sizes("--weights", "16Gi", "--dtype", "float32", model=llama)
    assert doubled["kv"]["native"]["token_bytes"] == 2 * found["kv"]["native"]["token_bytes"]
    # Packing is for bfloat16.
    assert doubled["kv"]["packed"] == doubled["kv"]["native"]


def test_the_manifest_of_a_folder_names_where_pods_read_the_model(llama: Path) -> None:
    assert "--source" in size("--weights", "16Gi", "-o", "yaml", model=llama).stderr
    words = ("--weights", "16Gi", "--source", "pvc:models/llama-8b")
    assert manifest(*words, model=llama)["spec"]["model"]["source"] == "pvc:models/llama-8b"


def test_the_weights_of_a_folder_are_read() -> None:
    folder = checkout_model("tinyrag")
    assert folder is not None
    found = read_model(str(folder), "auto", None)
    assert found.source is None
    assert found.size.token_bytes == 2 * 5 * 6 * 32 * 2
    assert found.size.weights_bytes == read_weights_bytes(str(folder), "auto")
    assert read_model("bundled:tinyrag", "auto", None).size.token_bytes == found.size.token_bytes


def test_the_catalog_knows_the_configuration_of_a_fetched_model() -> None:
    folder = find_model(SMOLLM2.name)
    if folder is None:
        pytest.skip("smollm2 is not fetched")
    config = json.loads((folder / "config.json").read_text())
    assert SMOLLM2.kv_config.items() <= config.items()


def test_a_profile_counts_cached_tokens_too(tmp_path: Path) -> None:
    file = tmp_path / "prefill.json"
    seconds = ((0.5, 1.0), (1.5, 2.0))
    file.write_text(json.dumps(PrefillProfile((0, 2048), (512, 1024), seconds, 4096).to_json()))
    engines = sizes("--profile", file, "--reuse-share", 2 / 3)["engines"]
    assert engines["computed_tokens"] == 1024
    assert engines["prefill_s"] == 2.0


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        (("--prompt-tokens", 5), "the chunks of a prompt have 3072"),
        (("--hit-share", 0.3, "--memory-hit-share", 0.4), "the whole store answers 0.3"),
        (("--store-memory", "4Qi"), "--store-memory: '4Qi' is not a quantity"),
        (("--host-tier", "-1Gi"), "is below 0"),
        (("--profile", "no-such-file"), "--profile: no-such-file cannot be read"),
        (("--profile", "x", "--prefill-tokens-per-second", 1), "is given beside a rate"),
        (("--prefill-tokens-per-second", 1, "-o", "yaml"), "a group has at most 64 replicas"),
        (("--name", "Wrong_Name", "-o", "yaml"), "metadata.name"),
        (("--requests-per-second", "nan"), "--requests-per-second"),
        (("--zipf", "inf"), "--zipf"),
        (("--chunks", 0), "--chunks"),
    ],
)
def test_mistakes_name_the_option(words: tuple[object, ...], problem: str) -> None:
    result = size(*words)
    assert result.exit_code == 2
    assert problem in " ".join(result.stderr.split())


def test_an_unknown_model_is_reported() -> None:
    result = size(model="gpt")
    assert result.exit_code == 2
    assert "none of smollm2, tinyrag" in result.stderr


def test_a_model_without_sizes_is_reported(tmp_path: Path) -> None:
    for config in ("[]", "{", '{"hidden_size": 64}', json.dumps({**LLAMA_8B, "dtype": "int4"})):
        (tmp_path / "config.json").write_text(config)
        result = size("--weights", "1Gi", model=tmp_path)
        assert result.exit_code == 2, config
        assert "Traceback" not in result.stderr
