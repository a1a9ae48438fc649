"""When a gateway reads the keys of an issuer, from a real server."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from cryptography.hazmat.primitives.asymmetric import rsa

from harness.cluster.certificates import make_certificates
from ragcache_core.access.networks import AddressRules, parse_networks
from ragcache_core.access.token_claims import TokenIssuer
from ragcache_core.errors import RagCacheError, Unavailable
from ragcache_gateway.auth.issuer_documents import IssuerDocuments
from ragcache_gateway.auth.issuer_keys import KEEP_S, REFRESH_S, RETRY_S, IssuerKeys, usable_keys
from ragcache_wire.address_gate import AddressGate
from tests.kit.clock import ManualClock
from tests.kit.token_issuer import SigningKey, TokenIssuerServer, serving_issuer
from tests.kit.wait import until

LOOPBACK = AddressRules(parse_networks("test", ["127.0.0.0/8"]))
OLD, NEW = SigningKey.make("old"), SigningKey.make("new")


@pytest.fixture
def server() -> Iterator[TokenIssuerServer]:
    with serving_issuer(OLD) as found:
        yield found


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock()


@pytest.fixture
def keys(server: TokenIssuerServer, clock: ManualClock) -> IssuerKeys:
    issuer = TokenIssuer("id", server.url, ("ragcache",))
    return IssuerKeys(issuer, IssuerDocuments(AddressGate(LOOPBACK)), clock)


async def has(keys: IssuerKeys, key: SigningKey) -> bool:
    return await keys.find(key.key_id, key.algorithm) is not None


async def test_requests_at_once_share_one_read(keys: IssuerKeys, server: TokenIssuerServer) -> None:
    assert all(await asyncio.gather(*(has(keys, OLD) for _ in range(50))))
    assert server.asked == ["/.well-known/openid-configuration", "/keys"]


async def test_a_key_has_one_algorithm(keys: IssuerKeys) -> None:
    assert await has(keys, OLD)
    assert await keys.find("old", "RS256") is None
    # A token without an id fits if there is one key.
    assert await keys.find(None, "ES256") is not None


async def test_an_unknown_key_is_asked_for_once_in_a_while(
    keys: IssuerKeys, server: TokenIssuerServer, clock: ManualClock
) -> None:
    assert await has(keys, OLD)
    server.keys.append(NEW)
    assert not await has(keys, NEW)
    assert len(server.asked) == 2
    clock.now += RETRY_S
    assert await has(keys, NEW)
    assert await keys.find(None, "ES256") is None, "it could be either key"


async def test_a_key_that_the_issuer_removed_ends_with_the_next_read(
    keys: IssuerKeys, server: TokenIssuerServer, clock: ManualClock
) -> None:
    assert await has(keys, OLD)
    server.keys[:] = [NEW]
    clock.now += REFRESH_S + 1
    assert await has(keys, OLD), "a read in the background delays no request"

    async def is_gone() -> bool:
        return not await has(keys, OLD)

    await until(is_gone, "the next read")
    assert await has(keys, NEW)


async def test_old_keys_serve_until_they_are_too_old(
    keys: IssuerKeys, server: TokenIssuerServer, clock: ManualClock
) -> None:
    assert await has(keys, OLD)
    server.status = 500
    clock.now += KEEP_S - 1
    assert await has(keys, OLD)
    await until(lambda: keys.is_failing, "a read that fails")
    with pytest.raises(Unavailable):
        await has(keys, NEW)
    clock.now += 2
    with pytest.raises(Unavailable, match="'id' cannot be read") as refused:
        await has(keys, OLD)
    assert 1 <= refused.value.retry_after_s <= RETRY_S
    server.status = 200
    clock.now += RETRY_S
    assert await has(keys, OLD)
    assert not keys.is_failing


async def test_a_client_that_leaves_does_not_end_the_read_of_others(
    keys: IssuerKeys, server: TokenIssuerServer
) -> None:
    server.delay_s = 0.2
    first, second = (asyncio.ensure_future(has(keys, OLD)) for _ in range(2))
    await until(lambda: bool(server.asked), "a read")
    first.cancel()
    assert await second


async def test_https_is_checked_by_name_on_the_address_that_the_gate_has_checked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = make_certificates(tmp_path, ["id.example"], [])
    monkeypatch.setenv("SSL_CERT_FILE", str(made.authority))
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(made.server_certificate, made.server_key)
    with serving_issuer(OLD, tls=context) as server:
        documents = IssuerDocuments(AddressGate(LOOPBACK, lambda host, port: ["127.0.0.1"]))
        for name, is_known in (("id.example", True), ("other.example", False)):
            server.url = f"https://{name}:{server.port}"
            issuer = TokenIssuer("id", server.url, ("ragcache",))
            if is_known:
                assert await documents.keys_of(issuer) == [OLD.jwk]
                continue
            with pytest.raises(RagCacheError, match=r"certificate|CERTIFICATE"):
                await documents.keys_of(issuer)


async def test_each_address_is_tried(server: TokenIssuerServer) -> None:
    addresses = ["127.0.0.2", "127.0.0.1"]
    documents = IssuerDocuments(AddressGate(LOOPBACK, lambda host, port: addresses))
    assert await documents.keys_of(TokenIssuer("id", server.url, ("ragcache",))) == [OLD.jwk]


def test_only_keys_that_verify_signatures_are_used() -> None:
    good = OLD.jwk
    weak = SigningKey("weak", "RS256", rsa.generate_private_key(65_537, 1024))
    bad: list[Any] = [
        weak.jwk,
        {**good, "kid": "encrypts", "use": "enc"},
        {**good, "kid": "other", "alg": "ES384"},
        {**good, "kid": "mixed", "alg": "HS256"},
        {**good, "kid": "off the curve", "x": "AAAA"},
        {"kty": "oct", "kid": "secret", "k": "AAAA"},
        {"kty": "OKP", "crv": "X25519", "x": "AAAA"},
        {"kty": "RSA", "kid": "short", "n": "AQAB", "e": "AQAB"},
        *({}, None, 7, "key", []),
    ]
    assert [one[0] for one in usable_keys([*bad, good])] == ["old"]
