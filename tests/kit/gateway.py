"""Fakes of the components that the gateway calls: real servers on loopback, fixed answers."""

from __future__ import annotations

import asyncio
import hashlib
import json
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import grpc
import httpx
import numpy as np
import uvicorn

from ragcache_core.access.caller import Caller, Scope
from ragcache_core.access.key_file import MAX_PRIORITY, entry_text, hash_text, key_of
from ragcache_core.errors import InvalidInput, NotFound, Unavailable
from ragcache_core.identity.keys import PUBLIC_DOMAIN, KVSpace, VariantKey, chunk_key, token_digest
from ragcache_core.knowledge.knowledge_tree import KnowledgeTree
from ragcache_core.plan.reuse_plan import NO_REUSE, ReusePlan
from ragcache_core.scheduling.priority import GUESS_BAND, TIME_BITS
from ragcache_engine.telemetry.engine_feed import EngineFeed
from ragcache_gateway.app import create_app
from ragcache_gateway.http.server import GatewayProtocol, bind_sockets
from ragcache_gateway.planning.source_follower import FeedState, SourceFollower
from ragcache_gateway.prompts.builder import PromptBuilder
from ragcache_gateway.prompts.model_runtime import load_models
from ragcache_gateway.prompts.tokenizer import load_tokenizer
from ragcache_kv.model.folder import load_model_folder
from ragcache_retriever.messages.backups import complete_parts
from ragcache_retriever.messages.replies import delete_message
from ragcache_retriever.messages.usage import (
    counted_of,
    rows_message,
    sender_of,
    total_message,
    wanted_of,
)
from ragcache_retriever.store.outbox import Outbox
from ragcache_retriever.store.usage import UsageTable
from ragcache_wire.clients.feed_client import FeedClient
from ragcache_wire.feeds.feed_cursor import FeedCursor
from ragcache_wire.peers.credentials import NO_CREDENTIALS, Credentials
from ragcache_wire.server import GrpcServer
from ragcache_wire.settings import GatewaySettings
from ragcache_wire.settings.gateway import EngineAddress
from ragcache_wire.v1 import (
    cachestore_pb2,
    cachestore_pb2_grpc,
    engine_pb2,
    engine_pb2_grpc,
    retriever_pb2,
    retriever_pb2_grpc,
)
from ragcache_wire.watched.members import FixedMembers
from tests.kit.memory_database import MemoryDatabase
from tests.kit.wait import until

MODEL = "tiny"
MAX_MODEL_LEN = 1024


def band_of(body: Mapping[str, Any]) -> int:
    """Return the band of the priority of an engine's request."""
    return int(body.get("priority", 0)) >> TIME_BITS


def chunk(document: str, ordinal: int, text: str = "") -> retriever_pb2.Chunk:
    return retriever_pb2.Chunk(
        id=f"{document}#{ordinal}",
        document_id=document,
        title=f"Title of {document}",
        heading_path=["Handbook", document],
        page=3,
        page_end=4,
        ordinal=ordinal,
        text=text or f"Chunk {ordinal} of {document}.",
        content_hash=f"hash of {document}",
        updated_unix_ms=1_700_000_000_000,
    )


@dataclass
class HeldStage:
    """An early stage of a search, after which the search waits for ``go_on``."""

    hits: list[retriever_pb2.Hit]
    final_probability: float
    go_on: asyncio.Event = field(default_factory=asyncio.Event)


