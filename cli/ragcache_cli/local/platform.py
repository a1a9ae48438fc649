"""A RagCache as processes of this machine: started in order, kept running, ended completely."""

from __future__ import annotations

import asyncio
import os
import random
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from types import TracebackType
from typing import Self

import psutil

from ragcache_cli.local.part import Part, parts_from
from ragcache_cli.local.ports import LOOPBACK, demand_free, free_ports
from ragcache_cli.local.probe import Prober
from ragcache_cli.local.process import end_families, last_lines
from ragcache_cli.local.signing_key_file import plan_key_file
from ragcache_cli.local.site import RUN_FOLDER, LocalSite
from ragcache_cli.local.state_file import (
    PartRecord,
    PlatformRecord,
    only_supervisor,
    read_record,
    remove_record,
    write_record,
)
from ragcache_cli.local.supervision import PartState, Phase, RestartPolicy, is_crash_loop
from ragcache_cli.local.supervisor import LONGEST_GRACE_S, Keeper
from ragcache_core.errors import NotFound, RagCacheError, Unavailable
from ragcache_operator.builders import build_children
from ragcache_operator.spec import RagCache

_LOG_LINES = 12
_DEFAULT_POLICY = RestartPolicy()


@dataclass(frozen=True, slots=True)
class PartEvent:
    """A part changed its phase.

    elapsed_s: since the platform began to start. crash_loop: it keeps dying. log: file of its
    output; lines: the log's last ones, when it died and will be restarted.
    """

    part: str
    state: PartState
    elapsed_s: float
    crash_loop: bool
    log: Path
    lines: tuple[str, ...] = ()


class PartFailed(RagCacheError):
    """A part that never became ready was given up."""

    def __init__(self, part: str, cause: str, log: Path) -> None:
        lines = "".join(f"\n  | {line}" for line in last_lines(log, _LOG_LINES))
        super().__init__(f"the {part} {cause}; the end of {log}:{lines}")
        self.part = part
        self.log = log


