"""Fakes of the components that the gateway calls: real servers on loopback, fixed answers."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import uvicorn

from ragcache_core.errors import InvalidInput, NotFound, Unavailable
from ragcache_core.identity.keys import PUBLIC_DOMAIN, KVSpace, chunk_key, token_digest
from ragcache_core.plan.reuse_plan import ReusePlan
from ragcache_gateway.app import create_app
from ragcache_gateway.prompts.builder import PromptBuilder
from ragcache_gateway.prompts.tokenizer import load_tokenizer
from ragcache_kv.model_folder import load_model_folder
from ragcache_retriever.store.outbox import OutboxDelete
from ragcache_retriever.store.sqlite.outbox import SqliteOutbox
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
from tests.helpers.memory_database import MemoryDatabase

MODEL = "tiny"
MAX_MODEL_LEN = 1024


def chunk(document: str, ordinal: int, text: str = "") -> retriever_pb2.Chunk:
    return retriever_pb2.Chunk(
        id=f"{document}#{ordinal}",
        document_id=document,
        title=f"Title of {document}",
        heading_path=["Handbook", document],
        ordinal=ordinal,
        text=text or f"Chunk {ordinal} of {document}.",
        content_hash=f"hash of {document}",
        updated_unix_ms=1_700_000_000_000,
    )


class FakeRetriever(retriever_pb2_grpc.RetrieverServicer):
    """Returns fixed hits; keeps documents in a dict, each as one chunk, and has a real outbox.

    Args:
        token_digest: Returns the digest of a chunk's tokens.
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
        self.outbox = SqliteOutbox(MemoryDatabase())
        self.collections = {"default": retriever_pb2.Collection(name="default", window=1)}
        self.reports: dict[str, bytes] = {}
        self.similar: dict[str, list[float]] = {}  # scores, by document
        self.searches: list[retriever_pb2.SearchRequest] = []
        self.copy = [b"first part", b"second part"]  # of a backup
        self.upserts = 0
        self.most_upserts = 0
        self.hold_upserts: asyncio.Event | None = None
        self.restored: list[bytes] = []
        self.hold: asyncio.Event | None = None
        self.waiting = asyncio.Event()
        self.cancelled = asyncio.Event()

    async def Search(self, request: Any, context: Any) -> AsyncIterator[Any]:  # noqa: N802
        self.searches.append(request)
        self._known(request.collection)
        yield retriever_pb2.SearchStage(hits=self.hits[:1], progress=0.5, embed_us=9500)
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
        return list(map(_delete_message, claimed))

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
            deletes=map(_delete_message, claim.deletes), unacknowledged=claim.num_unacknowledged
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

    async def PutReport(self, request: Any, context: Any) -> Any:  # noqa: N802
        self.reports[request.report.name] = request.report.body
        return retriever_pb2.PutReportReply()

    async def GetReport(self, request: Any, context: Any) -> Any:  # noqa: N802
        if request.name not in self.reports:
            raise NotFound("report", request.name, "put it first")
        return retriever_pb2.Report(name=request.name, body=self.reports[request.name])

    async def PutCollection(self, request: Any, context: Any) -> Any:  # noqa: N802
        self.collections[request.collection.name] = request.collection
        return request.collection

    async def GetCollection(self, request: Any, context: Any) -> Any:  # noqa: N802
        self._known(request.name)
        return self.collections[request.name]

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
        parts = [part.data async for part in requests]
        self.restored = parts
        return retriever_pb2.RestoreReply(documents=7)

    async def ListCollections(self, request: Any, context: Any) -> Any:  # noqa: N802
        return retriever_pb2.ListCollectionsReply(collections=self.collections.values())

    def _known(self, name: str) -> None:
        if name not in self.collections:
            raise NotFound("collection", name, "create it with PUT /v1/collections/NAME")

    def _document(self, request: Any) -> retriever_pb2.Document:
        self._known(request.collection)
        if request.id not in self.documents:
            raise NotFound("document", request.id, "see GET /v1/documents")
        return self.documents[request.id]


