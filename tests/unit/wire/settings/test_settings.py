"""Each setting of every service: a missing or wrong one is an error that names its variable."""

from __future__ import annotations

from pathlib import Path
from typing import TypeVar

import pytest

from ragcache_core.errors import InvalidInput
from ragcache_core.eviction.admission import ADMISSION_NAMES
from ragcache_core.identity.store_key import StoreKey
from ragcache_core.identity.variant import Codec, Precision
from ragcache_core.tiering.precision_policy import PrecisionPolicy, Scheme
from ragcache_core.tiering.tier_placement import TIER_POLICIES
from ragcache_wire.settings import (
    CacheStoreSettings,
    EngineSettings,
    GatewaySettings,
    RetrieverSettings,
)
from ragcache_wire.settings.field_types import split_address
from ragcache_wire.settings.gateway import EngineAddress, ModelSettings, models_text
from ragcache_wire.settings.retriever import BUNDLED_EMBEDDER
from ragcache_wire.settings.table import ServiceSettings, variable
from tests.kit.certificates import NAME, issue, write
from tests.kit.settings import read_settings

S = TypeVar("S", bound=ServiceSettings)

REQUIRED: dict[type[ServiceSettings], dict[str, str]] = {
    CacheStoreSettings: {
        "RAGCACHE_LISTEN": "127.0.0.1:7000",
        "RAGCACHE_DATA_DIR": "data",
        "RAGCACHE_MEMORY_BYTES": "65536",
        "RAGCACHE_DISK_BYTES": "1000000",
    },
    EngineSettings: {"RAGCACHE_CACHESTORE": "host:1"},
    GatewaySettings: {
        "RAGCACHE_LISTEN": "[::1]:8080",
        "RAGCACHE_RETRIEVER": "retriever:7001",
        "RAGCACHE_ENGINES": "http://engine:8000/;records=8001, http://other:8000;records=8001",
        "RAGCACHE_CACHESTORE": "cachestore:7002",
        "RAGCACHE_MODEL": "/models/tiny",
        "RAGCACHE_MODEL_NAME": "tiny",
        "RAGCACHE_MAX_MODEL_LEN": "2048",
    },
    RetrieverSettings: {
        "RAGCACHE_LISTEN": "127.0.0.1:0",
        "RAGCACHE_DATA_DIR": "data",
        "RAGCACHE_MODEL": "model",
    },
}

WRONG: dict[type[ServiceSettings], dict[str, list[str]]] = {
    CacheStoreSettings: {
        "listen": ["7000", "host:", "host:port", "host:70000"],
        "health_listen": ["8081"],
        "memory_bytes": ["-1", "1Gi", "0"],
        "disk_bytes": ["0", "1.5"],
        "log_level": ["loud"],
        "policy": ["best"],
        "admission": ["never"],
        "precision": ["int9"],
        "reuse": ["sometimes"],
        "data_listen": ["7000"],
        "data_socket": ["relative.sock", "/" + "x" * 108],
        "cachestore": ["a"],
        "own_address": ["a"],
        "replication": ["maybe"],
        "otlp_endpoint": ["collector:4318"],
    },
    EngineSettings: {
        "load_always": ["never"],
        "host_tier_bytes": ["4G", "-1"],
        "device_pool_bytes": ["1.5Gi"],
        "tier_policy": ["lru"],
        "recompute_slice_tokens": ["0", "many"],
        "plain_prefixes": ["yes"],
        "layerwise": ["yes"],
        "lookup_deadline_s": ["soon", "inf", "0"],
        "load_deadline_s": ["0"],
        "hang_s": ["0", "-1", "soon", "inf"],
    },
    GatewaySettings: {
        "listen": ["8080", "host:99999"],
        "signing_key_file": ["keys", "/does/not/exist"],
        "store_key_file": ["store.key", "/does/not/exist"],
        "retriever": ["retriever:port"],
        "engines": [
            "http://engine:8000;records=",
            "engine:8000;records=8001",
            "http://engine;records=8001",
            "http://engine:port;records=8001",
            "http://engine:8000/v1;records=8001",
            "http://engine:8000;records=port",
            "http://engine:8000;records=0",
            "http://engine:8000;role=decode",
            "http://engine:8000;records=8001;role=one",
            "http://engine:8000;records=8001;color=red",
            "http://engine:8000;records",
        ],
        "cachestore": ["cachestore"],
        "stop_grace_s": ["long"],
        "model_dtype": ["int8"],
        "max_model_len": ["2k", "3"],
        "reuse": ["off", ""],
        "max_recompute_share": ["20%", "1.01", "-0.1", "nan"],
        "quality": ["95", "high", "nan"],
        "precompute": ["yes"],
        "otlp_endpoint": ["collector:4317"],
        "trace_sample_ratio": ["1.5"],
        "log_level": ["loud"],
    },
    RetrieverSettings: {
        "listen": ["", "8080", "host:port", "host:99999"],
        "health_listen": ["8081"],
        "data_dir": [""],
        "model": [" "],
        "embedder": [
            "minilm",
            "bundled:minilm",
            "path:models/e5",
            "hf:a/b/c",
            "hf:../b",
            "hf:a/b@main",
        ],
        "embedder_threads": ["0", "many"],
        "reranker": ["bundled"],
        "chunk_tokens": ["-1"],
        "log_level": ["loud"],
    },
}


