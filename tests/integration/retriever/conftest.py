"""A PostgreSQL server for the tests of this folder, and limits that no busy machine reaches."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from harness.availability import Unavailable, skip
from ragcache_retriever.readiness import StorageProbe
from ragcache_retriever.store.postgres import lexical
from tests.kit.limits import LIMIT_S
from tests.kit.postgres_server import PostgresServer
from tests.kit.retriever import lengthen_retriever_limits


@pytest.fixture(scope="session")
def postgres() -> Iterator[PostgresServer]:
    """A server of this test process. Under CI=true the tests fail where it cannot be had."""
    try:
        server = PostgresServer()
    except Unavailable as reason:
        skip(reason)
    yield server
    server.close()


@pytest.fixture(autouse=True)
def long_limits(monkeypatch: pytest.MonkeyPatch) -> None:
    lengthen_retriever_limits(monkeypatch)
    monkeypatch.setattr(lexical, "LIMIT_S", LIMIT_S)
    monkeypatch.setattr(StorageProbe.__init__, "__defaults__", (LIMIT_S,))
