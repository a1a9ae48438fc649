"""Simulated engines: vLLM's API and RagCache's scheduler half, with the timing of a model.

The connector's scheduler half is the product's: it verifies plans, asks the real cache store,
decides what to load and to save, and publishes the engine's queue. So is the gRPC service with
records, costs and the feed. Only vLLM's scheduler, its prefix cache and the worker are simulated
(``pass_scheduler``, ``block_cache``, ``engine_times``). A load reads the values from the store, and
ends when the simulated link would have carried them. A save puts a value of zeros. Nothing blends.

Run it as a program: ``python -m bench.support.cluster.simulated_engine FILE``. The file has the
engines as a JSON list of ``EngineConfig``. All of them share one event loop.
"""

from __future__ import annotations

import asyncio
import json
import os
import re
import sys
import time
import uuid
from collections.abc import Coroutine, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast
from unittest.mock import patch

import orjson
import uvloop

from bench.support.cluster.block_cache import BlockCache
from bench.support.cluster.engine_times import EngineTimes
from bench.support.cluster.pass_scheduler import EngineRequest, PassScheduler
from bench.support.gateway_load.simulated_engine import HEAD, EngineConnection
from ragcache_core.cost.load_or_compute import ReuseCosts
from ragcache_core.errors import RagCacheError
from ragcache_core.identity.keys import KVSpace
from ragcache_core.identity.variant import Miss, ValueShape
from ragcache_core.store_api import NewVariant
from ragcache_engine.announcements.node_announcer import NodeAnnouncer
from ragcache_engine.protocol.context import EngineContext
from ragcache_engine.protocol.messages import (
    STORE_TIER,
    LoadJob,
    LoadOutcome,
    MeasuredPass,
    ProbeOutcome,
    SaveJob,
    StepReport,
    miss_reason,
)
from ragcache_engine.scheduler.load_publisher import ArrivedRequest
from ragcache_engine.scheduler.request import NewRequest
from ragcache_engine.scheduler.scheduler import ConnectorScheduler
from ragcache_engine.telemetry.engine_feed import EngineFeed
from ragcache_engine.telemetry.request_records import RequestRecords, serve_records
from ragcache_kv.model.folder import load_model_folder
from ragcache_kv.store_client.sharded import ShardedStore
from ragcache_kv.values.layout import FORMAT, value_parts
from ragcache_kv.values.outgoing_value import ReadyValue
from ragcache_wire.settings import EngineSettings

_POLL_S = 0.002
"""Time between two passes without tokens, in which lookups are awaited."""

_STREAMS = re.compile(rb'"stream": ?true')


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """One engine: its HTTP port, the environment of its connector, and its times."""

    port: int
    model: str
    dtype: str
    environment: Mapping[str, str]
    times: Mapping[str, Any]


class SimulatedWorker:
    """Moves the values of one engine, for the times of its link.

    Args:
        pool: Threads that talk to the store.
    """

    def __init__(
        self, times: EngineTimes, space: KVSpace, store: ShardedStore, pool: ThreadPoolExecutor
    ) -> None:
        self._times = times
        self._space = space
        self._store = store
        self._pool = pool
        self._link_free_s = 0.0

    async def load(self, job: LoadJob) -> LoadOutcome:
        """Read the values of a load, and return when the link has carried them."""
        loop, began_s = asyncio.get_running_loop(), time.monotonic()
        num_bytes, end, missing, reason = await loop.run_in_executor(self._pool, self._read, job)
        tokens = max(0, min(end, job.end) - job.first)
        self._link_free_s = max(self._link_free_s, began_s) + tokens * self._times.load_token_s
        until_s = max(self._link_free_s, began_s + self._times.load_s)
        await asyncio.sleep(until_s - time.monotonic())
        return LoadOutcome(
            job.request_id,
            tokens,
            num_bytes,
            time.monotonic() - began_s,
            missing,
            reason,
            values_by_tier={STORE_TIER: len(job.spans)},
            bytes_by_tier={STORE_TIER: num_bytes},
        )

    def save(self, job: SaveJob, token_s: float) -> None:
        """Put a value of zeros, in the background."""
        self._pool.submit(self._put, job, token_s * job.info.num_tokens)

    def _read(self, job: LoadJob) -> tuple[int, int, Any, str]:
        num_bytes, end = 0, job.first
        keys = [span.variant for span in job.spans]
        try:
            answers = self._store.get(keys, job.deadline_s, exact=True, domain=job.domain)
            for span, (_, value) in zip(job.spans, answers, strict=False):
                if isinstance(value, Miss):
                    return num_bytes, end, span.variant, miss_reason(value)
                num_bytes, end = num_bytes + len(value.value), span.end
        except RagCacheError as error:
            return num_bytes, end, None, str(error)
        return num_bytes, end, None, ""

    def _put(self, job: SaveJob, cost_s: float) -> None:
        space = self._space
        parts = value_parts(space, job.info.num_tokens)
        shape = ValueShape(space.num_layers, space.num_kv_heads, space.head_dim, space.dtype)
        variant = NewVariant(job.span.variant, job.info, job.origin, shape, parts, FORMAT)
        value = ReadyValue.with_checksums(memoryview(bytes(sum(parts))), parts, cost_s)
        try:
            self._store.put(variant, value, 30.0, as_of=job.as_of)
        except RagCacheError as error:
            print(f"save failed: {error}", file=sys.stderr, flush=True)


