"""No frame on the data port stops a store, keeps a connection, or costs memory for ever."""

from __future__ import annotations

import contextlib
import os
import random
import socket
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Final

import pytest
from google.protobuf.message import Message

from harness.processes import running_cachestore
from ragcache_core.store_api import Ack, PutOutcome
from ragcache_kv.store_client.client import StoreClient
from ragcache_kv.transport.framed_transport import receive_reply, send_credential
from ragcache_kv.transport.framing import (
    HEADER,
    FramedConnection,
    FrameKind,
)
from ragcache_kv.values.conversions import to_key, to_put_header
from ragcache_wire.peers.credentials import Credentials
from ragcache_wire.v1 import cachestore_pb2 as pb
from ragcache_wire.watched.signing_keys import SigningKeys
from tests.attack.fuzzed_process import FuzzedProcess
from tests.attack.mutations import mutated_message, with_odd_bytes
from tests.kit.store import completion, key, value, variant, whole

SEED: Final = 37
WARM_UP: Final = 2000
THREADS: Final = 4
TIMEOUT_S: Final = 60.0
MAX_FRAMES: Final = 6
"""Of one connection."""

COUNTS: Final = [
    pytest.param(10_000, marks=pytest.mark.timeout(300)),
    pytest.param(100_000, marks=[pytest.mark.slow, pytest.mark.timeout(3600)]),
]
RAW: Final = value(3000)
STORED, LAST = variant(key(1), RAW), variant(key(7), RAW)
PUT: Final = variant(key(2), RAW, num_parts=2)


@dataclass(frozen=True, slots=True)
class Frame:
    """A valid frame, with the bytes that follow it."""

    kind: FrameKind
    message: Message
    data: bytes = b""

    def mutated(self, rng: random.Random) -> bytes:
        """Encode it with an odd message, an odd header or odd bytes, or as it is."""
        payload = mutated_message(self.message, rng)
        size, kind, skippable = len(payload), int(self.kind), len(self.data)
        match rng.randrange(12):
            case 0:
                size = rng.choice((0, size + 1, size + 40, 1 << 14, 1 << 20, (1 << 32) - 1))
            case 1:
                kind = rng.randrange(256)
            case 2:
                skippable = rng.choice((0, skippable + 1, 1 << 14, (1 << 32) - 1))
            case 3:
                payload = self.message.SerializeToString()
        encoded = HEADER.pack(size, kind, skippable) + payload + self.data
        return with_odd_bytes(encoded, rng) if rng.random() < 0.1 else encoded


def corpus() -> list[list[Frame]]:
    """Return valid sequences of frames."""
    stored = to_key(STORED.key)
    get = pb.GetRequest(keys=[stored, to_key(key(9))], domain="", fix_overheads=[0.5, 0])
    read = pb.ReadReport.Read(key=stored, times=2, seconds=0.01, fix_overhead=0.5)
    commit = pb.PutCompletion(checksums=completion(PUT, RAW).checksums, cost_s=0.5)
    put = to_put_header(PUT, Ack.ACCEPTED, "")
    again = to_put_header(STORED, Ack.DURABLE, "")
    commit_again = pb.PutCompletion(checksums=completion(STORED, RAW).checksums)
    return [
        [
            Frame(FrameKind.GET, get),
            Frame(FrameKind.RELEASE, pb.LeaseRelease(leases=range(1, 9), seconds=0.1)),
        ],
        [Frame(FrameKind.GET, get), Frame(FrameKind.RELEASE, pb.LeaseRelease(corrupt=[3]))],
        [Frame(FrameKind.PUT, again, RAW), Frame(FrameKind.COMMIT, commit_again)],
        [Frame(FrameKind.READS, pb.ReadReport(reads=[read, read]))],
        [Frame(FrameKind.PUT, put, RAW), Frame(FrameKind.COMMIT, commit)],
        [
            Frame(FrameKind.PUT, put),
            Frame(FrameKind.WRITTEN, pb.PutProgress(num_bytes=1500)),
            Frame(FrameKind.WRITTEN, pb.PutProgress(num_bytes=3000)),
            Frame(FrameKind.COMMIT, commit),
        ],
        [Frame(FrameKind.PUT, put), Frame(FrameKind.ABORT, pb.PutCompletion())],
    ]