class FakeRetriever(retriever_pb2_grpc.RetrieverServicer):
    """Returns fixed hits; keeps documents in a dict, each as one chunk, and has a real outbox.

    Args:
        token_digest: Returns the digest of a chunk's tokens.
        stages: The stages before the final one; None: one, which is not probable.
    """

    def __init__(self, token_digest: Callable[[str], bytes] | None = None) -> None:
        self.token_digest = token_digest or (lambda text: text.encode()[:16].ljust(16))
        self.hits = [
            retriever_pb2.Hit(
                chunk=chunk("billing.md", 1), score=0.9, before=[chunk("billing.md", 0)]
            ),
            retriever_pb2.Hit(chunk=chunk("search.md", 0), score=0.5),
        ]
        self.documents: dict[str, retriever_pb2.Document] = {}
        self.outbox = Outbox(MemoryDatabase())
        self.usage = UsageTable(MemoryDatabase())
        self.forgets_usage_reply = False  # adds usage, but its reply is lost
        self.collections = {"default": retriever_pb2.Collection(name="default", window=1)}
        self.reports: dict[str, bytes] = {}
        self.similar: dict[str, list[float]] = {}  # scores, by document
        self.searches: list[retriever_pb2.SearchRequest] = []
        self.copy = [b"first part", b"second part"]  # of a backup
        self.operations: dict[tuple[str, str], retriever_pb2.Operation] = {}
        self.submitted: list[retriever_pb2.Document] = []
        self.upserts = 0
        self.most_upserts = 0
        self.hold_upserts: asyncio.Event | None = None
        self.restored: list[bytes] = []
        self.stages: list[HeldStage] | None = None
        self.hold: asyncio.Event | None = None
        self.waiting = asyncio.Event()
        self.cancelled = asyncio.Event()

    async def Search(self, request: Any, context: Any) -> AsyncIterator[Any]:  # noqa: N802
        self.searches.append(request)
        self._known(request.collection)
        if self.stages is None:
            yield retriever_pb2.SearchStage(hits=self.hits[:1], progress=0.5, embed_us=9500)
        try:
            for number, stage in enumerate(self.stages or (), 1):
                yield retriever_pb2.SearchStage(
                    hits=stage.hits,
                    # As if the scan had a hundred seconds to go.
                    progress=0.01 * number,
                    search_us=1_000_000 * number,
                    final_probability=stage.final_probability,
                )
                await stage.go_on.wait()
        except asyncio.CancelledError:
            self.cancelled.set()
            raise
        if self.hold is not None:
            self.waiting.set()
            try:
                await self.hold.wait()
            except asyncio.CancelledError:
                self.cancelled.set()
                raise
        yield retriever_pb2.SearchStage(
            hits=self.hits[: request.top_k], final=True, progress=1, embed_us=9500, search_us=250
        )

    async def UpsertDocument(self, request: Any, context: Any) -> Any:  # noqa: N802
        document = request.document
        self.upserts += 1
        self.most_upserts = max(self.most_upserts, self.upserts)
        try:
            return await self._upsert(document)
        finally:
            self.upserts -= 1

    async def _upsert(self, document: retriever_pb2.Document) -> Any:
        if self.hold_upserts is not None:
            await self.hold_upserts.wait()
        if not document.id or not document.text.strip():
            raise InvalidInput("document.text" if document.id else "document.id", "is empty", "fix")
        self._known(document.collection)
        old = self.documents.get(document.id)
        self.documents[document.id] = document
        stored = retriever_pb2.Document()
        stored.CopyFrom(document)
        stored.text = ""
        stored.num_chunks = 1
        stored.title = document.title or document.id
        changed = old is None or old.text != document.text
        removed = [self.token_digest(old.text)] if old is not None and changed else []
        return retriever_pb2.UpsertDocumentReply(
            document=stored,
            changed=changed,
            deletes=self._add_to_outbox(document.collection, document.id, removed, False),
            sequence=self.outbox.last_sequence(),
            chunks=[document.text] if changed else [],
        )

    async def SubmitDocument(self, request: Any, context: Any) -> Any:  # noqa: N802
        self._known(request.document.collection)
        content = repr((request.owner, request.document.id, request.document.text))
        operation = retriever_pb2.Operation(
            id=hashlib.sha256(content.encode()).hexdigest()[:32],
            collection=request.document.collection,
            document_id=request.document.id,
            state=retriever_pb2.OPERATION_STATE_PENDING,
        )
        known = self.operations.setdefault((request.owner, operation.id), operation)
        self.submitted.append(request.document)
        return known

    async def GetOperation(self, request: Any, context: Any) -> Any:  # noqa: N802
        if (request.owner, request.id) not in self.operations:
            raise NotFound("operation", request.id, "send the document again")
        return self.operations[request.owner, request.id]

    async def DeleteDocument(self, request: Any, context: Any) -> Any:  # noqa: N802
        document = self._document(request)
        del self.documents[request.id]
        digests = [self.token_digest(document.text)]
        return retriever_pb2.DeleteDocumentReply(
            deletes=self._add_to_outbox(request.collection, request.id, digests, True)
        )

    def _add_to_outbox(
        self, collection: str, document: str, digests: list[bytes], names_document: bool
    ) -> list[retriever_pb2.OutboxDelete]:
        now_ms = _now_ms()
        self.outbox.add(collection, document, digests, names_document=names_document, now_ms=now_ms)
        claimed = self.outbox.claim_of(collection, document, now_ms, is_repeated=False)
        return list(map(delete_message, claimed))

    async def GetStatus(self, request: Any, context: Any) -> Any:  # noqa: N802
        """See the proto."""
        return retriever_pb2.RetrieverStatus()

    async def ListRemovals(self, request: Any, context: Any) -> Any:  # noqa: N802
        removals, last = self.outbox.removals(request.after, 1000)
        return retriever_pb2.ListRemovalsReply(
            removals=[
                retriever_pb2.Removal(
                    sequence=one.sequence, collection=one.collection, document_id=one.document
                )
                for one in removals
            ],
            last_sequence=last,
        )

    async def ClaimDeletes(self, request: Any, context: Any) -> Any:  # noqa: N802
        claim = self.outbox.claim(request.limit, _now_ms())
        return retriever_pb2.ClaimDeletesReply(
            deletes=map(delete_message, claim.deletes), unacknowledged=claim.num_unacknowledged
        )

    async def AcknowledgeDeletes(self, request: Any, context: Any) -> Any:  # noqa: N802
        self.outbox.acknowledge(request.complete, request.partial, _now_ms())
        return retriever_pb2.AcknowledgeDeletesReply()

    async def GetDocument(self, request: Any, context: Any) -> Any:  # noqa: N802
        if not request.id:
            raise InvalidInput("id", "is empty", "name a document")
        return self._document(request)

    async def ListDocuments(self, request: Any, context: Any) -> Any:  # noqa: N802
        self._known(request.collection)
        ids = sorted(i for i in self.documents if i > request.page_token)
        page = ids[: request.page_size]
        return retriever_pb2.ListDocumentsReply(
            documents=[self.documents[i] for i in page],
            next_page_token=page[-1] if len(ids) > len(page) else "",
        )

    async def GetSimilarChunks(self, request: Any, context: Any) -> Any:  # noqa: N802
        scores = self.similar.get(request.id, [])
        similar = [retriever_pb2.SimilarChunk(document_id="other", score=one) for one in scores]
        return retriever_pb2.GetSimilarChunksReply(
            chunks=[retriever_pb2.SimilarChunks(similar=similar)]
        )

    async def Embed(self, request: Any, context: Any) -> Any:  # noqa: N802
        rows = [(float(len(text)), 1.0) for text in request.texts]
        packed = np.array(rows, "<f4").tobytes()
        return retriever_pb2.EmbedReply(vectors=packed, dimension=2)

    async def Rerank(self, request: Any, context: Any) -> Any:  # noqa: N802
        words = set(request.query.lower().split())
        scores = [len(words & set(text.lower().split())) for text in request.texts]
        return retriever_pb2.RerankReply(scores=scores)

    async def PutReport(self, request: Any, context: Any) -> Any:  # noqa: N802
        self.reports[request.report.name] = request.report.body
        return retriever_pb2.PutReportReply()

    async def GetReport(self, request: Any, context: Any) -> Any:  # noqa: N802
        if request.name not in self.reports:
            raise NotFound("report", request.name, "put it first")
        return retriever_pb2.Report(name=request.name, body=self.reports[request.name])

    async def AddUsage(self, request: Any, context: Any) -> Any:  # noqa: N802
        now_ms = _now_ms()
        self.usage.add(sender_of(request), counted_of(request), now_ms)
        if self.forgets_usage_reply:
            raise Unavailable("retriever", "its reply is lost")
        totals = [
            total_message(owner, one)
            for owner, names in (("key", request.keys), ("tenant", request.tenants))
            for one in self.usage.totals(owner, names, request.now_unix_s)
        ]
        waiting = self.usage.waiting(request.gateway, now_ms)
        return retriever_pb2.AddUsageReply(totals=totals, waiting=waiting)

    async def ListUsage(self, request: Any, context: Any) -> Any:  # noqa: N802
        found = self.usage.page(wanted_of(request), request.page_size + 1)
        return rows_message(found, request.page_size)

    async def PutCollection(self, request: Any, context: Any) -> Any:  # noqa: N802
        name = request.collection.name
        if request.keep_unset and name in self.collections:
            self.collections[name].MergeFrom(request.collection)
        else:
            self.collections[name] = request.collection
        return _with_defaults(self.collections[name])

    async def GetCollection(self, request: Any, context: Any) -> Any:  # noqa: N802
        self._known(request.name)
        return _with_defaults(self.collections[request.name])

    async def DeleteCollection(self, request: Any, context: Any) -> Any:  # noqa: N802
        self._known(request.name)
        del self.collections[request.name]
        count = len(self.documents)
        deletes = []
        for name, document in self.documents.items():
            digests = [self.token_digest(document.text)]
            deletes += self._add_to_outbox(request.name, name, digests, True)
        self.documents.clear()
        return retriever_pb2.DeleteCollectionReply(documents=count, deletes=deletes)

    async def Backup(self, request: Any, context: Any) -> AsyncIterator[Any]:  # noqa: N802
        for part in self.copy:
            yield retriever_pb2.BackupPart(data=part)

    async def Restore(self, requests: Any, context: Any) -> Any:  # noqa: N802
        self.restored = [part async for part in complete_parts(requests)]
        return retriever_pb2.RestoreReply(documents=7)

    async def ListCollections(self, request: Any, context: Any) -> Any:  # noqa: N802
        return retriever_pb2.ListCollectionsReply(
            collections=map(_with_defaults, self.collections.values())
        )

    def _known(self, name: str) -> None:
        if name not in self.collections:
            raise NotFound("collection", name, "create it with PUT /v1/collections/NAME")

    def _document(self, request: Any) -> retriever_pb2.Document:
        self._known(request.collection)
        if request.id not in self.documents:
            raise NotFound("document", request.id, "see GET /v1/documents")
        return self.documents[request.id]


