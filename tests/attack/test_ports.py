"""The ports between the parts, for callers without the platform's key."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import grpc
import httpx
import psutil
import pytest

from harness.processes import Service, free_port, is_serving, running_cachestore, running_engine
from ragcache_core.errors import Unauthenticated
from ragcache_core.identity.peer_token import (
    MAX_CLOCK_SKEW_S,
    NONCE_BYTES,
    TOKEN_LIFETIME_S,
    make_token,
)
from ragcache_kv.store_client.client import StoreClient
from ragcache_kv.transport.framed_transport import receive_reply, send_credential
from ragcache_kv.transport.framing import (
    HEADER,
    ConnectionBroken,
    FramedConnection,
    FrameKind,
    frame,
)
from ragcache_wire.channel import OPTIONS
from ragcache_wire.clients.engine_client import EngineClient
from ragcache_wire.peers.credentials import Credentials
from ragcache_wire.peers.peer_access import TOKEN_METADATA, PeerTokens, proof_for
from ragcache_wire.peers.peer_channel import open_blocking_channel
from ragcache_wire.v1 import cachestore_pb2, retriever_pb2
from ragcache_wire.v1 import cachestore_pb2 as pb
from ragcache_wire.watched.signing_keys import SigningKeys
from tests.kit.wait import wait_until

pytestmark = pytest.mark.timeout(900)

TIMEOUT_S: Final = 60.0
MIB: Final = 1 << 20
STORE_METHODS: Final = cachestore_pb2.DESCRIPTOR.services_by_name["CacheStore"]
RETRIEVER_METHODS: Final = retriever_pb2.DESCRIPTOR.services_by_name["Retriever"]


class Platform:
    """The key of a platform, and another key."""

    def __init__(self, folder: Path) -> None:
        for name, key in (("keys", "a1" * 32), ("others", "b2" * 32)):
            (folder / name).write_text(f"{key}\n")
        self.folder = folder
        self.keys, self.others = SigningKeys(folder / "keys"), SigningKeys(folder / "others")
        self.env = {"RAGCACHE_SIGNING_KEY_FILE": str(folder / "keys")}

    def tokens_of_strangers(self, method: str) -> Iterator[tuple[tuple[str, str], ...]]:
        """Yield metadata that does not admit a caller to a method."""
        key = self.keys.current()[0]
        old_s = time.time() - TOKEN_LIFETIME_S - MAX_CLOCK_SKEW_S - 1
        yield ()
        yield ((TOKEN_METADATA, ""),)
        yield PeerTokens(self.others).metadata(method)
        yield PeerTokens(self.keys).metadata("/ragcache.v1.Another/Method")
        yield ((TOKEN_METADATA, make_token(method, key, old_s, os.urandom(NONCE_BYTES))),)


@pytest.fixture(scope="module")
def platform(tmp_path_factory: pytest.TempPathFactory) -> Platform:
    return Platform(tmp_path_factory.mktemp("ports"))


class Shard:
    """A real store process with the platform's key."""

    def __init__(self, address: str, pid: int, log: Path, keys: SigningKeys) -> None:
        self.address, self.pid, self.log = address, pid, log
        with contextlib.closing(StoreClient(address, credentials=Credentials(keys))) as client:
            client.connect(TIMEOUT_S)
            assert client.hello is not None
            self.hello = client.hello
            assert client.transport == "shared"

    @property
    def memory_bytes(self) -> int:
        return int(psutil.Process(self.pid).memory_info().rss)

    def open(self, *, shared: bool = False) -> FramedConnection:
        """Return a connection to the data port that has sent and received nothing."""
        if shared:
            sock = socket.socket(socket.AF_UNIX)
            sock.connect(self.hello.data_socket)
        else:
            sock = socket.create_connection(("127.0.0.1", self.hello.data_port), TIMEOUT_S)
        connection = FramedConnection(sock)
        connection.deadline = time.monotonic() + TIMEOUT_S
        return connection


@pytest.fixture(scope="module")
def shard(platform: Platform) -> Iterator[Shard]:
    with running_cachestore(platform.folder / "store", env=platform.env) as store:
        yield Shard(store.address, store.service.pid, store.service.log, platform.keys)


@pytest.fixture(scope="module")
def retriever(platform: Platform, tiny_model: Path) -> Iterator[str]:
    """The address of a real retriever process."""
    address = f"127.0.0.1:{free_port()}"
    env = {
        "RAGCACHE_LISTEN": address,
        "RAGCACHE_DATA_DIR": str(platform.folder / "documents"),
        "RAGCACHE_MODEL": str(tiny_model),
        "OMP_NUM_THREADS": "1",
    } | platform.env
    command = [sys.executable, "-m", "ragcache_retriever"]
    service = Service("retriever", command, env, platform.folder / "retriever.log")
    try:
        service.wait_until("ready", lambda: is_serving(address))
        yield address
    finally:
        service.stop()


