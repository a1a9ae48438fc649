"""The client of the Kubernetes API against a fake server."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import gc
import json
import socket
import ssl
import threading
import warnings
from collections.abc import Callable, Coroutine, Iterator
from contextlib import aclosing
from pathlib import Path

import pytest

from harness.cluster.certificates import make_certificates
from ragcache_operator.kube.api import Api
from ragcache_operator.kube.resources import PODS, SERVICES
from tests.kit.wait import until

HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nTransfer-Encoding: chunked\r\n\r\n"
EVENT = b'{"type": "ADDED", "object": {"metadata": {"name": "one"}}}\n'

unanswered: list[bytes] = []
"""Requests for Services, which the silent server never answers."""


@pytest.fixture
def silent(tmp_path: Path) -> Iterator[Path]:
    """A kubeconfig of a server that starts a watch and then neither answers nor closes."""
    pair = make_certificates(tmp_path / "keys", names=[], addresses=["127.0.0.1"])
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(pair.server_certificate, pair.server_key)
    connections = contextlib.ExitStack()
    listener = socket.create_server(("127.0.0.1", 0))

    def serve() -> None:
        while True:
            try:
                accepted, _ = listener.accept()
            except OSError:
                return
            with contextlib.suppress(OSError):  # the client may leave at any moment
                connection = context.wrap_socket(accepted, server_side=True)
                connections.enter_context(connection)
                if b"/services" in (request := connection.recv(1 << 16)):
                    unanswered.append(request)
                    continue
                connection.sendall(HEAD + b"%x\r\n%s\r\n" % (len(EVENT), EVENT))

    thread = threading.Thread(target=serve)
    thread.start()
    cluster = {
        "server": f"https://127.0.0.1:{listener.getsockname()[1]}",
        "certificate-authority-data": base64.b64encode(pair.authority.read_bytes()).decode("ascii"),
    }
    config = {
        "apiVersion": "v1",
        "kind": "Config",
        "clusters": [{"name": "one", "cluster": cluster}],
        "users": [{"name": "one", "user": {"token": "none"}}],
        "contexts": [{"name": "one", "context": {"cluster": "one", "user": "one"}}],
        "current-context": "one",
    }
    path = tmp_path / "kubeconfig"
    path.write_text(json.dumps(config))
    yield path
    listener.shutdown(socket.SHUT_RDWR)
    listener.close()
    thread.join()
    connections.close()


def unclosed(watching: Callable[[], Coroutine[None, None, None]]) -> list[str]:
    """Return what is found unclosed after a client has watched and was closed."""
    gc.collect()
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always", ResourceWarning)
        asyncio.run(watching())
        gc.collect()
    return [str(one.message) for one in said]


def test_an_abandoned_watch_leaves_no_connection(silent: Path) -> None:
    async def watch() -> None:
        async with await Api.connect(silent) as api, aclosing(api.watch(PODS, "1")) as events:
            assert await anext(events) == ("ADDED", {"metadata": {"name": "one"}})

    assert unclosed(watch) == []


def test_a_watch_that_is_cancelled_before_its_answer_leaves_no_connection(silent: Path) -> None:
    async def watch() -> None:
        async with await Api.connect(silent) as api:
            watches = [api.watch(SERVICES, str(number)) for number in range(8)]
            reading = [asyncio.ensure_future(anext(events)) for events in watches]
            await until(lambda: len(unanswered) == len(watches), "the server has every request")
            for one in reading:
                one.cancel()
            await asyncio.wait(reading)

    unanswered.clear()
    assert unclosed(watch) == []