def _with_defaults(collection: retriever_pb2.Collection) -> retriever_pb2.Collection:
    """Return a collection with the settings that apply, as replies have them."""
    chunking = retriever_pb2.Chunking(size_tokens=64, overlap_tokens=16)
    shown = retriever_pb2.Collection(window=1, chunking=chunking)
    shown.MergeFrom(collection)
    return shown


def _now_ms() -> int:
    return time.time_ns() // 1_000_000


async def refuse_watch(context: Any) -> Any:
    """Answer as a service without a feed."""
    await context.abort(grpc.StatusCode.UNIMPLEMENTED, "no feed")


class FakeStore(cachestore_pb2_grpc.CacheStoreServicer):
    """Records which chunks were looked up and deleted, and every deletion.

    Args:
        unavailable: Whether it refuses every lookup.
        unavailable_chunks: Chunks whose lookup it refuses.
        stored: Variants by chunk.
        stats: Its counters.
        prefetched: Keys of variants that were to be brought into memory.
        feed: What it tells of its variants. None: it has no feed. It is set before the gateway
            starts.
    """

    def __init__(self) -> None:
        self.unavailable = False
        self.unavailable_chunks: set[bytes] = set()
        self.stored: dict[bytes, list[cachestore_pb2.StoredVariant]] = {}
        self.asked: list[bytes] = []
        self.deleted: list[bytes] = []
        self.deletions: list[cachestore_pb2.Deletion] = []
        self.prefetched: list[cachestore_pb2.VariantKey] = []
        self.feed: EngineFeed | None = None
        self.stats = cachestore_pb2.StatsReply(variants=3, disk_bytes=300, memory_bytes=200)

    async def Stats(self, request: Any, context: Any) -> Any:  # noqa: N802
        return self.stats

    async def Hello(self, request: Any, context: Any) -> Any:  # noqa: N802
        return cachestore_pb2.HelloReply(boot=bytes(16), store=bytes(16))

    async def Lookup(self, request: Any, context: Any) -> Any:  # noqa: N802
        if self.unavailable or not self.unavailable_chunks.isdisjoint(
            key.chunk for key in request.keys
        ):
            raise Unavailable("cachestore", "it is starting")
        self.asked += [key.chunk for key in request.keys]
        return cachestore_pb2.LookupReply(variants=[self._variants(key) for key in request.keys])

    def _variants(self, want: Any) -> Any:
        held = [
            one for one in self.stored.get(want.chunk, []) if want.prefix in (b"", one.key.prefix)
        ]
        miss = cachestore_pb2.MISS_UNSPECIFIED if held else cachestore_pb2.MISS_NEVER_STORED
        return cachestore_pb2.ChunkVariants(stored=held, miss=miss)

    async def Prefetch(self, request: Any, context: Any) -> Any:  # noqa: N802
        self.prefetched += request.keys
        return cachestore_pb2.PrefetchReply(started=len(request.keys))

    async def Delete(self, request: Any, context: Any) -> Any:  # noqa: N802
        self.deletions.append(request.deletion)
        self.deleted += request.deletion.chunks
        return cachestore_pb2.DeleteReply(removed=2 * len(request.deletion.chunks))

    async def FindRemains(self, request: Any, context: Any) -> Any:  # noqa: N802
        held = sum(len(self.stored.get(chunk, [])) for chunk in request.deletion.chunks)
        return cachestore_pb2.RemainsReply(on_disk=held)

    async def Watch(self, request: Any, context: Any) -> Any:  # noqa: N802
        if self.feed is None:
            yield await refuse_watch(context)
            return
        cursor = FeedCursor(self.feed)
        while True:
            message = cursor.next()
            yield message or cursor.heartbeat()
            if message is None:
                await asyncio.sleep(0.05)


