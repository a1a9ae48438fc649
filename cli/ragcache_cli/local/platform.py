"""Runs a RagCache as local processes: starts them in order, restarts them, stops them all."""

from __future__ import annotations

import asyncio
import os
import random
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, replace
from itertools import groupby
from pathlib import Path
from types import TracebackType
from typing import Self

import psutil

from ragcache_cli.local.component import LocalComponent, Prober, components_from
from ragcache_cli.local.gpus import gpus_for
from ragcache_cli.local.key_files import (
    certificate_files,
    demand_gateway_certificate,
    ensure_key,
    ensure_key_file,
    plan_key_file,
    platform_key,
    read_api_key,
)
from ragcache_cli.local.placement import RUN_FOLDER, LocalPlacement
from ragcache_cli.local.ports import LOOPBACK, demand_free, free_ports
from ragcache_cli.local.process import end_families, last_lines
from ragcache_cli.local.state_file import (
    ComponentRecord,
    PlatformRecord,
    only_supervisor,
    read_record,
    remove_record,
    write_record,
)
from ragcache_cli.local.supervision import ProcessPhase, ProcessState, RestartPolicy, is_crash_loop
from ragcache_cli.local.supervisor import LONGEST_GRACE_S, ComponentSupervisor
from ragcache_core.errors import NotFound, RagCacheError, Unavailable
from ragcache_operator.builders import build_children
from ragcache_operator.builders.keys import asks_for_keys
from ragcache_operator.builders.part_tls import platform_name
from ragcache_operator.spec.ragcache import RagCache

_LOG_LINES = 12
_STATUS_PATH = "/v1/status"
"""Path of the gateway that succeeds while questions can be answered."""
_STATUS_POLL_S = 0.2
_DEFAULT_POLICY = RestartPolicy()


@dataclass(frozen=True, slots=True)
class ComponentEvent:
    """A component changed its phase."""

    component: str
    state: ProcessState
    elapsed_s: float
    """Since the platform began to start."""
    crash_loop: bool
    log: Path
    lines: tuple[str, ...] = ()
    """The last lines of the log, if the component died and will be restarted."""


class ComponentFailed(RagCacheError):
    """A component never became ready and is not restarted any more."""

    def __init__(self, component: str, cause: str, log: Path) -> None:
        lines = "".join(f"\n  | {line}" for line in last_lines(log, _LOG_LINES))
        super().__init__(f"the {component} {cause}; the end of {log}:{lines}")
        self.component = component
        self.log = log