class LocalPlatform:
    """Every part of one RagCache, from entering to leaving the context.

    Entering returns when all parts are ready and raises what kept one from it: InvalidInput (a
    port or a data folder in use, no such model), PartFailed, or Unavailable after start_timeout_s.
    Leaving ends every process that was started, however the body was left; cancelled once more
    meanwhile, it kills at once.

    data: folder for volumes, logs and the state file; made if missing.
    gateway_port: instead of the manifest's; 0 takes a free one.
    progress: called in the event loop with each change of a part's phase.
    """

    def __init__(
        self,
        cache: RagCache,
        data: Path,
        *,
        progress: Callable[[PartEvent], None] | None = None,
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
        self._keepers: list[Keeper] = []
        self._tasks: dict[Keeper, asyncio.Task[None]] = {}
        self._told: dict[Keeper, Phase] = {}
        self._held = ExitStack()
        self._prober = Prober()
        self._begun = 0.0
        self._phase = "starting"
        self._changed = asyncio.Event()

    @property
    def gateway_url(self) -> str:
        """Base URL of the REST interface."""
        return f"http://{LOOPBACK}:{self._gateway_port}"

    @property
    def data(self) -> Path:
        """The data folder."""
        return self._data

    def states(self) -> dict[str, PartState]:
        """State of every part, by name."""
        return {keeper.part.name: keeper.state for keeper in self._keepers}

    def pid(self, name: str) -> int:
        """Process id of a part; raises NotFound when it has no process."""
        [keeper] = self._named(name)
        if keeper.child is None:
            raise NotFound("process of part", name, "wait until it is ready")
        return keeper.child.pid

    def address(self, name: str, port: str) -> str:
        """Where a part listens, as host:port; port: ``http`` or ``grpc``. Raises NotFound."""
        [keeper] = self._named(name)
        if port not in keeper.part.ports:
            raise NotFound("port", port, f"the ports are {', '.join(keeper.part.ports)}")
        return str(keeper.part.ports[port])

    def log(self, name: str) -> Path:
        """File of a part's output."""
        return self._data / "logs" / f"{name}.log"

    async def restart(self, name: str) -> None:
        """End a part (or every part of a component, like ``engine``) and start it afresh.

        Returns when it is ready again. Raises NotFound, Unavailable when it takes too long.
        """
        keepers = self._named(name)
        for keeper in keepers:
            keeper.restart()
        await self._until_ready(keepers)

    async def until_ready(self) -> None:
        """Wait until every part is ready (again). Raises as entering does."""
        await self._until_ready(self._keepers)

    async def keep_running(self) -> None:
        """Wait to be cancelled; never returns. Raises what a keeper did not expect."""
        # Not gather, which would pass the cancellation on and take the parts' grace away.
        ended, _ = await asyncio.wait(self._tasks.values(), return_when=asyncio.FIRST_COMPLETED)
        for task in ended:
            task.result()
        raise RagCacheError("a part has ended for good")

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
        """Take the folder and the ports, build the parts and let them start."""
        (self._data / "logs").mkdir(parents=True, exist_ok=True)
        # Whoever can open the socket in it reads and writes the store's memory, and who has the
        # key has engines believe what they say.
        (self._data / RUN_FOLDER).mkdir(mode=0o700, exist_ok=True)
        self._held.enter_context(only_supervisor(self._data))
        left_behind = read_record(self._data)
        if left_behind is not None:
            # A supervisor that was killed could not end its parts, which hold files and ports.
            await asyncio.to_thread(end_families, left_behind.leaders, LONGEST_GRACE_S)
        ports = free_ports(random.Random())
        if self._gateway_port == 0:
            self._gateway_port = next(ports)
        else:
            demand_free(self._gateway_port, "spec.gateway.port")
        site = LocalSite(self._data, self._gateway_port, ports)
        self._held.enter_context(plan_key_file(Path(site.signing_key_file())))
        for part in parts_from(build_children(self._cache, site), self._cache.metadata.name):
            self._keepers.append(self._keeper(part))
        for keeper in self._keepers:
            self._tasks[keeper] = asyncio.create_task(self._keep(keeper), name=keeper.part.name)

    def _keeper(self, part: Part) -> Keeper:
        folder, log = self._data / part.name, self.log(part.name)
        folder.mkdir(exist_ok=True)
        if log.exists():
            log.replace(log.with_suffix(".previous.log"))
        return Keeper(
            part,
            folder,
            log,
            prober=self._prober,
            policy=self._policy,
            on_change=self._on_change,
        )

    async def _keep(self, keeper: Keeper) -> None:
        awaited = [k for k in self._keepers if k.part.component in keeper.part.after]
        await self._until(
            lambda: self._phase == "stopping" or all(k.state.was_ready for k in awaited)
        )
        if self._phase != "stopping":
            await keeper.run()

    def _named(self, name: str) -> list[Keeper]:
        named = [k for k in self._keepers if name in (k.part.name, k.part.component)]
        if not named:
            raise NotFound("part", name, f"the parts are {', '.join(self.states())}")
        return named

    async def _until(self, holds: Callable[[], bool]) -> None:
        while not holds():
            await self._changed.wait()

    async def _until_ready(self, keepers: Sequence[Keeper]) -> None:
        def is_settled() -> bool:
            failed = any(k.state.phase is Phase.FAILED for k in self._keepers)
            broken = any(task.done() for task in self._tasks.values())
            return failed or broken or all(k.state.phase is Phase.READY for k in keepers)

        try:
            async with asyncio.timeout(self._start_timeout_s):
                await self._until(is_settled)
        except TimeoutError:
            late = next(k for k in keepers if k.state.phase is not Phase.READY)
            problem = f"not ready after {self._start_timeout_s:g} s ({late.state.cause})"
            raise Unavailable(late.part.name, f"{problem}; see {late.log}") from None
        for keeper, task in self._tasks.items():
            if keeper.state.phase is Phase.FAILED:
                raise PartFailed(keeper.part.name, keeper.state.cause, keeper.log)
            if task.done():
                task.result()

    def _on_change(self, keeper: Keeper) -> None:
        self._signal()
        if self._told.get(keeper) is keeper.state.phase:
            return
        self._told[keeper] = keeper.state.phase
        self._write()
        if self._progress is not None:
            self._progress(self._event(keeper))

    def _signal(self) -> None:
        """Wake everyone who waits for a change."""
        self._changed.set()
        self._changed = asyncio.Event()

    def _event(self, keeper: Keeper) -> PartEvent:
        state = keeper.state
        # Of a part that is given up, PartFailed tells the same.
        has_died = state.deaths > 0 and state.phase is Phase.BACKOFF
        return PartEvent(
            part=keeper.part.name,
            state=state,
            elapsed_s=time.monotonic() - self._begun,
            crash_loop=is_crash_loop(state, self._policy),
            log=keeper.log,
            lines=tuple(last_lines(keeper.log, _LOG_LINES)) if has_died else (),
        )

    async def _finish(self) -> None:
        """End everything; what cancels this meanwhile only takes away the grace."""
        ending = asyncio.create_task(self._end())
        cancelled: asyncio.CancelledError | None = None
        while not ending.done():
            try:
                await asyncio.shield(ending)
            except asyncio.CancelledError as error:
                if cancelled is None:
                    # Once: a second time would interrupt the killing itself.
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
        # What asks before what it asks: a gateway first, the stores that engines save to last.
        in_order = sorted(self._keepers, key=lambda keeper: keeper.part.stop_rank)
        for _, rank in groupby(in_order, key=lambda keeper: keeper.part.stop_rank):
            keepers = [keeper for keeper in rank if keeper in self._tasks]
            for keeper in keepers:
                keeper.stop()
            tasks = [self._tasks[keeper] for keeper in keepers]
            await asyncio.gather(*tasks, return_exceptions=True)
        await self._prober.close()
        if self._keepers:
            remove_record(self._data)
        self._held.close()

    def _write(self) -> None:
        if not self._keepers:
            # Nothing of ours runs; the record, if there is one, is another supervisor's.
            return
        record = PlatformRecord(
            name=self._cache.metadata.name,
            pid=os.getpid(),
            started=psutil.Process().create_time(),
            phase=self._phase,
            gateway_url=self.gateway_url,
            model=self._cache.spec.model.served_name,
            parts=tuple(self._record(keeper) for keeper in self._keepers),
        )
        # A full disk must not end what runs, nor keep it from ending.
        with suppress(OSError):
            write_record(self._data, record)

    def _record(self, keeper: Keeper) -> PartRecord:
        state, child = keeper.state, keeper.child
        return PartRecord(
            name=keeper.part.name,
            component=keeper.part.component,
            pid=child.pid if child else 0,
            started=child.create_time if child else 0.0,
            phase=state.phase.value,
            cause=state.cause,
            restarts=state.restarts,
            addresses={name: str(address) for name, address in keeper.part.ports.items()},
            log=str(keeper.log),
        )
