"""The encrypted ports between the parts, for callers without the right certificate."""

from __future__ import annotations

import contextlib
import dataclasses
import socket
import ssl
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import grpc
import httpx
import pytest

from harness.processes import (
    Service,
    answers,
    free_port,
    launch_cachestore,
    launch_engine,
)
from ragcache_core.errors import Unauthenticated, Unavailable
from ragcache_kv.store_client.client import StoreClient
from ragcache_kv.transport.framed_transport import receive_reply
from ragcache_kv.transport.framing import FrameKind
from ragcache_kv.transport.tls_connection import TlsConnection
from ragcache_wire.channel import OPTIONS
from ragcache_wire.peers.certificates import AUTHORITIES_FILE, CERTIFICATE_FILE, Certificates
from ragcache_wire.peers.credentials import Credentials
from ragcache_wire.peers.peer_access import PeerTokens
from ragcache_wire.v1 import cachestore_pb2 as pb
from ragcache_wire.watched.signing_keys import SigningKeys
from tests.kit.certificates import NAME, issue, write
from tests.kit.strangers import channels, greeting, status
from tests.kit.wait import wait_until

pytestmark = pytest.mark.timeout(900)

TIMEOUT_S: Final = 60.0
STATS: Final = "/ragcache.v1.CacheStore/Stats"
COLLECTIONS: Final = "/ragcache.v1.Retriever/ListCollections"


