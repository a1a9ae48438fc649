"""Keeps one part running: the shell around ``supervision``, with real processes and probes."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Callable
from pathlib import Path

from ragcache_cli.local import supervision
from ragcache_cli.local.part import Part
from ragcache_cli.local.probe import Prober
from ragcache_cli.local.process import ChildProcess, describe_exit
from ragcache_cli.local.supervision import PartState, Phase, RestartPolicy

START_POLL_S = 0.25
"""How often a part that is not ready is asked; a pod's period of seconds would be felt."""

LONGEST_GRACE_S = 10.0
"""A pod's grace is for connections that drain; at a desk nobody waits half a minute."""

_OWN_PREFIX = "RAGCACHE_"
_OWN_PASSED = ("RAGCACHE_EMBEDDER_API_KEY",)
"""Of our own variables only secrets are inherited from the user: the manifest says the rest."""


class Keeper:
    """One part of a platform.

    folder: its working folder. log: where its output goes.
    on_change: called after every change of state.
    """

    def __init__(
        self,
        part: Part,
        folder: Path,
        log: Path,
        *,
        prober: Prober,
        policy: RestartPolicy,
        on_change: Callable[[Keeper], None],
    ) -> None:
        self.part = part
        self.log = log
        self.state = PartState(since=time.monotonic())
        self.child: ChildProcess | None = None
        self._folder = folder
        self._prober = prober
        self._policy = policy
        self._on_change = on_change
        self._stopping = False
        self._order = asyncio.Event()

    def restart(self) -> None:
        """Ask for a fresh process; from now on the part is not ready until that one is."""
        self._become(supervision.asked_to_restart(self.state, time.monotonic()))
        self._order.set()

    def stop(self) -> None:
        """Ask for the end: ``run`` returns when nothing of the part is left."""
        self._stopping = True
        self._order.set()

    async def run(self) -> None:
        """Keep the part running until it is stopped or given up. Cancelled, it kills the part."""
        while await self._may_start():
            cause = await self._live()
            now = time.monotonic()
            if cause is not None:
                self._become(supervision.died(self.state, now, cause, self._policy))
            if self.state.phase is Phase.FAILED:
                return
        self._become(supervision.stopped(self.state, time.monotonic()))

    async def _may_start(self) -> bool:
        """Wait for the end of a backoff, or an order; False when the order is to stop."""
        wait_s = self.state.start_at - time.monotonic()
        if self.state.phase is Phase.BACKOFF and wait_s > 0 and not self._order.is_set():
            try:
                async with asyncio.timeout(wait_s):
                    await self._order.wait()
            except TimeoutError:
                pass
        self._order.clear()
        return not self._stopping

    async def _live(self) -> str | None:
        """One life of its process. Returns the cause of death; None when it was ordered."""
        try:
            child = await ChildProcess.start(
                self.part.command, self._environment(), self._folder, self.log
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
            # What a part answers while it ends is no news.
            verdict.cancel()
            await child.stop(min(self.part.grace_s, LONGEST_GRACE_S))
            return cause
        finally:
            for task in tasks:
                task.cancel()
            # Its own children may outlive it, and hold its ports and its memory.
            await child.sweep()
            self.child = None

    async def _watch(self) -> str:
        """Run the part's probes; returns when they condemn it, with the reason."""
        startup = self.part.startup
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
        check, noes = self.part.readiness, 0
        while True:
            cause = await self._prober.ask(check)
            noes = 0 if cause is None else noes + 1
            now = time.monotonic()
            if cause is None:
                self._become(supervision.ready(self.state, now))
            elif noes >= check.failures or self.state.phase is not Phase.READY:
                self._become(supervision.unready(self.state, now, cause))
            is_ready = self.state.phase is Phase.READY
            await asyncio.sleep(check.period_s if is_ready else START_POLL_S)

    async def _watch_liveness(self) -> str:
        check, noes = self.part.liveness, 0
        while True:
            await asyncio.sleep(check.period_s)
            cause = await self._prober.ask(check)
            noes = 0 if cause is None else noes + 1
            if noes >= check.failures:
                return f"stopped answering: {cause}"

    def _environment(self) -> dict[str, str]:
        inherited = {
            name: value
            for name, value in os.environ.items()
            if not name.startswith(_OWN_PREFIX) or name in _OWN_PASSED
        }
        return inherited | self.part.env

    def _become(self, state: PartState) -> None:
        if state != self.state:
            self.state = state
            self._on_change(self)
