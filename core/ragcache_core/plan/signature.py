"""The seal of a plan: by it an engine tells a gateway's plans from anybody else's.

HMAC-SHA256 (RFC 2104) over the plan and the prompt that it is for, under a key that gateways and
engines share, so that a seal that was seen stands for no other plan and no other prompt. Without it
whoever reaches an engine could name another's access domain, and learn by timing what is held there
or have KV of their own saved in it.

Several keys hold at a time, so that they can be exchanged while everything runs: the first one
seals, and any of them is believed.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import hmac
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final

import numpy as np

from ragcache_core.errors import InvalidInput

SIGNATURE_FIELD: Final = "ragcache_signature"
"""Beside the plan in kv_transfer_params."""

MIN_KEY_BYTES: Final = 32
"""As many as the digest has; a shorter key would be what is guessed."""

MAX_KEYS: Final = 8
"""Each is tried on a plan that is not sealed well."""

_CONTEXT: Final = b"ragcache-plan-seal-1\0"
_HEX: Final = re.compile(r"(?:[0-9a-fA-F]{2})+")


def parse_keys(field: str, content: bytes) -> tuple[bytes, ...]:
    """Keys from lines of text, each once: hex digits, or else base64. Blank lines are nothing.

    field: what errors name. Raises InvalidInput, which never repeats what a line says.
    """
    keys: dict[bytes, None] = {}
    for number, line in enumerate(content.split(b"\n"), 1):
        if text := line.strip():
            keys[_key(field, number, text)] = None
    if not 0 < len(keys) <= MAX_KEYS:
        raise InvalidInput(field, f"holds {len(keys)} keys", f"write 1 to {MAX_KEYS}, one a line")
    return tuple(keys)


def sign(plan: Mapping[str, Any], token_ids: Sequence[int], key: bytes) -> str:
    """Seal of a plan's JSON object for the prompt token_ids: 64 hex digits."""
    return hmac.new(key, _message(plan, token_ids), hashlib.sha256).hexdigest()


def is_signed(plan: object, token_ids: Sequence[int], given: object, keys: Iterable[bytes]) -> bool:
    """Whether given is the seal of plan for this prompt under one of keys.

    plan, given: as a client sent them; whatever they are, they are answered by False at worst.
    """
    if not (isinstance(plan, Mapping) and isinstance(given, str) and given.isascii()):
        return False
    try:
        message = _message(plan, token_ids)
    except (TypeError, ValueError, RecursionError):
        return False  # no JSON that a gateway writes
    # All of them, each in constant time, so that how long it took tells nothing of any.
    matches = [
        hmac.compare_digest(hmac.new(key, message, hashlib.sha256).hexdigest(), given)
        for key in keys
    ]
    return any(matches)


def _message(plan: Mapping[str, Any], token_ids: Sequence[int]) -> bytes:
    """What is sealed. Raises TypeError, ValueError or RecursionError for what is no JSON."""
    # One text for one value, however it was written on its way.
    said = json.dumps(plan, sort_keys=True, separators=(",", ":"), allow_nan=False).encode()
    # With its length in front, no plan's end can pass for a prompt's beginning.
    tokens = np.asarray(token_ids, dtype="<i8").tobytes()
    return b"".join((_CONTEXT, len(said).to_bytes(8, "little"), said, tokens))


def _key(field: str, number: int, text: bytes) -> bytes:
    try:
        said = text.decode("ascii")
        # Hex digits are base64 as well; nobody writes a random key in base64 that looks like hex.
        key = bytes.fromhex(said) if _HEX.fullmatch(said) else base64.b64decode(said, validate=True)
    except (UnicodeDecodeError, binascii.Error):
        raise InvalidInput(
            field, f"line {number} is neither hex nor base64", "write one key a line"
        ) from None
    if len(key) < MIN_KEY_BYTES:
        raise InvalidInput(
            field,
            f"line {number} is a key of {len(key)} bytes",
            f"write at least {MIN_KEY_BYTES} random bytes (openssl rand -hex {MIN_KEY_BYTES})",
        )
    return key