class SimulatedEngine:
    """One engine. For one event loop."""

    def __init__(self, config: EngineConfig, pool: ThreadPoolExecutor) -> None:
        self._times = times = EngineTimes.from_json(config.times)
        with patch.dict(os.environ, config.environment):
            settings = EngineSettings(lookup_wait_s=1e-4)
        space = load_model_folder(config.model).space(config.dtype)
        records, self._costs, feed = RequestRecords(), ReuseCosts(), EngineFeed()
        announcer = NodeAnnouncer(space, self._costs, feed)
        store = ShardedStore(settings.cachestore, settings.credentials)
        self._connector = ConnectorScheduler(
            EngineContext(settings, space), records, store, self._costs, announcer, feed
        )
        self._connector.on_profile(times.profile, joins_passes=False)
        self._cache = cache = BlockCache(times.cache_tokens, times.block_tokens)
        self._connector.bind(cast(Any, cache), times.block_tokens, cast(Any, cache))
        self._scheduler = PassScheduler(times, cache, self._connector)
        self._worker = SimulatedWorker(times, space, store, pool)
        self._streams: dict[EngineConnection, EngineRequest] = {}
        self._connections: dict[EngineRequest, RequestConnection] = {}
        self._changed = asyncio.Event()
        self._tasks: set[asyncio.Task[None]] = set()
        assert settings.records_listen is not None
        self._server = serve_records(
            records, self._costs, settings.records_listen, feed, settings.credentials
        )

    def accept(self, connection: RequestConnection, body: Mapping[str, Any]) -> None:
        """Queue a request after the time that the engine's API server takes for it."""
        params = dict(body.get("kv_transfer_params") or {})
        token_ids = params.pop("prompt_token_ids", None) or body["prompt"]
        salt = body.get("cache_salt")
        request = EngineRequest(
            uuid.uuid4().hex,
            token_ids,
            body.get("max_tokens") or body.get("max_completion_tokens") or 16,
            body.get("priority", 0),
            self._cache.hashes(token_ids, salt),
        )
        self._streams[connection], self._connections[request] = request, connection
        loop = asyncio.get_running_loop()
        loop.call_later(self._times.accept_s, self._queue, request, params, salt)

    def remove(self, stream: EngineConnection) -> None:
        """Forget a stream that has ended. A request that goes on is aborted."""
        request = self._streams.pop(stream, None)
        if request is not None:
            del self._connections[request]
            self._scheduler.remove(request)

    async def run(self) -> None:
        """Run passes until cancelled."""
        finished: list[str] = []
        while True:
            if self._scheduler.is_idle and not finished:
                self._changed.clear()
                await self._changed.wait()
            began_s = time.monotonic()
            current = self._scheduler.next_pass()
            blocks = {one.id: one.blocks for one, _, _ in current.progress}
            progress = [(one.id, before, tokens) for one, before, tokens in current.progress]
            jobs = self._connector.step(progress, blocks.__getitem__, finished)
            for load in jobs.loads:
                [request] = [one for one in self._connections if one.id == load.request_id]
                self._spawn(self._load(load, request))
            if (probe := jobs.probe) is not None:
                self._connector.on_released([probe.request_id])
                if self._scheduler.is_idle:
                    self._spawn(self._measure(probe))
            seconds = current.seconds(self._times) if current.progress else _POLL_S
            await asyncio.sleep(began_s + seconds - time.monotonic())
            token_s = seconds / max(1, jobs.num_tokens)
            for save in jobs.saves:
                self._worker.save(save, token_s)
            passes = [MeasuredPass(jobs.work, seconds)] if jobs.prompt_tokens else []
            self._connector.on_reports([StepReport(passes=passes)])
            written = self._scheduler.end_pass(current)
            self._cache.report()
            finished = [one.id for one in written if one.is_done]
            for request in written:
                if (connection := self._connections.get(request)) is not None:
                    connection.write_next(request)

    def _queue(self, request: EngineRequest, params: Mapping[str, Any], salt: str | None) -> None:
        if request not in self._connections:  # its client has left
            return
        length, hashes = len(request.token_ids), request.hashes
        self._connector.on_arrival(ArrivedRequest(request.id, length, params, hashes))
        new = NewRequest(request.id, request.token_ids, params, salt, block_hashes=hashes)
        self._connector.on_new_request(new)
        self._scheduler.add(request)
        self._changed.set()

    async def _load(self, job: LoadJob, request: EngineRequest) -> None:
        outcome = await self._worker.load(job)
        self._connector.on_outcomes([outcome])
        self._scheduler.end_load(request, outcome)
        self._cache.report()

    async def _measure(self, probe: LoadJob) -> None:
        """Make a load that a request declined."""
        outcome = await self._worker.load(probe)
        variants = tuple(span.variant for span in probe.spans)
        self._connector.on_reports([StepReport(probes=[ProbeOutcome(outcome, variants)])])

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