def _delete_message(delete: OutboxDelete) -> retriever_pb2.OutboxDelete:
    return retriever_pb2.OutboxDelete(
        id=delete.id,
        collection=delete.collection,
        document_id=delete.document,
        names_document=delete.names_document,
        token_digests=delete.token_digests,
        everything=delete.everything,
        acknowledged_unix_ms=delete.acknowledged_unix_ms,
    )


def _now_ms() -> int:
    return time.time_ns() // 1_000_000


class FakeStore(cachestore_pb2_grpc.CacheStoreServicer):
    """Records which chunks were looked up and deleted, and every deletion.

    Args:
        unavailable: Whether it refuses every lookup.
        unavailable_chunks: Chunks whose lookup it refuses.
        stored: Variants by chunk.
        stats: Its counters.
    """

    def __init__(self) -> None:
        self.unavailable = False
        self.unavailable_chunks: set[bytes] = set()
        self.stored: dict[bytes, list[cachestore_pb2.StoredVariant]] = {}
        self.asked: list[bytes] = []
        self.deleted: list[bytes] = []
        self.deletions: list[cachestore_pb2.Deletion] = []
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

    async def Delete(self, request: Any, context: Any) -> Any:  # noqa: N802
        self.deletions.append(request.deletion)
        self.deleted += request.deletion.chunks
        return cachestore_pb2.DeleteReply(removed=2 * len(request.deletion.chunks))


class FakeRecords(engine_pb2_grpc.EngineServicer):
    """Returns a record of every request.

    Args:
        has_no_records: Whether it has no record of any request.
        unavailable: Whether it refuses every call.
        pass_tokens: Tokens of one engine step; 0: it does not report them.
        fields: Fields of every record that differ from the defaults.
        fields_of: Returns such fields by request.
    """

    def __init__(self) -> None:
        self.has_no_records = False
        self.unavailable = False
        self.pass_tokens = 0
        self.fields: dict[str, Any] = {}
        self.fields_of: Callable[[str], dict[str, Any]] = lambda _: {}
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
        fields |= self.fields | self.fields_of(request.request)
        return engine_pb2.RequestRecord(request=request.request, **fields)

    async def GetCosts(self, request: Any, context: Any) -> Any:  # noqa: N802
        self._raise_if_unavailable()
        costs = engine_pb2.Costs()
        if self.pass_tokens:
            costs.prefill.pass_tokens = self.pass_tokens
        return costs

    def _raise_if_unavailable(self) -> None:
        if self.unavailable:
            raise Unavailable("engine", "its records are unavailable")


