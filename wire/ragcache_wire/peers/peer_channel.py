"""gRPC channels to the other parts of a platform: encrypted, and with a token in each call."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from typing import Any, Final, cast

import grpc
import grpc.aio

from ragcache_wire.channel import OPTIONS, Option, with_options
from ragcache_wire.peers.certificates import Certificate, Certificates
from ragcache_wire.peers.credentials import Credentials
from ragcache_wire.peers.peer_access import PeerTokens

_NAME_OPTION: Final = "grpc.ssl_target_name_override"


def open_channel(
    address: str, credentials: Credentials, options: Iterable[Option] = OPTIONS
) -> grpc.aio.Channel:
    """Return a channel of grpc.aio to a part at address ("host:port")."""
    secure, plain = grpc.aio.secure_channel, grpc.aio.insecure_channel
    return cast(grpc.aio.Channel, _open(address, credentials, options, (secure, plain)))


def open_blocking_channel(
    address: str, credentials: Credentials, options: Iterable[Option] = OPTIONS
) -> grpc.Channel:
    """Return a channel for threads to a part at address ("host:port")."""
    secure, plain = grpc.secure_channel, grpc.insecure_channel
    return cast(grpc.Channel, _open(address, credentials, options, (secure, plain)))


def add_port(server: grpc.Server | grpc.aio.Server, listen: str, credentials: Credentials) -> int:
    """Have a server listen at "host:port", and return the port. Raises RuntimeError."""
    if credentials.certificates is None:
        return server.add_insecure_port(listen)
    return server.add_secure_port(listen, credentials.certificates.server_credentials())


def _open(
    address: str,
    credentials: Credentials,
    options: Iterable[Option],
    kinds: tuple[Callable[..., Any], Callable[..., Any]],
) -> Any:
    secure, plain = kinds
    certificates = credentials.certificates
    if certificates is None:
        channel = plain(address, options=list(options))
        if credentials.keys is None:
            return channel
        return _PeerChannel(_FixedChannel(channel), PeerTokens(credentials.keys))

    def connect(certificate: Certificate) -> Any:
        named = with_options(options, (_NAME_OPTION, certificate.name))
        return secure(address, certificate.channel_credentials(), options=named)

    return _PeerChannel(_RenewedChannel(certificates, connect), PeerTokens(credentials.keys))


class _FixedChannel:
    """A channel that stays as it is."""

    def __init__(self, channel: Any) -> None:
        self._channel = channel
        self.close = channel.close

    def calls(self, make: Callable[[Any], Callable[..., Any]]) -> Callable[[], Callable[..., Any]]:
        """Return what returns the call of a method."""
        call = make(self._channel)
        return lambda: call


class _RenewedChannel:
    """A channel that is opened again when the certificate has changed. Safe for threads.

    Calls that run go on. The channel before is closed at the next change only.
    """

    def __init__(self, certificates: Certificates, connect: Callable[[Certificate], Any]) -> None:
        self._certificates = certificates
        self._connect = connect
        self._lock = threading.Lock()
        self._used = certificates.current()
        self._channel = connect(self._used)
        self._before: Any = None

    def close(self, *args: Any, **options: Any) -> Any:
        """Close as the channel does."""
        self._before = None
        return self._channel.close(*args, **options)

    def calls(self, make: Callable[[Any], Callable[..., Any]]) -> Callable[[], Callable[..., Any]]:
        """Return what returns the call of a method on the current channel."""
        made = self._channel, make(self._channel)

        def current() -> Callable[..., Any]:
            nonlocal made
            channel = self._current()
            if made[0] is not channel:
                made = channel, make(channel)
            return made[1]

        return current

    def _current(self) -> Any:
        certificate = self._certificates.current()
        if certificate is not self._used:
            with self._lock:
                if certificate is not self._used:
                    self._before, self._channel = self._channel, self._connect(certificate)
                    self._used = certificate
        return self._channel


class _PeerChannel:
    """Makes the calls of a channel, and closes it.

    Interceptors of gRPC would do the same, but each of them adds a task or a thread to every call.
    """

    def __init__(self, channel: _FixedChannel | _RenewedChannel, tokens: PeerTokens) -> None:
        self._channel = channel
        self._tokens = tokens
        self.close = channel.close

    def unary_unary(self, method: str, *args: Any, **options: Any) -> Callable[..., Any]:
        """Return the call of a method with one request and one reply."""
        return self._signed(method, lambda to: to.unary_unary(method, *args, **options))

    def unary_stream(self, method: str, *args: Any, **options: Any) -> Callable[..., Any]:
        """Return the call of a method with one request and several replies."""
        return self._signed(method, lambda to: to.unary_stream(method, *args, **options))

    def stream_unary(self, method: str, *args: Any, **options: Any) -> Callable[..., Any]:
        """Return the call of a method with several requests and one reply."""
        return self._signed(method, lambda to: to.stream_unary(method, *args, **options))

    def _signed(self, method: str, make: Callable[[Any], Callable[..., Any]]) -> Callable[..., Any]:
        token, call = self._tokens.metadata, self._channel.calls(make)

        def signed_call(request: Any, metadata: Any = None, **options: Any) -> Any:
            return call()(request, metadata=(*(metadata or ()), *token(method)), **options)

        return signed_call
