"""All engines: which there are, which are well, and which one answers a request."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack
from typing import Any

from ragcache_core.errors import Unavailable
from ragcache_gateway.config import Config, EngineName
from ragcache_gateway.engines.client import Completion, Engine, Late, NotReached, watch
from ragcache_gateway.engines.completion import PART
from ragcache_gateway.engines.resolver import host_and_port, resolve
from ragcache_gateway.status.metrics import Metrics
from ragcache_wire.tracing import Tracer

log = logging.getLogger(__name__)

MAX_LOST = 2
"""Engines that one request may be lost with: should it be what ends them, it must not end all."""


class Engines:
    """Every address of every engine's name, looked up again and again.

    probe: body of a request for one token, for engines that have not answered since they failed.
    """

    def __init__(
        self, config: Config, probe: Mapping[str, Any], metrics: Metrics, tracer: Tracer
    ) -> None:
        self._config = config
        self._probe = probe
        self._metrics = metrics
        self._tracer = tracer
        self._addresses: dict[EngineName, tuple[str, ...]] = {}
        self._turns = itertools.count(1)
        self._last_chosen: dict[Engine, int] = {}
        self._watched: dict[Engine, asyncio.Task[None]] = {}
        self._leaving: set[asyncio.Task[None]] = set()
        self._following: asyncio.Task[None] | None = None

    @property
    def known(self) -> list[Engine]:
        """Every engine there is, by address."""
        return sorted(self._watched, key=lambda engine: engine.address)

    @property
    def problem(self) -> str | None:
        """Why no engine can answer; None if one can."""
        engines = self.known
        if not engines:
            names = ", ".join(sorted({name.host for name in self._config.engines}))
            return f"there is none at {names}"
        if any(engine.failure is None for engine in engines):
            return None
        if len(engines) == 1:
            return engines[0].failure
        return ", ".join(f"{engine.address}: {engine.failure}" for engine in engines)

    async def start(self) -> None:
        """Find the engines and follow their names; returns when they are found, or soon."""
        found = asyncio.Event()
        self._following = asyncio.create_task(self._follow(found))
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(self._config.engine_connect_timeout_s):
                await found.wait()

    async def close(self) -> None:
        """Stop watching and end every connection."""
        tasks = [*self._watched.values(), *self._leaving]
        if self._following is not None:
            tasks.append(self._following)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for engine in self._watched:
            await engine.close()

    async def complete(
        self, body: Mapping[str, Any], stack: AsyncExitStack
    ) -> tuple[Engine, Completion]:
        """Start a completion and wait for its first token, which the engine given sent.

        A request whose engine is lost before that goes to another one that is well. Leaving the
        stack leaves the completion. Raises Unavailable, or InvalidInput for what is refused.
        """
        tried: list[Engine] = []
        times_lost = 0
        try:
            async with asyncio.timeout(self._config.first_token_timeout_s):
                while True:
                    tried.append(self._choose(tried))
                    try:
                        return tried[-1], await tried[-1].complete(body, stack)
                    except Unavailable as error:
                        tried[-1].note_failure(error)
                        times_lost += not isinstance(error, NotReached)
                        if times_lost == MAX_LOST or not self._well(tried):
                            raise
                        log.info("engine %s is lost, asking another: %s", tried[-1].address, error)
        except TimeoutError:
            late = self._late()
            tried[-1].note_failure(late)
            raise late from None

    def choose(self) -> Engine:
        """The engine that would be asked first now. Raises Unavailable if there is none."""
        return self._choose([])

    async def complete_on(
        self, engine: Engine, body: Mapping[str, Any], stack: AsyncExitStack
    ) -> Completion:
        """As ``complete``, on one engine and no other, for what may be put off for long.

        An engine that is too busy for it is not taken to have failed.
        """
        if engine not in self._watched:
            raise Unavailable(PART, f"{engine.address} has left")
        try:
            async with asyncio.timeout(self._config.first_token_timeout_s):
                return await engine.complete(body, stack)
        except Unavailable as error:
            engine.note_failure(error)
            raise
        except TimeoutError:
            raise self._late() from None

    def _late(self) -> Late:
        timeout_s = self._config.first_token_timeout_s
        return Late(PART, f"no first token came within {timeout_s:g} s")

    def _well(self, tried: Sequence[Engine]) -> list[Engine]:
        return [e for e in self._watched if e.failure is None and e not in tried]

    def _choose(self, tried: Sequence[Engine]) -> Engine:
        """The engine with the fewest requests in flight; of several, who was chosen longest ago."""
        # With none that is well the request finds out whether one of the others is again.
        candidates = self._well(tried) or list(self._watched)
        if not candidates:
            raise Unavailable(PART, self.problem or "")
        engine = min(candidates, key=lambda e: (e.in_flight, self._last_chosen.get(e, 0)))
        self._last_chosen[engine] = next(self._turns)
        return engine

    async def _follow(self, found: asyncio.Event) -> None:
        while True:
            names = self._config.engines
            found_now = await asyncio.gather(*(resolve(one.host, one.http_port) for one in names))
            for name, addresses in zip(names, found_now, strict=True):
                if addresses is None:
                    log.warning("the addresses of %s cannot be asked for", name.host)
                else:
                    self._addresses[name] = addresses
            self._update()
            found.set()
            await asyncio.sleep(self._config.engine_watch_s)

    def _update(self) -> None:
        wanted = {
            host_and_port(address, name.http_port): host_and_port(address, name.records_port)
            for name, addresses in self._addresses.items()
            for address in addresses
        }
        for engine in list(self._watched):
            if wanted.pop(engine.address, None) is None:
                self._forget(engine)
        for address, records in wanted.items():
            log.info("engine %s joins", address)
            engine = Engine(address, records, self._config, self._metrics, self._tracer)
            watching = watch(engine, self._probe, self._config.engine_watch_s)
            self._watched[engine] = asyncio.create_task(watching)

    def _forget(self, engine: Engine) -> None:
        log.info("engine %s leaves, with %d requests in flight", engine.address, engine.in_flight)
        self._watched.pop(engine).cancel()
        self._last_chosen.pop(engine, None)
        self._metrics.forget_engine(engine.address)
        leaving = asyncio.create_task(engine.close_when_idle())
        self._leaving.add(leaving)
        leaving.add_done_callback(self._leaving.discard)
