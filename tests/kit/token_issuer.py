"""An issuer of OpenID Connect: a real HTTP server on loopback, with keys of its own."""

from __future__ import annotations

import json
import ssl
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import jwt
from cryptography.hazmat.primitives.asymmetric import ec, ed25519, rsa
from jwt.algorithms import get_default_algorithms

AUDIENCE = "ragcache"
Private = rsa.RSAPrivateKey | ec.EllipticCurvePrivateKey | ed25519.Ed25519PrivateKey


@dataclass
class SigningKey:
    """A private key of an issuer, and the id under which it is published."""

    key_id: str
    algorithm: str
    private: Private

    @classmethod
    def make(cls, key_id: str, algorithm: str = "ES256") -> SigningKey:
        """Make a key."""
        match algorithm:
            case "RS256":
                made: Private = rsa.generate_private_key(65_537, 2048)
            case "ES256":
                made = ec.generate_private_key(ec.SECP256R1())
            case _:
                made = ed25519.Ed25519PrivateKey.generate()
        return cls(key_id, algorithm, made)

    @property
    def jwk(self) -> dict[str, Any]:
        """The public key as a JSON Web Key."""
        algorithm: Any = get_default_algorithms()[self.algorithm]
        found = algorithm.to_jwk(self.private.public_key(), as_dict=True)
        return {**found, "kid": self.key_id, "alg": self.algorithm, "use": "sig"}


@dataclass
class TokenIssuerServer:
    """What the issuer publishes, and what it was asked for.

    Attributes:
        answers: Body by path, in place of the issuer's own.
        status: Of every answer.
        delay_s: Before every answer.
        asked: Paths, in their order.
    """

    port: int
    url: str
    keys: list[SigningKey]
    answers: dict[str, bytes] = field(default_factory=dict)
    status: int = 200
    delay_s: float = 0.0
    asked: list[str] = field(default_factory=list)

    def body(self, path: str) -> bytes | None:
        """Return what the issuer has at a path."""
        found: dict[str, Any] = {
            "/.well-known/openid-configuration": {
                "issuer": self.url,
                "jwks_uri": f"{self.url}/keys",
            },
            "/keys": {"keys": [one.jwk for one in self.keys]},
        }
        if path in self.answers:
            return self.answers[path]
        return json.dumps(found[path]).encode() if path in found else None

    def claims(self, **changes: Any) -> dict[str, Any]:
        """Return the claims of a valid token; a change to None leaves a claim out."""
        now = int(time.time())
        found = {
            "iss": self.url,
            "aud": AUDIENCE,
            "sub": "jane",
            "iat": now,
            "exp": now + 600,
            "roles": ["asker"],
            **changes,
        }
        return {name: value for name, value in found.items() if value is not None}

    def token(
        self, key: SigningKey | None = None, headers: dict[str, Any] | None = None, **changes: Any
    ) -> str:
        """Return a token that is signed with a key, by default the first one."""
        signing = key or self.keys[0]
        found = {"kid": signing.key_id, **(headers or {})}
        return jwt.encode(self.claims(**changes), signing.private, signing.algorithm, headers=found)


@contextmanager
def serving_issuer(
    *keys: SigningKey, tls: ssl.SSLContext | None = None
) -> Iterator[TokenIssuerServer]:
    """Run an issuer with these keys."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            issuer.asked.append(self.path)
            time.sleep(issuer.delay_s)
            body = issuer.body(self.path)
            self.send_response(issuer.status if body is not None else 404)
            self.send_header("Content-Length", str(len(body or b"")))
            self.end_headers()
            self.wfile.write(body or b"")

        def log_message(self, *args: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    if tls is not None:
        server.socket = tls.wrap_socket(server.socket, server_side=True)
    port = server.server_port
    issuer = TokenIssuerServer(port, f"http://127.0.0.1:{port}", list(keys))
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield issuer
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
