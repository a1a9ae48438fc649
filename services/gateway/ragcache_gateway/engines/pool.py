"""All engines: which there are, which are healthy, and which one answers a request."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import socket
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import AsyncExitStack
from typing import Any, TypeVar

from ragcache_core.errors import Unavailable
from ragcache_gateway.engines.client import Engine, watch_health
from ragcache_gateway.engines.completion import ENGINE
from ragcache_gateway.engines.completion_stream import (
    Completion,
    FirstTokenTimeout,
    RequestNotSent,
    WholeCompletion,
)
from ragcache_gateway.tasks import BackgroundTasks
from ragcache_gateway.telemetry.metrics import Metrics
from ragcache_wire.settings import GatewaySettings
from ragcache_wire.settings.gateway import EngineAddress
from ragcache_wire.tracing import Tracer
from ragcache_wire.watched.limits import Limits

_NO_SUCH_NAME = {socket.EAI_NONAME, socket.EAI_NODATA}


async def resolve(host: str, port: int) -> tuple[str, ...] | None:
    """Return the IP addresses of a host, sorted; empty if there is no such name.

    A host with addresses of both families counts with its IPv4 addresses only, or each engine
    would count twice.

    Returns:
        None if the lookup failed. The addresses known before may still be valid then.
    """
    loop = asyncio.get_running_loop()
    try:
        found = await loop.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except socket.gaierror as error:
        return () if error.errno in _NO_SUCH_NAME else None
    except OSError:
        return None
    except UnicodeError:  # an impossible name, such as one with an empty label
        return ()
    for family in (socket.AF_INET, socket.AF_INET6):
        addresses = {str(address[0]) for kind, *_, address in found if kind == family}
        if addresses:
            return tuple(sorted(addresses))
    return ()


def host_and_port(address: str, port: int) -> str:
    """Join an IP address and a port to ``host:port``."""
    return f"[{address}]:{port}" if ":" in address else f"{address}:{port}"


log = logging.getLogger(__name__)

T = TypeVar("T")

SLOWEST_TOKEN_S = 1.0
"""Time for each token of an answer in one piece, whose progress the gateway cannot see."""

MAX_LOST_ENGINES = 2
"""A request is abandoned after this many engines failed with it, so that one bad request cannot
take down all engines."""


class EnginePool(BackgroundTasks):
    """The engines behind every configured host name, which the pool resolves periodically.

    Args:
        probe: Body of a request for one token, for engines that have failed.
    """

    def __init__(
        self,
        settings: GatewaySettings,
        limits: Limits,
        probe: Mapping[str, Any],
        metrics: Metrics,
        tracer: Tracer,
    ) -> None:
        super().__init__()
        self._settings = settings
        self._limits = limits
        self._probe = probe
        self._metrics = metrics
        self._tracer = tracer
        self._resolved: dict[EngineAddress, tuple[str, ...]] = {}
        self._choice_numbers = itertools.count(1)
        self._last_chosen: dict[Engine, int] = {}
        self._health_tasks: dict[Engine, asyncio.Task[None]] = {}

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
        self._spawn(self._resolve_periodically(resolved))
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(self._settings.engine_connect_timeout_s):
                await resolved.wait()

    async def close(self) -> None:
        """Stop every task and close every connection."""
        await super().close()
        for engine in self._health_tasks:
            await engine.close()

    async def complete(
        self,
        body: Mapping[str, Any],
        stack: AsyncExitStack,
        request_id: str | None = None,
        preferred: Engine | None = None,
        on_accepted: Callable[[str], None] | None = None,
    ) -> tuple[Engine, Completion]:
        """Start a streamed completion and wait for its first token, which the engine sent.

        If an engine or its health check fails before that, another healthy engine gets the
        request. When the stack closes, the engine aborts the completion.

        Args:
            request_id: Id of the answer; None: the engine chooses one.
            preferred: The engine that gets the request first, if it is healthy.
            on_accepted: Gets the address of each engine that accepts the request.

        Raises:
            Unavailable: No engine could answer.
            InvalidInput: The engine refused the request.
        """
        timeout_s = self._limits.current().first_token_timeout_s
        return await self._first_of(
            lambda engine: engine.complete(body, stack, request_id, on_accepted),
            timeout_s,
            f"no first token came within {timeout_s:g} s",
            preferred,
        )

    async def complete_whole(
        self,
        body: Mapping[str, Any],
        max_tokens: int,
        stack: AsyncExitStack,
        request_id: str | None = None,
        preferred: Engine | None = None,
    ) -> tuple[Engine, WholeCompletion]:
        """Have an engine answer in one piece. If it or its health check fails, another one answers.

        Args:
            max_tokens: Most tokens of the answer. Each adds a second to the deadline.
            request_id: See ``complete``.
            preferred: See ``complete``.

        Raises:
            Unavailable: No engine could answer.
            InvalidInput: The engine refused the request.
        """
        limits = self._limits.current()
        timeout_s = limits.first_token_timeout_s + limits.next_token_timeout_s
        timeout_s += SLOWEST_TOKEN_S * max_tokens
        return await self._first_of(
            lambda engine: engine.complete_whole(body, stack, request_id),
            timeout_s,
            f"no answer came within {timeout_s:g} s",
            preferred,
        )

    async def _first_of(
        self,
        attempt: Callable[[Engine], Awaitable[T]],
        timeout_s: float,
        timeout_problem: str,
        preferred: Engine | None,
    ) -> tuple[Engine, T]:
        """Return the result of the first engine that does not fail, the preferred one first."""
        tried: list[Engine] = []
        times_lost = 0
        try:
            async with asyncio.timeout(timeout_s):
                while True:
                    if not tried and preferred in self._healthy_except(tried):
                        tried.append(self._choose(preferred))
                    else:
                        tried.append(self._choose_except(tried))
                    try:
                        return tried[-1], await attempt(tried[-1])
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
            timed_out = FirstTokenTimeout(ENGINE, timeout_problem)
            tried[-1].record_failure(timed_out)
            raise timed_out from None

    def last_chosen(self, engine: Engine) -> int:
        """Return the number of the last choice of an engine, which ascends; 0: it had none."""
        return self._last_chosen.get(engine, 0)

    @property
    def healthy(self) -> list[Engine]:
        """The engines that have not failed, by address."""
        return [engine for engine in self.known if engine.failure is None]

    def choose(self) -> Engine:
        """Choose an engine with RagCache, for background work. Raises Unavailable without one."""
        own = [engine for engine in self._health_tasks if engine.records is not None]
        if not own:
            raise Unavailable(ENGINE, "there is none that runs RagCache")
        return self._choose(self._least_busy([e for e in own if e.failure is None] or own))

    async def complete_on(
        self, engine: Engine, body: Mapping[str, Any], stack: AsyncExitStack
    ) -> Completion:
        """Start a completion on one engine and no other, for work that can wait.

        A timeout does not mark the engine as failed: it may only be busy. Raises as ``complete``.
        """
        if engine not in self._health_tasks:
            raise Unavailable(ENGINE, f"{engine.address} has left")
        try:
            async with asyncio.timeout(self._limits.current().first_token_timeout_s):
                return await engine.complete(body, stack)
        except Unavailable as error:
            engine.record_failure(error)
            raise
        except TimeoutError:
            timeout_s = self._limits.current().first_token_timeout_s
            raise FirstTokenTimeout(ENGINE, f"no first token came within {timeout_s:g} s") from None

    def _healthy_except(self, tried: Sequence[Engine]) -> list[Engine]:
        return [
            engine
            for engine in self._health_tasks
            if engine.failure is None and engine not in tried
        ]

    def _choose_except(self, tried: Sequence[Engine]) -> Engine:
        return self._choose(self._least_busy_except(tried))

    def _choose(self, engine: Engine) -> Engine:
        self._last_chosen[engine] = next(self._choice_numbers)
        return engine

    def _least_busy_except(self, tried: Sequence[Engine]) -> Engine:
        """Return the engine with the fewest requests in flight, then the least recently chosen."""
        # If none is healthy, the request finds out whether a failed engine answers again.
        candidates = self._healthy_except(tried) or list(self._health_tasks)
        if not candidates:
            raise Unavailable(ENGINE, self.problem or "")
        return self._least_busy(candidates)

    def _least_busy(self, engines: Sequence[Engine]) -> Engine:
        return min(engines, key=lambda e: (e.in_flight, self._last_chosen.get(e, 0)))

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
            host_and_port(address, host.http_port): (
                None if host.records_port is None else host_and_port(address, host.records_port)
            )
            for host, addresses in self._resolved.items()
            for address in addresses
        }
        for engine in list(self._health_tasks):
            if engine.address not in records_by_address:
                self._remove(engine)
            records_by_address.pop(engine.address, None)
        for address, records in records_by_address.items():
            log.info("engine pool: engine joins address=%s", address)
            engine = Engine(
                address, records, self._settings, self._limits, self._metrics, self._tracer
            )
            watching = watch_health(
                engine, self._probe, self._settings.engine_watch_s, self._move_waiting
            )
            self._health_tasks[engine] = self._spawn(watching)

    def _move_waiting(self, failed: Engine) -> None:
        """End the requests that wait on a failed engine, so that another engine gets them.

        Without another engine they stay: the failed one may only be busy.
        """
        if self._healthy_except([failed]):
            failed.end_waiting()

    def _remove(self, engine: Engine) -> None:
        log.info(
            "engine pool: engine leaves address=%s in_flight=%d", engine.address, engine.in_flight
        )
        self._health_tasks.pop(engine).cancel()
        self._last_chosen.pop(engine, None)
        self._metrics.remove_engine(engine.address)
        self._spawn(engine.close_when_idle())
