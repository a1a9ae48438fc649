"""The gateway's settings come from the environment; an error names the variable."""

from __future__ import annotations

from pathlib import Path

import pytest

from ragcache_core.errors import InvalidInput
from ragcache_wire.settings.field_types import split_address
from ragcache_wire.settings.gateway import EngineAddress, GatewaySettings
from tests.kit.settings import read_settings

REQUIRED = {
    "RAGCACHE_LISTEN": "[::1]:8080",
    "RAGCACHE_RETRIEVER": "retriever:7001",
    "RAGCACHE_ENGINES": "http://engine:8000/;records=8001, http://other:8000;records=8001",
    "RAGCACHE_CACHESTORE": "cachestore:7002",
    "RAGCACHE_MODEL": "/models/tiny",
    "RAGCACHE_MODEL_NAME": "tiny",
    "RAGCACHE_MAX_MODEL_LEN": "2048",
}


def read(**changes: str) -> GatewaySettings:
    return read_settings(GatewaySettings, REQUIRED | changes)


def test_settings_come_from_the_environment() -> None:
    settings = read()
    assert split_address(settings.listen) == ("::1", 8080)
    assert settings.engines == (
        EngineAddress("engine", 8000, 8001),
        EngineAddress("other", 8000, 8001),
    )
    without_ragcache = read(RAGCACHE_ENGINES="http://vllm:8000, http://[::1]:8000;records=8001")
    assert without_ragcache.engines == (
        EngineAddress("vllm", 8000),
        EngineAddress("::1", 8000, 8001),
    )
    texts = ",".join(map(str, without_ragcache.engines))
    assert read(RAGCACHE_ENGINES=texts).engines == without_ragcache.engines
    assert settings.cachestore.current() == ("cachestore:7002",)
    assert settings.stop_grace_s == 10
    assert read(RAGCACHE_STOP_GRACE_S="300").stop_grace_s == 300
    assert (settings.model_dtype, settings.max_model_len) == ("auto", 2048)
    assert (settings.reuse, settings.max_recompute_share) == ("exact", 0.2)
    blending = read(RAGCACHE_REUSE="blend", RAGCACHE_MAX_RECOMPUTE_SHARE=" 1 ")
    assert (blending.reuse, blending.max_recompute_share) == ("blend", 1.0)
    assert (settings.quality, read(RAGCACHE_QUALITY="0.95").quality) == (None, 0.95)
    assert not settings.precompute
    assert read(RAGCACHE_PRECOMPUTE="on").precompute


@pytest.mark.parametrize(
    "address", [EngineAddress("engine", 8000, 8001), EngineAddress("::1", 1, 2)]
)
def test_an_engine_is_read_as_it_is_written(address: EngineAddress) -> None:
    assert read(RAGCACHE_ENGINES=f"{address},{address}").engines == (address, address)


def test_a_file_of_signing_keys_is_read(tmp_path: Path) -> None:
    assert read().signing_key_file is None
    assert read(RAGCACHE_SIGNING_KEY_FILE=" ").signing_key_file is None
    path = tmp_path / "keys"
    path.write_text("ab" * 32 + "\n")
    keys = read(RAGCACHE_SIGNING_KEY_FILE=str(path)).signing_key_file
    assert keys is not None
    assert keys.current() == (bytes.fromhex("ab" * 32),)


@pytest.mark.parametrize("name", sorted(REQUIRED))
def test_a_missing_variable_is_named(name: str) -> None:
    environment = {key: value for key, value in REQUIRED.items() if key != name}
    with pytest.raises(InvalidInput) as refused:
        read_settings(GatewaySettings, environment)
    assert (refused.value.field, refused.value.problem) == (name, "is not set")


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("RAGCACHE_LISTEN", "8080"),
        ("RAGCACHE_LISTEN", "host:99999"),
        ("RAGCACHE_SIGNING_KEY_FILE", "keys"),
        ("RAGCACHE_SIGNING_KEY_FILE", "/does/not/exist"),
        ("RAGCACHE_RETRIEVER", "retriever:port"),
        ("RAGCACHE_ENGINES", "http://engine:8000;records="),
        ("RAGCACHE_ENGINES", "engine:8000;records=8001"),
        ("RAGCACHE_ENGINES", "https://engine:8000;records=8001"),
        ("RAGCACHE_ENGINES", "http://engine;records=8001"),
        ("RAGCACHE_ENGINES", "http://engine:port;records=8001"),
        ("RAGCACHE_ENGINES", "http://engine:8000/v1;records=8001"),
        ("RAGCACHE_ENGINES", "http://engine:8000;records=port"),
        ("RAGCACHE_ENGINES", "http://engine:8000;records=0"),
        ("RAGCACHE_CACHESTORE", "cachestore"),
        ("RAGCACHE_STOP_GRACE_S", "long"),
        ("RAGCACHE_MODEL_DTYPE", "int8"),
        ("RAGCACHE_MAX_MODEL_LEN", "2k"),
        ("RAGCACHE_MAX_MODEL_LEN", "3"),
        ("RAGCACHE_REUSE", "off"),
        ("RAGCACHE_REUSE", ""),
        ("RAGCACHE_MAX_RECOMPUTE_SHARE", "20%"),
        ("RAGCACHE_MAX_RECOMPUTE_SHARE", "1.01"),
        ("RAGCACHE_MAX_RECOMPUTE_SHARE", "-0.1"),
        ("RAGCACHE_MAX_RECOMPUTE_SHARE", "nan"),
        ("RAGCACHE_QUALITY", "95"),
        ("RAGCACHE_QUALITY", "high"),
        ("RAGCACHE_QUALITY", "nan"),
        ("RAGCACHE_PRECOMPUTE", "yes"),
        ("RAGCACHE_OTLP_ENDPOINT", "collector:4317"),
        ("RAGCACHE_TRACE_SAMPLE_RATIO", "1.5"),
        ("RAGCACHE_LOG_LEVEL", "loud"),
    ],
)
def test_a_bad_variable_is_named(name: str, value: str) -> None:
    with pytest.raises(InvalidInput) as refused:
        read(**{name: value})
    assert refused.value.field == name


def test_an_error_says_what_to_set() -> None:
    with pytest.raises(InvalidInput) as refused:
        read(RAGCACHE_REUSE="off")
    assert str(refused.value) == "RAGCACHE_REUSE: is 'off'; set it to exact or blend"
