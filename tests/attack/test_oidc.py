"""Tokens that an attacker makes or steals, and issuers that fail or lie.

The gateway and the retriever are processes, and the issuers are real HTTP servers.
"""

from __future__ import annotations

import base64
import hashlib
import hmac
import json
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import ExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
import pytest_asyncio
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import rsa

from ragcache_core.access.caller import Scope
from ragcache_core.access.token_claims import TokenIssuer
from ragcache_wire.settings.gateway import issuers_text
from tests.attack.test_keys import PROMPT, Platform, platform
from tests.kit.token_issuer import AUDIENCE, SigningKey, TokenIssuerServer, serving_issuer
from tests.kit.wait import until

SCOPES = {Scope.ASK: ("asker",), Scope.WRITE: ("writer",), Scope.ADMIN: ("root",)}
TENANTS = (
    '[[tenants]]\nname = "red"\nquota = { requests_per_day = 2 }\n[[tenants]]\nname = "blue"\n'
)
SEARCH = {"query": PROMPT, "collection": "red"}


@pytest.fixture(scope="module")
def keys() -> dict[str, SigningKey]:
    return {name: SigningKey.make(name, name) for name in ("RS256", "ES256", "EdDSA")}


@pytest.fixture
def issuer(keys: dict[str, SigningKey]) -> Iterator[TokenIssuerServer]:
    with serving_issuer(*keys.values()) as found:
        yield found


@asynccontextmanager
async def accepting(
    folder: Path, model: Path, *issuers: TokenIssuer, networks: str = "127.0.0.0/8"
) -> AsyncIterator[Platform]:
    settings = {"OIDC": issuers_text(issuers), "ISSUER_NETWORKS": networks}
    async with platform(folder, model, TENANTS, **settings) as found:
        for name in ("red", "blue"):
            put = await found.send("admin", "PUT", f"/v1/collections/{name}", json={})
            assert put.status_code == 200, put.text
        yield found


def rules(server: TokenIssuerServer, name: str = "id", **changes: Any) -> TokenIssuer:
    found = {"scopes": SCOPES, "tenant_claim": "org", "audiences": (AUDIENCE,), **changes}
    return TokenIssuer(name, server.url, **found)


@pytest_asyncio.fixture
async def attacked(
    tmp_path: Path, tiny_model: Path, issuer: TokenIssuerServer
) -> AsyncIterator[Platform]:
    async with accepting(tmp_path, tiny_model, rules(issuer)) as found:
        yield found


async def send(
    platform: Platform, token: str, method: str = "POST", path: str = "/v1/search", **more: Any
) -> httpx.Response:
    headers = {"Authorization": f"Bearer {token}"}
    if method == "POST" and not more:
        more = {"json": SEARCH}
    return await platform.client.request(method, path, headers=headers, **more)


def part(value: object) -> str:
    data = value if isinstance(value, bytes) else json.dumps(value).encode()
    return base64.urlsafe_b64encode(data).rstrip(b"=").decode()


def pem(key: SigningKey) -> bytes:
    return key.private.public_key().public_bytes(
        serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo
    )


def forged(issuer: TokenIssuerServer, header: dict[str, Any], secret: bytes | None) -> str:
    """Return a token with any header: without a signature, or with an HMAC of it."""
    claims = issuer.claims(org="red", roles=["root"])
    text = f"{part({'typ': 'JWT', **header})}.{part(claims)}"
    digest = b"" if secret is None else hmac.digest(secret, text.encode(), hashlib.sha256)
    return f"{text}.{part(digest)}"


async def test_a_valid_token_of_each_algorithm_asks_in_its_tenant(
    attacked: Platform, issuer: TokenIssuerServer, keys: dict[str, SigningKey]
) -> None:
    for number, key in enumerate(keys.values()):
        token = issuer.token(key, org="blue", sub=f"user-{number}")
        answer = await send(attacked, token, path="/v1/chat/completions", json={
            "messages": [{"role": "user", "content": PROMPT}],
            "ragcache": {"collection": "blue"},
        })  # fmt: skip
        assert answer.status_code == 200, answer.text
        line = await attacked.line(action="answer", key=f"id:user-{number}")
        assert line["tenant"] == "blue"
        assert token not in attacked.audit.read_text()
    assert len(issuer.asked) == 2, "one discovery document and one read of the keys"


async def test_the_rules_of_its_tenant_hold_for_tokens(
    attacked: Platform, issuer: TokenIssuerServer
) -> None:
    statuses = [
        (await send(attacked, issuer.token(org="red", sub=f"user-{number}"))).status_code
        for number in range(3)
    ]
    assert statuses == [200, 200, 429], "the quota is that of all users of the tenant"
    assert (await send(attacked, issuer.token(org="blue"))).status_code == 200
    used = await attacked.send("admin", "GET", "/v1/usage")
    assert used.status_code == 200