def read(table: type[S], **changes: str) -> S:
    return read_settings(table, REQUIRED[table] | changes)


@pytest.mark.parametrize(
    ("table", "field"),
    [(table, name) for table, required in REQUIRED.items() for name in required],
)
def test_a_missing_variable_is_named(table: type[ServiceSettings], field: str) -> None:
    environment = {name: value for name, value in REQUIRED[table].items() if name != field}
    with pytest.raises(InvalidInput) as refused:
        read_settings(table, environment)
    assert (refused.value.field, refused.value.problem) == (field, "is not set")


@pytest.mark.parametrize(
    ("table", "field", "value"),
    [
        (table, field, value)
        for table, fields in WRONG.items()
        for field, values in fields.items()
        for value in values
    ],
)
def test_a_wrong_variable_is_named(table: type[ServiceSettings], field: str, value: str) -> None:
    own_address = {"RAGCACHE_OWN_ADDRESS": "a:1"} if table is CacheStoreSettings else {}
    environment = REQUIRED[table] | own_address | {variable(field): value}
    with pytest.raises(InvalidInput) as refused:
        read_settings(table, environment)
    assert refused.value.field == variable(field)


GRADES = PrecisionPolicy(
    Scheme.HARAG, (Precision(), Precision(Codec.INT8, Codec.GSE8)), shares=(0.25,)
)


def test_a_full_environment_of_the_cache_store() -> None:
    environment = {
        "RAGCACHE_LOG_LEVEL": "debug",
        "RAGCACHE_HEALTH_LISTEN": "0.0.0.0:8081",
        "RAGCACHE_POLICY": "lru",
        "RAGCACHE_ADMISSION": "second-touch",
        "RAGCACHE_PRECISION": str(GRADES),
        "RAGCACHE_REUSE": "blend",
        "RAGCACHE_DATA_LISTEN": "0.0.0.0:7001",
        "RAGCACHE_DATA_SOCKET": "/run/transport.sock",
        "RAGCACHE_CACHESTORE": "a:1,b:2",
        "RAGCACHE_OWN_ADDRESS": "a:1",
        "RAGCACHE_REPLICATION": "off",
        "RAGCACHE_OTLP_ENDPOINT": "http://collector:4318",
    }
    config = read(CacheStoreSettings, **environment)
    assert config.cachestore is not None
    assert config.cachestore.current() == ("a:1", "b:2")
    assert config.replace(cachestore=None) == CacheStoreSettings(
        listen="127.0.0.1:7000",
        health_listen="0.0.0.0:8081",
        data_dir=Path("data"),
        memory_bytes=65536,
        disk_bytes=1_000_000,
        log_level="debug",
        policy="lru",
        admission="second-touch",
        precision=GRADES,
        reuse="blend",
        data_listen="0.0.0.0:7001",
        data_socket=Path("/run/transport.sock"),
        own_address="a:1",
        replication=False,
        otlp_endpoint="http://collector:4318",
    )


def test_what_the_cache_store_is_not_told_has_a_default() -> None:
    assert read(CacheStoreSettings) == CacheStoreSettings(
        listen="127.0.0.1:7000",
        health_listen=None,
        data_dir=Path("data"),
        memory_bytes=65536,
        disk_bytes=1_000_000,
    )


