"""Keeps records of the engine's latest requests, and serves what gateways ask over gRPC.

vLLM's streamed completions carry no connector output, so a gateway asks for a record after the
first token. It also asks for costs, to choose among engines, and follows what the caches have.
"""

from __future__ import annotations

import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent import futures
from dataclasses import dataclass
from typing import Any, Final, NoReturn

import grpc

from ragcache_core.cost.load_or_compute import PredictedTime, ReuseCosts
from ragcache_core.errors import NotFound, RagCacheError, Unavailable
from ragcache_engine.protocol.messages import LoadOutcome
from ragcache_engine.telemetry.engine_feed import EngineFeed
from ragcache_wire.channel import SERVER_OPTIONS
from ragcache_wire.feeds.engine_load import to_load_message
from ragcache_wire.feeds.feed_cursor import HEARTBEAT_S, FeedCursor
from ragcache_wire.message_check import BlockingMessageInterceptor
from ragcache_wire.peers.credentials import NO_CREDENTIALS, Credentials
from ragcache_wire.peers.peer_access import PeerGuard
from ragcache_wire.peers.peer_channel import add_port
from ragcache_wire.peers.peer_interceptors import BlockingPeerInterceptor
from ragcache_wire.status import to_status, trailing_metadata
from ragcache_wire.v1 import engine_pb2 as pb
from ragcache_wire.v1 import engine_pb2_grpc
from ragcache_wire.v1 import node_feed_pb2 as feed_pb

CAPACITY = 4096
"""Number of records kept. A gateway asks for one right after the first token."""

RECORD_THREADS = 2
MAX_WATCHERS = 32
"""Most gateway processes that follow the engine's feed."""
LOAD_INTERVAL_S: Final = 0.01
"""Least time between two messages to one reader with what the engine has to do."""

_SERVED_FIELDS: Final = (
    *("queue_s", "load_s", "prefill_s", "select_s", "recompute_s", "prompt_tokens", "local_tokens"),
    *("loaded_tokens", "loaded_bytes", "blended_tokens", "recomputed_tokens", "missing_chunks"),
    "segments",
)
"""What a gateway gets of a record as it is."""


