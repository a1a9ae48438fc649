"""All engines: which there are, which are healthy, and which one answers a request."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack
from typing import Any

from ragcache_core.errors import Unavailable
from ragcache_gateway.engines.client import Engine, watch_health
from ragcache_gateway.engines.completion import PART
from ragcache_gateway.engines.completion_stream import (
    Completion,
    FirstTokenTimeout,
    RequestNotSent,
)
from ragcache_gateway.engines.resolver import host_and_port, resolve
from ragcache_gateway.status.metrics import Metrics
from ragcache_wire.settings import GatewaySettings
from ragcache_wire.settings.gateway import EngineAddress
from ragcache_wire.tracing import Tracer

log = logging.getLogger(__name__)

MAX_LOST_ENGINES = 2
"""A request is abandoned after this many engines failed with it, so that one bad request cannot
take down all engines."""


class EnginePool:
    """The engines behind every configured host name, which the pool resolves periodically.

    Args:
        probe: Body of a request for one token, for engines that have failed.
    """

    def __init__(
        self,
        settings: GatewaySettings,
        probe: Mapping[str, Any],
        metrics: Metrics,
        tracer: Tracer,
    ) -> None:
        self._settings = settings
        self._probe = probe
        self._metrics = metrics
        self._tracer = tracer
        self._resolved: dict[EngineAddress, tuple[str, ...]] = {}
        self._choice_numbers = itertools.count(1)
        self._last_chosen: dict[Engine, int] = {}
        self._health_tasks: dict[Engine, asyncio.Task[None]] = {}
        self._closing: set[asyncio.Task[None]] = set()
        self._resolver_task: asyncio.Task[None] | None = None

    @property
    def known(self) -> list[Engine]:
        """Every engine there is, by address."""
        return sorted(self._health_tasks, key=lambda engine: engine.address)

    @property
    def in_flight(self) -> int:
        """Requests of this gateway that engines are answering."""
        return sum(engine.in_flight for engine in self._health_tasks)

    @property
    def problem(self) -> str | None:
        """Why no engine can answer; None if one can."""
        engines = self.known
        if not engines:
            hosts = ", ".join(sorted({engine.host for engine in self._settings.engines}))
            return f"there is none at {hosts}"
        if any(engine.failure is None for engine in engines):
            return None
        if len(engines) == 1:
            return engines[0].failure
        return ", ".join(f"{engine.address}: {engine.failure}" for engine in engines)

    async def start(self) -> None:
        """Resolve the host names from now on; wait for the first result, but not long."""
        resolved = asyncio.Event()
        self._resolver_task = asyncio.create_task(self._resolve_periodically(resolved))
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(self._settings.engine_connect_timeout_s):
                await resolved.wait()

    async def close(self) -> None:
        """Stop every task and close every connection."""
        tasks = [*self._health_tasks.values(), *self._closing]
        if self._resolver_task is not None:
            tasks.append(self._resolver_task)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for engine in self._health_tasks:
            await engine.close()

    async def complete(
        self, body: Mapping[str, Any], stack: AsyncExitStack
    ) -> tuple[Engine, Completion]:
        """Start a completion and wait for its first token, which the returned engine sent.

        If an engine fails before that, another healthy engine gets the request. When the stack
        closes, the engine aborts the completion.

        Raises:
            Unavailable: No engine could answer.
            InvalidInput: The engine refused the request.
        """
        tried: list[Engine] = []
        times_lost = 0
        try:
            async with asyncio.timeout(self._settings.first_token_timeout_s):
                while True:
                    tried.append(self._choose_except(tried))
                    try:
                        return tried[-1], await tried[-1].complete(body, stack)
                    except Unavailable as error:
                        tried[-1].record_failure(error)
                        times_lost += not isinstance(error, RequestNotSent)
                        if times_lost == MAX_LOST_ENGINES or not self._healthy_except(tried):
                            raise
                        log.info(
                            "engine pool: trying another engine failed=%s error=%s",
                            tried[-1].address,
                            error,
                        )
        except TimeoutError:
            timed_out = self._first_token_timeout()
            tried[-1].record_failure(timed_out)
            raise timed_out from None

    def choose(self) -> Engine:
        """Choose the engine that would get the next request. Raises Unavailable without one."""
        return self._choose_except([])

    async def complete_on(
        self, engine: Engine, body: Mapping[str, Any], stack: AsyncExitStack
    ) -> Completion:
        """Start a completion on one engine and no other, for work that can wait.

        A timeout does not mark the engine as failed: it may only be busy. Raises as ``complete``.
        """
        if engine not in self._health_tasks:
            raise Unavailable(PART, f"{engine.address} has left")
        try:
            async with asyncio.timeout(self._settings.first_token_timeout_s):
                return await engine.complete(body, stack)
        except Unavailable as error:
            engine.record_failure(error)
            raise
        except TimeoutError:
            raise self._first_token_timeout() from None

    def _first_token_timeout(self) -> FirstTokenTimeout:
        timeout_s = self._settings.first_token_timeout_s
        return FirstTokenTimeout(PART, f"no first token came within {timeout_s:g} s")

    def _healthy_except(self, tried: Sequence[Engine]) -> list[Engine]:
        return [
            engine
            for engine in self._health_tasks
            if engine.failure is None and engine not in tried
        ]

    def _choose_except(self, tried: Sequence[Engine]) -> Engine:
        """Choose the engine with the fewest requests in flight, then the least recently chosen."""
        # If none is healthy, the request finds out whether a failed engine answers again.
        candidates = self._healthy_except(tried) or list(self._health_tasks)
        if not candidates:
            raise Unavailable(PART, self.problem or "")
        engine = min(candidates, key=lambda e: (e.in_flight, self._last_chosen.get(e, 0)))
        self._last_chosen[engine] = next(self._choice_numbers)
        return engine

    async def _resolve_periodically(self, resolved: asyncio.Event) -> None:
        while True:
            hosts = self._settings.engines
            results = await asyncio.gather(*(resolve(one.host, one.http_port) for one in hosts))
            for host, addresses in zip(hosts, results, strict=True):
                if addresses is None:
                    log.warning("engine pool: cannot resolve host=%s", host.host)
                else:
                    self._resolved[host] = addresses
            self._update_engines()
            resolved.set()
            await asyncio.sleep(self._settings.engine_watch_s)

    def _update_engines(self) -> None:
        records_by_address = {
            host_and_port(address, host.http_port): host_and_port(address, host.records_port)
            for host, addresses in self._resolved.items()
            for address in addresses
        }
        for engine in list(self._health_tasks):
            if records_by_address.pop(engine.address, None) is None:
                self._remove(engine)
        for address, records in records_by_address.items():
            log.info("engine pool: engine joins address=%s", address)
            engine = Engine(address, records, self._settings, self._metrics, self._tracer)
            watching = watch_health(engine, self._probe, self._settings.engine_watch_s)
            self._health_tasks[engine] = asyncio.create_task(watching)

    def _remove(self, engine: Engine) -> None:
        log.info(
            "engine pool: engine leaves address=%s in_flight=%d", engine.address, engine.in_flight
        )
        self._health_tasks.pop(engine).cancel()
        self._last_chosen.pop(engine, None)
        self._metrics.remove_engine(engine.address)
        closing = asyncio.create_task(engine.close_when_idle())
        self._closing.add(closing)
        closing.add_done_callback(self._closing.discard)