@pytest.mark.parametrize(
    "text",
    [
        "int8",
        "[]",
        '{"grades": []}',
        '{"grades": ["int9"]}',
        '{"grades": ["native", "int8"]}',
        '{"grades": ["native", "int8"], "shares": [1.0]}',
        '{"scheme": "rank"}',
        '{"max_error": 0}',
        '{"grade": []}',
        '{"grades": "int8"}',
    ],
)
def test_a_wrong_policy_of_precision_is_refused(text: str) -> None:
    with pytest.raises(InvalidInput) as refused:
        read(CacheStoreSettings, **{"RAGCACHE_PRECISION": text})
    assert refused.value.field == "RAGCACHE_PRECISION"


def test_a_shard_must_know_its_own_name() -> None:
    with pytest.raises(InvalidInput) as refused:
        read(CacheStoreSettings, **{"RAGCACHE_CACHESTORE": "a:1"})
    assert refused.value.field == "RAGCACHE_OWN_ADDRESS"


def test_admission_by_score_needs_the_score() -> None:
    wrong = {"RAGCACHE_ADMISSION": "score", "RAGCACHE_POLICY": "lru"}
    with pytest.raises(InvalidInput) as refused:
        read(CacheStoreSettings, **wrong)
    assert refused.value.field == "RAGCACHE_ADMISSION"


@pytest.mark.parametrize(
    ("about", "admission"),
    [
        ({}, "always"),
        ({"RAGCACHE_REUSE": "exact"}, "always"),
        ({"RAGCACHE_REUSE": "blend"}, "score"),
        ({"RAGCACHE_REUSE": "blend", "RAGCACHE_POLICY": "lru"}, "always"),
        ({"RAGCACHE_REUSE": "blend", "RAGCACHE_ADMISSION": "always"}, "always"),
    ],
)
def test_admission_is_the_one_that_did_best(about: dict[str, str], admission: str) -> None:
    assert read(CacheStoreSettings, **about).admission == admission


@pytest.mark.parametrize("name", ADMISSION_NAMES)
def test_every_admission_of_core_is_a_choice(name: str) -> None:
    environment = {"RAGCACHE_ADMISSION": name}
    assert read(CacheStoreSettings, **environment).admission == name


def test_defaults_of_the_engine() -> None:
    settings = read(EngineSettings)
    assert settings.cachestore.current() == ("host:1",)
    assert not settings.load_always
    assert settings.plain_prefixes
    assert not settings.layerwise
    assert (settings.host_tier_bytes, settings.device_pool_bytes) == (0, 0)
    assert settings.signing_key_file is None


def test_settings_of_the_engine_are_read() -> None:
    settings = read(
        EngineSettings,
        RAGCACHE_LOAD_ALWAYS="on",
        RAGCACHE_RECOMPUTE_SLICE_TOKENS="64",
        RAGCACHE_PLAIN_PREFIXES="off",
        RAGCACHE_LOOKUP_DEADLINE_S="2",
        RAGCACHE_LOAD_DEADLINE_S="0.75",
        RAGCACHE_LAYERWISE="on",
        RAGCACHE_HOST_TIER_BYTES="4Gi",
        RAGCACHE_DEVICE_POOL_BYTES="1000",
        RAGCACHE_TIER_POLICY="thresholds",
        RAGCACHE_HANG_S="300",
    )
    assert settings.load_always
    assert settings.recompute_slice_tokens == 64
    assert not settings.plain_prefixes
    assert settings.lookup_deadline_s == 2.0
    assert settings.load_deadline_s == 0.75
    assert settings.layerwise
    assert (settings.host_tier_bytes, settings.device_pool_bytes) == (4 << 30, 1000)
    assert settings.tier_policy == "thresholds"
    assert settings.hang_s == 300


@pytest.mark.parametrize("name", TIER_POLICIES)
def test_every_tier_policy_of_core_is_a_choice(name: str) -> None:
    assert read(EngineSettings, RAGCACHE_TIER_POLICY=name).tier_policy == name


