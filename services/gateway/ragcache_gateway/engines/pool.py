"""All engines: which there are, which are healthy, and which one answers a request."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import socket
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import AsyncExitStack
from functools import partial
from typing import Any, Final, TypeVar

from ragcache_core.cluster.engine_queue import EngineQueue
from ragcache_core.errors import Unavailable
from ragcache_core.planner.request_plan import EngineRole
from ragcache_gateway.engines.client import Engine, Work, host_and_port, watch_health
from ragcache_gateway.engines.completion import ENGINE
from ragcache_gateway.engines.completion_stream import (
    Completion,
    FirstTokenTimeout,
    RequestNotSent,
    WholeCompletion,
)
from ragcache_gateway.engines.handoff import EngineCall, PairedRequest, Route
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


async def _resolve(group: EngineAddress) -> tuple[str, ...] | None:
    if group.is_tls and group.records_port is None:
        # A certificate is for the name, and the addresses behind one change often.
        return (group.host,)
    return await resolve(group.host, group.http_port)


log = logging.getLogger(__name__)

T = TypeVar("T")

SLOWEST_TOKEN_S = 1.0
"""Time for each token of an answer in one piece, whose progress the gateway cannot see."""

_WHOLE_ORDER: Final[Sequence[EngineRole]] = ("both", "decode", "prefill")
"""Roles of the engines that get a request with prefill and decode, the first choice first."""

ANY_ENGINE: Final = Route()

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
        self._missing_roles: frozenset[EngineRole] = frozenset()

    @property
    def known(self) -> list[Engine]:
        """Every engine there is, by address."""
        return sorted(self._health_tasks, key=lambda engine: engine.address)

    @property
    def in_flight(self) -> int:
        """Requests of this gateway that engines are answering."""
        return sum(engine.in_flight for engine in self._health_tasks)

    @property
    def first_token_timeout_s(self) -> float:
        """Time from sending a prompt to its first token."""
        return self._limits.current().first_token_timeout_s

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
        route: Route = ANY_ENGINE,
        on_accepted: Callable[[str], None] | None = None,
        work_s: float = 0.0,
    ) -> tuple[Engine, Completion]:
        """Start a streamed completion and wait for its first token, which the engine sent.

        If an engine or its health check fails before that, another healthy engine gets the
        request. When the stack closes, the engine aborts the completion.

        Args:
            request_id: Id of the answer; None: the engine chooses one.
            route: The engines that get the request first, if they are healthy.
            on_accepted: Gets the address of each engine that accepts the request.
            work_s: Predicted seconds of the request's load and prefill; 0: not known.

        Raises:
            Unavailable: No engine could answer.
            InvalidInput: The engine refused the request.
        """
        timeout_s = self.first_token_timeout_s
        return await self._first_of(
            lambda engine, call: engine.complete(
                call.body, stack, request_id, on_accepted, work=call.work
            ),
            EngineCall(body, Work(work_s)),
            timeout_s,
            f"no first token came within {timeout_s:g} s",
            route,
        )

    async def complete_whole(
        self,
        body: Mapping[str, Any],
        max_tokens: int,
        stack: AsyncExitStack,
        request_id: str | None = None,
        route: Route = ANY_ENGINE,
        work_s: float = 0.0,
    ) -> tuple[Engine, WholeCompletion]:
        """Have an engine answer in one piece. If it or its health check fails, another one answers.

        Args:
            max_tokens: Most tokens of the answer. Each adds a second to the deadline.
            request_id: See ``complete``.
            route: See ``complete``.
            work_s: See ``complete``.

        Raises:
            Unavailable: No engine could answer.
            InvalidInput: The engine refused the request.
        """
        limits = self._limits.current()
        timeout_s = limits.first_token_timeout_s + limits.next_token_timeout_s
        timeout_s += SLOWEST_TOKEN_S * max_tokens
        return await self._first_of(
            lambda engine, call: engine.complete_whole(
                call.body, stack, request_id, work=call.work
            ),
            EngineCall(body, Work(work_s)),
            timeout_s,
            f"no answer came within {timeout_s:g} s",
            route,
        )

    async def _first_of(
        self,
        attempt: Callable[[Engine, EngineCall], Awaitable[T]],
        call: EngineCall,
        timeout_s: float,
        timeout_problem: str,
        route: Route,
    ) -> tuple[Engine, T]:
        """Return the result of the first engine that does not fail, those of the route first."""
        tried: list[Engine] = []
        times_lost = 0
        try:
            async with asyncio.timeout(timeout_s):
                while True:
                    handoff = None
                    if not tried and route.engine in self.healthy:
                        tried.append(self._choose(route.engine))
                        handoff = route.handoff
                    else:
                        tried.append(self._choose_except(tried))
                    engine = tried[-1]
                    try:
                        if handoff is not None and handoff.prefill in self.healthy:
                            self._choose(handoff.prefill)
                            answer = await self._hand_off(handoff, partial(attempt, engine))
                            if answer is not None:
                                return engine, answer
                        return engine, await attempt(engine, call)
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

    async def _hand_off(
        self, handoff: PairedRequest, attempt: Callable[[EngineCall], Awaitable[T]]
    ) -> T | None:
        """Have two engines answer, see ``PairedRequest.answer``, and count it."""
        try:
            answer = await handoff.answer(attempt)
        except Unavailable:
            self._metrics.handoffs.labels("decode failed").inc()
            raise
        self._metrics.handoffs.labels("prefill failed" if answer is None else "answered").inc()
        return answer

    def last_chosen(self, engine: Engine) -> int:
        """Return the number of the last choice of an engine, which ascends; 0: it had none."""
        return self._last_chosen.get(engine, 0)

    @property
    def healthy(self) -> list[Engine]:
        """The engines that have not failed, by address."""
        return [engine for engine in self.known if engine.failure is None]

    def queue_of(self, address: str) -> EngineQueue | None:
        """Return the queue of the engine at an address; None: it has left."""
        return next((one.queue for one in self._health_tasks if one.address == address), None)

    def choose(self) -> Engine:
        """Choose an engine with RagCache, for background work. Raises Unavailable without one.

        It is no engine that only decodes, as far as there are others.
        """
        own = [engine for engine in self._health_tasks if engine.records is not None]
        own = [engine for engine in own if engine.role != "decode"] or own
        if not own:
            raise Unavailable(ENGINE, "there is none that runs RagCache")
        return self._choose(self._least_busy([e for e in own if e.failure is None] or own))

    async def complete_on(
        self,
        engine: Engine,
        body: Mapping[str, Any],
        stack: AsyncExitStack,
        work_s: float = 0.0,
    ) -> Completion:
        """Start a completion on one engine and no other, for work of low priority.

        A timeout does not mark the engine as failed: it may only be busy. Arguments and errors are
        those of ``complete``.
        """
        if engine not in self._health_tasks:
            raise Unavailable(ENGINE, f"{engine.address} has left")
        try:
            async with asyncio.timeout(self.first_token_timeout_s):
                return await engine.complete(body, stack, work=Work(work_s, is_background=True))
        except Unavailable as error:
            engine.record_failure(error)
            raise
        except TimeoutError:
            timeout_s = self.first_token_timeout_s
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
        """Return the engine with the fewest requests in flight, then the least recently chosen.

        It is one that does all, or else one that decodes, as far as there is one.
        """
        # If none is healthy, the request finds out whether a failed engine answers again.
        candidates = self._healthy_except(tried) or list(self._health_tasks)
        if not candidates:
            raise Unavailable(ENGINE, self.problem or "")
        first = min((engine.role for engine in candidates), key=_WHOLE_ORDER.index)
        return self._least_busy([engine for engine in candidates if engine.role == first])

    def _least_busy(self, engines: Sequence[Engine]) -> Engine:
        return min(engines, key=lambda e: (e.in_flight, self._last_chosen.get(e, 0)))

    async def _resolve_periodically(self, resolved: asyncio.Event) -> None:
        while True:
            hosts = self._settings.engines
            results = await asyncio.gather(*map(_resolve, hosts))
            for host, addresses in zip(hosts, results, strict=True):
                if addresses is None:
                    log.warning("engine pool: cannot resolve host=%s", host.host)
                else:
                    self._resolved[host] = addresses
            self._update_engines()
            resolved.set()
            await asyncio.sleep(self._settings.engine_watch_s)

    def _update_engines(self) -> None:
        wanted = {
            host_and_port(ip, group.http_port): (group, ip)
            for group, ips in self._resolved.items()
            for ip in ips
        }
        for engine in list(self._health_tasks):
            if engine.address not in wanted:
                self._remove(engine)
            wanted.pop(engine.address, None)
        for address, (group, ip) in wanted.items():
            log.info("engine pool: engine joins address=%s role=%s", address, group.role)
            engine = Engine(group, ip, self._settings, self._limits, self._metrics, self._tracer)
            watching = watch_health(
                engine, self._probe, self._settings.engine_watch_s, self._on_checked
            )
            self._health_tasks[engine] = self._spawn(watching)

    def _on_checked(self) -> None:
        self._move_waiting()
        self._log_missing_roles()

    def _log_missing_roles(self) -> None:
        """Log when engines of another role begin or cease to do the part of a role."""
        ready = {engine.role for engine in self.healthy}
        missing: frozenset[EngineRole] = frozenset(
            engine.role
            for engine in self._health_tasks
            if engine.role != "both" and ready and not ready & {engine.role, "both"}
        )
        for role in missing - self._missing_roles:
            log.warning("engine pool: no engine is ready, others do its part role=%s", role)
        for found in self._missing_roles - missing:
            log.info("engine pool: an engine is ready again role=%s", found)
        self._missing_roles = missing

    def _move_waiting(self) -> None:
        """End the requests that wait on failed engines, so that another engine gets them.

        Without another engine they stay: the failed ones may only be busy.
        """
        if self.healthy:
            for engine in self._health_tasks:
                if engine.failure is not None:
                    engine.end_waiting()

    def _remove(self, engine: Engine) -> None:
        log.info(
            "engine pool: engine leaves address=%s in_flight=%d", engine.address, engine.in_flight
        )
        self._health_tasks.pop(engine).cancel()
        self._last_chosen.pop(engine, None)
        self._metrics.remove_engine(engine.address)
        self._spawn(engine.close_when_idle())