class FakeRecords(engine_pb2_grpc.EngineServicer):
    """Returns a record of every request.

    Args:
        has_no_records: Whether it has no record of any request.
        unavailable: Whether it refuses every call.
        pass_tokens: Tokens of one engine step; 0: it does not report them.
        token_s: Seconds for each token of a prefill; 0: it does not report them.
        fields: Fields of every record that differ from the defaults.
        fields_of: Returns such fields by request.
        segments: Outcomes of the segments of every prompt.
    """

    def __init__(self) -> None:
        self.has_no_records = False
        self.unavailable = False
        self.pass_tokens = 0
        self.token_s = 0.0
        self.costs_sent = 0  # replies with these seconds
        self.fields: dict[str, Any] = {}
        self.fields_of: Callable[[str], dict[str, Any]] = lambda _: {}
        self.segments: list[engine_pb2.SegmentRecord] = []
        self.asked: list[str] = []

    async def GetRequestRecord(self, request: Any, context: Any) -> Any:  # noqa: N802
        self._raise_if_unavailable()
        self.asked.append(request.request)
        if self.has_no_records:
            raise NotFound("record", request.request, "ask sooner")
        fields: dict[str, Any] = {
            "queue_s": 0.001,
            "load_s": 0.002,
            "prefill_s": 0.003,
            "prompt_tokens": 100,
            "local_tokens": 10,
            "loaded_tokens": 60,
            "loaded_bytes": 61440,
            "blended_tokens": 20,
            "recomputed_tokens": 5,
            "recompute_s": 0.0015,
        }
        fields["segments"] = self.segments
        fields |= self.fields | self.fields_of(request.request)
        return engine_pb2.RequestRecord(request=request.request, **fields)

    async def Watch(self, request: Any, context: Any) -> Any:  # noqa: N802
        yield await refuse_watch(context)

    async def GetCosts(self, request: Any, context: Any) -> Any:  # noqa: N802
        self._raise_if_unavailable()
        self.costs_sent += bool(self.token_s)
        costs = engine_pb2.Costs()
        if self.token_s:
            costs.prefill.cached.append(0)
            costs.prefill.computed.extend((1, 1000))
            costs.prefill.seconds.extend((self.token_s, 1000 * self.token_s))
        if self.pass_tokens:
            costs.prefill.pass_tokens = self.pass_tokens
        return costs

    def _raise_if_unavailable(self) -> None:
        if self.unavailable:
            raise Unavailable("engine", "its records are unavailable")


@dataclass(frozen=True)
class _Reply:
    """Makes the JSON of one answer, in vLLM's shape."""

    body: dict[str, Any]
    is_chat: bool
    request_id: str

    def head(self, *, chunk: bool = False) -> dict[str, Any]:
        kind = "chat.completion" + ".chunk" * chunk if self.is_chat else "text_completion"
        prefix = "chatcmpl" if self.is_chat else "cmpl"
        identity = {"id": f"{prefix}-{self.request_id}", "object": kind}
        return {**identity, "created": 1_700_000_000, "model": self.body["model"]}

    def chunk(self, delta: dict[str, Any], i: int, reason: str | None = None) -> dict[str, Any]:
        choice = {"index": i, "delta": delta, "logprobs": None, "finish_reason": reason}
        return {**self.head(chunk=True), "choices": [choice]}

    def text_chunk(
        self, word: str, i: int, reason: str | None, more: dict[str, Any]
    ) -> dict[str, Any]:
        if self.is_chat:
            return self.chunk({"content": word, **more}, i, reason)
        choice = {"index": i, "text": word, "logprobs": None, "finish_reason": reason}
        return {**self.head(chunk=True), "choices": [choice]}

    def whole_choice(
        self, i: int, words: list[str], logprobs: dict[str, Any] | None, more: dict[str, Any]
    ) -> dict[str, Any]:
        text = "".join(words)
        end = {"logprobs": logprobs, "finish_reason": "stop", "stop_reason": None}
        if self.is_chat:
            message = {"role": "assistant", "content": text, **more}
            return {"index": i, "message": message, **end}
        return {"index": i, "text": text, **end}


