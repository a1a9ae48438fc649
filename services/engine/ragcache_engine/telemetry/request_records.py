"""The engine's own record of its requests, and of what they cost, served over gRPC.

Streamed replies carry no record; what costs are is for those who choose among engines.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from concurrent import futures
from dataclasses import dataclass
from typing import Any

import grpc

from ragcache_core.cost.load_or_compute import ReuseCosts
from ragcache_core.errors import NotFound
from ragcache_core.identity.variant import Miss
from ragcache_wire.channel import SERVER_OPTIONS
from ragcache_wire.status import to_status, trailing_metadata
from ragcache_wire.v1 import engine_pb2 as pb
from ragcache_wire.v1 import engine_pb2_grpc

CAPACITY = 4096
"""Records kept; a gateway asks for one within moments of the first token."""


@dataclass(slots=True)
class Record:
    """Where a request's time went, in seconds, and where its KV came from.

    holes: places of the plan's segments that the repair computed: nothing of them was held or came.
    loaded_from: position of the first token that was loaded. slower: less was loaded than is held,
    because computing the rest is faster; else miss says why.
    """

    queue_s: float = 0.0
    load_s: float = 0.0
    prefill_s: float = 0.0
    prompt_tokens: int = 0
    local_tokens: int = 0
    loaded_from: int = 0
    loaded_tokens: int = 0
    loaded_bytes: int = 0
    blended_tokens: int = 0
    repaired_tokens: int = 0
    repair_s: float = 0.0
    holes: tuple[int, ...] = ()
    miss: str = ""
    slower: bool = False

    @property
    def why(self) -> str:
        """What was not loaded was not for this reason; empty where nothing was missing."""
        return "computing is faster" if self.slower else self.miss

    def begin_load(self, first: int) -> None:
        """Tokens from first on are about to be loaded, and nothing has come yet."""
        self.local_tokens = self.loaded_from = first
        self.loaded_tokens = self.loaded_bytes = 0
        self._forget_repair()

    def count_local(self, num_local: int) -> None:
        """The engine holds the first num_local tokens itself.

        After a preemption what was loaded may be among them, and counts once. What is not held any
        more is missing from the end, where what is blended lies; how much of that was repaired is
        not known, but no more than all of what is left.
        """
        kept = max(0, min(self.loaded_tokens, num_local - self.loaded_from))
        self.blended_tokens = max(0, self.blended_tokens - (self.loaded_tokens - kept))
        self.repaired_tokens = min(self.repaired_tokens, self.blended_tokens)
        self.loaded_tokens, self.local_tokens = kept, num_local - kept
        if not kept:
            self.loaded_bytes = 0
        if not self.blended_tokens:
            self._forget_repair()

    def _forget_repair(self) -> None:
        self.blended_tokens = self.repaired_tokens = 0
        self.repair_s = 0.0
        self.holes = ()


def reason(miss: Miss) -> str:
    """Why a variant was not served, in the words of a record."""
    return miss.value.replace("_", " ")


class RecordBook:
    """The latest CAPACITY records by the gateway's request id; safe to share between threads."""

    def __init__(self) -> None:
        self._records: OrderedDict[str, Record] = OrderedDict()
        self._lock = threading.Lock()

    def put(self, request: str, record: Record) -> None:
        """Keep a record, forgetting the oldest beyond CAPACITY."""
        with self._lock:
            self._records[request] = record
            self._records.move_to_end(request)
            while len(self._records) > CAPACITY:
                self._records.popitem(last=False)

    def get(self, request: str) -> Record | None:
        """The record of request, or None."""
        with self._lock:
            return self._records.get(request)


class _EngineServicer(engine_pb2_grpc.EngineServicer):
    def __init__(self, book: RecordBook, costs: ReuseCosts) -> None:
        self._book = book
        self._costs = costs

    def GetRequestRecord(  # noqa: N802  name given by the protocol
        self, request: pb.GetRequestRecordRequest, context: Any
    ) -> pb.RequestRecord:
        record = self._book.get(request.request)
        if record is None:
            error = NotFound("request record", request.request, "ask right after the answer")
            code, message, fields = to_status(error)
            context.set_trailing_metadata(trailing_metadata(fields))
            context.abort(code, message)
            raise AssertionError("abort raises")
        return pb.RequestRecord(
            request=request.request,
            queue_s=record.queue_s,
            load_s=record.load_s,
            prefill_s=record.prefill_s,
            prompt_tokens=record.prompt_tokens,
            local_tokens=record.local_tokens,
            loaded_tokens=record.loaded_tokens,
            loaded_bytes=record.loaded_bytes,
            blended_tokens=record.blended_tokens,
            repaired_tokens=record.repaired_tokens,
            repair_s=record.repair_s,
            holes=record.holes,
            miss=record.why,
        )

    def GetCosts(self, request: pb.GetCostsRequest, context: Any) -> pb.Costs:  # noqa: N802
        costs = self._costs
        reply = pb.Costs(
            correction=costs.correction,
            loads=[
                pb.LoadCost(tier=place, latency_s=latency_s, bytes_per_s=bytes_per_s)
                for place, (latency_s, bytes_per_s) in costs.bandwidths().items()
            ],
        )
        if (profile := costs.profile) is not None:
            reply.prefill.cached.extend(profile.cached)
            reply.prefill.computed.extend(profile.computed)
            reply.prefill.seconds.extend(s for row in profile.seconds for s in row)
            reply.prefill.pass_tokens = profile.pass_tokens
        return reply


def serve(book: RecordBook, costs: ReuseCosts, listen: str) -> grpc.Server:
    """Serve both at listen ("host:port") until the returned server is stopped.

    Raises RuntimeError when the address is taken.
    """
    server = grpc.server(futures.ThreadPoolExecutor(2, "records"), options=SERVER_OPTIONS)
    engine_pb2_grpc.add_EngineServicer_to_server(_EngineServicer(book, costs), server)
    server.add_insecure_port(listen)
    server.start()
    return server