class Platform:
    """The key and certificate of a platform, and what attackers have."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        (folder / "keys").write_text(f"{'a1' * 32}\n")
        self.keys = SigningKeys(folder / "keys")
        self.own = write(folder / "own", issue())
        # Attackers have the public certificate of our authority, and certificates of another one.
        self.stranger = write(folder / "stranger", issue("theirs"), issue().authorities)
        self.neighbour = write(folder / "neighbour", issue("ours", "other.team.ragcache.internal"))
        self.env = {
            "RAGCACHE_SIGNING_KEY_FILE": str(folder / "keys"),
            "RAGCACHE_TLS_DIR": str(self.own),
        }

    def credentials(self, folder: Path | None = None) -> Credentials:
        return Credentials(self.keys, Certificates(folder or self.own))


@pytest.fixture(scope="module")
def platform(tmp_path_factory: pytest.TempPathFactory) -> Platform:
    return Platform(tmp_path_factory.mktemp("tls"))


class Shard:
    """A real store process with certificates."""

    def __init__(self, platform: Platform, folder: Path) -> None:
        store = launch_cachestore(folder, env=platform.env, shared=False)
        self.service, self.address, self.log = store.service, store.address, store.service.log
        client = StoreClient(self.address, ("socket",), platform.credentials())
        with contextlib.closing(client):
            self.service.wait_until("ready", lambda: connects(client))
            assert client.transport == "socket"
            assert client.hello is not None
            self.hello = client.hello

    def dial(self) -> socket.socket:
        return socket.create_connection(("127.0.0.1", self.hello.data_port), TIMEOUT_S)


def connects(client: StoreClient) -> bool:
    try:
        client.connect(1.0)
    except Unavailable:
        return False
    return True


@pytest.fixture(scope="module")
def shard(platform: Platform) -> Iterator[Shard]:
    found = Shard(platform, platform.folder / "store")
    yield found
    found.service.stop()


def check_grpc_port(platform: Platform, address: str, method: str) -> None:
    """Check that a port needs a certificate, and that a certificate alone is not enough."""
    token = PeerTokens(platform.keys).metadata(method)
    for channel in channels(platform.own, platform.stranger, address, NAME):
        with channel:
            assert status(channel, method, token) is grpc.StatusCode.UNAVAILABLE, "a valid token"
            health = "/grpc.health.v1.Health/Check"
            assert status(channel, health) is grpc.StatusCode.UNAVAILABLE
    options = [("grpc.ssl_target_name_override", NAME), *OPTIONS]
    right = Certificates(platform.own).current().channel_credentials()
    with grpc.secure_channel(address, right, options=options) as channel:
        assert status(channel, method) is grpc.StatusCode.UNAUTHENTICATED
        assert status(channel, method, token) is grpc.StatusCode.OK


def test_the_grpc_port_of_a_store_needs_a_certificate_and_a_token(
    platform: Platform, shard: Shard
) -> None:
    size = shard.log.stat().st_size
    check_grpc_port(platform, shard.address, STATS)
    assert shard.log.stat().st_size == size, "strangers leave no line"


@pytest.mark.slow
def test_the_grpc_port_of_a_retriever_needs_a_certificate_and_a_token(
    platform: Platform, tiny_model: Path
) -> None:
    address = f"127.0.0.1:{free_port()}"
    health = f"127.0.0.1:{free_port()}"
    env = {
        "RAGCACHE_LISTEN": address,
        "RAGCACHE_HEALTH_LISTEN": health,
        "RAGCACHE_DATA_DIR": str(platform.folder / "documents"),
        "RAGCACHE_MODEL": str(tiny_model),
        "OMP_NUM_THREADS": "1",
    } | platform.env
    command = [sys.executable, "-m", "ragcache_retriever"]
    service = Service("retriever", command, env, platform.folder / "retriever.log")
    try:
        service.wait_until("ready", lambda: answers(f"http://{health}/readyz"))
        check_grpc_port(platform, address, COLLECTIONS)
    finally:
        service.stop()


def test_the_data_port_needs_a_certificate_and_a_proof(platform: Platform, shard: Shard) -> None:
    with shard.dial() as plain:
        plain.sendall(b"\0" * 64)
        assert plain.recv(64)[:1] in (b"", b"\x15"), "an alert, and no challenge"
    without = ssl.create_default_context(cafile=str(platform.own / AUTHORITIES_FILE))
    assert greeting(shard.dial(), without, NAME) == b""
    assert greeting(shard.dial(), Certificates(platform.stranger).current().client, NAME) == b""
    right = Certificates(platform.own).current()
    assert greeting(shard.dial(), right.client, NAME) != b""
    with contextlib.closing(TlsConnection(shard.dial(), right)) as connection:
        connection.deadline = time.monotonic() + TIMEOUT_S
        connection.shake_hands()
        receive_reply(connection, FrameKind.CHALLENGE, pb.DataChallenge)
        connection.send(FrameKind.CREDENTIAL, pb.DataCredential())
        with pytest.raises(Unauthenticated, match="proof"):
            receive_reply(connection, FrameKind.WELCOME, pb.HelloReply)


def test_older_versions_of_tls_are_refused(platform: Platform, shard: Shard) -> None:
    context = ssl.create_default_context(cafile=str(platform.own / AUTHORITIES_FILE))
    context.load_cert_chain(platform.own / CERTIFICATE_FILE, platform.own / "tls.key")
    context.maximum_version = ssl.TLSVersion.TLSv1_2
    assert greeting(shard.dial(), context, NAME) == b""


def test_a_client_refuses_a_server_of_another_platform(platform: Platform, shard: Shard) -> None:
    """It would show its documents and KV to the server that has taken the address."""
    for folder in (platform.neighbour, write(platform.folder / "fake", issue("theirs"))):
        client = StoreClient(shard.address, ("socket",), platform.credentials(folder))
        with contextlib.closing(client), pytest.raises(Unavailable, match="RAGCACHE_TLS_DIR"):
            client.connect(5.0)
        certificate = Certificates(folder).current()
        with contextlib.closing(TlsConnection(shard.dial(), certificate)) as connection:
            connection.deadline = time.monotonic() + TIMEOUT_S
            with pytest.raises(Unauthenticated, match="RAGCACHE_TLS_DIR"):
                connection.shake_hands()


def test_a_client_without_certificates_reads_which_setting_it_lacks(
    platform: Platform, shard: Shard
) -> None:
    client = StoreClient(shard.address, ("socket",), Credentials(platform.keys))
    with contextlib.closing(client), pytest.raises(Unavailable, match="RAGCACHE_TLS_DIR"):
        client.connect(5.0)


def test_strangers_that_wait_in_the_handshake_keep_no_client_out(
    platform: Platform, shard: Shard
) -> None:
    waiting = [shard.dial() for _ in range(200)]
    with contextlib.closing(
        StoreClient(shard.address, ("socket",), platform.credentials())
    ) as client:
        client.connect(TIMEOUT_S)
        assert client.transport == "socket"

    def has_ended(one: socket.socket) -> bool:
        one.settimeout(0)
        try:
            return one.recv(1) == b""
        except BlockingIOError:
            return False
        except OSError:
            return True

    wait_until(lambda: all(map(has_ended, waiting)))
    for one in waiting:
        one.close()


def test_certificates_rotate_without_a_restart(platform: Platform, tmp_path: Path) -> None:
    old, new = issue("old"), issue("new")
    both = old.authorities + new.authorities
    server = write(tmp_path / "server", old, both)
    env = platform.env | {"RAGCACHE_TLS_DIR": str(server)}
    moved = Platform(tmp_path)
    moved.env, moved.keys = env, platform.keys
    moved.own = write(tmp_path / "client", old, both)
    shard = Shard(moved, tmp_path / "store")
    try:
        client = StoreClient(shard.address, ("socket",), moved.credentials())
        with contextlib.closing(client):
            client.stats(TIMEOUT_S)
            stale = write(tmp_path / "stale", old)  # trusts the old authority alone
            write(server, new, new.authorities)

            def is_refused() -> bool:
                before = StoreClient(shard.address, ("socket",), moved.credentials(stale))
                with contextlib.closing(before):
                    return not connects(before)

            wait_until(is_refused)
            client.stats(TIMEOUT_S)  # on its open connection
            write(moved.own, new, new.authorities)
            time.sleep(2 * 1.0)  # files are checked every second
            client.stats(TIMEOUT_S)  # on a connection with the new certificate
            other = StoreClient(shard.address, ("socket",), moved.credentials())
            with contextlib.closing(other):
                other.connect(TIMEOUT_S)
                assert other.transport == "socket"
    finally:
        shard.service.stop()


@pytest.mark.slow
def test_the_http_port_of_an_engine_needs_a_certificate_of_the_platform_or_none(
    platform: Platform, shard: Shard, tiny_model: Path, tmp_path: Path
) -> None:
    """A caller without a certificate reaches the open paths alone, as it has no token."""
    served = write(tmp_path / "served", issue())
    options = [
        *("--middleware", "ragcache_engine.telemetry.health.HealthMiddleware"),
        *("--middleware", "ragcache_engine.peer_middleware.PeerMiddleware"),
        *("--ssl-certfile", str(served / CERTIFICATE_FILE)),
        *("--ssl-keyfile", str(served / "tls.key")),
        *("--ssl-ca-certs", str(served / AUTHORITIES_FILE)),
        *("--ssl-cert-reqs", str(int(ssl.CERT_OPTIONAL))),
    ]
    env = platform.env | {"RAGCACHE_TLS_DIR": str(served)}
    engine = launch_engine(tmp_path, tiny_model, shard.address, *options, settings=env)
    url = engine.url.replace("http:", "https:")
    engine = dataclasses.replace(engine, url=url)
    path = "/v1/completions"
    body = {"model": "model", "prompt": [7] * 40, "max_tokens": 2}
    token = dict(PeerTokens(platform.keys).metadata(path))

    def ask(folder: Path | None, headers: dict[str, str], trusted: Path = served) -> int:
        context = ssl.create_default_context(cafile=str(trusted / AUTHORITIES_FILE))
        if folder is not None:
            context.load_cert_chain(folder / CERTIFICATE_FILE, folder / "tls.key")
        extensions = {"sni_hostname": NAME}
        with httpx.Client(verify=context, timeout=TIMEOUT_S, trust_env=False) as http:
            call = http.post(url + path, json=body, headers=headers, extensions=extensions)
            return call.status_code

    try:
        engine.service.wait_until("serving", lambda: answers(f"{url}/health"))
        assert not answers(f"{engine.url.replace('https:', 'http:')}/health"), "no plain HTTP"
        assert ask(platform.own, token) == 200
        assert ask(platform.own, {}) == 401
        assert ask(None, {}) == 401
        with pytest.raises(httpx.HTTPError):
            ask(platform.stranger, token)
        with pytest.raises(httpx.HTTPError):  # a client knows a server of another authority
            ask(platform.own, token, write(tmp_path / "wrong", issue("theirs")))
        assert engine.records is not None
        check_grpc_port(platform, engine.records, "/ragcache.v1.Engine/GetCosts")
        # The operator renews the certificate while the engine runs.
        renewed = issue("new")
        write(served, renewed, renewed.authorities + issue().authorities)
        wait_until(lambda: answers(f"{url}/health") and presented(url, served))
    finally:
        engine.service.stop()


def presented(url: str, folder: Path) -> bool:
    """Whether a server shows a certificate of the first authority that a folder trusts."""
    host, _, port = url.partition("://")[2].rpartition(":")
    first = (folder / AUTHORITIES_FILE).read_text().partition("-----END CERTIFICATE-----\n")
    context = ssl.create_default_context(cadata="".join(first[:2]))
    with socket.create_connection((host, int(port)), TIMEOUT_S) as sock:
        try:
            with context.wrap_socket(sock, server_hostname=NAME):
                return True
        except ssl.SSLError:
            return False


def test_a_plain_store_tells_a_client_with_certificates(platform: Platform, tmp_path: Path) -> None:
    env = {"RAGCACHE_SIGNING_KEY_FILE": platform.env["RAGCACHE_SIGNING_KEY_FILE"]}
    store = launch_cachestore(tmp_path, env=env, shared=False)
    try:
        plain = StoreClient(store.address, ("socket",), Credentials(platform.keys))
        with contextlib.closing(plain):
            store.service.wait_until("ready", lambda: connects(plain))
        client = StoreClient(store.address, ("socket",), platform.credentials())
        with contextlib.closing(client), pytest.raises(Unavailable, match="RAGCACHE_TLS_DIR"):
            client.connect(5.0)
    finally:
        store.service.stop()
