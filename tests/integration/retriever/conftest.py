"""A PostgreSQL server for the tests of this folder."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from harness.availability import Unavailable, skip
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