def outcome(channel: grpc.Channel, method: str, metadata: Any) -> grpc.StatusCode:
    """Return the status of a call with one empty message, after its first reply."""
    call = channel.stream_stream(method, None, None)(
        iter([b""]), metadata=metadata, timeout=TIMEOUT_S
    )
    try:
        next(iter(call), None)
    except grpc.RpcError as error:
        return error.code()
    finally:
        call.cancel()
    return grpc.StatusCode.OK


def check_service(platform: Platform, address: str, service: Any, harmless: str) -> None:
    with grpc.insecure_channel(address, options=OPTIONS) as channel:
        names = [f"/{service.full_name}/{method.name}" for method in service.methods]
        names.append("/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo")
        for name in names:
            for metadata in platform.tokens_of_strangers(name):
                found = outcome(channel, name, metadata)
                assert found is grpc.StatusCode.UNAUTHENTICATED, (name, metadata)
        own = PeerTokens(platform.keys)
        assert outcome(channel, harmless, own.metadata(harmless)) is grpc.StatusCode.OK
        assert outcome(channel, names[-1], own.metadata(names[-1])) is (
            grpc.StatusCode.UNIMPLEMENTED
        ), "there is no reflection"


def test_every_method_of_a_store_needs_a_token(platform: Platform, shard: Shard) -> None:
    assert is_serving(shard.address), "health needs none"
    check_service(platform, shard.address, STORE_METHODS, "/ragcache.v1.CacheStore/Stats")
    for keys in (None, platform.others):
        stranger = StoreClient(shard.address, credentials=Credentials(keys))
        with pytest.raises(Unauthenticated):
            stranger.stats(TIMEOUT_S)
        stranger.close()


@pytest.mark.slow
def test_every_method_of_a_retriever_needs_a_token(platform: Platform, retriever: str) -> None:
    check_service(platform, retriever, RETRIEVER_METHODS, "/ragcache.v1.Retriever/ListCollections")


@pytest.mark.parametrize("shared", [False, True])
def test_the_data_port_needs_a_proof(platform: Platform, shard: Shard, shared: bool) -> None:
    def refused(connection: FramedConnection) -> bool:
        if shared:  # no descriptors of the store's memory come with the refusal
            assert socket.recv_fds(connection.socket, 1, 3)[:2] == (b"\0", [])
        with pytest.raises(Unauthenticated, match="proof"):
            receive_reply(connection, FrameKind.WELCOME, pb.HelloReply)
        connection.close()
        return True

    for keys in (None, platform.others):
        connection = shard.open(shared=shared)
        send_credential(connection, shard.hello.boot, keys)
        assert refused(connection)
    # A proof that another client sent is of no use.
    first = shard.open(shared=shared)
    challenge = receive_reply(first, FrameKind.CHALLENGE, pb.DataChallenge).challenge
    proof = proof_for(platform.keys, challenge, shard.hello.boot)
    for connection in (first, shard.open(shared=shared)):
        if connection is not first:
            receive_reply(connection, FrameKind.CHALLENGE, pb.DataChallenge)
        connection.send(FrameKind.CREDENTIAL, pb.DataCredential(proof=proof))
        if connection is not first:
            assert refused(connection)
    first.close()


def test_a_call_before_the_proof_ends_the_connection(shard: Shard) -> None:
    for kind, message in (
        (FrameKind.GET, pb.GetRequest()),
        (FrameKind.PUT, pb.PutHeader()),
        (FrameKind.RELEASE, pb.LeaseRelease(leases=range(100_000))),
    ):
        connection = shard.open()
        receive_reply(connection, FrameKind.CHALLENGE, pb.DataChallenge)
        connection.socket.sendall(frame(kind, message)[:4096])
        with pytest.raises(ConnectionBroken):
            receive_reply(connection, FrameKind.WELCOME, pb.HelloReply)
        connection.close()


def incomplete() -> bytes:
    return HEADER.pack(MIB, FrameKind.GET, 0) + bytes(MIB - 100)


def send_incomplete(shard: Shard, connections: list[socket.socket]) -> int:
    """Return by how much the store's memory grows at most until all connections have ended."""
    before, most = shard.memory_bytes, 0
    for connection in connections:
        with contextlib.suppress(OSError):
            connection.settimeout(0.5)
            connection.sendall(incomplete())
        most = max(most, shard.memory_bytes - before)
    deadline = time.monotonic() + TIMEOUT_S
    while not all(map(has_ended, connections)) and time.monotonic() < deadline:
        most = max(most, shard.memory_bytes - before)
        time.sleep(0.2)
    return most


