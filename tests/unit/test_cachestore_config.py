"""The environment is read once; a bad value names its variable."""

from __future__ import annotations

from pathlib import Path

import pytest

from ragcache_cachestore.config import Config
from ragcache_core.errors import InvalidInput

REQUIRED = {
    "RAGCACHE_LISTEN": "127.0.0.1:7000",
    "RAGCACHE_DATA_DIR": "data",
    "RAGCACHE_MEMORY_BYTES": "0",
    "RAGCACHE_DISK_BYTES": "1000",
}


def test_a_full_environment() -> None:
    environment = REQUIRED | {
        "RAGCACHE_LOG_LEVEL": "debug",
        "RAGCACHE_HEALTH_LISTEN": "0.0.0.0:8081",
    }
    assert Config.from_environment(environment) == Config(
        listen="127.0.0.1:7000",
        health_listen="0.0.0.0:8081",
        data_dir=Path("data"),
        memory_bytes=0,
        disk_bytes=1000,
        log_level="debug",
    )


@pytest.mark.parametrize("name", REQUIRED)
def test_a_missing_variable_is_named(name: str) -> None:
    with pytest.raises(InvalidInput) as refused:
        Config.from_environment({n: v for n, v in REQUIRED.items() if n != name})
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
    ],
)
def test_a_wrong_variable_is_named(name: str, value: str) -> None:
    with pytest.raises(InvalidInput) as refused:
        Config.from_environment(REQUIRED | {name: value})
    assert refused.value.field == name