WORD_ID = 900_000
"""Token id of the first word of a fake engine's answer."""


class FakeEngine:
    """An ASGI app with vLLM's /v1/completions and /v1/chat/completions.

    A chat takes the token ids of its prompt from the transfer parameters, as vLLM does. The
    requests that are kept have them as their prompt. Each word is a token, and a prompt that ends
    with the first words is answered with the others.
    """

    def __init__(self) -> None:
        self.healthy = True
        self.words = ["It runs in ", "eu-north", "."]
        self.blend_words: list[str] | None = None  # the words of blends, if they differ
        self.query: str | None = None  # the answer to a request for a search query
        self.message: dict[str, Any] = {}  # further fields of a chat's message or last delta
        self.hold_health: asyncio.Event | None = None  # a health check waits until it is set
        self.health_checks = 0
        self.requests: list[dict[str, Any]] = []
        self.headers: list[dict[str, str]] = []  # by request
        self.probes = 0
        self.refuse: tuple[int, dict[str, Any]] | None = None
        self.fail_after: int | None = None  # words, then an error event
        self.drop_after: int | None = None  # words, then the stream ends
        self.sends_usage = True
        self.reports_cached = True
        self.top_logprobs: dict[str, float] | None = None  # of the first token, if requested
        self.hold_after: int | None = None  # words, then nothing until the client leaves
        self.prefill: asyncio.Event | None = None  # before the first word, until it is set
        self.hold_prefills: asyncio.Event | None = None  # the same, for guesses only
        self.fails_prefills = False
        self.pause: asyncio.Event | None = None  # after the first word, until it is set
        self.aborted = asyncio.Event()
        self.waiting = asyncio.Event()

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["path"] == "/version":
            return await _respond(send, 200, b'{"version": "0.32.0"}')
        if scope["path"] == "/health":
            self.health_checks += 1
            if self.hold_health is not None:
                await self.hold_health.wait()
            return await _respond(send, 200 if self.healthy else 503, b"")
        body = json.loads(await _body(receive))
        if self.refuse is not None:
            status, answer = self.refuse
            return await _respond(send, status, json.dumps(answer).encode())
        if body.get("n", 1) not in range(1, 65):
            return await _respond(send, 400, b'{"error": {"message": "n is wrong", "code": 400}}')
        if set(body) == {"model", "prompt", "max_tokens", "temperature"}:
            self.probes += 1
            return await _respond(send, 200, b'{"choices":[{"text":"x","finish_reason":"length"}]}')
        is_chat = scope["path"] == "/v1/chat/completions"
        if is_chat:
            body["prompt"] = body["kv_transfer_params"].pop("prompt_token_ids")
        headers = {name.decode(): value.decode() for name, value in scope["headers"]}
        self.requests.append(body)
        self.headers.append(headers)
        reply = _Reply(body, is_chat, headers.get("x-request-id", "1"))
        if not body.get("stream"):
            return await self._answer(reply, receive, send)
        head = [(b"content-type", b"text/event-stream; charset=utf-8")]
        await send({"type": "http.response.start", "status": 200, "headers": head})
        await self._stream(reply, receive, send)

    async def _answer(self, reply: _Reply, receive: Any, send: Any) -> None:
        """Answer in one piece."""
        words = self._words_for(reply.body)
        if self.prefill is not None and not await self._prefilled(self.prefill, receive):
            return
        if self.hold_after is not None:
            return await self._hold(receive)
        if self.pause is not None:
            self.waiting.set()
            await self.pause.wait()
        if self.fail_after is not None:
            error = b'{"error": {"message": "the engine died", "code": 500}}'
            return await _respond(send, 500, error)
        choices = [
            reply.whole_choice(i, words, self._logprobs(reply.body), self.message)
            for i in range(reply.body.get("n", 1))
        ]
        answer = {**reply.head(), "choices": choices, "kv_transfer_params": None}
        if self.sends_usage:
            answer["usage"] = self._usage(reply.body, len(words))
        content = json.dumps(answer, ensure_ascii=False).encode()
        await _respond(send, 200, content if self.drop_after is None else content[:20])

    async def _hold(self, receive: Any) -> None:
        self.waiting.set()
        while (await receive())["type"] != "http.disconnect":
            pass
        self.aborted.set()

    async def _stream(self, reply: _Reply, receive: Any, send: Any) -> None:
        async def event(value: Any) -> None:
            compact = (",", ":")  # as vLLM
            data = json.dumps(value, ensure_ascii=False, separators=compact)
            await _part(send, f"data: {data}\n\n".encode())

        words, count = self._words_for(reply.body), reply.body.get("n", 1)
        ids = range(WORD_ID, WORD_ID + len(words))
        prompt = reply.body["prompt"]
        given = max(k for k in range(len(words)) if k == 0 or prompt[-k:] == list(ids[:k]))
        words = words[given:]
        last = len(words) - 1
        if not await self._reaches_first_word(reply.body, event, receive, send):
            return
        for index, word in enumerate([*words, ""]):
            if index == self.hold_after:
                return await self._hold(receive)
            if index == 1 and self.pause is not None:
                self.waiting.set()
                await self.pause.wait()
            if index == self.fail_after:
                await event({"error": {"message": "the engine died", "code": 500}})
                await _part(send, b"data: [DONE]\n\n")
                return await _part(send, b"", more=False)
            if index == self.drop_after:
                return await _part(send, b"", more=False)
            for i in range(count if index == 0 and reply.is_chat else 0):
                await event(reply.chunk({"role": "assistant", "content": ""}, i))
            if word:
                more = self.message if index == last else {}
                for i in range(count):
                    reason = "stop" if index == last else None
                    chunk = reply.text_chunk(word, i, reason, more)
                    if reply.body.get("return_token_ids"):
                        chunk["choices"][0]["token_ids"] = [ids[given + index]]
                    await event(chunk)
        if self.sends_usage:
            usage = self._usage(reply.body, len(words))
            if reply.body.get("stream_options", {}).get("include_usage"):
                await event({**reply.head(chunk=True), "choices": [], "usage": usage})
            await _part(send, b"data: [DONE]\n\n")
        await _part(send, b"", more=False)

    async def _reaches_first_word(self, body: Any, event: Any, receive: Any, send: Any) -> bool:
        held = self.prefill
        if band_of(body) == GUESS_BAND:
            held = self.hold_prefills
            if self.fails_prefills:
                await event({"error": {"message": "the engine died", "code": 500}})
                await _part(send, b"", more=False)
                return False
        return held is None or await self._prefilled(held, receive)

    def _usage(self, body: Any, num_words: int) -> dict[str, Any]:
        prompt, answer = len(body["prompt"]), num_words * body.get("n", 1)
        usage: dict[str, Any] = {"prompt_tokens": prompt, "completion_tokens": answer}
        usage["total_tokens"] = prompt + answer
        if self.reports_cached:
            usage["prompt_tokens_details"] = {"cached_tokens": self._cached_tokens(body)}
        return usage

    def _logprobs(self, body: Any) -> dict[str, Any] | None:
        if not body.get("logprobs") or self.top_logprobs is None:
            return None
        top = [{"token": t, "logprob": p, "bytes": None} for t, p in self.top_logprobs.items()]
        return {"content": [{**top[0], "top_logprobs": top}]}

    def _cached_tokens(self, body: Any) -> int:
        """Return 70 for questions; for prefills the longest beginning that came before."""
        if band_of(body) <= MAX_PRIORITY:
            return 70
        earlier = [one["prompt"] for one in self.requests if one is not body]
        starts = [one for one in earlier if body["prompt"][: len(one)] == one]
        return max(map(len, starts), default=0)

    async def _prefilled(self, prefill: asyncio.Event, receive: Any) -> bool:
        """Wait for the prefill; return whether the client stayed connected."""
        self.waiting.set()
        ended, gone = asyncio.create_task(prefill.wait()), asyncio.create_task(receive())
        await asyncio.wait((ended, gone), return_when=asyncio.FIRST_COMPLETED)
        ended.cancel()
        if gone.done():
            self.aborted.set()
        else:
            gone.cancel()
        return not gone.done()

    def _words_for(self, body: Any) -> list[str]:
        plan_text = (body.get("kv_transfer_params") or {}).get("ragcache", NO_REUSE)
        if plan_text == NO_REUSE:
            return self.words
        plan = ReusePlan.decode(plan_text)
        if plan.request.startswith("query-"):
            return [self.query or "NONE"]
        blends = plan.blends
        return self.blend_words if blends and self.blend_words else self.words


