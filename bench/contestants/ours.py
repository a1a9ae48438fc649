"""This project's store: its own process, and the client that engines use."""

from __future__ import annotations

import os
import secrets
import sys
import time
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from unittest.mock import patch

from bench.contestants.contestant import START_S, Contestant, Server, free_port
from ragcache_core.identity.keys import VariantKey
from ragcache_core.identity.store_key import StoreKey
from ragcache_core.identity.variant import Miss, Origin, Provenance, Tier, VariantInfo
from ragcache_core.store_api import Ack, NewVariant, PutOutcome
from ragcache_kv.store_client.client import StoreClient
from ragcache_kv.values.layout import FORMAT
from ragcache_kv.values.outgoing_value import ReadyValue
from ragcache_wire.settings.part import PartSettings

TIMEOUT_S = 30.0
_PART_BYTES = 1 << 20
"""Size of a part: a value of 8 MiB has eight, like KV of eight layers."""


class RagCache(Contestant):
    """One shard, with a transport for values and an acknowledgement that a put waits for.

    Args:
        folder: Has its data.
        peers: Variables with the credentials of the store. Its client has the same.
    """

    verifies = True
    transport = "shared"
    ack = Ack.ACCEPTED
    memory_bytes = 192 << 20
    disk_bytes = 256 << 20
    store_key: StoreKey | None = None
    encrypts = False

    def __init__(self, folder: Path, peers: Mapping[str, str] | None = None) -> None:
        port, data_port = free_port(), free_port()
        environment = {
            **os.environ,
            "RAGCACHE_LISTEN": f"127.0.0.1:{port}",
            "RAGCACHE_DATA_LISTEN": f"127.0.0.1:{data_port}",
            "RAGCACHE_DATA_SOCKET": str(folder / "transport.sock"),
            "RAGCACHE_DATA_DIR": str(folder / "data"),
            "RAGCACHE_MEMORY_BYTES": str(self.memory_bytes),
            "RAGCACHE_DISK_BYTES": str(self.disk_bytes),
            # The benchmark reads the newest values, which the score may evict for older ones.
            "RAGCACHE_POLICY": "lru",
            "RAGCACHE_LOG_LEVEL": "warning",
            **(peers or {}),
        }
        if self.encrypts:
            key = folder / "disk.key"
            key.write_text(secrets.token_hex(32))
            environment["RAGCACHE_DISK_KEY_FILE"] = str(key)
        argv = [sys.executable, "-m", "ragcache_cachestore"]
        self._server = Server(argv, port, environment)
        with patch.dict(os.environ, peers or {}):
            credentials = PartSettings().credentials
        self._client = StoreClient(
            f"127.0.0.1:{port}", (self.transport,), credentials, self.store_key
        )
        self._client.stats(START_S)
        self._puts: Counter[int] = Counter()
        self._keys: dict[int, VariantKey] = {}

    def put(self, number: int, value: memoryview) -> None:
        starts = range(0, len(value), _PART_BYTES)
        sizes = tuple([min(_PART_BYTES, len(value) - start) for start in starts])
        info = VariantInfo(256, len(value), 0, Provenance(exact=True))
        self._puts[number] += 1
        # A variant never changes, so other bytes are another variant that replaces an old one.
        self._keys[number] = VariantKey(number.to_bytes(16), self._puts[number].to_bytes(16))
        new = NewVariant(self._keys[number], info, Origin(), None, sizes, FORMAT)
        outgoing = ReadyValue.with_checksums(value, sizes, cost_s=0.01)
        if self._client.put(new, outgoing, TIMEOUT_S, ack=self.ack) is not PutOutcome.STORED:
            raise OSError("the store refused a put")

    def get(self, number: int, buffer: memoryview) -> None:
        ((_, found),) = self._client.get([self._keys[number]], TIMEOUT_S, allocate=lambda _: buffer)
        if isinstance(found, Miss):
            raise OSError(f"the store has no value: {found}")
        self.note(found.tier)

    def settle(self) -> None:
        """Wait until what was accepted is written to disk."""
        while self._client.stats(TIMEOUT_S).unwritten:
            time.sleep(0.02)

    def note(self, tier: Tier) -> None:
        """Note the tier of a value."""

    def close(self) -> None:
        self._client.close()
        self._server.end()


class RagCacheSocket(RagCache):
    """Over a TCP socket, as between machines."""

    transport = "socket"


class RagCacheTagged(RagCache):
    """Values have tags, which the client makes and checks."""

    store_key = StoreKey.of_secret(bytes(32))


class RagCacheTaggedSocket(RagCacheTagged):
    """The same over a TCP socket."""

    transport = "socket"


class RagCacheDurable(RagCache):
    """Durable puts: an acknowledged one survives kill -9."""

    ack = Ack.DURABLE


class RagCacheDisk(RagCacheDurable):
    """More values than memory holds: gets come from the disk tier with a warm page cache."""

    memory_bytes = 32 << 20

    def note(self, tier: Tier) -> None:
        self.counts = tier is Tier.DISK


class RagCacheDiskEncrypted(RagCacheDisk):
    """The values on disk are encrypted."""

    encrypts = True


class RagCacheDiskSocket(RagCacheDisk):
    """From disk over a TCP socket, as between machines."""

    transport = "socket"


class RagCacheDiskSocketEncrypted(RagCacheDiskSocket):
    """The same with encrypted values on disk."""

    encrypts = True
