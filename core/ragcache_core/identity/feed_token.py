"""Tokens that prove to a source of a feed that its reader has a signing key.

HMAC-SHA256 (RFC 2104) over the method, the expiry and a nonce, under the keys that sign plans. The
first key signs and every key verifies, so that keys can be rotated while the system runs. A token
is valid for one method and for TOKEN_LIFETIME_S, so a captured one is soon of no use.
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

_CONTEXT: Final = b"ragcache-feed-token-1\0"
_FORM: Final = re.compile(rf"([0-9]{{1,12}})\.([0-9a-f]{{{2 * NONCE_BYTES}}})\.([0-9a-f]{{64}})")


def make_token(method: str, key: bytes, now_s: float, nonce: bytes) -> str:
    """Return a token for one method, as ASCII text.

    Args:
        method: Full name of the method (``/package.Service/Method``).
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


def _signature(method: str, claims: str, key: bytes) -> str:
    # A method's name has no NUL, so it cannot run into the claims.
    message = _CONTEXT + method.encode() + b"\0" + claims.encode()
    return hmac.new(key, message, hashlib.sha256).hexdigest()
