"""Environments of containers follow the settings tables."""

from __future__ import annotations

from typing import Any

import pytest

from ragcache_operator.builders.environment import (
    FromSecret,
    settings_environment,
    spec_value,
)
from ragcache_operator.spec.values import SecretKey
from ragcache_wire.settings import (
    TABLES,
    CacheStoreSettings,
    EngineSettings,
    GatewaySettings,
    RetrieverSettings,
    unmapped_settings,
)
from ragcache_wire.settings.table import ServiceSettings, rows, setting
from tests.kit.operator import build, container_of, make_cache

EVERYTHING: dict[str, Any] = {
    "model": {"name": "m"},
    "gateway": {
        "audit": {"claim": "audit", "maxSize": "2Gi"},
        "allowedOrigins": ["*"],
        "maxDisplacement": 3,
        "slo": {"firstTokenMilliseconds": 2000, "nextTokenMilliseconds": 100},
    },
    "retriever": {
        "embedder": {"source": "http://host/v1", "model": "e", "keySecret": {"name": "keys"}},
        "index": {"recall": 0.95},
        "reranker": {"source": "http://host/v1", "model": "r", "keySecret": {"name": "keys"}},
    },
    "engines": [{"hostTier": "1Gi"}],
    "cacheStore": {"admission": "always"},
    "reuse": {"mode": "blend", "quality": 0.9},
    "telemetry": {"otlp": {"endpoint": "http://collector:4318"}},
}
"""A spec that sets every optional field that a setting is mapped to."""

LIMITS = "spec.gateway.limits."
"""Fields that the gateway reads from a file."""

CONTAINERS = {"engine": "engine-main"}


def variables_of(table: type[ServiceSettings]) -> set[str]:
    container = container_of(build(**EVERYTHING), CONTAINERS.get(table.service, table.service))
    return {variable["name"] for variable in container["env"]}


def test_every_setting_is_mapped_to_a_field_or_internal() -> None:
    assert unmapped_settings() == []


@pytest.mark.parametrize("table", TABLES)
def test_every_mapped_field_exists(table: type[ServiceSettings]) -> None:
    cache = make_cache(**EVERYTHING)
    for row in rows(table):
        if row.spec is not None:
            path = row.spec.removesuffix("[]")
            assert spec_value(path, cache, cache.spec.engines[0]) is not None, row.spec


@pytest.mark.parametrize("table", TABLES)
def test_a_builder_sets_every_mapped_setting(table: type[ServiceSettings]) -> None:
    mapped = {row.variable for row in rows(table) if row.spec is not None}
    in_file = {row.variable for row in rows(table) if (row.spec or "").startswith(LIMITS)}
    assert mapped - in_file <= variables_of(table)
    assert not in_file & variables_of(table), "a change of a limit would restart the gateway"


@pytest.mark.parametrize("table", TABLES)
def test_a_builder_sets_every_required_setting_and_no_unknown_one(
    table: type[ServiceSettings],
) -> None:
    known = {row.variable for row in rows(table)}
    given = {name for name in variables_of(table) if name.startswith("RAGCACHE_")}
    assert {row.variable for row in rows(table) if row.default is None} <= given
    assert given <= known


@pytest.mark.parametrize("table", TABLES)
def test_every_row_is_described(table: type[ServiceSettings]) -> None:
    for row in rows(table):
        assert row.description, row.variable
        assert row.accepts, row.variable


def test_values_are_written_as_the_services_read_them() -> None:
    cache = make_cache(cacheStore={"memory": "2Gi", "replication": {"enabled": False}})
    environment = settings_environment(
        CacheStoreSettings, cache, disk_bytes="1", admission="always", precision="native"
    )
    assert environment["RAGCACHE_MEMORY_BYTES"] == str(2 << 30)
    assert environment["RAGCACHE_REPLICATION"] == "off"
    assert "RAGCACHE_OTLP_ENDPOINT" not in environment
    assert "RAGCACHE_LISTEN" not in environment


def test_a_secret_becomes_a_reference() -> None:
    environment = settings_environment(RetrieverSettings, make_cache(**EVERYTHING))
    assert environment["RAGCACHE_EMBEDDER_API_KEY"] == FromSecret.of(
        SecretKey(name="keys", key="key")
    )


def test_a_given_value_replaces_the_field_and_none_leaves_it_out() -> None:
    cache = make_cache(engines=[{"hostTier": "1Gi"}])
    engine = cache.spec.engines[0]
    name = "RAGCACHE_HOST_TIER_BYTES"
    assert settings_environment(EngineSettings, cache, engine)[name] == str(1 << 30)
    given = settings_environment(EngineSettings, cache, engine, host_tier_bytes="7")
    assert given[name] == "7"
    assert name not in settings_environment(EngineSettings, cache, engine, host_tier_bytes=None)


def test_a_name_that_is_not_in_the_table_is_an_error() -> None:
    with pytest.raises(ValueError, match="GatewaySettings has no setting listenn"):
        settings_environment(GatewaySettings, make_cache(), listenn="x")


def test_a_field_that_the_operator_cannot_write_is_an_error() -> None:
    class Unwritable(ServiceSettings):
        precision: str = setting("", spec="spec.cacheStore.precision")

    with pytest.raises(TypeError, match="precision: a builder has to give"):
        settings_environment(Unwritable, make_cache())
