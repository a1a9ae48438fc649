"""Who may call a part of the platform: callers with a token under a signing key.

Parts hold documents, prompts and KV, so a caller has to prove that it belongs to the platform. The
rule is the same for gRPC calls, for connections that carry values, and for an engine's HTTP port.
"""

from __future__ import annotations

import ipaddress
import os
import time
from collections.abc import Callable, Iterable
from typing import Final

from ragcache_core.errors import Unauthenticated
from ragcache_core.identity.peer_token import (
    NONCE_BYTES,
    TOKEN_LIFETIME_S,
    admits_until_s,
    is_proof,
    make_proof,
    make_token,
    token_problem,
)
from ragcache_wire.watched.signing_keys import SigningKeys

TOKEN_METADATA: Final = "ragcache-token"
"""Name of the token in the metadata of a call, and in the headers of a request."""

TOKEN_REUSE_S: Final = TOKEN_LIFETIME_S / 3
"""How long a caller uses one token. A token that waits in a queue then is still valid."""

MAX_ADMITTED: Final = 4096
"""Most valid tokens that a guard keeps, so that it verifies each of them once."""

Metadata = Iterable[tuple[str, str | bytes]]

_VARIABLE: Final = "RAGCACHE_SIGNING_KEY_FILE"
_FIX: Final = f"give both services the same keys in {_VARIABLE}, and set their clocks"


class PeerGuard:
    """Admits callers of one service. Safe to use from any thread.

    Args:
        keys: The signing keys. Without them only a service that listens on loopback has callers.
        listen: "host:port" that the service listens on.
        clock: Returns the Unix time in seconds.
    """

    def __init__(
        self, keys: SigningKeys | None, listen: str, clock: Callable[[], float] = time.time
    ) -> None:
        self._keys = keys
        self._is_local = is_loopback(listen)
        self._listen = listen
        self._clock = clock
        # One tuple, so that no thread adds a token under old keys to those under new ones.
        self._admitted: tuple[tuple[bytes, ...], dict[tuple[str, str], float]] = ((), {})

    def check(self, method: str, metadata: Metadata | None) -> None:
        """Check the metadata of a call.

        Args:
            method: Full name of the method (``/package.Service/Method``), or the path of a URL.
            metadata: Names, in lower case, and values.

        Raises:
            Unauthenticated: The caller has no valid token, or this service cannot check one.
        """
        keys = self._current_keys()
        if keys is None:
            return
        tokens = [value for name, value in metadata or () if name == TOKEN_METADATA]
        if len(tokens) != 1 or not isinstance(tokens[0], str):
            raise Unauthenticated(
                TOKEN_METADATA,
                "is missing",
                f"set {_VARIABLE} of the caller to a file with this service's keys",
            )
        token, now_s, known = tokens[0], self._clock(), self._admitted
        if known[0] is not keys:
            known = self._admitted = keys, {}
        admitted = known[1]
        if now_s < admitted.get((method, token), 0.0):
            return
        problem = token_problem(token, method, keys, now_s)
        if problem is not None:
            raise Unauthenticated(TOKEN_METADATA, problem, _FIX)
        if len(admitted) >= MAX_ADMITTED:
            admitted.clear()
        admitted[method, token] = admits_until_s(token)

    def check_proof(self, proof: bytes, challenge: bytes, store: bytes) -> None:
        """Check the proof of a connection that carries values.

        Raises:
            Unauthenticated: The client has no key, or this service cannot check its proof.
        """
        keys = self._current_keys()
        if keys is not None and not is_proof(proof, challenge, store, keys):
            problem = "is not signed with a key of this service" if proof else "is missing"
            raise Unauthenticated("proof", problem, _FIX)

    def _current_keys(self) -> tuple[bytes, ...] | None:
        """Return the valid keys, or None if no caller needs one. Raises Unauthenticated."""
        if self._keys is not None:
            return self._keys.current()
        if self._is_local:
            return None
        raise Unauthenticated(
            f"{_VARIABLE} of this service",
            f"is not set, and it listens on {self._listen}",
            "set it to a file with the gateway's keys, or listen on loopback only",
        )


class PeerTokens:
    """The tokens of one caller, which it makes every TOKEN_REUSE_S. Safe to use from any thread.

    Args:
        keys: The signing keys; the first one signs. None: calls carry no token.
        clock: Returns the Unix time in seconds.
    """

    def __init__(self, keys: SigningKeys | None, clock: Callable[[], float] = time.time) -> None:
        self._keys = keys
        self._clock = clock
        self._made: dict[str, tuple[bytes, float, tuple[tuple[str, str], ...]]] = {}

    def metadata(self, method: str) -> tuple[tuple[str, str], ...]:
        """Return the metadata of a call of a method; nothing without keys."""
        if self._keys is None:
            return ()
        key, now_s = self._keys.current()[0], self._clock()
        made = self._made.get(method)
        if made is not None and made[0] is key and 0 <= now_s - made[1] < TOKEN_REUSE_S:
            return made[2]
        token = make_token(method, key, now_s, os.urandom(NONCE_BYTES))
        found = ((TOKEN_METADATA, token),)
        self._made[method] = (key, now_s, found)
        return found


def proof_for(keys: SigningKeys | None, challenge: bytes, store: bytes) -> bytes:
    """Return the proof of a client of the store with this id; nothing without keys."""
    return b"" if keys is None else make_proof(challenge, store, keys.current()[0])


def is_loopback(listen: str) -> bool:
    """Tell whether "host:port" can be reached from this machine alone."""
    host = listen.rpartition(":")[0].strip("[]")
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