@dataclass(slots=True)
class RequestRecord:
    """Where a request's time went, and where its KV came from."""

    queue_s: float = 0.0
    load_s: float = 0.0
    prefill_s: float = 0.0
    prompt_tokens: int = 0
    local_tokens: int = 0
    # Position of the first loaded token.
    loaded_from: int = 0
    loaded_tokens: int = 0
    loaded_bytes: int = 0
    # Of loaded_tokens, those that are not exact.
    blended_tokens: int = 0
    recomputed_tokens: int = 0
    recompute_s: float = 0.0
    # Of recompute_s, the selection of tokens.
    select_s: float = 0.0
    # Of recomputed_tokens, those that the request's first pass recomputes beside its own tokens.
    joint_tokens: int = 0
    # Indexes of the plan's segments that the engine recomputed because no variant was loaded.
    missing_chunks: tuple[int, ...] = ()
    miss: str = ""
    # The request loaded less than the store has, because computing the rest is faster.
    compute_is_faster: bool = False
    # What the last decision about the load expected. None: it could not predict.
    predicted: PredictedTime | None = None
    # The valid segments of the plan, set at the first token.
    segments: tuple[pb.SegmentRecord, ...] = ()

    @property
    def reported_miss(self) -> str:
        """Return why the request did not load more. Empty: it loaded all that was planned."""
        return "computing is faster" if self.compute_is_faster else self.miss

    def begin_load(self, first: int) -> None:
        """Reset what depends on a load: one of the tokens from ``first`` on begins."""
        self.local_tokens = self.loaded_from = first
        self.loaded_tokens = self.loaded_bytes = 0
        self._reset_blend()

    def end_load(self, outcome: LoadOutcome, missing_chunks: Sequence[int]) -> None:
        """Record the outcome of a load."""
        self.loaded_tokens = outcome.tokens
        self.loaded_bytes = outcome.num_bytes if outcome.tokens else 0
        self.blended_tokens = outcome.blended_tokens
        self.recomputed_tokens = outcome.recomputed_tokens
        self.recompute_s, self.select_s = outcome.recompute_s, outcome.select_s
        self.missing_chunks = tuple(missing_chunks)
        if outcome.reason:
            self.miss, self.compute_is_faster = outcome.reason, False

    def end_prefill(self) -> None:
        """Divide the time of the passes between the tokens that they computed and recomputed."""
        computed = self.prompt_tokens - self.local_tokens - self.loaded_tokens
        if self.joint_tokens:
            share = self.joint_tokens / (self.joint_tokens + max(0, computed))
            seconds = share * self.prefill_s
            self.recompute_s += seconds
            self.load_s += seconds
            self.prefill_s -= seconds
            self.joint_tokens = 0

    @property
    def passes_s(self) -> float:
        """Seconds of the passes. Call it after ``end_prefill``."""
        return self.recompute_s - self.select_s + self.prefill_s

    def prediction_ratios(self) -> Mapping[str, float]:
        """Return measured over predicted seconds, by stage. Empty without a prediction.

        Stages that were predicted to take no time are left out. Call it after ``end_prefill``.
        """
        if (predicted := self.predicted) is None:
            return {}
        load_s = self.load_s - self.recompute_s
        stages = {
            "load": (load_s, predicted.load_s),
            "select": (self.select_s, predicted.select_s),
            "passes": (self.passes_s, predicted.passes_s),
            "total": (self.load_s + self.prefill_s, predicted.total_s),
        }
        return {name: took_s / asked_s for name, (took_s, asked_s) in stages.items() if asked_s > 0}

    def count_local(self, num_local: int) -> None:
        """Record that vLLM has the first num_local tokens cached.

        After a preemption they may include loaded tokens, which count once. What vLLM has dropped
        was at the end, where the blend is. How many of the remaining blended tokens were recomputed
        is unknown, so the record assumes the most.
        """
        kept = max(0, min(self.loaded_tokens, num_local - self.loaded_from))
        self.blended_tokens = max(0, self.blended_tokens - (self.loaded_tokens - kept))
        self.recomputed_tokens = min(self.recomputed_tokens, self.blended_tokens)
        self.loaded_tokens, self.local_tokens = kept, num_local - kept
        if not kept:
            self.loaded_bytes = 0
        if not self.blended_tokens:
            self._reset_blend()

    def _reset_blend(self) -> None:
        self.blended_tokens = self.recomputed_tokens = 0
        self.recompute_s = self.select_s = 0.0
        self.joint_tokens = 0
        self.missing_chunks = ()


class RequestRecords:
    """The latest CAPACITY records, by the gateway's request id. Thread-safe."""

    def __init__(self) -> None:
        self._records: OrderedDict[str, RequestRecord] = OrderedDict()
        self._lock = threading.Lock()

    def put(self, request: str, record: RequestRecord) -> None:
        """Keep a record at the first token, and drop the oldest ones beyond CAPACITY."""
        with self._lock:
            self._records[request] = record
            self._records.move_to_end(request)
            while len(self._records) > CAPACITY:
                self._records.popitem(last=False)

    def get(self, request: str) -> RequestRecord | None:
        """Return the record of a request, or None."""
        with self._lock:
            return self._records.get(request)


