"""No message of a call stops a service, makes it fail, or costs memory for ever."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import grpc
import pytest
import xxhash
from google.protobuf.message import Message

from harness.processes import Service, free_port, is_serving, running_cachestore
from ragcache_kv.store_client.client import StoreClient
from ragcache_wire.clients.retriever_client import RetrieverClient
from ragcache_wire.peers.credentials import Credentials
from ragcache_wire.v1 import cachestore_pb2, engine_pb2, retriever_pb2
from ragcache_wire.v1 import node_feed_pb2 as feed_pb
from ragcache_wire.watched.signing_keys import SigningKeys
from tests.attack.fuzzed_process import FuzzedProcess
from tests.attack.fuzzed_service import Call, FuzzedService, calls
from tests.kit.simulated_engines import PROMPT, Simulated

SEED: Final = 37
WARM_UP: Final = 2000
STRANGERS: Final = 1000
"""Calls without a token. They end before a message is read."""

COUNTS: Final = [
    pytest.param(10_000, marks=pytest.mark.timeout(300)),
    pytest.param(100_000, marks=[pytest.mark.slow, pytest.mark.timeout(3600)]),
]
TIMEOUT_S: Final = 60.0
RECORDED: Final = "recorded"
MINUTE_S: Final = 1_700_000_040


@pytest.fixture
def keys(tmp_path: Path) -> SigningKeys:
    (tmp_path / "keys").write_text("a1" * 32 + "\n")
    return SigningKeys(tmp_path / "keys")


def env_of(folder: Path) -> dict[str, str]:
    return {"RAGCACHE_SIGNING_KEY_FILE": str(folder / "keys"), "OMP_NUM_THREADS": "1"}


async def fuzz(
    process: FuzzedProcess,
    address: str,
    service: Any,
    corpus: Sequence[Call],
    keys: SigningKeys,
    count: int,
) -> None:
    """Send ``count`` mutated calls, and check the process."""
    peer, stranger = (FuzzedService(address, service, one) for one in (keys, None))
    await peer.fuzz(corpus, SEED, WARM_UP)
    process.warmed_up()
    await stranger.fuzz(corpus, SEED, STRANGERS)
    await peer.fuzz(corpus, SEED + 1, count - WARM_UP - STRANGERS)
    assert peer.outcomes[grpc.StatusCode.OK] > count / 10, peer.outcomes
    await peer.close()
    await stranger.close()
    process.check()


def store_corpus() -> list[Call]:
    pb = cachestore_pb2
    key = pb.VariantKey(chunk=b"c" * 16, prefix=b"p" * 16)
    raw = b"v" * 3000
    sums = [xxhash.xxh3_64_intdigest(raw[:1500]), xxhash.xxh3_64_intdigest(raw[1500:])]
    header = pb.PutHeader(
        key=key,
        info=pb.VariantInfo(num_tokens=8, num_bytes=3000, exact=True, format=1),
        origin=pb.Origin(
            prefix_chunks=[b"q" * 16],
            domain="public",
            document="a.md",
            token_s=0.01,
            influence=pb.Influence(rights=b"r" * 16, num_head=1),
        ),
        part_bytes=[1500, 1500],
        as_of=pb.AsOf(store=b"s" * 16, sequence=1, planned_at_ms=1),
    )
    shaped = pb.PutHeader()
    shaped.CopyFrom(header)
    shaped.shape.CopyFrom(pb.ValueShape(num_layers=2, num_kv_heads=1, head_dim=16, dtype="float16"))
    put = [
        pb.PutPart(header=header),
        *(pb.PutPart(data=raw[:1000]), pb.PutPart(data=raw[1000:])),
        pb.PutPart(completion=pb.PutCompletion(checksums=sums, cost_s=0.5)),
    ]
    deletions = (
        pb.Deletion(id=b"i" * 16, chunks=[b"x" * 16], made_at_ms=1),
        pb.Deletion(variants=[pb.VariantKey(chunk=b"x" * 16, prefix=b"y" * 16)]),
        pb.Deletion(documents=["b.md"], domain="tenant:red"),
    )
    use = pb.UseReport.Use(key=key, times=1, fix_overhead=0.5, token_s=0.01)
    lookup = (pb.LookupKey(chunk=b"c" * 16), pb.LookupKey(chunk=b"c" * 16, prefix=b"p" * 16))
    single: Mapping[str, Sequence[Message]] = {
        "Hello": [pb.HelloRequest()],
        "Lookup": [pb.LookupRequest(keys=lookup, exact=True, domain="public")],
        "Get": [pb.GetRequest(keys=[key], domain="public", fix_overheads=[0.5])],
        "FindMisses": [pb.FindMissesRequest(keys=[key])],
        "ReportUses": [pb.UseReport(uses=[use])],
        "Prefetch": [pb.PrefetchRequest(keys=[key])],
        "Delete": [pb.DeleteRequest(deletion=one) for one in deletions],
        "FindRemains": [pb.RemainsRequest(deletion=one) for one in deletions],
        "Tombstones": [pb.TombstonesRequest(pulled=[pb.PullPosition(store=b"s" * 16, sequence=1)])],
        "DropCopy": [pb.DropCopyRequest(key=key)],
        "Watch": [feed_pb.WatchRequest(boot=b"b" * 16, after=3, reader="gateway")],
        "Stats": [pb.StatsRequest()],
    }
    first = pb.PutPart(header=shaped)
    return [*calls(single), Call("Put", tuple(put)), Call("Put", (first, *put[1:]))]


@pytest.mark.parametrize("count", COUNTS)
async def test_mutated_calls_of_a_store(tmp_path: Path, keys: SigningKeys, count: int) -> None:
    with running_cachestore(tmp_path / "store", env=env_of(tmp_path)) as store:
        process = FuzzedProcess(store.service.pid, store.service.log)
        service = cachestore_pb2.DESCRIPTOR.services_by_name["CacheStore"]
        await fuzz(process, store.address, service, store_corpus(), keys, count)
        client = StoreClient(store.address, credentials=Credentials(keys))
        client.connect(TIMEOUT_S)
        assert client.stats(TIMEOUT_S).puts
        client.close()


def engine_corpus() -> list[Call]:
    single: Mapping[str, Sequence[Message]] = {
        # A watch of an idle engine waits for its heartbeats.
        "GetRequestRecord": [engine_pb2.GetRequestRecordRequest(request=RECORDED)] * 60,
        "GetCosts": [engine_pb2.GetCostsRequest()] * 20,
        "Watch": [feed_pb.WatchRequest(boot=b"b" * 16, after=3, reader="gateway")],
    }
    return calls(single)


@pytest.mark.parametrize("count", COUNTS)
async def test_mutated_calls_of_an_engine(
    tmp_path: Path, keys: SigningKeys, tiny_model: Path, count: int
) -> None:
    with running_cachestore(tmp_path / "store", env=env_of(tmp_path)) as store:
        engines = Simulated(tmp_path, tiny_model, store, tmp_path / "keys")
        try:
            engines.wait_until_ready()
            await engines.send(0, engines.params(RECORDED))
            process = FuzzedProcess(engines.service.pid, engines.service.log)
            service = engine_pb2.DESCRIPTOR.services_by_name["Engine"]
            await fuzz(process, engines.engines[0][1], service, engine_corpus(), keys, count)
            asked = await engines.ask(0)
            assert asked.prompt_tokens == len(PROMPT.token_ids)
        finally:
            engines.service.stop()


def retriever_corpus() -> list[Call]:
    pb = retriever_pb2
    document = pb.Document(
        collection="default",
        id="a.md",
        title="A",
        text="# A\n\nThe lamp is green.",
        content_type=pb.CONTENT_TYPE_MARKDOWN,
        metadata='{"team": ["a", "b"], "year": 2024, "public": true}',
    )
    conditions = (
        pb.FieldFilter(name="team", one_of=pb.TextList(values=["a", "b"])),
        pb.FieldFilter(name="year", range=pb.Range(gte=2000, lt=2030)),
        pb.FieldFilter(name="public", exists=True),
        pb.FieldFilter(name="id", prefix="a"),
        pb.FieldFilter(name="updated", period=pb.Period(start_us=1, end_us=1 << 52)),
    )
    fields = [pb.Filter(field=one) for one in conditions]
    filters = (
        pb.Filter(all=pb.Filters(filters=fields[:3])),
        pb.Filter(any=pb.Filters(filters=[pb.Filter(none=fields[3]), fields[4]])),
    )
    searches = [
        pb.SearchRequest(
            collection="default", query="Which lamp?", top_k=2, filter=one, min_score=-1.0
        )
        for one in filters
    ]
    searches.append(pb.SearchRequest(collection="default", query="lamp", top_k=2, diversity=0.5))
    counts = pb.UsageCounts(requests=1, computed_tokens=7, output_tokens=2)
    delta = pb.UsageDelta(
        minute_unix_s=MINUTE_S, tenant="red", key="red", model="tiny", counts=counts
    )
    load = pb.QueueLoad(
        bands=[pb.BandLoad(band=1, rate=0.5, tenants=[pb.TenantLoad(tenant="red", weight=1)])]
    )
    collection = pb.Collection(
        name="other",
        chunking=pb.Chunking(size_tokens=64, overlap_tokens=8),
        window=1,
        index=pb.INDEX_KIND_FLAT,
        max_documents=100,
        lexical_weight=0.5,
    )
    single: Mapping[str, Sequence[Message]] = {
        "PutCollection": [pb.PutCollectionRequest(collection=collection, keep_unset=True)],
        "GetCollection": [pb.GetCollectionRequest(name="default")],
        "ListCollections": [pb.ListCollectionsRequest()],
        "DeleteCollection": [pb.DeleteCollectionRequest(name="other")],
        "UpsertDocument": [pb.UpsertDocumentRequest(document=document)],
        "SubmitDocument": [pb.SubmitDocumentRequest(document=document, owner="red")],
        "GetOperation": [pb.GetOperationRequest(id="0" * 32, owner="red")],
        "DeleteDocument": [pb.DeleteDocumentRequest(collection="default", id="b.md")],
        "GetDocument": [pb.GetDocumentRequest(collection="default", id="a.md")],
        "ListDocuments": [
            pb.ListDocumentsRequest(collection="default", page_size=2, page_token="YS5tZA==")
        ],
        "Search": searches,
        "GetSimilarChunks": [pb.GetSimilarChunksRequest(collection="default", id="a.md", top_k=2)],
        "Embed": [pb.EmbedRequest(texts=["a", "b"])],
        "Rerank": [pb.RerankRequest(query="a", texts=["a", "b"])],
        "ListRemovals": [pb.ListRemovalsRequest(after=1)],
        "ClaimDeletes": [pb.ClaimDeletesRequest(limit=3)],
        "AcknowledgeDeletes": [
            pb.AcknowledgeDeletesRequest(complete=[b"i" * 16], partial=[b"j" * 16])
        ],
        "PutReport": [pb.PutReportRequest(report=pb.Report(name="quality", body=b"[]"))],
        "GetReport": [pb.GetReportRequest(name="quality")],
        "AddUsage": [
            pb.AddUsageRequest(
                gateway=b"g" * 16,
                sequence=1,
                deltas=[delta],
                now_unix_s=MINUTE_S,
                keys=["red"],
                tenants=["red"],
                waiting=load.SerializeToString(),
            )
        ],
        "ListUsage": [
            pb.ListUsageRequest(
                period=pb.USAGE_PERIOD_DAY,
                start_unix_s=MINUTE_S,
                end_unix_s=MINUTE_S + 86_400,
                tenant="red",
                page_size=2,
            )
        ],
        "GetStatus": [pb.GetStatusRequest()],
        "Backup": [pb.BackupRequest()],
    }
    copy = os.urandom(3000)
    parts = (pb.BackupPart(data=copy[:1000]), pb.BackupPart(data=copy[1000:], last=True))
    return [*calls(single), Call("Restore", parts)]


@pytest.mark.parametrize("count", COUNTS)
async def test_mutated_calls_of_a_retriever(
    tmp_path: Path, keys: SigningKeys, tiny_model: Path, count: int
) -> None:
    address = f"127.0.0.1:{free_port()}"
    env = {
        "RAGCACHE_LISTEN": address,
        "RAGCACHE_DATA_DIR": str(tmp_path / "documents"),
        "RAGCACHE_MODEL": str(tiny_model),
    } | env_of(tmp_path)
    command = [sys.executable, "-m", "ragcache_retriever"]
    retriever = Service("retriever", command, env, tmp_path / "retriever.log")
    try:
        retriever.wait_until("ready", lambda: is_serving(address))
        process = FuzzedProcess(retriever.pid, retriever.log)
        service = retriever_pb2.DESCRIPTOR.services_by_name["Retriever"]
        await fuzz(process, address, service, retriever_corpus(), keys, count)
        client = RetrieverClient(address, Credentials(keys))
        await client.put_collection(retriever_pb2.Collection(name="right"))
        document = retriever_pb2.Document(collection="right", id="a.md", text="A green lamp.")
        await client.upsert_document(document)
        found = [stage async for stage in client.search("right", "lamp", 1)]
        assert found[-1].hits[0].chunk.document_id == "a.md"
        await client.close()
    finally:
        retriever.stop()
