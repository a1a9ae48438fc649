"""Keeps one component running: the shell around ``supervision`` with processes and probes."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Callable
from pathlib import Path

from ragcache_cli.local import supervision
from ragcache_cli.local.component import LocalComponent, Prober
from ragcache_cli.local.process import ChildProcess, describe_exit
from ragcache_cli.local.supervision import ProcessPhase, ProcessState, RestartPolicy

START_POLL_S = 0.25
"""Probe interval while a component is not ready; a pod's interval would delay the start."""

LONGEST_GRACE_S = 10.0
"""Upper bound of a component's grace period; a pod's 30 s would be too long in a terminal."""

_OWN_PREFIX = "RAGCACHE_"
_OWN_PASSED = ("RAGCACHE_EMBEDDER_API_KEY",)
"""Secrets are the only own variables a component inherits; the manifest sets the others."""


class ComponentSupervisor:
    """Supervises one component of a platform.

    Args:
        folder: The working folder of its process.
        log: The file of its output.
        on_change: Called after every change of state.
    """

    def __init__(
        self,
        component: LocalComponent,
        folder: Path,
        log: Path,
        *,
        prober: Prober,
        policy: RestartPolicy,
        on_change: Callable[[ComponentSupervisor], None],
    ) -> None:
        self.component = component
        self.log = log
        self.state = ProcessState(since=time.monotonic())
        self.child: ChildProcess | None = None
        self._folder = folder
        self._prober = prober
        self._policy = policy
        self._on_change = on_change
        self._stopping = False
        self._order = asyncio.Event()

    def restart(self) -> None:
        """Request a new process; the component is not ready until that one is."""
        self._become(supervision.asked_to_restart(self.state, time.monotonic()))
        self._order.set()

    def stop(self) -> None:
        """Request the end; ``run`` returns when all processes of the component have ended."""
        self._stopping = True
        self._order.set()

    async def run(self) -> None:
        """Keep the component running until it is stopped or fails. Cancellation kills it."""
        while await self._may_start():
            cause = await self._live()
            now = time.monotonic()
            if cause is not None:
                self._become(supervision.died(self.state, now, cause, self._policy))
            if self.state.phase is ProcessPhase.FAILED:
                return
        self._become(supervision.stopped(self.state, time.monotonic()))

    async def _may_start(self) -> bool:
        """Wait for the end of a backoff or for a request; return False if it is to stop."""
        wait_s = self.state.start_at - time.monotonic()
        if self.state.phase is ProcessPhase.BACKOFF and wait_s > 0 and not self._order.is_set():
            try:
                async with asyncio.timeout(wait_s):
                    await self._order.wait()
            except TimeoutError:
                pass
        self._order.clear()
        return not self._stopping

    async def _live(self) -> str | None:
        """Run its process once. Return the cause of death, or None if the end was requested."""
        try:
            child = await ChildProcess.start(
                self.component.command, self._environment(), self._folder, self.log
            )
        except OSError as error:
            return f"cannot be started: {error}"
        self.child = child
        exit_status = asyncio.create_task(child.wait())
        verdict = asyncio.create_task(self._watch())
        order = asyncio.create_task(self._order.wait())
        tasks = {exit_status, verdict, order}
        try:
            self._become(supervision.started(self.state, time.monotonic()))
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            if exit_status.done():
                return describe_exit(exit_status.result())
            cause = None if order.done() else verdict.result()
            # Probe results of a stopping component do not count.
            verdict.cancel()
            await child.stop(min(self.component.grace_s, LONGEST_GRACE_S))
            return cause
        finally:
            for task in tasks:
                task.cancel()
            # Its children may outlive it and keep its ports and memory.
            await child.sweep()
            self.child = None

    async def _watch(self) -> str:
        """Run the component's probes until one fails for good; return the reason."""
        startup = self.component.startup
        give_up = time.monotonic() + startup.failures * startup.period_s
        while (cause := await self._prober.ask(startup)) is not None:
            self._become(supervision.unready(self.state, time.monotonic(), cause))
            if time.monotonic() > give_up:
                return f"did not start: {cause}"
            await asyncio.sleep(START_POLL_S)
        readiness = asyncio.create_task(self._watch_readiness())
        try:
            return await self._watch_liveness()
        finally:
            readiness.cancel()

    async def _watch_readiness(self) -> None:
        check, failures = self.component.readiness, 0
        while True:
            cause = await self._prober.ask(check)
            failures = 0 if cause is None else failures + 1
            now = time.monotonic()
            if cause is None:
                self._become(supervision.ready(self.state, now))
            elif failures >= check.failures or self.state.phase is not ProcessPhase.READY:
                self._become(supervision.unready(self.state, now, cause))
            is_ready = self.state.phase is ProcessPhase.READY
            await asyncio.sleep(check.period_s if is_ready else START_POLL_S)

    async def _watch_liveness(self) -> str:
        check, failures = self.component.liveness, 0
        while True:
            await asyncio.sleep(check.period_s)
            cause = await self._prober.ask(check)
            failures = 0 if cause is None else failures + 1
            if failures >= check.failures:
                return f"stopped answering: {cause}"

    def _environment(self) -> dict[str, str]:
        inherited = {
            name: value
            for name, value in os.environ.items()
            if not name.startswith(_OWN_PREFIX) or name in _OWN_PASSED
        }
        return inherited | self.component.env

    def _become(self, state: ProcessState) -> None:
        if state != self.state:
            self.state = state
            self._on_change(self)