class _EngineServicer(engine_pb2_grpc.EngineServicer):
    def __init__(self, records: RequestRecords, costs: ReuseCosts, feed: EngineFeed) -> None:
        self._records = records
        self._costs = costs
        self._feed = feed
        self._free_watches = threading.BoundedSemaphore(MAX_WATCHERS)

    def GetRequestRecord(  # noqa: N802  name given by the protocol
        self, request: pb.GetRequestRecordRequest, context: Any
    ) -> pb.RequestRecord:
        record = self._records.get(request.request)
        if record is None:
            _abort(
                context,
                NotFound("request record", request.request, "ask right after the answer"),
            )
        predicted = record.predicted
        return pb.RequestRecord(
            **{name: getattr(record, name) for name in _SERVED_FIELDS},
            request=request.request,
            miss=record.reported_miss,
            predicted=None
            if predicted is None
            else pb.PredictedTime(
                load_s=predicted.load_s,
                select_s=predicted.select_s,
                passes_s=predicted.passes_s,
            ),
        )

    def GetCosts(self, request: pb.GetCostsRequest, context: Any) -> pb.Costs:  # noqa: N802
        costs = self._costs
        reply = pb.Costs(
            correction=costs.correction,
            request_s=costs.request_s,
            loads=[
                pb.LoadCost(tier=tier, latency_s=latency_s, bytes_per_s=bytes_per_s)
                for tier, (latency_s, bytes_per_s) in costs.tier_bandwidths().items()
            ],
        )
        if (profile := costs.profile) is not None:
            reply.prefill.cached.extend(profile.cached)
            reply.prefill.computed.extend(profile.computed)
            reply.prefill.seconds.extend(s for row in profile.seconds for s in row)
            reply.prefill.pass_tokens = profile.pass_tokens
        return reply

    def Watch(  # noqa: N802  name given by the protocol
        self, request: feed_pb.WatchRequest, context: Any
    ) -> Iterator[feed_pb.NodeChanges]:
        if not self._free_watches.acquire(blocking=False):
            _abort(context, Unavailable("engine", f"it has {MAX_WATCHERS} watchers, the most"))
        try:
            context.add_callback(self._feed.wake)
            yield from self._messages(request, context.is_active)
        finally:
            self._free_watches.release()

    def _messages(
        self, request: feed_pb.WatchRequest, is_active: Callable[[], bool]
    ) -> Iterator[feed_pb.NodeChanges]:
        """Yield changes of nodes at once, and changes of the load at most every LOAD_INTERVAL_S."""
        cursor = FeedCursor(self._feed, request.boot, request.after)
        load_number, next_load_s = 0, 0.0
        while is_active():
            message, load = cursor.next(), None
            if time.monotonic() >= next_load_s:
                load = self._feed.load_after(load_number, request.reader)
            if load is not None:
                message = message or cursor.heartbeat()
                load_number, next_load_s = load[0], time.monotonic() + LOAD_INTERVAL_S
                message.load.CopyFrom(to_load_message(load[1], load[2]))
            if message is not None:
                yield message
            elif self._feed.wait(cursor.sequence, load_number, HEARTBEAT_S):
                time.sleep(max(0.0, next_load_s - time.monotonic()))
            else:
                yield cursor.heartbeat()


def _abort(context: Any, error: RagCacheError) -> NoReturn:
    """End a call with an error."""
    code, message, fields = to_status(error)
    context.set_trailing_metadata(trailing_metadata(fields))
    context.abort(code, message)
    raise AssertionError("abort raises")


def serve_records(
    records: RequestRecords,
    costs: ReuseCosts,
    listen: str,
    feed: EngineFeed | None = None,
    credentials: Credentials = NO_CREDENTIALS,
) -> grpc.Server:
    """Serve records, costs and the feed at listen ("host:port") until the server is stopped.

    Args:
        records: The latest requests.
        costs: Predictions of loads and computations.
        listen: Address to bind.
        feed: What the engine's caches have. None: nothing is told of them.
        credentials: Of the platform. Without keys, only a server on loopback has callers.

    Raises:
        RuntimeError: The address is in use.
    """
    # A watch occupies a thread, which waits most of the time.
    threads = futures.ThreadPoolExecutor(RECORD_THREADS + MAX_WATCHERS, "records")
    admission = BlockingPeerInterceptor(PeerGuard(credentials.keys, listen))
    interceptors = [admission, BlockingMessageInterceptor()]
    server = grpc.server(threads, interceptors=interceptors, options=SERVER_OPTIONS)
    servicer = _EngineServicer(records, costs, feed or EngineFeed())
    engine_pb2_grpc.add_EngineServicer_to_server(servicer, server)
    add_port(server, listen, credentials)
    server.start()
    return server