async def test_a_token_may_do_what_its_roles_allow_and_no_more(
    attacked: Platform, issuer: TokenIssuerServer
) -> None:
    document = {"id": "a.md", "collection": "blue", "text": "Text."}
    asker, writer = issuer.token(org="blue"), issuer.token(org="blue", roles=["writer"])
    without_role = issuer.token(org="blue", roles=["another"])
    refused = await send(attacked, asker, path="/v1/documents", json=document)
    assert refused.status_code == 403
    written = await send(attacked, writer, path="/v1/documents", json=document)
    assert written.status_code == 200, written.text
    assert (await send(attacked, without_role)).status_code == 403
    assert (await send(attacked, asker, "GET", "/v1/backup")).status_code == 403


async def test_a_tenant_that_is_not_listed_is_refused(
    attacked: Platform, issuer: TokenIssuerServer
) -> None:
    for org in ("green", "RED", "", None, ["red", "blue"], {"red": 1}):
        refused = await send(attacked, issuer.token(org=org))
        assert refused.status_code == 403, (org, refused.text)
        assert "'org'" in refused.json()["error"]["message"]


def bad_tokens(issuer: TokenIssuerServer, keys: dict[str, SigningKey]) -> dict[str, str]:
    rsa_key, other = keys["RS256"], SigningKey.make("RS256", "RS256")
    now, valid = int(time.time()), issuer.token(org="red")
    head, body, signature = valid.split(".")
    claims = json.loads(base64.urlsafe_b64decode(body + "=="))
    jwk = {**other.jwk, "kid": "RS256"}
    found = {
        "alg none": forged(issuer, {"alg": "none"}, None),
        "alg None": forged(issuer, {"alg": "None", "kid": "RS256"}, None),
        "no alg": forged(issuer, {}, None),
        "alg is a list": forged(issuer, {"alg": ["RS256"]}, None),
        "RS256 without signature": forged(issuer, {"alg": "RS256", "kid": "RS256"}, None),
        "claims changed": f"{head}.{part({**claims, 'roles': ['root']})}.{signature}",
        "signature of another token": f"{head}.{body}."
        + issuer.token(org="red", sub="joe").rpartition(".")[2],
        "another key under a known id": issuer.token(other, org="red"),
        "key in the header": issuer.token(other, {"jwk": jwk}, org="red"),
        "key by URL": issuer.token(other, {"jku": f"{issuer.url}/evil"}, org="red"),
        "certificate by URL": issuer.token(other, {"x5u": f"{issuer.url}/evil"}, org="red"),
        "path as id": issuer.token(other, {"kid": "../../../../dev/null"}, org="red"),
        "SQL as id": issuer.token(other, {"kid": "x' UNION SELECT 'key"}, org="red"),
        "long id": issuer.token(other, {"kid": "k" * 5000}, org="red"),
        "critical header": issuer.token(headers={"crit": ["exp"], "exp": 1}, org="red"),
        "another type": issuer.token(headers={"typ": "logout+jwt"}, org="red"),
        "wrong audience": issuer.token(org="red", aud="another"),
        "no audience": issuer.token(org="red", aud=None),
        "audience inside another": issuer.token(org="red", aud="ragcache-admin"),
        "other issuer": issuer.token(org="red", iss="https://accounts.example.com"),
        "issuer with a slash": issuer.token(org="red", iss=f"{issuer.url}/"),
        "no issuer": issuer.token(org="red", iss=None),
        "expired": issuer.token(org="red", exp=now - 60),
        "no expiry": issuer.token(org="red", exp=None),
        "expiry as text": issuer.token(org="red", exp=f"{now + 60}x"),
        "not valid yet": issuer.token(org="red", nbf=now + 120),
        "issued later": issuer.token(org="red", iat=now + 120),
        "too long": issuer.token(org="red", pad="x" * 20_000),
        "no JSON": f"eyJ.{body}.{signature}",
        "deep JSON": f"{part(b'{' + b'[' * 9000)}.{body}.{signature}",
        "endless expiry": issuer.token(org="red", exp=float("inf")),
    }
    for name in ("HS256", "HS384"):
        for secret in (pem(rsa_key), json.dumps(rsa_key.jwk).encode(), b""):
            header = {"alg": name, "kid": "RS256"}
            found[f"{name} with {secret[:12]!r}"] = forged(issuer, header, secret)
    return found


