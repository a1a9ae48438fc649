"""Serves JSON to POST requests from threads, in place of a model's endpoint."""

from __future__ import annotations

import contextlib
import json
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

Reply = Callable[[Any], bytes]
"""From the content of a request to that of its reply. Several threads call it."""


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    reply: Reply

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        content = type(self).reply(body)
        self.send_response(200)
        self.send_header("content-length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, *args: object) -> None:
        pass


@contextlib.contextmanager
def serving_json(reply: Reply) -> Iterator[str]:
    """Serve all paths, and yield the base URL."""
    handler = type("Handler", (_Handler,), {"reply": staticmethod(reply)})
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}/v1"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
