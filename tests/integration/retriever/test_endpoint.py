"""An embedder behind HTTP: a real local server that can be told to misbehave."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator, Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ragcache_core.errors import InvalidInput, Unavailable
from ragcache_retriever.embedding import endpoint as embedding_endpoint
from ragcache_retriever.embedding.endpoint import PROBES, EmbeddingEndpoint
from ragcache_wire.v1 import retriever_pb2 as pb
from tests.kit.retriever import make_knowledge_base, serving, tokenizer_of

Answer = Callable[[dict[str, Any]], tuple[int, Any]]


def vectors_for(body: dict[str, Any]) -> tuple[int, Any]:
    """Vectors as OpenAI sends them, here out of order and not of length 1."""
    data = [
        {"index": i, "embedding": [float(len(text)), 0.0, 1.0]}
        for i, text in enumerate(body["input"])
    ]
    return 200, {"data": data[::-1]}


class Server(ThreadingHTTPServer):
    """answers: what to say next, in order; then vectors_for. requests: (path, key, body)."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.answers: list[Answer] = []
        self.requests: list[tuple[str, str | None, dict[str, Any]]] = []

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}/v1"


class Handler(BaseHTTPRequestHandler):
    server: Server

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        self.server.requests.append((self.path, self.headers["authorization"], body))
        answer = self.server.answers.pop(0) if self.server.answers else vectors_for
        status, reply = answer(body)
        content = reply if isinstance(reply, bytes) else json.dumps(reply).encode()
        self.send_response(status)
        self.send_header("content-length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, *args: object) -> None:
        pass


@pytest.fixture
def server() -> Iterator[Server]:
    server = Server()
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    yield server
    server.shutdown()
    thread.join()
    server.server_close()


@pytest.fixture
async def endpoint(server: Server):  # type: ignore[no-untyped-def]
    endpoint = EmbeddingEndpoint(server.url, "small", "secret")
    yield endpoint
    await endpoint.close()


async def test_it_learns_its_dimension_and_speaks_the_protocol(
    server: Server, endpoint: EmbeddingEndpoint
) -> None:
    await endpoint.start()
    assert endpoint.dimension == 3
    assert endpoint.identity.startswith("endpoint:small:")
    vectors = await endpoint.embed(["a", "abc"], urgent=False)
    assert vectors == pytest.approx(
        np.array([[1, 0, 1], [3, 0, 1]]) / np.sqrt([[2], [10]]), abs=1e-6
    )
    path, key, body = server.requests[-1]
    assert (path, key) == ("/v1/embeddings", "Bearer secret")
    assert body == {"model": "small", "input": ["a", "abc"], "encoding_format": "float"}


async def test_a_temporary_failure_is_retried(server: Server, endpoint: EmbeddingEndpoint) -> None:
    await endpoint.start()
    server.answers = [lambda _: (503, {}), lambda _: (429, {})]
    assert (await endpoint.embed(["a"], urgent=True)).shape == (1, 3)
    assert len(server.requests) == 4


async def test_a_deadline_ends_the_retries(
    server: Server, endpoint: EmbeddingEndpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    await endpoint.start()
    monkeypatch.setattr(embedding_endpoint, "QUERY_DEADLINE_S", 2.0)
    server.answers = [lambda _: (503, {})] * 100
    with pytest.raises(Unavailable, match=r"503 within 2 s"):
        await endpoint.embed(["a"], urgent=True)


async def test_a_server_that_is_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(embedding_endpoint, "QUERY_DEADLINE_S", 2.0)
    endpoint = EmbeddingEndpoint("http://127.0.0.1:9/v1", "small")
    with pytest.raises(Unavailable, match="ConnectError"):
        await endpoint.start()
    await endpoint.close()


async def test_a_refusal_at_start_is_an_error_of_the_settings(
    server: Server, endpoint: EmbeddingEndpoint
) -> None:
    server.answers = [lambda _: (401, {"error": "no such key"})]
    with pytest.raises(InvalidInput, match=r"401.*no such key"):
        await endpoint.start()
    await endpoint.start()
    server.answers = [lambda _: (401, {"error": "no such key"})]
    with pytest.raises(Unavailable, match=r"401.*no such key"):
        await endpoint.embed(["a"], urgent=True)
    assert server.requests[0][1] == "Bearer secret"


@pytest.mark.parametrize(("urgent", "field"), [(True, "query"), (False, "document.text")])
async def test_a_refused_text_is_an_error_of_the_caller(
    server: Server, endpoint: EmbeddingEndpoint, urgent: bool, field: str
) -> None:
    await endpoint.start()
    server.answers = [lambda _: (400, {"error": "too many tokens"})]
    with pytest.raises(InvalidInput, match="too many tokens") as caught:
        await endpoint.embed(["a"], urgent=urgent)
    assert caught.value.field == field


@pytest.mark.parametrize(
    "reply",
    [
        b"not json",
        [],
        {"data": "?"},
        {"data": []},
        {"data": [{"index": 0}]},
        {"data": [{"index": 0, "embedding": []}]},
        {"data": [{"index": 0, "embedding": ["x"]}]},
        {"data": [{"index": 0, "embedding": [1.0, float("nan")]}]},
        {"data": [{"index": 0, "embedding": [1.0]}, {"index": 1, "embedding": [1.0]}]},
    ],
)
async def test_a_reply_without_embeddings(
    server: Server, endpoint: EmbeddingEndpoint, reply: Any
) -> None:
    server.answers = [lambda _: (200, reply)]
    with pytest.raises(Unavailable):
        await endpoint.start()


async def test_vectors_that_change_their_length(
    server: Server, endpoint: EmbeddingEndpoint
) -> None:
    await endpoint.start()
    server.answers = [lambda _: (200, {"data": [{"index": 0, "embedding": [1.0]}]})]
    with pytest.raises(Unavailable, match="from 3 to 1"):
        await endpoint.embed(["a"], urgent=True)


def test_an_invalid_address_is_refused() -> None:
    with pytest.raises(InvalidInput) as caught:
        EmbeddingEndpoint("http://host:port/v1", "small")
    assert caught.value.field == "RAGCACHE_EMBEDDER"


async def test_many_texts_are_several_requests(server: Server, endpoint: EmbeddingEndpoint) -> None:
    await endpoint.start()
    vectors = await endpoint.embed(["a" * (i + 1) for i in range(70)], urgent=False)
    assert vectors[:, 0] == pytest.approx([i / np.hypot(i, 1) for i in range(1, 71)], abs=1e-6)
    assert [len(body["input"]) for _, _, body in server.requests] == [3, 32, 32, 6]
    assert (await endpoint.embed([], urgent=False)).shape == (0, 3)


async def test_it_keeps_the_stored_identity_of_the_same_model(server: Server) -> None:
    async def identity_of(name: str, reply: Answer, known: Sequence[str] = ()) -> str:
        server.answers = [reply]
        endpoint = EmbeddingEndpoint(server.url, name)
        await endpoint.start()
        endpoint.adopt(known)
        await endpoint.close()
        return endpoint.identity

    stored = await identity_of("small", random_vectors(0))
    known = ["model:0123", "endpoint:small:no sketch", stored]
    almost = random_vectors(0, noise=0.01)
    assert await identity_of("small", almost) != stored
    assert await identity_of("small", almost, known) == stored
    assert await identity_of("renamed", almost, known) == stored


async def test_another_model_under_the_same_name_gets_another_identity(
    server: Server, caplog: pytest.LogCaptureFixture
) -> None:
    identities: list[str] = []
    for reply in (random_vectors(0), random_vectors(1), random_vectors(0, noise=0.2)):
        server.answers = [reply]
        endpoint = EmbeddingEndpoint(server.url, "small")
        await endpoint.start()
        endpoint.adopt(identities[:1])
        identities.append(endpoint.identity)
        await endpoint.close()
    assert len(set(identities)) == 3
    assert caplog.text.count("another model under the same name") == 2


async def test_only_another_model_embeds_the_documents_again(
    server: Server, tmp_path: Path, tiny_model: Path
) -> None:
    async def embedded_texts(reply: Answer, document: pb.Document | None = None) -> int:
        """Serve with an endpoint and return how many texts it embedded, probes left out."""
        server.requests.clear()
        server.answers = [reply] * 10
        endpoint = EmbeddingEndpoint(server.url, "small")
        knowledge_base = make_knowledge_base(tmp_path, tokenizer_of(tiny_model), embedder=endpoint)
        async with serving(knowledge_base) as client:
            if document is not None:
                await client.upsert_document(document)
            await knowledge_base.wait_until_idle()
        return sum(len(body["input"]) for _, _, body in server.requests) - len(PROBES)

    page = pb.Document(
        collection="default", id="d", text="It is.", content_type=pb.CONTENT_TYPE_TEXT
    )
    assert await embedded_texts(random_vectors(0), page) == 1
    assert await embedded_texts(random_vectors(0, noise=0.01)) == 0
    assert await embedded_texts(random_vectors(1)) == 1


def random_vectors(seed: int, noise: float = 0.0) -> Answer:
    """Answer with vectors of a seed, to which noise is added in proportion to their length."""

    def answer(body: dict[str, Any]) -> tuple[int, Any]:
        shape = len(body["input"]), 64
        vectors = np.random.default_rng(seed).standard_normal(shape)
        vectors += noise * np.random.default_rng(9).standard_normal(shape)
        data = [{"index": i, "embedding": list(row)} for i, row in enumerate(vectors)]
        return 200, {"data": data}

    return answer
