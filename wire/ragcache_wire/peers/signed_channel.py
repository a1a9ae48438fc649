"""A gRPC channel whose calls carry the token of a peer."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar, cast

import grpc
import grpc.aio

from ragcache_wire.peers.peer_access import PeerTokens
from ragcache_wire.watched.signing_keys import SigningKeys

C = TypeVar("C", grpc.Channel, grpc.aio.Channel)


def signed(channel: C, keys: SigningKeys | None) -> C:
    """Return the channel with a token in each call. Without keys, it stays as it is.

    Interceptors of gRPC would do the same, but each of them adds a task or a thread to every call.
    """
    return channel if keys is None else cast(C, _SignedChannel(channel, PeerTokens(keys)))


class _SignedChannel:
    """Makes the calls of a channel, and closes it."""

    def __init__(self, channel: Any, tokens: PeerTokens) -> None:
        self._channel = channel
        self._tokens = tokens
        self.close = channel.close

    def unary_unary(self, method: str, *args: Any, **options: Any) -> Callable[..., Any]:
        """Return the call of a method with one request and one reply."""
        return self._signed(method, self._channel.unary_unary(method, *args, **options))

    def unary_stream(self, method: str, *args: Any, **options: Any) -> Callable[..., Any]:
        """Return the call of a method with one request and several replies."""
        return self._signed(method, self._channel.unary_stream(method, *args, **options))

    def stream_unary(self, method: str, *args: Any, **options: Any) -> Callable[..., Any]:
        """Return the call of a method with several requests and one reply."""
        return self._signed(method, self._channel.stream_unary(method, *args, **options))

    def _signed(self, method: str, call: Callable[..., Any]) -> Callable[..., Any]:
        token = self._tokens.metadata

        def signed_call(request: Any, metadata: Any = None, **options: Any) -> Any:
            return call(request, metadata=(*(metadata or ()), *token(method)), **options)

        return signed_call
