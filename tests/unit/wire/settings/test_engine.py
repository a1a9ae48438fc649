"""The connector's settings come from the environment; an error names the variable."""

from __future__ import annotations

import pytest

from ragcache_core.errors import InvalidInput
from ragcache_core.tiering.tier_placement import TIER_POLICIES
from ragcache_wire.settings.engine import EngineSettings
from tests.kit.settings import read_settings


def read(**changes: str) -> EngineSettings:
    return read_settings(EngineSettings, {"RAGCACHE_CACHESTORE": "host:1"} | changes)


def test_the_cache_store_is_required() -> None:
    with pytest.raises(InvalidInput) as refused:
        read_settings(EngineSettings, {})
    assert refused.value.field == "RAGCACHE_CACHESTORE"


def test_defaults() -> None:
    settings = read()
    assert settings.cachestore.current() == ("host:1",)
    assert not settings.load_always
    assert settings.plain_prefixes
    assert not settings.layerwise
    assert (settings.host_tier_bytes, settings.device_pool_bytes) == (0, 0)
    assert settings.signing_key_file is None


def test_settings_are_read() -> None:
    settings = read(
        RAGCACHE_LOAD_ALWAYS="on",
        RAGCACHE_RECOMPUTE_SLICE_TOKENS="64",
        RAGCACHE_PLAIN_PREFIXES="off",
        RAGCACHE_HANDOFF_WAIT_S="1.5",
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
    assert (settings.handoff_wait_s, settings.lookup_deadline_s) == (1.5, 2.0)
    assert settings.load_deadline_s == 0.75
    assert settings.layerwise
    assert (settings.host_tier_bytes, settings.device_pool_bytes) == (4 << 30, 1000)
    assert settings.tier_policy == "thresholds"
    assert settings.hang_s == 300


@pytest.mark.parametrize("name", TIER_POLICIES)
def test_every_tier_policy_of_core_is_a_choice(name: str) -> None:
    assert read(RAGCACHE_TIER_POLICY=name).tier_policy == name


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("RAGCACHE_LOAD_ALWAYS", "never"),
        ("RAGCACHE_HOST_TIER_BYTES", "4G"),
        ("RAGCACHE_HOST_TIER_BYTES", "-1"),
        ("RAGCACHE_DEVICE_POOL_BYTES", "1.5Gi"),
        ("RAGCACHE_TIER_POLICY", "lru"),
        ("RAGCACHE_RECOMPUTE_SLICE_TOKENS", "0"),
        ("RAGCACHE_RECOMPUTE_SLICE_TOKENS", "many"),
        ("RAGCACHE_PLAIN_PREFIXES", "yes"),
        ("RAGCACHE_LAYERWISE", "yes"),
        ("RAGCACHE_HANDOFF_WAIT_S", "long"),
        ("RAGCACHE_HANDOFF_WAIT_S", "nan"),
        ("RAGCACHE_HANDOFF_WAIT_S", "-1"),
        ("RAGCACHE_LOOKUP_DEADLINE_S", "soon"),
        ("RAGCACHE_LOOKUP_DEADLINE_S", "inf"),
        ("RAGCACHE_LOOKUP_DEADLINE_S", "0"),
        ("RAGCACHE_LOAD_DEADLINE_S", "0"),
        ("RAGCACHE_HANG_S", "0"),
        ("RAGCACHE_HANG_S", "-1"),
        ("RAGCACHE_HANG_S", "soon"),
        ("RAGCACHE_HANG_S", "inf"),
    ],
)
def test_a_wrong_setting_is_named(name: str, value: str) -> None:
    with pytest.raises(InvalidInput) as refused:
        read(**{name: value})
    assert refused.value.field == name
