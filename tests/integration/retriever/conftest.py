"""A PostgreSQL server for the tests of this folder, and limits that no busy machine reaches."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from harness.availability import Unavailable, skip
from ragcache_retriever.embedding import endpoint
from ragcache_retriever.knowledge_base import filter_cache, searching
from ragcache_retriever.ranking import hybrid
from ragcache_retriever.readiness.storage_probe import StorageProbe
from ragcache_retriever.store.postgres import lexical as postgres_lexical
from ragcache_retriever.store.postgres.connections import database
from ragcache_retriever.store.sqlite import lexical as sqlite_lexical
from ragcache_wire.clients import retriever_client
from tests.kit.limits import LIMIT_S
from tests.kit.postgres_server import PostgresServer


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
    """Lengthen the limits of a retriever in this process. A test about one of them shortens it."""
    monkeypatch.setattr(endpoint, "QUERY_DEADLINE_S", LIMIT_S)
    monkeypatch.setattr(filter_cache, "LIMIT_S", LIMIT_S)
    monkeypatch.setattr(searching, "CHANGE_WAIT_S", LIMIT_S)
    monkeypatch.setattr(hybrid, "LEXICAL_DEADLINE_S", LIMIT_S)
    monkeypatch.setattr(postgres_lexical, "LIMIT_S", LIMIT_S)
    monkeypatch.setattr(sqlite_lexical, "LIMIT_S", LIMIT_S)
    monkeypatch.setattr(database, "CONNECT_LIMIT_S", int(LIMIT_S))
    monkeypatch.setattr(retriever_client, "QUERY_TIMEOUT_S", LIMIT_S)
    monkeypatch.setattr(StorageProbe.__init__, "__defaults__", (LIMIT_S,))
