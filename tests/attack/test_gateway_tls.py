"""The gateway's own ports with TLS, on a real process: what clients see, and what they cannot do.

The certificate is a user's, so no client has one of its own.
"""

from __future__ import annotations

import asyncio
import socket
import ssl
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import ExitStack, asynccontextmanager, contextmanager
from pathlib import Path

import httpx
import pytest

from harness.processes import free_port
from ragcache_cli.clients.gateway_client import GatewayApiClient, GatewayTarget
from ragcache_core.errors import InvalidInput, Unavailable
from ragcache_wire.peers.certificates import AUTHORITIES_FILE, CERTIFICATE_FILE
from tests.attack.attacked_gateway import ENTRIES, QUESTION
from tests.integration.gateway.test_process import environment_with
from tests.kit.certificates import issue, write
from tests.kit.gateway import bearer, data_of, world, write_keys
from tests.kit.wait import until

NAME = "localhost"


class TlsGateway:
    """A gateway with two ports that serve HTTPS."""

    def __init__(self, folder: Path, log: Path, ports: tuple[int, int]) -> None:
        self.folder, self.log, self.ports = folder, log, ports
        self.url = f"https://{NAME}:{ports[0]}"

    def client(self, authority: str = "ours", address: str = "127.0.0.1") -> httpx.AsyncClient:
        """A client that trusts one authority, with an address of its own."""
        context = ssl.create_default_context(cadata=issue(authority).authorities)
        transport = httpx.AsyncHTTPTransport(verify=context, local_address=address)
        return httpx.AsyncClient(base_url=self.url, transport=transport, timeout=60)

    async def shows(self, authority: str) -> bool:
        """Whether a new connection gets a certificate of an authority."""
        async with self.client(authority) as client:
            try:
                return (await client.get("/healthz")).status_code == 200
            except httpx.TransportError:
                return False


@asynccontextmanager
async def tls_gateway(model: Path, folder: Path, **settings: str) -> AsyncIterator[TlsGateway]:
    ports = (free_port(), free_port())
    served = write(folder / "served", issue(name=NAME))
    (served / AUTHORITIES_FILE).unlink()  # a Secret for TLS need not have it
    log = folder / "gateway.log"
    async with world(model) as fakes:
        env = environment_with(fakes, f"127.0.0.1:{ports[0]}")
        env |= {
            "RAGCACHE_ADMIN_LISTEN": f"127.0.0.1:{ports[1]}",
            "RAGCACHE_SERVER_TLS_DIR": str(served),
            "RAGCACHE_API_KEYS_FILE": str(write_keys(folder / "keys.toml", ENTRIES)),
        } | settings
        with log.open("wb") as file:
            process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-m", "ragcache_gateway"), env=env, stderr=file
            )
        gateway = TlsGateway(served, log, ports)
        try:
            await until(lambda: gateway.shows("ours"))
            yield gateway
            process.terminate()
            assert await asyncio.wait_for(process.wait(), 60) == 0
        finally:
            if process.returncode is None:
                process.kill()
                await process.wait()
    assert "Traceback" not in log.read_text()


@pytest.fixture
async def gateway(tiny_model: Path, tmp_path: Path) -> AsyncIterator[TlsGateway]:
    async with tls_gateway(tiny_model, tmp_path) as found:
        yield found


async def test_both_ports_serve_https_and_no_plain_http(gateway: TlsGateway) -> None:
    size = gateway.log.stat().st_size
    async with httpx.AsyncClient(trust_env=False, timeout=60) as plain:
        for port in gateway.ports:
            with pytest.raises(httpx.TransportError):
                await plain.get(f"http://127.0.0.1:{port}/healthz", headers=bearer("red"))
    assert gateway.log.stat().st_size == size, "strangers leave no line"
    async with gateway.client() as client:
        assert (await client.post("/v1/chat/completions", json=QUESTION)).status_code == 401
        answer = await client.post(
            "/v1/chat/completions", json=QUESTION | {"stream": True}, headers=bearer("red")
        )
        assert answer.status_code == 200, answer.text
        assert data_of(answer.text)[-1] == "[DONE]"
        admin = f"https://{NAME}:{gateway.ports[1]}"
        assert (await client.get(f"{admin}/v1/documents", headers=bearer("red"))).status_code == 200
        assert (await client.get(f"{admin}/metrics")).status_code == 200


def shake_hands(port: int, version: ssl.TLSVersion) -> str | None:
    """The version of a handshake with a client that has this version alone."""
    context = ssl.create_default_context(cadata=issue().authorities)
    context.set_ciphers("ALL:@SECLEVEL=0")  # else this client would not offer old versions
    context.minimum_version = context.maximum_version = version
    with (
        socket.create_connection(("127.0.0.1", port), 60) as sock,
        context.wrap_socket(sock, server_hostname=NAME) as tls,
    ):
        return tls.version()


@pytest.mark.filterwarnings("ignore:ssl.TLSVersion:DeprecationWarning")
async def test_old_versions_of_tls_are_refused(gateway: TlsGateway) -> None:
    for port in gateway.ports:
        for old in (ssl.TLSVersion.TLSv1, ssl.TLSVersion.TLSv1_1):
            with pytest.raises(ssl.SSLError, match=r"PROTOCOL_VERSION|EOF occurred"):
                await asyncio.to_thread(shake_hands, port, old)
        for new, name in ((ssl.TLSVersion.TLSv1_2, "TLSv1.2"), (ssl.TLSVersion.TLSv1_3, "TLSv1.3")):
            assert await asyncio.to_thread(shake_hands, port, new) == name


