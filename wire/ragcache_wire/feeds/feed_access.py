"""Who may read a feed: callers with a token under a signing key.

A feed tells which documents are asked for, so a reader has to prove that it belongs to the system.
"""

from __future__ import annotations

import ipaddress
import os
import time
from collections.abc import Callable, Iterable
from typing import Final

from ragcache_core.errors import Unauthenticated
from ragcache_core.identity.feed_token import NONCE_BYTES, make_token, token_problem
from ragcache_wire.watched.signing_keys import SigningKeys

TOKEN_METADATA: Final = "ragcache-feed-token"
"""Name of the token in the metadata of a call."""

_VARIABLE: Final = "RAGCACHE_SIGNING_KEY_FILE"


class FeedGuard:
    """Admits readers of one service's feed.

    Args:
        keys: The signing keys. Without them only a service that listens on loopback has a feed.
        listen: "host:port" that the service listens on.
        method: Full name of the method (``/package.Service/Method``).
        clock: Returns the Unix time in seconds.
    """

    def __init__(
        self,
        keys: SigningKeys | None,
        listen: str,
        method: str,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._keys = keys
        self._is_local = is_loopback(listen)
        self._listen = listen
        self._method = method
        self._clock = clock

    def check(self, metadata: Iterable[tuple[str, str | bytes]] | None) -> None:
        """Check the metadata of a call.

        Raises:
            Unauthenticated: The caller has no valid token, or this service cannot check one.
        """
        if self._keys is None:
            if self._is_local:
                return
            raise Unauthenticated(
                f"{_VARIABLE} of this service",
                f"is not set, and it listens on {self._listen}",
                "set it to a file with the gateway's keys, or listen on loopback only",
            )
        tokens = [value for name, value in metadata or () if name == TOKEN_METADATA]
        if len(tokens) != 1 or not isinstance(tokens[0], str):
            raise Unauthenticated(
                TOKEN_METADATA,
                "is missing",
                f"set {_VARIABLE} of the caller to a file with this service's keys",
            )
        problem = token_problem(tokens[0], self._method, self._keys.current(), self._clock())
        if problem is not None:
            raise Unauthenticated(
                TOKEN_METADATA,
                problem,
                f"give both services the same keys in {_VARIABLE}, and set their clocks",
            )


def feed_metadata(
    keys: SigningKeys | None, method: str, clock: Callable[[], float] = time.time
) -> tuple[tuple[str, str], ...]:
    """Return the metadata of a call that reads a feed; nothing without keys."""
    if keys is None:
        return ()
    token = make_token(method, keys.current()[0], clock(), os.urandom(NONCE_BYTES))
    return ((TOKEN_METADATA, token),)


def is_loopback(listen: str) -> bool:
    """Tell whether "host:port" can be reached from this machine alone."""
    host = listen.rpartition(":")[0].strip("[]")
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
