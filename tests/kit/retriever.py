"""Parts that the retriever's tests share: a small embedder, and a server in the test's process."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import hashlib
import re
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import grpc
import numpy as np
import pytest

from ragcache_core.identity.keys import token_digest
from ragcache_retriever.concurrency.query_gate import QueryGate
from ragcache_retriever.documents.collection import Chunking, CollectionDefaults
from ragcache_retriever.documents.splitter import SplitLimit
from ragcache_retriever.documents.tokenizer import ServingTokenizer, load_serving_tokenizer
from ragcache_retriever.embedding import endpoint
from ragcache_retriever.embedding.embedder import Embedder, Vectors, normalised
from ragcache_retriever.knowledge_base import filter_cache, searching
from ragcache_retriever.knowledge_base.coordinator import KnowledgeBase
from ragcache_retriever.preparer import DocumentPreparer
from ragcache_retriever.ranking import hybrid
from ragcache_retriever.ranking.hybrid import HybridRanking
from ragcache_retriever.search.faiss_base import SearchEffort
from ragcache_retriever.search.faiss_index import BuildThread, FaissIndexes, IndexOptions
from ragcache_retriever.search.vector_index import VectorIndexes
from ragcache_retriever.service import SERVICE_NAME, RetrieverService
from ragcache_retriever.store.document_store import DocumentStore
from ragcache_retriever.store.sqlite import lexical
from ragcache_retriever.store.sqlite.document_store import open_sqlite
from ragcache_retriever.store.sqlite.files.backup import INDEXES_FOLDER
from ragcache_retriever.store.sqlite.files.reserve import DiskReserve
from ragcache_wire.clients import retriever_client
from ragcache_wire.clients.retriever_client import RetrieverClient
from ragcache_wire.server import CallInterceptor, GrpcServer
from ragcache_wire.status import from_rpc_error
from ragcache_wire.v1 import retriever_pb2 as pb
from ragcache_wire.v1 import retriever_pb2_grpc
from tests.kit.limits import LIMIT_S

DEFAULTS = CollectionDefaults(Chunking(size_tokens=64, overlap_tokens=16), window=1)


@dataclass
class WordEmbedder:
    """Texts that share words have similar vectors. ``embedded`` holds all texts it embedded."""

    identity: str = "words"
    dimension: int = 64
    embedded: list[str] = field(default_factory=list)

    async def start(self) -> None:
        pass

    def adopt(self, identities: Iterable[str]) -> None:
        pass

    async def embed(self, texts: Sequence[str], *, urgent: bool) -> Vectors:
        self.embedded += texts
        vectors = np.zeros((len(texts), self.dimension), np.float32)
        for vector, text in zip(vectors, texts, strict=True):
            for word in re.findall(r"\w+", text.lower()):
                digest = hashlib.blake2b(word.encode(), digest_size=8).digest()
                vector[int.from_bytes(digest) % self.dimension] += 1
        return normalised("embedder", vectors)

    async def close(self) -> None:
        pass


@dataclass
class HeldEmbedder(WordEmbedder):
    """Embeds some texts of documents at once, and the others when it is told to."""

    num_free: int = 0
    hold: asyncio.Event = field(default_factory=asyncio.Event)

    async def embed(self, texts: Sequence[str], *, urgent: bool) -> Vectors:
        if not urgent:
            self.num_free -= len(texts)
            if self.num_free < 0:
                await self.hold.wait()
        return await super().embed(texts, urgent=urgent)


@functools.cache
def build_thread() -> BuildThread:
    """Return the thread that all indexes of the tests' process share."""
    return BuildThread()


def make_knowledge_base(
    folder: Path,
    tokenizer: ServingTokenizer,
    *,
    embedder: Embedder | None = None,
    defaults: CollectionDefaults = DEFAULTS,
    effort: SearchEffort = SearchEffort(),  # noqa: B008  it is immutable
    split_limit: SplitLimit | None = None,
    now: float = 1_700_000_000.0,
    clock: Callable[[], float] | None = None,
    gate: QueryGate | None = None,
    store: DocumentStore | None = None,
    indexes: VectorIndexes | None = None,
) -> KnowledgeBase:
    return KnowledgeBase(
        store or open_sqlite(folder, DiskReserve(folder, 0)),
        indexes
        or FaissIndexes(folder / INDEXES_FOLDER, IndexOptions(effort=effort), build_thread()),
        HybridRanking(),
        DocumentPreparer(embedder or WordEmbedder(), tokenizer, split_limit, gate),
        defaults,
        clock or (lambda: now),
    )


@contextlib.asynccontextmanager
async def serving(
    knowledge_base: KnowledgeBase,
    *interceptors: CallInterceptor,
    address: str = "127.0.0.1:0",
) -> AsyncIterator[RetrieverClient]:
    """Yield a client of a real server that is ready."""
    service = RetrieverService(knowledge_base)
    server = GrpcServer(
        address,
        [SERVICE_NAME],
        lambda server: retriever_pb2_grpc.add_RetrieverServicer_to_server(service, server),
        interceptors=interceptors,
    )
    await server.start()
    await knowledge_base.load()
    await server.set_ready()
    client = RetrieverClient(f"127.0.0.1:{server.port}")
    try:
        yield client
    finally:
        await client.close()
        await server.stop()
        await knowledge_base.close()


def tokenizer_of(model: Path) -> ServingTokenizer:
    return load_serving_tokenizer(str(model))


def digest_of(tokenizer: ServingTokenizer, text: str) -> bytes:
    """Return the digest of a chunk's tokens."""
    return token_digest(np.frombuffer(tokenizer.token_ids(text), "<u4"))


async def stages_of(client: RetrieverClient, request: pb.SearchRequest) -> list[pb.SearchStage]:
    """Return all stages of a search with any of its options."""
    try:
        return [stage async for stage in client._stub.Search(request, timeout=60)]
    except grpc.RpcError as error:
        raise from_rpc_error("retriever", error) from error


async def status_of(client: RetrieverClient) -> pb.RetrieverStatus:
    return await client._stub.GetStatus(pb.GetStatusRequest(), timeout=60)


def lengthen_retriever_limits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lengthen the limits of a retriever in this process, so that a busy machine reaches none."""
    for module, name in (
        (endpoint, "QUERY_DEADLINE_S"),
        (filter_cache, "LIMIT_S"),
        (hybrid, "LEXICAL_DEADLINE_S"),
        (lexical, "LIMIT_S"),
        (retriever_client, "QUERY_TIMEOUT_S"),
    ):
        monkeypatch.setattr(module, name, LIMIT_S)
    # It is no limit: after a failure a search waits for it.
    monkeypatch.setattr(searching, "CHANGE_WAIT_S", 5.0)
