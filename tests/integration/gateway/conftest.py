"""Fixtures of the gateway's tests. A module may have a gateway of its own."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from pathlib import Path

import pytest

from harness.browser import Page, console_page, screenshots_folder
from ragcache_gateway.documents import removal_feed, writer
from ragcache_gateway.engines import client, completion_stream, engine_load, liveness
from ragcache_gateway.planning import source_follower
from ragcache_kv.store_client.async_sharded import AsyncStoreClient
from ragcache_wire.clients import engine_client, retriever_client
from tests.kit.gateway import World, world
from tests.kit.limits import LIMIT_S, lengthen_limits


@pytest.fixture(autouse=True)
def long_limits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lengthen the limits of a gateway in this process, so that a busy machine reaches none.

    A test about one of them shortens it.
    """
    monkeypatch.setattr(writer, "CATCH_UP_WAIT_S", LIMIT_S)
    monkeypatch.setattr(removal_feed, "START_WAIT_S", LIMIT_S)
    monkeypatch.setattr(liveness, "CHECK_TIMEOUT_S", LIMIT_S)
    monkeypatch.setattr(liveness, "SILENCE_S", LIMIT_S)
    monkeypatch.setattr(client, "_WRITE_TIMEOUT_S", LIMIT_S)
    monkeypatch.setattr(completion_stream, "_REST_TIMEOUT_S", LIMIT_S)
    monkeypatch.setattr(engine_load, "_FIRST_REFRESH_S", LIMIT_S)
    monkeypatch.setattr(source_follower, "MAX_SILENCE_S", LIMIT_S)
    monkeypatch.setattr(source_follower, "IDLE_TIMEOUT_S", LIMIT_S)
    monkeypatch.setattr(engine_client, "HEALTH_TIMEOUT_S", LIMIT_S)
    monkeypatch.setattr(retriever_client, "QUERY_TIMEOUT_S", LIMIT_S)
    monkeypatch.setattr(engine_client, "RECORD_TIMEOUT_S", LIMIT_S)
    lengthen_limits(monkeypatch, engine_client.EngineClient, AsyncStoreClient)


@pytest.fixture
async def gateway(tiny_model: Path) -> AsyncGenerator[World, None]:
    async with world(tiny_model) as running:
        yield running


@pytest.fixture
async def page(gateway: World, tmp_path: Path) -> AsyncGenerator[Page, None]:
    """The console of the module's gateway in a browser."""
    async with console_page(gateway.base_url, tmp_path / "profile") as opened:
        yield opened


@pytest.fixture
def screenshots(tmp_path: Path) -> Path:
    """Folder for the test's screenshots."""
    return screenshots_folder(tmp_path / "screenshots")