async def test_forged_expired_and_foreign_tokens_are_refused_and_recorded(
    attacked: Platform, issuer: TokenIssuerServer, keys: dict[str, SigningKey]
) -> None:
    assert (await send(attacked, issuer.token(org="blue"))).status_code == 200
    tokens = bad_tokens(issuer, keys)
    for what, token in tokens.items():
        for method, path in (("GET", "/v1/models"), ("GET", "/v1/backup")):
            refused = await send(attacked, token, method, path)
            assert refused.status_code == 401, (what, refused.text)
            challenge = refused.headers["WWW-Authenticate"]
            assert ('error="invalid_token"' in challenge) == token.startswith("eyJ")
            assert token not in refused.text
    assert "/evil" not in issuer.asked
    expired = await send(attacked, tokens["expired"])
    assert "has expired" in expired.json()["error"]["message"]
    recorded = await attacked.line(outcome="unknown_key", action="backup")
    assert "key" not in recorded
    assert (await send(attacked, issuer.token(org="blue"))).status_code == 200


async def test_users_of_two_issuers_and_keys_share_no_name(
    tmp_path: Path, tiny_model: Path, issuer: TokenIssuerServer
) -> None:
    key = SigningKey.make("ES256")
    with serving_issuer(key) as other:
        both = (rules(issuer, tenants={"a": "blue"}), rules(other, "other", tenants={"a": "red"}))
        async with accepting(tmp_path, tiny_model, *both) as found:
            for server, name, tenant in ((issuer, "id", "blue"), (other, "other", "red")):
                answer = await send(found, server.token(org="a", sub="admin"))
                assert answer.status_code == 200, answer.text
                line = await found.line(action="search", key=f"{name}:admin")
                assert line["tenant"] == tenant
            # A key that one issuer has signs nothing for the other.
            crossed = other.token(org="a", iss=issuer.url)
            assert (await send(found, crossed)).status_code == 401


async def test_a_new_key_is_found_and_unknown_ids_do_not_flood_the_issuer(
    attacked: Platform, issuer: TokenIssuerServer
) -> None:
    assert (await send(attacked, issuer.token(org="blue"))).status_code == 200
    before, started = len(issuer.asked), time.monotonic()
    unknown = SigningKey.make("unknown")
    for number in range(200):
        token = issuer.token(unknown, {"kid": f"guess-{number}"}, org="blue")
        assert (await send(attacked, token)).status_code == 401
    reads = (len(issuer.asked) - before) / 2
    assert reads <= 1 + (time.monotonic() - started) / 10
    rotated = SigningKey.make("next")
    issuer.keys.append(rotated)

    async def is_known() -> bool:
        return (await send(attacked, issuer.token(rotated, org="blue"))).status_code == 200

    await until(is_known, "the new key", timeout_s=60)


def huge(issuer: TokenIssuerServer) -> None:
    issuer.answers["/keys"] = json.dumps({"keys": [{"n": "A" * 1_000_000}]}).encode()


def down(issuer: TokenIssuerServer) -> None:
    issuer.status = 500


def hangs(issuer: TokenIssuerServer) -> None:
    issuer.delay_s = 30.0


def deep(issuer: TokenIssuerServer) -> None:
    issuer.answers["/keys"] = b"[" * 100_000


def redirects(issuer: TokenIssuerServer) -> None:
    issuer.status = 302


def another(issuer: TokenIssuerServer) -> None:
    body = {"issuer": "https://accounts.example.com", "jwks_uri": f"{issuer.url}/keys"}
    issuer.answers["/.well-known/openid-configuration"] = json.dumps(body).encode()


def metadata_service(issuer: TokenIssuerServer) -> None:
    body = {"issuer": issuer.url, "jwks_uri": "http://169.254.169.254/latest/meta-data"}
    issuer.answers["/.well-known/openid-configuration"] = json.dumps(body).encode()


def local_file(issuer: TokenIssuerServer) -> None:
    body = {"issuer": issuer.url, "jwks_uri": "file:///etc/passwd"}
    issuer.answers["/.well-known/openid-configuration"] = json.dumps(body).encode()


FAILURES = (huge, down, hangs, deep, redirects, another, metadata_service, local_file)