async def _part(send: Any, data: bytes, *, more: bool = True) -> None:
    await send({"type": "http.response.body", "body": data, "more_body": more})


async def _respond(send: Any, status: int, body: bytes) -> None:
    await send({"type": "http.response.start", "status": status, "headers": []})
    await _part(send, body, more=False)


async def _body(receive: Any) -> bytes:
    body, more = b"", True
    while more:
        message = await receive()
        body += message.get("body", b"")
        more = message.get("more_body", False)
    return body


NO_TLS: Final[Mapping[str, Any]] = {}


@asynccontextmanager
async def serving(
    app: Any,
    port: int = 0,
    host: str = "127.0.0.1",
    admin_listen: str | None = None,
    tls: Mapping[str, Any] = NO_TLS,
) -> AsyncGenerator[int, None]:
    """Serve an ASGI app on loopback, as the gateway does; yields its port.

    Args:
        admin_listen: A second address.
        tls: ``ssl_certfile`` and ``ssl_keyfile`` of a server with TLS.
    """
    config = uvicorn.Config(
        app,
        host,
        port,
        http=GatewayProtocol,
        log_config=None,
        ws="none",
        timeout_graceful_shutdown=1,
        **tls,
    )
    config.load()
    server = uvicorn.Server(config)
    server.lifespan = config.lifespan_class(config)
    # Server.serve would also poll, and handle the signals of the whole process.
    admin = [] if admin_listen is None else [admin_listen]
    sockets = bind_sockets([f"{host}:{port}", *admin])
    await server.startup(sockets)
    try:
        yield sockets[0].getsockname()[1]
    finally:
        await server.shutdown(sockets)