def test_settings_of_the_gateway_come_from_the_environment() -> None:
    settings = read(GatewaySettings)
    assert split_address(settings.listen) == ("::1", 8080)
    assert settings.engines == (
        EngineAddress("engine", 8000, 8001),
        EngineAddress("other", 8000, 8001),
    )
    without_ragcache = read(
        GatewaySettings, RAGCACHE_ENGINES="http://vllm:8000, http://[::1]:8000;records=8001"
    )
    assert without_ragcache.engines == (
        EngineAddress("vllm", 8000),
        EngineAddress("::1", 8000, 8001),
    )
    texts = ",".join(map(str, without_ragcache.engines))
    assert read(GatewaySettings, RAGCACHE_ENGINES=texts).engines == without_ragcache.engines
    assert settings.cachestore.current() == ("cachestore:7002",)
    assert settings.stop_grace_s == 10
    assert read(GatewaySettings, RAGCACHE_STOP_GRACE_S="300").stop_grace_s == 300
    assert (settings.model_dtype, settings.max_model_len) == ("auto", 2048)
    assert (settings.reuse, settings.max_recompute_share) == ("exact", 0.2)
    blending = read(GatewaySettings, RAGCACHE_REUSE="blend", RAGCACHE_MAX_RECOMPUTE_SHARE=" 1 ")
    assert (blending.reuse, blending.max_recompute_share) == ("blend", 1.0)
    assert (settings.quality, read(GatewaySettings, RAGCACHE_QUALITY="0.95").quality) == (
        None,
        0.95,
    )
    assert not settings.precompute
    assert read(GatewaySettings, RAGCACHE_PRECOMPUTE="on").precompute


@pytest.mark.parametrize(
    "address",
    [
        EngineAddress("engine", 8000, 8001),
        EngineAddress("::1", 1, 2),
        EngineAddress("e", 1, 2, role="prefill"),
        EngineAddress("llm.example.com", 443, None, True, Path("/keys/one"), "org/model=8b"),
        EngineAddress("engine", 8000, 8001, model=2),
    ],
)
def test_an_engine_is_read_as_it_is_written(address: EngineAddress) -> None:
    assert read(GatewaySettings, RAGCACHE_ENGINES=f"{address},{address}").engines == (
        address,
        address,
    )


def test_https_has_a_port_unless_another_one_is_given() -> None:
    engines = "https://llm.example.com, https://llm.example.com:8443;key=/keys/one"
    assert read(GatewaySettings, RAGCACHE_ENGINES=engines).engines == (
        EngineAddress("llm.example.com", 443, is_tls=True),
        EngineAddress("llm.example.com", 8443, is_tls=True, key_file=Path("/keys/one")),
    )


@pytest.mark.parametrize(
    "engine", ["http://a", "http://a:1;", "http://a:1;key=", "http://a:1;x=1", "https://a/v1"]
)
def test_an_engine_with_an_unknown_part_is_refused(engine: str) -> None:
    with pytest.raises(InvalidInput, match="RAGCACHE_ENGINES"):
        read(GatewaySettings, RAGCACHE_ENGINES=engine)


def test_further_models_follow_the_first_one() -> None:
    others = (ModelSettings("b, c", "org/b", "auto", 512), ModelSettings("d", "/d", "float16", 64))
    settings = read(GatewaySettings, RAGCACHE_OTHER_MODELS=models_text(others))
    assert settings.models == (
        ModelSettings(settings.model_name, settings.model, "auto", 2048),
        *others,
    )
    assert len(read(GatewaySettings).models) == 1


@pytest.mark.parametrize(
    "models",
    ["b", "{}", '[{"name": "b"}]', '[{"name":"b","source":"c","dtype":"int8","max_length":64}]'],
)
def test_models_without_all_fields_are_refused(models: str) -> None:
    with pytest.raises(InvalidInput, match="RAGCACHE_OTHER_MODELS"):
        read(GatewaySettings, RAGCACHE_OTHER_MODELS=models)


def test_a_file_of_signing_keys_is_read(tmp_path: Path) -> None:
    assert read(GatewaySettings).signing_key_file is None
    assert read(GatewaySettings, RAGCACHE_SIGNING_KEY_FILE=" ").signing_key_file is None
    path = tmp_path / "keys"
    path.write_text("ab" * 32 + "\n")
    keys = read(GatewaySettings, RAGCACHE_SIGNING_KEY_FILE=str(path)).signing_key_file
    assert keys is not None
    assert keys.current() == (bytes.fromhex("ab" * 32),)


