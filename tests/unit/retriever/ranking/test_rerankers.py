"""A reranker behind an endpoint, asked over real HTTP; failures leave the order as it is."""

from __future__ import annotations

import contextlib
import json
import logging
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from ragcache_core.errors import InvalidInput
from ragcache_retriever.ranking.rerankers import PAUSE_S, CandidateText, RerankEndpoint

Answer = Callable[[dict[str, Any]], tuple[int, bytes]]


def scores_of(reranker: RerankEndpoint, *texts: str) -> list[float] | None:
    found = reranker.scores("which one?", [CandidateText("title", text) for text in texts])
    return None if found is None else found.tolist()


class RerankServer:
    """An endpoint with /v1/rerank whose answer a test sets."""

    def __init__(self) -> None:
        self.answer: Answer = lambda body: (200, b"{}")
        self.bodies: list[dict[str, Any]] = []
        self.keys: list[str | None] = []
        outer = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["content-length"])))
                outer.bodies.append(body)
                outer.keys.append(self.headers["authorization"])
                status, content = outer.answer(body)
                assert self.path == "/v1/rerank"
                with contextlib.suppress(OSError):  # the client has gone at its deadline
                    self.send_response(status)
                    self.send_header("content-length", str(len(content)))
                    self.end_headers()
                    self.wfile.write(content)

            def log_message(self, *_: object) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_port}/v1"
        self._thread = threading.Thread(target=self._server.serve_forever)
        self._thread.start()

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


@pytest.fixture
def server() -> Iterator[RerankServer]:
    server = RerankServer()
    yield server
    server.close()


def results(*scored: tuple[int, float]) -> tuple[int, bytes]:
    found = [{"index": index, "relevance_score": score} for index, score in scored]
    return 200, json.dumps({"results": found}).encode()


def test_scores_are_those_of_the_reply_in_the_order_of_the_texts(server: RerankServer) -> None:
    server.answer = lambda body: results((1, 0.9), (0, 0.1))
    reranker = RerankEndpoint(server.url, "m", "secret")
    scores = scores_of(reranker, "a", "b")
    reranker.close()
    assert scores == [0.1, 0.9]
    assert server.keys == ["Bearer secret"]
    assert server.bodies[0]["model"] == "m"
    assert server.bodies[0]["query"] == "which one?"
    assert server.bodies[0]["documents"] == ["title\na", "title\nb"]


@pytest.mark.parametrize(
    "answer",
    [
        (500, b"overloaded"),
        (200, b"no json"),
        (200, b"[]"),
        (200, b"{}"),
        results((0, 1.0)),
        results((0, 1.0), (0, 0.5)),
        results((0, 1.0), (2, 0.5)),
        (200, b'{"results": [{"index": 0, "relevance_score": NaN}, {"index": 1}]}'),
        (200, b" " * (1 << 21)),
    ],
)
def test_a_failure_is_logged_and_the_endpoint_rests(
    server: RerankServer, answer: tuple[int, bytes], caplog: pytest.LogCaptureFixture
) -> None:
    now = [100.0]
    server.answer = lambda body: answer
    reranker = RerankEndpoint(server.url, "m", clock=lambda: now[0])
    with caplog.at_level(logging.WARNING):
        assert scores_of(reranker, "a", "b") is None
    assert "reranker: failed" in caplog.text
    server.answer = lambda body: results((0, 1.0), (1, 0.5))
    assert scores_of(reranker, "a", "b") is None
    assert len(server.bodies) == 1
    now[0] += PAUSE_S
    assert scores_of(reranker, "a", "b") is not None
    reranker.close()


def test_a_silent_endpoint_is_left_at_the_deadline(server: RerankServer) -> None:
    released = threading.Event()

    def silent(body: dict[str, Any]) -> tuple[int, bytes]:
        released.wait(600)
        return results((0, 1.0))

    server.answer = silent
    reranker = RerankEndpoint(server.url, "m", deadline_s=0.05)
    assert scores_of(reranker, "a") is None
    released.set()
    reranker.close()


def test_an_unreachable_endpoint_leaves_the_order() -> None:
    reranker = RerankEndpoint("http://127.0.0.1:9/v1", "m")
    assert scores_of(reranker, "a") is None
    reranker.close()


def test_a_bad_url_is_refused() -> None:
    with pytest.raises(InvalidInput):
        RerankEndpoint("http://host:port/v1", "m")
