"""The environment is read once; a bad value names its variable."""

from __future__ import annotations

from pathlib import Path

import pytest

from ragcache_core.errors import InvalidInput
from ragcache_core.eviction import POLICY_NAMES
from ragcache_core.eviction.admission import ADMISSION_NAMES
from ragcache_core.identity.variant import Codec, Precision
from ragcache_wire.settings.cachestore import CacheStoreSettings
from tests.kit.settings import read_settings

REQUIRED = {
    "RAGCACHE_LISTEN": "127.0.0.1:7000",
    "RAGCACHE_DATA_DIR": "data",
    "RAGCACHE_MEMORY_BYTES": "65536",
    "RAGCACHE_DISK_BYTES": "1000000",
}


def test_a_full_environment() -> None:
    environment = REQUIRED | {
        "RAGCACHE_LOG_LEVEL": "debug",
        "RAGCACHE_HEALTH_LISTEN": "0.0.0.0:8081",
        "RAGCACHE_POLICY": "lru",
        "RAGCACHE_ADMISSION": "second-touch",
        "RAGCACHE_PRECISION": "int8/int4",
        "RAGCACHE_REUSE": "blend",
        "RAGCACHE_DATA_LISTEN": "0.0.0.0:7001",
        "RAGCACHE_DATA_SOCKET": "/run/transport.sock",
        "RAGCACHE_CACHESTORE": "a:1,b:2",
        "RAGCACHE_OWN_ADDRESS": "a:1",
        "RAGCACHE_REPLICATION": "off",
        "RAGCACHE_OTLP_ENDPOINT": "http://collector:4318",
    }
    config = read_settings(CacheStoreSettings, environment)
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
        precision=Precision(Codec.INT8, Codec.INT4),
        reuse="blend",
        data_listen="0.0.0.0:7001",
        data_socket=Path("/run/transport.sock"),
        own_address="a:1",
        replication=False,
        otlp_endpoint="http://collector:4318",
    )


def test_what_is_left_out_has_a_default() -> None:
    assert read_settings(CacheStoreSettings, REQUIRED) == CacheStoreSettings(
        listen="127.0.0.1:7000",
        health_listen=None,
        data_dir=Path("data"),
        memory_bytes=65536,
        disk_bytes=1_000_000,
    )


@pytest.mark.parametrize("name", ["harag", "score"])
def test_an_assignment_may_decide_on_the_precision(name: str) -> None:
    assert (
        read_settings(CacheStoreSettings, REQUIRED | {"RAGCACHE_PRECISION": name}).precision == name
    )


def test_a_shard_must_know_its_own_name() -> None:
    with pytest.raises(InvalidInput) as refused:
        read_settings(CacheStoreSettings, REQUIRED | {"RAGCACHE_CACHESTORE": "a:1"})
    assert refused.value.field == "RAGCACHE_OWN_ADDRESS"


def test_admission_by_score_needs_the_score() -> None:
    wrong = {"RAGCACHE_ADMISSION": "score", "RAGCACHE_POLICY": "lru"}
    with pytest.raises(InvalidInput) as refused:
        read_settings(CacheStoreSettings, REQUIRED | wrong)
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
    assert read_settings(CacheStoreSettings, REQUIRED | about).admission == admission


@pytest.mark.parametrize("name", REQUIRED)
def test_a_missing_variable_is_named(name: str) -> None:
    with pytest.raises(InvalidInput) as refused:
        read_settings(CacheStoreSettings, {n: v for n, v in REQUIRED.items() if n != name})
    assert refused.value.field == name


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("RAGCACHE_LISTEN", "7000"),
        ("RAGCACHE_LISTEN", "host:"),
        ("RAGCACHE_LISTEN", "host:port"),
        ("RAGCACHE_LISTEN", "host:70000"),
        ("RAGCACHE_HEALTH_LISTEN", "8081"),
        ("RAGCACHE_MEMORY_BYTES", "-1"),
        ("RAGCACHE_MEMORY_BYTES", "1Gi"),
        ("RAGCACHE_DISK_BYTES", "0"),
        ("RAGCACHE_DISK_BYTES", "1.5"),
        ("RAGCACHE_LOG_LEVEL", "loud"),
        ("RAGCACHE_MEMORY_BYTES", "0"),
        ("RAGCACHE_POLICY", "best"),
        ("RAGCACHE_ADMISSION", "never"),
        ("RAGCACHE_PRECISION", "int9"),
        ("RAGCACHE_REUSE", "sometimes"),
        ("RAGCACHE_DATA_LISTEN", "7000"),
        ("RAGCACHE_DATA_SOCKET", "relative.sock"),
        ("RAGCACHE_DATA_SOCKET", "/" + "x" * 108),
        ("RAGCACHE_CACHESTORE", "a"),
        ("RAGCACHE_OWN_ADDRESS", "a"),
        ("RAGCACHE_REPLICATION", "maybe"),
        ("RAGCACHE_OTLP_ENDPOINT", "collector:4318"),
    ],
)
def test_a_wrong_variable_is_named(name: str, value: str) -> None:
    with pytest.raises(InvalidInput) as refused:
        read_settings(
            CacheStoreSettings, REQUIRED | {"RAGCACHE_OWN_ADDRESS": "a:1"} | {name: value}
        )
    assert refused.value.field == name


@pytest.mark.parametrize("name", POLICY_NAMES)
def test_every_policy_of_core_is_a_choice(name: str) -> None:
    environment = REQUIRED | {"RAGCACHE_POLICY": name, "RAGCACHE_ADMISSION": "always"}
    assert read_settings(CacheStoreSettings, environment).policy == name


@pytest.mark.parametrize("name", ADMISSION_NAMES)
def test_every_admission_of_core_is_a_choice(name: str) -> None:
    environment = REQUIRED | {"RAGCACHE_ADMISSION": name}
    assert read_settings(CacheStoreSettings, environment).admission == name