def test_strangers_cannot_fill_the_memory_with_incomplete_frames(
    platform: Platform, shard: Shard
) -> None:
    connections = [shard.open().socket for _ in range(300)]
    grown = send_incomplete(shard, connections)
    assert grown < 64 * MIB
    assert all(map(has_ended, connections)), "none may stay for longer than the proof takes"
    for one in connections:
        one.close()
    with contextlib.closing(
        StoreClient(shard.address, ("socket",), Credentials(platform.keys))
    ) as client:
        client.connect(TIMEOUT_S)


def test_incomplete_frames_of_clients_have_one_budget_and_seconds(
    platform: Platform, shard: Shard
) -> None:
    connections = []
    for _ in range(300):
        connection = shard.open()
        send_credential(connection, shard.hello.boot, platform.keys)
        receive_reply(connection, FrameKind.WELCOME, pb.HelloReply)
        connections.append(connection.socket)
    before = shard.memory_bytes
    grown = send_incomplete(shard, connections)
    assert grown < 96 * MIB, "64 MiB of frames, and threads"
    assert all(map(has_ended, connections)), "a frame has seconds, and not the time of silence"
    for one in connections:
        one.close()
    wait_until(lambda: shard.memory_bytes < before + 24 * MIB)


def has_ended(connection: socket.socket) -> bool:
    """Whether the store has closed a connection. Reads what it sent."""
    connection.settimeout(0)
    try:
        while connection.recv(4096):
            pass
    except BlockingIOError:
        return False
    except OSError:
        return True
    return True


def test_messages_that_are_none_do_not_fill_the_log(platform: Platform, shard: Shard) -> None:
    method = "/ragcache.v1.CacheStore/Lookup"
    with grpc.insecure_channel(shard.address, options=OPTIONS) as channel:
        size = shard.log.stat().st_size
        call = channel.unary_unary(method, None, None)
        for _ in range(200):
            with pytest.raises(grpc.RpcError) as raised:
                call(b"\xff\xff", timeout=TIMEOUT_S)
            assert raised.value.code() is grpc.StatusCode.UNAUTHENTICATED
        assert shard.log.stat().st_size == size, "strangers leave no line"
        call = open_blocking_channel(shard.address, Credentials(platform.keys)).unary_unary(
            method, None, None
        )
        for _ in range(200):
            with pytest.raises(grpc.RpcError) as raised:
                call(b"\xff\xff", timeout=TIMEOUT_S)
            assert raised.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert shard.log.read_bytes()[size:].count(b"\n") <= 3


@pytest.mark.slow
def test_every_path_of_an_engine_needs_a_token(
    platform: Platform, shard: Shard, tiny_model: Path, tmp_path: Path
) -> None:
    options = [
        *("--middleware", "ragcache_engine.telemetry.health.HealthMiddleware"),
        *("--middleware", "ragcache_engine.peer_middleware.PeerMiddleware"),
    ]
    body = {"model": "model", "prompt": [7] * 40, "max_tokens": 2, "cache_salt": "tenant:red"}
    with (
        running_engine(
            tmp_path, tiny_model, shard.address, *options, settings=platform.env
        ) as engine,
        httpx.Client(base_url=engine.url, timeout=TIMEOUT_S, trust_env=False) as http,
    ):
        for path in ("/v1/completions", "/v1/models", "/tokenize", "/version", "/docs", "/x"):
            for metadata in platform.tokens_of_strangers(path):
                assert http.post(path, json=body, headers=dict(metadata)).status_code == 401
                assert http.get(path, headers=dict(metadata)).status_code == 401
        path = "/v1/completions"
        own = dict(PeerTokens(platform.keys).metadata(path))
        assert http.post(path, json=body, headers=own).status_code == 200
        assert http.get("/health").status_code == 200
        assert "vllm:num_requests_running" in http.get("/metrics").text
        assert engine.records is not None
        asyncio.run(check_records(platform, engine.records))


async def check_records(platform: Platform, address: str) -> None:
    for keys in (None, platform.others):
        stranger = EngineClient(address, Credentials(keys))
        with pytest.raises(Unauthenticated):
            await stranger.costs()
        await stranger.close()
    client = EngineClient(address, Credentials(platform.keys))
    await client.costs()
    await client.close()


def test_the_credential_is_short(shard: Shard) -> None:
    connection = shard.open()
    receive_reply(connection, FrameKind.CHALLENGE, pb.DataChallenge)
    connection.send_raw(frame(FrameKind.CREDENTIAL, pb.DataCredential(proof=bytes(300))))
    with pytest.raises(ConnectionBroken):
        receive_reply(connection, FrameKind.WELCOME, pb.HelloReply)
    connection.close()