async def test_a_renewed_certificate_is_shown_without_a_restart(gateway: TlsGateway) -> None:
    async with gateway.client() as before:
        assert (await before.get("/healthz")).status_code == 200
        write(gateway.folder, issue("new", NAME))
        await until(lambda: gateway.shows("new"))
        assert not await gateway.shows("ours")
        assert (await before.get("/healthz")).status_code == 200, "its connection stays"
    # What cannot be used changes nothing.
    (gateway.folder / CERTIFICATE_FILE).write_text(issue("other", NAME).chain)

    async def has_tried_to_read_it() -> bool:
        assert await gateway.shows("new")  # files are checked when a client connects
        return "reload failed name=server certificate" in gateway.log.read_text()

    await until(has_tried_to_read_it)


async def test_clients_that_wait_in_the_handshake_count(tiny_model: Path, tmp_path: Path) -> None:
    """They take no more connections than other clients of an address."""
    limits = {"RAGCACHE_MAX_CONNECTIONS": "16", "RAGCACHE_HEADER_TIMEOUT_S": "600"}
    async with tls_gateway(tiny_model, tmp_path, **limits) as gateway:
        with waiting(gateway, 64) as connections:
            await until(lambda: sum(map(has_ended, connections)) >= 64 - 16)
            async with gateway.client(address="127.0.0.2") as other:
                assert (await other.get("/healthz")).status_code == 200
        await until(lambda: gateway.shows("ours"), "an end of their counts")


async def test_a_handshake_has_the_time_of_a_header(tiny_model: Path, tmp_path: Path) -> None:
    async with tls_gateway(tiny_model, tmp_path, RAGCACHE_HEADER_TIMEOUT_S="1") as gateway:
        with waiting(gateway, 8) as connections:
            await until(lambda: all(map(has_ended, connections)))


@contextmanager
def waiting(gateway: TlsGateway, count: int) -> Iterator[list[socket.socket]]:
    """Connections that never begin a handshake."""
    with ExitStack() as stack:
        made = [
            stack.enter_context(socket.create_connection(("127.0.0.1", gateway.ports[0]), 60))
            for _ in range(count)
        ]
        for one in made:
            one.setblocking(False)
        yield made


def has_ended(connection: socket.socket) -> bool:
    try:
        return connection.recv(1) == b""
    except BlockingIOError:
        return False
    except OSError:
        return True


async def test_commands_check_the_certificate(gateway: TlsGateway, tmp_path: Path) -> None:
    """By its authority and name, or by the very certificate, as syncs and local commands do."""
    key = bearer("red")["Authorization"].removeprefix("Bearer ")
    admin = f"https://{NAME}:{gateway.ports[1]}"
    authority, other = tmp_path / "ca.crt", tmp_path / "other.crt"
    authority.write_text(issue(name=NAME).authorities)
    other.write_text(issue("other", NAME).authorities)
    own = gateway.folder / CERTIFICATE_FILE
    # cert-manager writes the authorities behind a certificate. They may make others, too.
    chain = tmp_path / "chain.crt"
    chain.write_text(own.read_text() + issue(name=NAME).authorities)
    neighbours = tmp_path / "neighbours.crt"
    neighbours.write_text(issue(name="another").chain + issue(name=NAME).authorities)

    async def collections(target: GatewayTarget) -> int:
        async with GatewayApiClient(target) as client:
            return len(await client.collections())

    by_address = admin.replace(NAME, "127.0.0.1")
    assert await collections(GatewayTarget(admin, key, ca_file=authority)) >= 0
    assert await collections(GatewayTarget(by_address, key, certificate=own)) >= 0
    assert await collections(GatewayTarget(by_address, key, certificate=chain)) >= 0
    refused = [
        GatewayTarget(admin, key),
        GatewayTarget(admin, key, ca_file=other),
        GatewayTarget(by_address, key, ca_file=authority),  # another name
        GatewayTarget(admin, key, certificate=other),
        GatewayTarget(admin, key, certificate=neighbours),
    ]
    for target in refused:
        with pytest.raises(Unavailable, match="--ca-file"):
            await collections(target)
    with pytest.raises(InvalidInput, match="RAGCACHE_CA_FILE"):
        await collections(GatewayTarget(admin, key, ca_file=tmp_path / "none.crt"))
    with pytest.raises(InvalidInput, match="--certificate"):
        await collections(GatewayTarget(admin, key, certificate=gateway.log))


async def test_a_waiting_command_trusts_the_renewed_certificate(
    gateway: TlsGateway, tmp_path: Path
) -> None:
    """As a sync whose file changes before or after the gateway's."""
    key = bearer("red")["Authorization"].removeprefix("Bearer ")
    mounted = tmp_path / "tls.crt"
    mounted.write_text(issue("old", NAME).chain)
    waits = 0

    async def renew(_: float) -> None:
        nonlocal waits
        waits += 1
        mounted.write_text((gateway.folder / CERTIFICATE_FILE).read_text())

    target = GatewayTarget(f"https://{NAME}:{gateway.ports[1]}", key, certificate=mounted)
    async with GatewayApiClient(target, patience_s=600, sleep=renew) as client:
        assert len(await client.collections()) >= 0
    assert waits == 1
