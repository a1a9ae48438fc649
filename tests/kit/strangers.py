"""Callers of a component's ports that lack what its own callers have."""

from __future__ import annotations

import socket
import ssl
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import grpc

from ragcache_wire.channel import OPTIONS
from ragcache_wire.peers.certificates import AUTHORITIES_FILE, Certificates

TIMEOUT_S: Final = 10.0


def channels(own: Path, stranger: Path, address: str, name: str) -> Iterator[grpc.Channel]:
    """Yield channels without a certificate, and with one of another authority.

    Args:
        own: Folder of the platform's certificate. Its authorities are public.
        stranger: Folder of a certificate of another authority, with these authorities.
        name: In the platform's certificate.
    """
    ours = (own / AUTHORITIES_FILE).read_bytes()
    options = [("grpc.ssl_target_name_override", name), *OPTIONS]
    yield grpc.insecure_channel(address, options=OPTIONS)
    yield grpc.secure_channel(address, grpc.ssl_channel_credentials(ours), options=options)
    theirs = Certificates(stranger).current().channel_credentials()
    yield grpc.secure_channel(address, theirs, options=options)


def status(channel: grpc.Channel, method: str, metadata: Any = ()) -> grpc.StatusCode:
    """Call a method with an empty message and return the status."""
    try:
        channel.unary_unary(method, None, None)(b"", metadata=metadata, timeout=TIMEOUT_S)
    except grpc.RpcError as error:
        return error.code()
    return grpc.StatusCode.OK


def greeting(sock: socket.socket, context: ssl.SSLContext, name: str) -> bytes:
    """Return what a data port sends to a client; nothing if it refuses the client."""
    try:
        with context.wrap_socket(sock, server_hostname=name) as tls:
            return tls.recv(64)
    except OSError:
        return b""