@asynccontextmanager
async def serving_retriever(
    retriever: retriever_pb2_grpc.RetrieverServicer,
) -> AsyncGenerator[str, None]:
    """Serve a retriever on loopback; yields its address."""
    server = GrpcServer(
        "127.0.0.1:0",
        ["ragcache.v1.Retriever"],
        lambda server: retriever_pb2_grpc.add_RetrieverServicer_to_server(retriever, server),
    )
    await server.start()
    try:
        await server.set_ready()
        yield f"127.0.0.1:{server.port}"
    finally:
        await server.stop()


@dataclass
class World:
    """A gateway with its fakes, and a client of it."""

    config: GatewaySettings
    retriever: FakeRetriever = field(default_factory=FakeRetriever)
    store: FakeStore = field(default_factory=FakeStore)
    records: FakeRecords = field(default_factory=FakeRecords)
    engine: FakeEngine = field(default_factory=FakeEngine)
    servers: dict[str, GrpcServer] = field(default_factory=dict)
    base_url: str = ""
    shards: tuple[str, ...] = ()  # addresses of a real cache store instead of the fake
    client: httpx.AsyncClient = field(init=False)

    async def start(self, stack: AsyncExitStack, model: Path) -> World:
        for name, service, register in (
            ("retriever", "ragcache.v1.Retriever", self._register_retriever),
            ("cachestore", "ragcache.v1.CacheStore", self._register_store),
            ("engine_records", "ragcache.v1.Engine", self._register_records),
        ):
            server = GrpcServer("127.0.0.1:0", [service], register)
            await server.start()
            await server.set_ready()
            stack.push_async_callback(server.stop)
            self.servers[name] = server
        engine_port = await stack.enter_async_context(serving(self.engine))
        self.config = self.config.replace(
            model=str(model),
            retriever=f"127.0.0.1:{self.servers['retriever'].port}",
            cachestore=FixedMembers(
                self.shards or (f"127.0.0.1:{self.servers['cachestore'].port}",)
            ),
            engines=(self.engine_name(engine_port), *self.config.engines),
        )
        if isinstance(self.retriever, FakeRetriever):
            self.retriever.token_digest = self.token_digest
        admin_listen = self.config.admin_listen
        port = await stack.enter_async_context(serving(self.app(), admin_listen=admin_listen))
        self.base_url = f"http://127.0.0.1:{port}"
        self.client = await stack.enter_async_context(
            httpx.AsyncClient(base_url=self.base_url, trust_env=False, timeout=60)
        )
        return self

    def engine_name(self, port: int) -> EngineAddress:
        return EngineAddress("127.0.0.1", port, self.servers["engine_records"].port)

    def prompts(self) -> PromptBuilder:
        return PromptBuilder(
            load_tokenizer(Path(self.config.model)),
            max_model_len=self.config.max_model_len,
            default_max_tokens=self.config.default_max_tokens,
            cache_bytes=self.config.token_cache_bytes,
        )

    def space(self) -> KVSpace:
        return load_model_folder(self.config.model).space("auto")

    def token_digest(self, text: str) -> bytes:
        """Return the digest of a chunk's tokens, as the retriever computes it."""
        return token_digest(self.prompts().encode_chunk(text))

    def chunk_key(self, text: str) -> bytes:
        """Return the key of a chunk, as the retriever does."""
        return chunk_key(self.space(), PUBLIC_DOMAIN, self.prompts().encode_chunk(text))

    def app(self) -> Any:
        return create_app(self.config, load_models(self.config))

    async def ask(self, question: str = "Where does billing run?", **more: Any) -> httpx.Response:
        body = {"messages": [{"role": "user", "content": question}], **more}
        return await self.client.post("/v1/chat/completions", json=body)

    async def put_report(
        self, rouge_l: float, share: float = 0.4, **changes: Any
    ) -> httpx.Response:
        """Put a quality report of the served model, with one recompute share."""
        state = (await self.client.get("/v1/quality")).json()
        budget = {
            "recompute_share": share,
            "rouge_l": rouge_l,
            "same_answers": 0.5,
            "first_token_kl": 0.01,
            "recomputed_share": share,
            "blended_share": 0.8,
            "num_questions": 20,
        }
        report = {
            "version": 2,
            "model": state["model"],
            "space": state["space"],
            "template": state["template"],
            "created_at": "2026-01-01T00:00:00Z",
            "capture": "on demand",
            "wanted_quality": 0.9,
            "budgets": [budget],
        }
        return await self.client.put("/v1/quality/report", json=report | changes)

    async def metric(self, name: str) -> float:
        """Return the value of a series of the gateway's metrics; 0 if there is none."""
        return (await self.metrics(name)).get(name, 0.0)

    async def until_metric(self, name: str, value: float) -> None:
        """Wait until every series whose name begins so has a value."""

        async def has_value() -> bool:
            found = await self.metrics(name)
            return bool(found) and set(found.values()) == {value}

        await until(has_value, f"{name} {value}")

    async def metrics(self, beginning: str) -> dict[str, float]:
        """Return the series whose names begin so, without the prefix of the gateway."""
        text = (await self.client.get("/metrics")).text
        prefix = "ragcache_gateway_"
        lines = [one for one in text.splitlines() if one.startswith(prefix + beginning)]
        pairs = (line.removeprefix(prefix).rsplit(" ", 1) for line in lines)
        return {name: float(value) for name, value in pairs}

    async def until_verdict(self, verdict: str) -> None:
        """Wait until the quality gate judges blends so."""

        async def is_judged() -> bool:
            return bool((await self.client.get("/v1/quality")).json()["verdict"] == verdict)

        await until(is_judged, f"the verdict {verdict}")

    def _register_retriever(self, server: Any) -> None:
        retriever_pb2_grpc.add_RetrieverServicer_to_server(self.retriever, server)

    def _register_store(self, server: Any) -> None:
        cachestore_pb2_grpc.add_CacheStoreServicer_to_server(self.store, server)

    def _register_records(self, server: Any) -> None:
        engine_pb2_grpc.add_EngineServicer_to_server(self.records, server)


