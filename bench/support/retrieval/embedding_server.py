"""An embeddings endpoint that answers at once, with vectors that were generated before."""

from __future__ import annotations

import contextlib
import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import numpy as np

DIMENSION = 384
_NUM_VECTORS = 1024


class _Server(ThreadingHTTPServer):
    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        vectors = np.random.default_rng(0).standard_normal((_NUM_VECTORS, DIMENSION))
        self.vectors = [
            json.dumps([round(float(value), 4) for value in vector]) for vector in vectors
        ]
        self.next = 0
        self.lock = threading.Lock()

    def reply(self, count: int) -> bytes:
        """Return the reply to a number of texts."""
        with self.lock:
            first, self.next = self.next, self.next + count
        rows = (
            f'{{"index":{i},"embedding":{self.vectors[(first + i) % _NUM_VECTORS]}}}'
            for i in range(count)
        )
        return f'{{"data":[{",".join(rows)}]}}'.encode()


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: _Server

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        content = self.server.reply(len(body["input"]))
        self.send_response(200)
        self.send_header("content-length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, *args: object) -> None:
        pass


@contextlib.contextmanager
def serving_embeddings() -> Iterator[str]:
    """Serve embeddings of 384 values from a thread, and yield the base URL."""
    server = _Server()
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}/v1"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