class LocalPlatform:
    """All components of one RagCache, as an async context manager.

    Entering returns when all components are ready and questions can be answered. Leaving stops
    every process that was started. If that is cancelled once more, the processes are killed at
    once.

    Args:
        data: Folder for volumes, logs and the state file; it is created if missing.
        gateway_port: Replaces the port of the manifest; 0 takes a free one.
        progress: Called in the event loop with each change of a component's phase.

    Raises:
        InvalidInput: A port or the data folder is in use, the model does not exist, or this machine
            lacks a GPU that the object asks for.
        ComponentFailed: A component does not start.
        Unavailable: The components were not ready after ``start_timeout_s``, or the gateway could
            not answer questions.
    """

    def __init__(
        self,
        cache: RagCache,
        data: Path,
        *,
        progress: Callable[[ComponentEvent], None] | None = None,
        gateway_port: int | None = None,
        policy: RestartPolicy = _DEFAULT_POLICY,
        start_timeout_s: float = 1800.0,
    ) -> None:
        self._cache = cache
        self._data = data.absolute()
        self._progress = progress
        self._gateway_port = cache.spec.gateway.port if gateway_port is None else gateway_port
        self._policy = policy
        self._start_timeout_s = start_timeout_s
        self._supervisors: list[ComponentSupervisor] = []
        self._tasks: dict[ComponentSupervisor, asyncio.Task[None]] = {}
        self._reported: dict[ComponentSupervisor, ProcessPhase] = {}
        self._held = ExitStack()
        self._prober = Prober()
        self._begun = 0.0
        self._phase = "starting"
        self._changed = asyncio.Event()

    @property
    def gateway_url(self) -> str:
        """Return the base URL of the REST API."""
        scheme = "http" if self._cache.spec.gateway.tls is None else "https"
        return f"{scheme}://{LOOPBACK}:{self._gateway_port}"

    @property
    def data(self) -> Path:
        """Return the data folder."""
        return self._data

    def states(self) -> dict[str, ProcessState]:
        """Return the state of every component, by name."""
        return {supervisor.component.name: supervisor.state for supervisor in self._supervisors}

    def pid(self, name: str) -> int:
        """Return the process id of a component. Raises NotFound without a process."""
        [supervisor] = self._named(name)
        if supervisor.child is None:
            raise NotFound("process of component", name, "wait until it is ready")
        return supervisor.child.pid

    def address(self, name: str, port: str) -> str:
        """Return host:port of a component for a port name such as ``http``. Raises NotFound."""
        [supervisor] = self._named(name)
        if port not in supervisor.component.ports:
            raise NotFound("port", port, f"the ports are {', '.join(supervisor.component.ports)}")
        return str(supervisor.component.ports[port])

    def log(self, name: str) -> Path:
        """Return the log file of a component."""
        return self._data / "logs" / f"{name}.log"

    async def restart(self, name: str) -> None:
        """Restart a component, or all of a kind such as ``engine``, until they are ready.

        Raises:
            NotFound: No component has this name.
            Unavailable: It was not ready in time.
        """
        supervisors = self._named(name)
        for supervisor in supervisors:
            supervisor.restart()
        await self._until_ready(supervisors)

    async def until_ready(self) -> None:
        """Wait until questions can be answered. Raises the same errors as entering."""
        deadline = time.monotonic() + self._start_timeout_s
        await self._until_ready(self._supervisors)
        await self._until_answering(deadline)

    async def keep_running(self) -> None:
        """Wait until cancelled. Raises the unexpected error of a supervisor."""
        # gather would pass the cancellation on, and the components would lose their grace period.
        ended, _ = await asyncio.wait(self._tasks.values(), return_when=asyncio.FIRST_COMPLETED)
        for task in ended:
            task.result()
        raise RagCacheError("a component has ended for good")

    async def __aenter__(self) -> Self:
        self._begun = time.monotonic()
        try:
            await self._prepare()
            await self.until_ready()
        except BaseException:
            await self._finish()
            raise
        self._phase = "ready"
        self._write()
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self._finish()

    async def _prepare(self) -> None:
        """Lock the folder, choose GPUs and ports, build the components and start them."""
        gpus = await asyncio.to_thread(gpus_for, self._cache.spec)
        (self._data / "logs").mkdir(parents=True, exist_ok=True)
        # The folder is private: its socket gives access to the store's memory, and its key signs
        # plans that engines accept.
        (self._data / RUN_FOLDER).mkdir(mode=0o700, exist_ok=True)
        self._held.enter_context(only_supervisor(self._data))
        left_behind = read_record(self._data)
        if left_behind is not None:
            # A killed supervisor leaves its components running, with their files and ports.
            await asyncio.to_thread(end_families, left_behind.leaders, LONGEST_GRACE_S)
        ports = free_ports(random.Random())
        if self._gateway_port == 0:
            self._gateway_port = next(ports)
        else:
            demand_free(self._gateway_port, "spec.gateway.port")
        if self._cache.spec.gateway.tls is not None:
            demand_gateway_certificate(self._data)
        key_hash = None
        if asks_for_keys(self._cache):
            ensure_key_file(self._data)
            key_hash = self._held.enter_context(platform_key(self._data))
        placement = LocalPlacement(self._data, self._gateway_port, ports, key_hash)
        self._held.enter_context(plan_key_file(Path(placement.signing_key_file())))
        if self._cache.spec.tls.enabled:
            folder, name = Path(placement.tls_dir()), platform_name(self._cache)
            self._held.enter_context(certificate_files(folder, name))
        ensure_key(Path(placement.store_key_file()))
        if self._cache.spec.cache_store.encryption is not None:
            ensure_key(Path(placement.disk_key_file()))
        children = build_children(self._cache, placement)
        devices = [gpu.device for gpu in gpus]
        for component in components_from(children, self._cache.metadata.name, devices):
            self._supervisors.append(self._make_supervisor(component))
        for supervisor in self._supervisors:
            self._tasks[supervisor] = asyncio.create_task(
                self._keep(supervisor), name=supervisor.component.name
            )

    def _make_supervisor(self, component: LocalComponent) -> ComponentSupervisor:
        folder, log = self._data / component.name, self.log(component.name)
        folder.mkdir(exist_ok=True)
        if log.exists():
            log.replace(log.with_suffix(".previous.log"))
        return ComponentSupervisor(
            component,
            folder,
            log,
            prober=self._prober,
            policy=self._policy,
            on_change=self._on_change,
        )

    async def _keep(self, supervisor: ComponentSupervisor) -> None:
        awaited = [k for k in self._supervisors if k.component.kind in supervisor.component.after]
        await self._until(
            lambda: self._phase == "stopping" or all(k.state.was_ready for k in awaited)
        )
        if self._phase != "stopping":
            await supervisor.run()

    def _named(self, name: str) -> list[ComponentSupervisor]:
        named = [k for k in self._supervisors if name in (k.component.name, k.component.kind)]
        if not named:
            raise NotFound("component", name, f"the components are {', '.join(self.states())}")
        return named

    async def _until(self, holds: Callable[[], bool]) -> None:
        while not holds():
            await self._changed.wait()

    async def _until_ready(self, supervisors: Sequence[ComponentSupervisor]) -> None:
        def is_settled() -> bool:
            failed = any(k.state.phase is ProcessPhase.FAILED for k in self._supervisors)
            broken = any(task.done() for task in self._tasks.values())
            return failed or broken or all(k.state.phase is ProcessPhase.READY for k in supervisors)

        try:
            async with asyncio.timeout(self._start_timeout_s):
                await self._until(is_settled)
        except TimeoutError:
            pending = next(k for k in supervisors if k.state.phase is not ProcessPhase.READY)
            problem = f"not ready after {self._start_timeout_s:g} s ({pending.state.cause})"
            raise Unavailable(pending.component.name, f"{problem}; see {pending.log}") from None
        self._check_components()

    async def _until_answering(self, deadline: float) -> None:
        """Wait for the gateway, which is ready before it has heard from the engines."""
        [gateway] = self._named("gateway")
        check = replace(gateway.component.readiness, url=f"{self.gateway_url}{_STATUS_PATH}")
        while (problem := await self._prober.ask(check, read_api_key(self._data))) is not None:
            self._check_components()
            if time.monotonic() > deadline:
                problem = f"no answers after {self._start_timeout_s:g} s ({problem})"
                raise Unavailable(gateway.component.name, f"{problem}; see {gateway.log}")
            await asyncio.sleep(_STATUS_POLL_S)

    def _check_components(self) -> None:
        """Raise the error of a component that is not restarted any more, or of its supervisor."""
        for supervisor, task in self._tasks.items():
            if supervisor.state.phase is ProcessPhase.FAILED:
                raise ComponentFailed(
                    supervisor.component.name, supervisor.state.cause, supervisor.log
                )
            if task.done():
                task.result()

    def _on_change(self, supervisor: ComponentSupervisor) -> None:
        self._signal()
        if self._reported.get(supervisor) is supervisor.state.phase:
            return
        self._reported[supervisor] = supervisor.state.phase
        self._write()
        if self._progress is not None:
            self._progress(self._event(supervisor))

    def _signal(self) -> None:
        """Wake all tasks that wait for a change."""
        self._changed.set()
        self._changed = asyncio.Event()

    def _event(self, supervisor: ComponentSupervisor) -> ComponentEvent:
        state = supervisor.state
        # ComponentFailed shows the log of a component that is not restarted.
        has_died = state.deaths > 0 and state.phase is ProcessPhase.BACKOFF
        return ComponentEvent(
            component=supervisor.component.name,
            state=state,
            elapsed_s=time.monotonic() - self._begun,
            crash_loop=is_crash_loop(state, self._policy),
            log=supervisor.log,
            lines=tuple(last_lines(supervisor.log, _LOG_LINES)) if has_died else (),
        )

    async def _finish(self) -> None:
        """Stop everything; a cancellation meanwhile only removes the grace period."""
        ending = asyncio.create_task(self._end())
        cancelled: asyncio.CancelledError | None = None
        while not ending.done():
            try:
                await asyncio.shield(ending)
            except asyncio.CancelledError as error:
                if cancelled is None:
                    # Only once: a second cancellation would interrupt the killing.
                    for task in self._tasks.values():
                        task.cancel()
                cancelled = error
        ending.result()
        if cancelled is not None:
            raise cancelled

    async def _end(self) -> None:
        self._phase = "stopping"
        self._write()
        self._signal()
        # Clients stop before the servers they call: the gateway first, the cache store last.
        in_order = sorted(self._supervisors, key=lambda supervisor: supervisor.component.stop_rank)
        for _, rank in groupby(in_order, key=lambda supervisor: supervisor.component.stop_rank):
            supervisors = [supervisor for supervisor in rank if supervisor in self._tasks]
            for supervisor in supervisors:
                supervisor.stop()
            tasks = [self._tasks[supervisor] for supervisor in supervisors]
            await asyncio.gather(*tasks, return_exceptions=True)
        await self._prober.close()
        if self._supervisors:
            remove_record(self._data)
        self._held.close()

    def _write(self) -> None:
        if not self._supervisors:
            # No component has started; an existing record belongs to another supervisor.
            return
        record = PlatformRecord(
            name=self._cache.metadata.name,
            pid=os.getpid(),
            started=psutil.Process().create_time(),
            phase=self._phase,
            gateway_url=self.gateway_url,
            model=self._cache.spec.model.served_name,
            parts=tuple(self._record(supervisor) for supervisor in self._supervisors),
        )
        # A full disk must neither stop the components nor prevent them from stopping.
        with suppress(OSError):
            write_record(self._data, record)

    def _record(self, supervisor: ComponentSupervisor) -> ComponentRecord:
        state, child = supervisor.state, supervisor.child
        return ComponentRecord(
            name=supervisor.component.name,
            component=supervisor.component.kind,
            pid=child.pid if child else 0,
            started=child.create_time if child else 0.0,
            phase=state.phase.value,
            cause=state.cause,
            restarts=state.restarts,
            addresses={name: str(address) for name, address in supervisor.component.ports.items()},
            log=str(supervisor.log),
        )
