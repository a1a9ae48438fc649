"""Tokens and proofs that show that a caller is a part of the same platform.

HMAC-SHA256 (RFC 2104) under the keys that sign plans. The first key signs and every key verifies,
so that keys can be rotated while the system runs.

A token admits a call. It covers the method, the expiry and a nonce, and it is valid for
TOKEN_LIFETIME_S. A caller may use one token for several calls of a method meanwhile.

A proof admits a connection that carries values. It covers a challenge, which the store makes for
this connection alone, so a captured proof is of no use.
"""

from __future__ import annotations

import hashlib
import hmac
import re
from collections.abc import Iterable
from typing import Final

TOKEN_LIFETIME_S: Final = 30
"""How long a new token is valid. It is checked when a call begins, and a call may last longer."""

MAX_CLOCK_SKEW_S: Final = 60
"""How far the clocks of two machines may differ. Such a token is valid for that much longer."""

NONCE_BYTES: Final = 16
CHALLENGE_BYTES: Final = 32

_TOKEN_CONTEXT: Final = b"ragcache-peer-token-1\0"
_PROOF_CONTEXT: Final = b"ragcache-data-proof-1\0"
_FORM: Final = re.compile(rf"([0-9]{{1,12}})\.([0-9a-f]{{{2 * NONCE_BYTES}}})\.([0-9a-f]{{64}})")


def make_token(method: str, key: bytes, now_s: float, nonce: bytes) -> str:
    """Return a token for one method, as ASCII text.

    Args:
        method: Full name of the method (``/package.Service/Method``), or the path of a URL.
        key: Signing key.
        now_s: Unix time.
        nonce: NONCE_BYTES random bytes, so that no two tokens are equal.
    """
    claims = f"{int(now_s) + TOKEN_LIFETIME_S}.{nonce.hex()}"
    return f"{claims}.{_signature(method, claims, key)}"


def token_problem(token: str, method: str, keys: Iterable[bytes], now_s: float) -> str | None:
    """Return why a token is not valid. None: it is.

    Args:
        token: As the caller sent it.
        method: Full name of the called method.
        keys: Valid signing keys.
        now_s: Unix time.
    """
    found = _FORM.fullmatch(token)
    if found is None:
        return "is malformed"
    expiry, nonce, given = found.groups()
    claims = f"{expiry}.{nonce}"
    # Every key is tried in constant time, so that the duration reveals nothing about a key.
    matches = [hmac.compare_digest(_signature(method, claims, key), given) for key in keys]
    if not any(matches):
        return "is not signed with a key of this service for this method"
    if int(expiry) + MAX_CLOCK_SKEW_S <= now_s:
        return "has expired"
    if int(expiry) > now_s + TOKEN_LIFETIME_S + MAX_CLOCK_SKEW_S:
        return "is valid for too long"
    return None


def admits_until_s(token: str) -> int:
    """Return the Unix time from which a valid token has expired for every clock."""
    return int(token.partition(".")[0]) + MAX_CLOCK_SKEW_S


def make_proof(challenge: bytes, store: bytes, key: bytes) -> bytes:
    """Return the proof that a client of a store's data port has a key.

    Args:
        challenge: CHALLENGE_BYTES random bytes, as the store sent them.
        store: Id of the store's start that the client expects (16 bytes). So a proof that was
            made for one store admits to no other one.
        key: Signing key.
    """
    return hmac.digest(key, _PROOF_CONTEXT + challenge + store, "sha256")


def is_proof(given: bytes, challenge: bytes, store: bytes, keys: Iterable[bytes]) -> bool:
    """Tell whether a client proved that it has one of the keys.

    Args:
        given: As the client sent it.
        challenge: As this store sent it.
        store: Id of this store's start.
        keys: Valid signing keys.
    """
    # Every key is tried, as for a token.
    matches = [hmac.compare_digest(make_proof(challenge, store, key), given) for key in keys]
    return any(matches)


def _signature(method: str, claims: str, key: bytes) -> str:
    # A method's name has no NUL, so it cannot run into the claims.
    message = _TOKEN_CONTEXT + method.encode() + b"\0" + claims.encode()
    return hmac.new(key, message, hashlib.sha256).hexdigest()
