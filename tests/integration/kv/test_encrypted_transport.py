"""Values over the encrypted data port: whole, from memory and from disk, and after evictions."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import pytest

from ragcache_cachestore.api import data_server
from ragcache_core.identity.variant import Tier
from ragcache_core.store_api import Ack
from ragcache_kv.store_client.client import StoreClient
from ragcache_kv.transport.tls_connection import BATCH_BYTES
from ragcache_kv.values.stored_value import StoredValue
from ragcache_wire.peers.certificates import Certificates
from ragcache_wire.peers.credentials import Credentials
from tests.integration.kv.test_transports import MIB, TIMEOUT_S, key, put
from tests.kit.certificates import issue, write
from tests.kit.store import ServedStore, serving
from tests.kit.wait import wait_until

RECORD: Final = 16 << 10


@pytest.fixture
def credentials(tmp_path: Path) -> Credentials:
    return Credentials(None, Certificates(write(tmp_path / "tls", issue())))


@pytest.fixture
def served(tmp_path: Path, credentials: Credentials) -> Iterator[ServedStore]:
    with serving(
        tmp_path, transports=("socket",), credentials=credentials, memory_bytes=16 * MIB
    ) as found:
        yield found


def get(client: StoreClient, number: int) -> tuple[bytes, Tier]:
    [(_, found)] = client.get([key(number)], TIMEOUT_S)
    assert isinstance(found, StoredValue), found
    return bytes(found.value), found.tier


@pytest.mark.parametrize("size", [1, RECORD - 1, RECORD, RECORD + 1, BATCH_BYTES + 1, 5 * MIB])
def test_a_value_arrives_as_it_was_put(served: ServedStore, size: int) -> None:
    value = put(served.client, 1, [size, size + 7])
    assert served.client.transport == "socket"
    for _ in range(2):
        assert get(served.client, 1)[0] == bytes(value)


def test_values_of_the_disk_arrive_as_they_were_put(served: ServedStore) -> None:
    values = {
        number: bytes(put(served.client, number, [MIB, MIB + 3], ack=Ack.DURABLE))
        for number in range(20)
    }
    found = {number: get(served.client, number) for number in values}
    assert {number: value for number, (value, _) in found.items()} == values
    assert Tier.DISK in {tier for _, tier in found.values()}


def test_many_values_of_one_call_arrive_in_order(served: ServedStore) -> None:
    values = [bytes(put(served.client, number, [1000 + number])) for number in range(100)]
    found = served.client.get([key(number) for number in range(100)], TIMEOUT_S)
    arrived = [one for _, one in found if isinstance(one, StoredValue)]
    assert [bytes(one.value) for one in arrived] == values


def test_an_evicted_client_connects_again_without_a_failure(
    served: ServedStore,
    credentials: Credentials,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO)
    monkeypatch.setattr(data_server, "MAX_ENCRYPTED_CONNECTIONS", 2)
    value = bytes(put(served.client, 1, [1000]))
    with contextlib.ExitStack() as ends:
        clients = [
            ends.enter_context(
                contextlib.closing(StoreClient(served.address, ["socket"], credentials))
            )
            for _ in range(4)
        ]
        for _ in range(3):
            for client in clients:
                assert get(client, 1)[0] == value
        evicted = served.store.stats().connections_evicted
        assert evicted >= 5
        assert "broken" not in caplog.text, "an eviction is no failure"


def test_a_store_that_ends_lets_the_client_find_its_successor(
    tmp_path: Path, credentials: Credentials
) -> None:
    with serving(tmp_path, transports=("socket",), credentials=credentials) as first:
        value = bytes(put(first.client, 1, [1000], ack=Ack.DURABLE))
        port = int(first.address.rpartition(":")[2])
        client = StoreClient(first.address, ["socket"], credentials)
        assert get(client, 1)[0] == value
    with (
        contextlib.closing(client),
        serving(tmp_path, transports=("socket",), credentials=credentials, port=port),
    ):
        wait_until(lambda: get(client, 1)[0] == value)