def test_a_store_key_is_one_key(tmp_path: Path) -> None:
    assert read(GatewaySettings).store_key_file is None
    path = tmp_path / "store.key"
    path.write_text("ab" * 32 + "\n")
    expected = StoreKey.of_secret(bytes.fromhex("ab" * 32))
    assert read(GatewaySettings, RAGCACHE_STORE_KEY_FILE=str(path)).store_key_file == expected
    assert read(EngineSettings, RAGCACHE_STORE_KEY_FILE=str(path)).store_key_file == expected
    path.write_text("ab" * 32 + "\n" + "cd" * 32 + "\n")
    with pytest.raises(InvalidInput, match="RAGCACHE_STORE_KEY_FILE: holds 2 keys"):
        read(GatewaySettings, RAGCACHE_STORE_KEY_FILE=str(path))


def test_an_error_says_what_to_set() -> None:
    with pytest.raises(InvalidInput) as refused:
        read(GatewaySettings, RAGCACHE_REUSE="off")
    assert str(refused.value) == "RAGCACHE_REUSE: is 'off'; set it to exact or blend"


def test_defaults_of_the_retriever() -> None:
    settings = read(RetrieverSettings)
    assert settings.listen == "127.0.0.1:0"
    assert settings.data_dir == Path("data")
    assert settings.model == "model"
    assert (settings.embedder, settings.embedder_threads) == (BUNDLED_EMBEDDER, None)
    assert settings.embeds_itself
    assert settings.reranker == "none"
    chunking = settings.chunk_tokens, settings.chunk_overlap_tokens, settings.window_chunks
    assert chunking == (256, 32, 1)
    assert settings.log_level == "info"
    assert settings.health_listen is None
    assert settings.otlp_endpoint is None


def test_an_endpoint() -> None:
    settings = read(
        RetrieverSettings,
        RAGCACHE_EMBEDDER="http://host/v1/",
        RAGCACHE_EMBEDDER_MODEL="m",
        RAGCACHE_EMBEDDER_API_KEY="secret",
    )
    endpoint = settings.embedder, settings.embedder_model, settings.embedder_api_key
    assert endpoint == ("http://host/v1", "m", "secret")
    assert not settings.embeds_itself
    assert "secret" not in repr(settings)


@pytest.mark.parametrize(
    "source", ["path:/models/e5", "hf:intfloat/e5-small-v2", "hf:e5", f"hf:a/b@{40 * '0'}"]
)
def test_a_model_of_a_folder_or_of_the_hub_needs_no_name(source: str) -> None:
    settings = read(RetrieverSettings, RAGCACHE_EMBEDDER=source)
    assert settings.embedder == source
    assert settings.embeds_itself


def test_an_endpoint_needs_a_model() -> None:
    with pytest.raises(InvalidInput) as caught:
        read(RetrieverSettings, RAGCACHE_EMBEDDER="https://host/v1")
    assert caught.value.field == "RAGCACHE_EMBEDDER_MODEL"


@pytest.mark.parametrize("source", ["cross-encoder", "https://host/v1"])
def test_a_reranker_needs_a_model(source: str) -> None:
    with pytest.raises(InvalidInput) as caught:
        read(RetrieverSettings, RAGCACHE_RERANKER=source)
    assert caught.value.field == "RAGCACHE_RERANKER_MODEL"
    settings = read(RetrieverSettings, RAGCACHE_RERANKER=source, RAGCACHE_RERANKER_MODEL="m")
    assert (settings.reranker, settings.reranker_model) == (source, "m")


def test_an_encrypted_engine_of_the_platform_needs_a_certificate(tmp_path: Path) -> None:
    engines = "https://engine:8000;records=8001"
    with pytest.raises(InvalidInput, match=r"^RAGCACHE_TLS_DIR: is not set"):
        read(GatewaySettings, RAGCACHE_ENGINES=engines)
    folder = write(tmp_path / "tls", issue())
    settings = read(GatewaySettings, RAGCACHE_ENGINES=engines, RAGCACHE_TLS_DIR=str(folder))
    [engine] = settings.engines
    assert engine.is_tls
    assert str(engine) == engines
    assert settings.credentials.certificates is not None
    assert settings.credentials.certificates.current().name == NAME


@pytest.mark.parametrize("missing", ["tls.crt", "tls.key", "ca.crt"])
def test_a_folder_without_a_file_of_the_certificate_is_named(tmp_path: Path, missing: str) -> None:
    folder = write(tmp_path / "tls", issue())
    (folder / missing).unlink()
    with pytest.raises(InvalidInput, match=rf"^RAGCACHE_TLS_DIR: .*{missing}"):
        read(GatewaySettings, RAGCACHE_TLS_DIR=str(folder))