class FuzzedPort:
    """The data port of a store: connections over TCP or a Unix socket."""

    def __init__(self, hello: pb.HelloReply, keys: SigningKeys) -> None:
        self._hello, self._keys = hello, keys
        self._corpus = corpus()

    def connect(self, *, shared: bool) -> FramedConnection:
        if shared:
            sock = socket.socket(socket.AF_UNIX)
            sock.settimeout(TIMEOUT_S)
            sock.connect(self._hello.data_socket)
        else:
            sock = socket.create_connection(("127.0.0.1", self._hello.data_port), TIMEOUT_S)
        return FramedConnection(sock)

    def fuzz(self, seed: int, count: int) -> None:
        """Send so many mutated frames, a few over each connection."""
        rng = random.Random(seed)
        while count > 0:
            frames = rng.choice(self._corpus)[:]
            frames += rng.choice(self._corpus)
            frames = frames[: rng.randint(1, MAX_FRAMES)]
            sent = [frame.mutated(rng) for frame in frames]
            if rng.random() < 0.1:
                rng.shuffle(sent)
            self._converse(sent, rng, seed)
            count -= len(sent)

    def _converse(self, sent: Sequence[bytes], rng: random.Random, seed: int) -> None:
        """Send frames over a new connection, and wait until the store has ended it."""
        shared = rng.random() < 0.3
        connection = self.connect(shared=shared)
        sock = connection.socket
        with contextlib.closing(sock):
            if rng.random() < 0.05:
                credential = Frame(FrameKind.CREDENTIAL, pb.DataCredential(proof=rng.randbytes(32)))
                sent = [credential.mutated(rng), *sent]
            else:
                self._admit(connection, shared=shared)
            sock.settimeout(TIMEOUT_S)
            try:
                sock.sendall(b"".join(sent))
                sock.shutdown(socket.SHUT_WR)
                while sock.recv(1 << 16):
                    pass
            except TimeoutError as error:
                raise AssertionError(f"seed {seed}: no end after {sent}") from error
            except OSError:
                pass  # the store has ended the connection before it read everything

    def _admit(self, connection: FramedConnection, *, shared: bool) -> None:
        connection.deadline = time.monotonic() + TIMEOUT_S
        send_credential(connection, self._hello.boot, self._keys)
        if shared:
            _, descriptors, _, _ = socket.recv_fds(connection.socket, 1, 3)
            for descriptor in descriptors:
                os.close(descriptor)
        receive_reply(connection, FrameKind.WELCOME, pb.HelloReply)


@pytest.mark.parametrize("count", COUNTS)
def test_mutated_frames(tmp_path: Path, count: int) -> None:
    (tmp_path / "keys").write_text("a1" * 32 + "\n")
    keys = SigningKeys(tmp_path / "keys")
    env = {"RAGCACHE_SIGNING_KEY_FILE": str(tmp_path / "keys")}
    with running_cachestore(tmp_path / "store", env=env) as store:
        client = StoreClient(store.address, ("socket",), Credentials(keys))
        client.put(STORED, whole(STORED, RAW), TIMEOUT_S)
        assert client.hello is not None
        port = FuzzedPort(client.hello, keys)
        process = FuzzedProcess(store.service.pid, store.service.log)

        def fuzz(first_seed: int, many: int) -> None:
            with ThreadPoolExecutor(THREADS) as threads:
                seeds = range(first_seed, first_seed + THREADS)
                list(threads.map(partial(port.fuzz, count=many // THREADS), seeds))

        fuzz(SEED, WARM_UP)
        process.warmed_up()
        fuzz(SEED + THREADS, count - WARM_UP)
        process.check()
        assert client.put(LAST, whole(LAST, RAW), TIMEOUT_S) is PutOutcome.STORED
        client.close()
