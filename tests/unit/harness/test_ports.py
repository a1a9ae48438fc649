"""Ports that benchmarks and tests keep for servers they start later."""

from __future__ import annotations

import socket

import pytest

from harness.processes import free_port

LOOPBACK = "127.0.0.1"
KEPT, OTHERS = 50, 2000


def listening(port: int) -> socket.socket:
    """A server's socket, opened as servers do."""
    server = socket.socket()
    server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    server.bind((LOOPBACK, port))
    server.listen()
    return server


def test_nobody_else_is_given_a_kept_port() -> None:
    kept = {free_port() for _ in range(KEPT)}
    assert len(kept) == KEPT
    for _ in range(OTHERS):  # of some 14,000, so that by chance some would meet
        with listening(0) as other:
            assert other.getsockname()[1] not in kept


def test_a_server_comes_up_on_it_as_often_as_it_likes() -> None:
    port = free_port()
    for _ in range(2):
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection((LOOPBACK, port))
        with listening(port), socket.create_connection((LOOPBACK, port)):
            pass