class FakeEngine:
    """An ASGI app with vLLM's /v1/completions."""

    def __init__(self) -> None:
        self.healthy = True
        self.words = ["It runs in ", "eu-north", "."]
        self.blend_words: list[str] | None = None  # the words of blends, if they differ
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
        self.pause: asyncio.Event | None = None  # after the first word, until it is set
        self.aborted = asyncio.Event()
        self.waiting = asyncio.Event()

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["path"] == "/health":
            return await _respond(send, 200 if self.healthy else 503, b"")
        body = json.loads(await _body(receive))
        if self.refuse is not None:
            status, answer = self.refuse
            return await _respond(send, status, json.dumps(answer).encode())
        if not body.get("stream"):
            self.probes += 1
            return await _respond(send, 200, b'{"choices":[{"text":"x","finish_reason":"length"}]}')
        self.requests.append(body)
        self.headers.append({name.decode(): value.decode() for name, value in scope["headers"]})
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await self._stream(body, receive, send)

    async def _stream(self, body: Any, receive: Any, send: Any) -> None:
        async def event(value: Any) -> None:
            data = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
            await _part(send, f"data: {data}\n\n".encode())

        words = self._words_for(body)
        last = len(words) - 1
        if self.prefill is not None and not await self._prefilled(self.prefill, receive):
            return
        for index, word in enumerate([*words, ""]):
            if index == self.hold_after:
                self.waiting.set()
                while (await receive())["type"] != "http.disconnect":
                    pass
                self.aborted.set()
                return
            if index == 1 and self.pause is not None:
                self.waiting.set()
                await self.pause.wait()
            if index == self.fail_after:
                await event({"error": {"message": "the engine died", "code": 500}})
                await event("[DONE]")
                return await _part(send, b"", more=False)
            if index == self.drop_after:
                return await _part(send, b"", more=False)
            if word:
                reason = "stop" if index == last else None
                choice: dict[str, Any] = {"index": 0, "text": word, "finish_reason": reason}
                if body.get("logprobs") and self.top_logprobs is not None:
                    choice["logprobs"] = {"top_logprobs": [self.top_logprobs]}
                await event({"id": "cmpl-1", "object": "text_completion", "choices": [choice]})
        if self.sends_usage:
            prompt, answer = len(body["prompt"]), len(words)
            usage = {"prompt_tokens": prompt, "completion_tokens": answer}
            usage["total_tokens"] = prompt + answer
            if self.reports_cached:
                details = {"cached_tokens": self._cached_tokens(body)}
                usage["prompt_tokens_details"] = details  # type: ignore[assignment]
            await event({"id": "cmpl-1", "choices": [], "usage": usage})
            await event("[DONE]")
        await _part(send, b"", more=False)

    def _cached_tokens(self, body: Any) -> int:
        """Return 70 for questions; for prefills the longest beginning that came before."""
        if "priority" not in body:
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
        blends = ReusePlan.from_json(body["kv_transfer_params"]["ragcache"]).blends
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


@asynccontextmanager
async def serving(app: Any, port: int = 0, host: str = "127.0.0.1") -> AsyncGenerator[int, None]:
    """Serve an ASGI app on loopback; yields its port."""
    config = uvicorn.Config(
        app, host, port, log_config=None, ws="none", timeout_graceful_shutdown=1
    )
    config.load()
    server = uvicorn.Server(config)
    server.lifespan = config.lifespan_class(config)
    # Server.serve would also poll, and handle the signals of the whole process.
    await server.startup()
    try:
        yield server.servers[0].sockets[0].getsockname()[1]
    finally:
        await server.shutdown()


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
            cachestore=FixedMembers((f"127.0.0.1:{self.servers['cachestore'].port}",)),
            engines=(self.engine_name(engine_port), *self.config.engines),
        )
        if isinstance(self.retriever, FakeRetriever):
            self.retriever.token_digest = self.token_digest
        port = await stack.enter_async_context(serving(self.app()))
        self.base_url = f"http://127.0.0.1:{port}"
        self.client = await stack.enter_async_context(
            httpx.AsyncClient(base_url=self.base_url, trust_env=False, timeout=30)
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
        return create_app(self.config, self.space(), self.prompts())

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
            "version": 1,
            "model": state["model"],
            "space": state["space"],
            "template": state["template"],
            "created_at": "2026-01-01T00:00:00Z",
            "capture": "on demand",
            "wanted_quality": 0.9,
            "budgets": [budget],
        }
        return await self.client.put("/v1/quality/report", json=report | changes)

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
    first_token_timeout_s=20,
    next_token_timeout_s=20,
    engine_watch_s=0.05,
)


@asynccontextmanager
async def world(model: Path, **changes: Any) -> AsyncGenerator[World, None]:
    """Run a gateway and its fakes. The changes apply to the gateway's settings."""
    async with AsyncExitStack() as stack:
        yield await World(CONFIG.replace(**changes)).start(stack, model)


def data_of(stream: str) -> list[Any]:
    """Parse the data of a stream's events; the end stays ``[DONE]``."""
    events = [line.removeprefix("data: ") for line in stream.split("\n\n") if line]
    return [event if event == "[DONE]" else json.loads(event) for event in events]
