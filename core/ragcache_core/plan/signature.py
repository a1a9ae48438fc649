"""The signature of a plan, which proves to an engine that a gateway made it.

HMAC-SHA256 (RFC 2104) over an expiry, the plan and its prompt, under a key that gateways and
engines share. So a captured signature is valid for no other plan and no other prompt, and for as
long as a token of a call. Without a signature any client that reaches an engine could name another
access domain. It could then learn by timing what is stored there, or have its own KV stored in it.

A gateway signs a plan each time that it sends it, so that the plan of a long answer can be sent
again. vLLM makes several requests of one with several answers. So a plan may come more than once,
and the engine remembers none.

Several keys are valid at a time, so that keys can be rotated while the system runs. The first key
signs, and every key verifies.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import hmac
import re
from collections.abc import Iterable
from typing import Final

from ragcache_core.errors import InvalidInput
from ragcache_core.identity.keys import TokenIds, token_bytes
from ragcache_core.identity.peer_token import MAX_CLOCK_SKEW_S, TOKEN_LIFETIME_S

SIGNATURE_FIELD: Final = "ragcache_signature"
"""Name of the signature in kv_transfer_params, next to the plan."""

MIN_KEY_BYTES: Final = 32
"""Length of the digest. A shorter key would be easier to guess than the digest."""

MAX_KEYS: Final = 8
"""Most keys at a time. Each is tried on a plan with an invalid signature."""

_CONTEXT: Final = b"ragcache-plan-signature-3\0"
_RECEIPT_CONTEXT: Final = b"ragcache-receipt-signature-1\0"
_HEX: Final = re.compile(r"(?:[0-9a-fA-F]{2})+")
_FORM: Final = re.compile(r"([0-9]{1,12})\.([0-9a-f]{64})")


def parse_keys(field: str, content: bytes) -> tuple[bytes, ...]:
    """Parse keys from lines of hex digits or base64. Blank lines are ignored.

    Args:
        field: Name for error messages.
        content: Content of the key file.

    Raises:
        InvalidInput: A line is not a key. The error never contains the line.
    """
    keys: dict[bytes, None] = {}
    for number, line in enumerate(content.split(b"\n"), 1):
        if text := line.strip():
            keys[_key(field, number, text)] = None
    if not 0 < len(keys) <= MAX_KEYS:
        raise InvalidInput(field, f"holds {len(keys)} keys", f"write 1 to {MAX_KEYS}, one per line")
    return tuple(keys)


def sign(plan: str, token_ids: TokenIds, key: bytes, now_s: float) -> str:
    """Return the signature of an encoded plan, as ASCII text.

    Args:
        plan: The encoded plan.
        token_ids: Of the prompt.
        key: Signing key.
        now_s: Unix time.
    """
    expiry = str(int(now_s) + TOKEN_LIFETIME_S)
    return f"{expiry}.{_digest(_message(expiry, plan, token_ids), key)}"


def signed_until_s(
    plan: object, token_ids: TokenIds, given: object, keys: Iterable[bytes]
) -> int | None:
    """Return the expiry in a plan's signature, as Unix time. None: the plan is not signed.

    Args:
        plan: As the client sent it. Anything but an encoded plan is not signed.
        token_ids: Of the prompt.
        given: As the client sent it.
        keys: Valid keys.
    """
    if not (isinstance(plan, str) and plan.isascii()):
        return None
    found = _FORM.fullmatch(given) if isinstance(given, str) else None
    if found is None:
        return None
    expiry, digest = found.groups()
    message = _message(expiry, plan, token_ids)
    # Every key is tried in constant time, so that the duration reveals nothing about a key.
    matches = [hmac.compare_digest(_digest(message, key), digest) for key in keys]
    return int(expiry) if any(matches) else None


def is_timely(until_s: int, now_s: float) -> bool:
    """Whether a signature is in its time for a clock, which may differ from the gateway's.

    Args:
        until_s: Expiry in the signature, as Unix time.
        now_s: Unix time.
    """
    return now_s - MAX_CLOCK_SKEW_S < until_s <= now_s + TOKEN_LIFETIME_S + MAX_CLOCK_SKEW_S


def sign_receipt(content: bytes, key: bytes) -> str:
    """Return the signature of a receipt: 64 hex digits. It is valid for no plan."""
    return hmac.new(key, _RECEIPT_CONTEXT + content, hashlib.sha256).hexdigest()


def is_signed_receipt(content: bytes, given: str, keys: Iterable[bytes]) -> bool:
    """Whether given, in ASCII, is the signature of a receipt under one of keys."""
    matches = [hmac.compare_digest(sign_receipt(content, one), given) for one in keys]
    return any(matches)


def _digest(message: bytes, key: bytes) -> str:
    return hmac.new(key, message, hashlib.sha256).hexdigest()


def _message(expiry: str, plan: str, token_ids: TokenIds) -> bytes:
    """Return the signed bytes."""
    encoded = plan.encode("ascii")
    # The NUL and the length separate the parts unambiguously.
    head = _CONTEXT + expiry.encode() + b"\0" + len(encoded).to_bytes(8, "little")
    return b"".join((head, encoded, token_bytes(token_ids)))


def _key(field: str, number: int, text: bytes) -> bytes:
    try:
        encoded = text.decode("ascii")
        # Hex digits are valid base64 too, but a random key in base64 never looks like hex.
        key = (
            bytes.fromhex(encoded)
            if _HEX.fullmatch(encoded)
            else base64.b64decode(encoded, validate=True)
        )
    except (UnicodeDecodeError, binascii.Error):
        raise InvalidInput(
            field, f"line {number} is neither hex nor base64", "write one key per line"
        ) from None
    if len(key) < MIN_KEY_BYTES:
        raise InvalidInput(
            field,
            f"line {number} is a key of {len(key)} bytes",
            f"write at least {MIN_KEY_BYTES} random bytes (openssl rand -hex {MIN_KEY_BYTES})",
        )
    return key