async def test_a_failing_issuer_is_503_for_its_tokens_and_nothing_for_others(
    tmp_path: Path, tiny_model: Path, issuer: TokenIssuerServer, keys: dict[str, SigningKey]
) -> None:
    with ExitStack() as servers:
        failing = [servers.enter_context(serving_issuer(keys["ES256"])) for _ in FAILURES]
        for server, fail in zip(failing, FAILURES, strict=True):
            fail(server)
        given = (rules(one, f"id{number}") for number, one in enumerate((*failing, issuer)))
        async with accepting(tmp_path, tiny_model, *given) as found:
            for server, fail in zip(failing, FAILURES, strict=True):
                started = time.monotonic()
                refused = await send(found, server.token(org="blue"))
                assert refused.status_code == 503, (fail.__name__, refused.text)
                assert int(refused.headers["Retry-After"]) >= 1
                assert "127.0.0.1" not in refused.text
                again = await send(found, server.token(org="blue"))
                assert again.status_code == 503
                # A read has at most 10 s, and a later token does not wait for another one.
                assert time.monotonic() - started < 20, fail.__name__
                models = await found.send("blue-ask", "GET", "/v1/models")
                assert models.status_code == 200
                assert (await send(found, issuer.token(org="blue"))).status_code == 200
            page = (await found.client.get("/metrics")).text
            assert f"ragcache_gateway_issuers_failing {len(FAILURES):.1f}" in page


async def test_keys_that_were_read_are_used_while_the_issuer_is_down(
    attacked: Platform, issuer: TokenIssuerServer
) -> None:
    assert (await send(attacked, issuer.token(org="blue"))).status_code == 200
    down(issuer)
    assert (await send(attacked, issuer.token(org="blue"))).status_code == 200
    # Whether a key that is not known is one of the issuer's cannot be told now.
    token = issuer.token(SigningKey.make("new"), org="blue")

    async def is_unavailable() -> bool:
        return (await send(attacked, token)).status_code == 503

    await until(is_unavailable, "a read that fails", timeout_s=60)


@pytest.mark.filterwarnings("ignore::jwt.warnings.InsecureKeyLengthWarning")
async def test_weak_and_symmetric_keys_of_an_issuer_sign_nothing(
    tmp_path: Path, tiny_model: Path
) -> None:
    weak = SigningKey("weak", "RS256", rsa.generate_private_key(65_537, 1024))
    fit = SigningKey.make("fit")
    with serving_issuer(weak, fit) as issuer:
        secret = b"s" * 32
        octets = {"kty": "oct", "kid": "secret", "alg": "HS256", "k": part(secret)}
        keys = {"keys": [octets, weak.jwk, {"kty": "EC"}, None, fit.jwk]}
        issuer.answers["/keys"] = json.dumps(keys).encode()
        async with accepting(tmp_path, tiny_model, rules(issuer)) as found:
            assert (await send(found, issuer.token(fit, org="blue"))).status_code == 200
            assert (await send(found, issuer.token(weak, org="blue"))).status_code == 401
            symmetric = forged(issuer, {"alg": "HS256", "kid": "secret"}, secret)
            assert (await send(found, symmetric)).status_code == 401


async def test_an_issuer_inside_the_network_needs_an_allowed_network(
    tmp_path: Path, tiny_model: Path, issuer: TokenIssuerServer
) -> None:
    async with accepting(tmp_path, tiny_model, rules(issuer), networks="10.9.0.0/16") as found:
        assert (await send(found, issuer.token(org="blue"))).status_code == 503
        assert issuer.asked == []
        assert (await found.send("blue-ask", "GET", "/v1/models")).status_code == 200


async def test_limits_of_a_token_come_from_its_claims(
    tmp_path: Path, tiny_model: Path, issuer: TokenIssuerServer
) -> None:
    given = rules(issuer, collections_claim="collections", filter_claim="filter")
    public = {"must": [{"key": "public", "match": {"value": True}}]}
    limits: dict[str, Any] = {"org": "blue", "collections": ["red"], "filter": public}
    async with accepting(tmp_path, tiny_model, given) as found:
        for number, metadata in enumerate(({"public": True}, {"public": False})):
            document = {
                "id": f"{number}.md",
                "collection": "red",
                "text": "The merger closes in May.",
                "metadata": metadata,
            }
            written = await found.send("admin", "POST", "/v1/documents", json=document)
            assert written.status_code == 200, written.text
        answer = await send(found, issuer.token(**limits))
        assert answer.status_code == 200, answer.text
        assert "0.md" in answer.text
        assert "1.md" not in answer.text
        elsewhere = {"query": PROMPT, "collection": "blue"}
        refused = await send(found, issuer.token(**limits), json=elsewhere)
        assert refused.status_code == 403
        changes: list[dict[str, Any]] = [
            {"collections": None},
            {"filter": None},
            {"filter": {"must": [{"key": 7}]}},
            {"roles": ["root"]},
            {"sub": ""},
            {"sub": "a\nb"},
        ]
        for change in changes:
            refused = await send(found, issuer.token(**{**limits, **change}))
            assert refused.status_code == 403, (change, refused.text)
        root: dict[str, Any] = {"org": "blue", "roles": ["root"]}
        assert (await send(found, issuer.token(**root), "GET", "/v1/status")).status_code == 200