class RequestConnection(EngineConnection):
    """A connection to a simulated engine."""

    def __init__(self, engine: SimulatedEngine) -> None:
        super().__init__(engine)
        self._engine = engine
        self._prompt_tokens = self._cached_tokens = 0
        self._is_chat = self._is_stream = self._has_begun = False

    def on_message_complete(self) -> None:
        """Answer a health check, or queue a request."""
        body = b"".join(self._body)
        self._body.clear()
        if not body:
            self._write(b"HTTP/1.1 200 OK\r\ncontent-length: 0\r\n\r\n")
            return
        self._is_chat = self._path == b"/v1/chat/completions"
        self._is_stream, self._has_begun = bool(_STREAMS.search(body)), False
        self._begin_events(self._is_chat)
        if self._is_stream:
            self._write(HEAD)
        self._engine.accept(self, orjson.loads(body))

    def write_next(self, request: EngineRequest) -> None:
        """Write the next token of a stream, or an answer in one piece after its last token."""
        self._prompt_tokens, self._cached_tokens = len(request.token_ids), request.cached
        self._num_tokens, self._left = request.max_tokens, request.max_tokens - request.generated
        if not self._is_stream:
            if request.is_done:
                self._write_whole(self._is_chat)
                self._engine.remove(self)
            return
        if not self._has_begun:
            self._has_begun = True
            self._write_role(self._is_chat)
        self._left += 1  # write_token counts this one
        self.write_token()

    def _usage(self) -> bytes:
        prompt, cached, written = self._prompt_tokens, self._cached_tokens, self._num_tokens
        return (
            b'"prompt_tokens":%d,"total_tokens":%d,"completion_tokens":%d,'
            b'"prompt_tokens_details":{"cached_tokens":%d}'
        ) % (prompt, prompt + written, written, cached)


async def serve(configs: list[EngineConfig]) -> None:
    """Serve until the process is stopped."""
    loop = asyncio.get_running_loop()
    with ThreadPoolExecutor(8, "store") as pool:
        engines = [SimulatedEngine(config, pool) for config in configs]
        for config, engine in zip(configs, engines, strict=True):
            await loop.create_server(
                lambda engine=engine: RequestConnection(engine),  # type: ignore[misc]
                "127.0.0.1",
                config.port,
            )
        await asyncio.gather(*(engine.run() for engine in engines))


if __name__ == "__main__":
    found = json.loads(Path(sys.argv[1]).read_text())
    uvloop.run(serve([EngineConfig(**one) for one in found]))