CONFIG = GatewaySettings(
    listen="127.0.0.1:0",
    retriever="127.0.0.1:9",
    engines=(),
    cachestore=FixedMembers(()),
    model="model",
    model_name=MODEL,
    model_dtype="auto",
    max_model_len=MAX_MODEL_LEN,
    first_token_timeout_s=120,
    next_token_timeout_s=120,
    engine_connect_timeout_s=60,
    engine_watch_s=0.05,
)


@asynccontextmanager
async def world(model: Path, **changes: Any) -> AsyncGenerator[World, None]:
    """Run a gateway and its fakes. The changes apply to the gateway's settings."""
    async with AsyncExitStack() as stack:
        yield await World(CONFIG.replace(**changes)).start(stack, model)


async def until_status(client: httpx.AsyncClient, *wanted: int) -> httpx.Response:
    """Wait until the gateway's status has one of these HTTP status codes."""
    response = await client.get("/v1/status")

    async def is_wanted() -> bool:
        nonlocal response
        response = await client.get("/v1/status")
        return response.status_code in wanted

    await until(is_wanted, f"a status in {wanted}")
    return response


async def until_predicted(client: httpx.AsyncClient) -> None:
    """Wait until the gateway predicts the caches of all its engines: the fakes have no feed."""

    async def are_predicted() -> bool:
        # A slow machine's first answer can be that the store did not answer in time.
        sources = (await client.get("/v1/cache")).json().get("sources", ())
        states = [one["state"] for one in sources if one["source"].startswith("engine:")]
        return set(states) == {"predicted"}

    await until(are_predicted, "predicted caches")


async def until_ready(client: httpx.AsyncClient, count: int) -> None:
    """Wait until this many engines of the gateway are ready."""

    async def are_ready() -> bool:
        engines = (await client.get("/v1/status")).json()["parts"]["engine"]["endpoints"]
        return sum(one["ready"] for one in engines) == count

    await until(are_ready, f"{count} ready engines")


async def until_metrics_have(client: httpx.AsyncClient, text: str) -> None:
    """Wait until the gateway's metrics have a text."""

    async def have() -> bool:
        return text in (await client.get("/metrics")).text

    await until(have, text)


def data_of(stream: str) -> list[Any]:
    """Parse the data of a stream's events; the end stays ``[DONE]``."""
    events = [line.removeprefix("data: ") for line in stream.split("\n\n") if line]
    return [event if event == "[DONE]" else json.loads(event) for event in events]


def plan_of(body: Mapping[str, Any]) -> ReusePlan:
    """Return the reuse plan in the body of an engine's request."""
    return ReusePlan.decode(body["kv_transfer_params"]["ragcache"])


OPERATOR = key_of(b"o" * 32)
BUILTIN = (("operator", hash_text(OPERATOR)),)


def key(name: str) -> str:
    """Return the key of a name, always the same."""
    return key_of(name.encode().ljust(32, b"-"))


def bearer(name: str) -> dict[str, str]:
    """Return the header with the key of a name."""
    return {"Authorization": f"Bearer {key(name)}"}


def write_keys(path: Path, entries: Mapping[str, str]) -> Path:
    """Write a key file: for each name, its fields after name and hash, in TOML."""
    path.write_text(
        "\n".join(
            f'[[keys]]\nname = "{name}"\nhash = "{hash_text(key(name))}"\n{more}\n'
            for name, more in entries.items()
        )
    )
    return path


def write_admin_key(path: Path) -> Path:
    """Write a key file with the one key ``admin``."""
    admin = Caller("admin", scopes=frozenset({Scope.ADMIN}))
    path.write_text(entry_text(admin, key("admin")))
    return path


WAIT_S = 60.0


@dataclass
class FollowedSource:
    """A follower, and the tree that it fills."""

    tree: KnowledgeTree
    follower: SourceFollower

    @property
    def is_synchronized(self) -> bool:
        return self.follower.state is FeedState.SYNCHRONIZED

    @property
    def tiers(self) -> dict[VariantKey, str]:
        """The tier of each node that the source has."""
        return tiers_of(self.tree, self.follower.source)

    async def synchronized(self) -> None:
        await until(lambda: self.is_synchronized)

    async def shows(self, tiers: dict[VariantKey, str]) -> None:
        """Wait until the view of the source is this."""
        await until(lambda: self.is_synchronized and self.tiers == tiers)


def tiers_of(tree: KnowledgeTree, source: str) -> dict[VariantKey, str]:
    """Return the tier of each node that a source has."""
    tree.check()
    return {
        node.key: node.residency[source].tier
        for node in tree._by_source.get(source, ())
        if node.key is not None
    }


@asynccontextmanager
async def following(
    address: str, method: str, credentials: Credentials = NO_CREDENTIALS
) -> AsyncIterator[FollowedSource]:
    """Follow the source at an address until the end."""
    tree = KnowledgeTree(100_000)
    follower = SourceFollower(tree, f"test:{address}", FeedClient(address, method, credentials))
    task = asyncio.create_task(follower.run())
    try:
        yield FollowedSource(tree, follower)
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
