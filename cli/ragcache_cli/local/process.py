"""Starts a process in its own session with its output in a file, and ends its whole family."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

import psutil

_POLL_S = 0.05
# Only a process that hangs in the kernel survives so many KILLs.
_SWEEPS = 200
_TAIL_BYTES = 64 << 10
# Start times that are read at different times differ by clock adjustments in between.
_SAME_START_S = 2.0


class ChildProcess:
    """A running command that leads its own session and process group.

    Ctrl-C in a terminal therefore reaches only the supervisor, which stops its components in order.
    """

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self._process = process
        self.pid = process.pid
        self.create_time = _create_time(process.pid)

    @classmethod
    async def start(
        cls, command: Sequence[str], env: Mapping[str, str], folder: Path, log: Path
    ) -> ChildProcess:
        """Start the command in ``folder`` and append its output to ``log``. Raises OSError."""
        with log.open("ab", buffering=0) as output:
            process = await asyncio.create_subprocess_exec(
                *command,
                env=dict(env),
                cwd=folder,
                stdin=asyncio.subprocess.DEVNULL,
                stdout=output,
                stderr=asyncio.subprocess.STDOUT,
                start_new_session=True,
            )
        return cls(process)

    async def wait(self) -> int:
        """Wait for the exit status; it is minus the signal's number after a signal."""
        return await self._process.wait()

    async def stop(self, grace_s: float) -> None:
        """Send TERM to the command; after its end or the grace period send KILL to the rest.

        Returns when the process group and all descendants have ended.
        """
        family = Family.of(self.pid, self.create_time)
        family.signal_leader(signal.SIGTERM)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(grace_s):
                await self._process.wait()
        await self.sweep(family)

    async def sweep(self, family: Family | None = None) -> None:
        """Kill the remaining processes of its group."""
        family = family or Family.of(self.pid, self.create_time)
        for _ in range(_SWEEPS):
            if not family.kill():
                break
            await asyncio.sleep(_POLL_S)
        await self._process.wait()


class Family:
    """A session leader, its group, and its descendants at construction.

    The leader may be dead already: its group can outlive it, as vLLM's engine core outlives a
    killed server.
    """

    def __init__(self, leader: int, descendants: Sequence[psutil.Process], alive: bool) -> None:
        self._leader = leader
        self._descendants = descendants
        self._alive = alive

    @classmethod
    def of(cls, leader: int, create_time: float) -> Family:
        """Return the family of the process with this id and start time."""
        try:
            process = psutil.Process(leader)
            if not _same_start(process, create_time):
                # The id was reused by another process, which cannot happen while the group lives.
                return cls(leader, (), alive=False)
            return cls(leader, process.children(recursive=True), alive=True)
        except psutil.NoSuchProcess:
            return cls(leader, _session_members(leader), alive=True)

    def signal_leader(self, number: signal.Signals) -> None:
        """Signal the leader alone: services stop their own children."""
        if self._alive:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self._leader, number)

    def kill(self) -> bool:
        """Kill all its living processes; return whether there were any."""
        if not self._alive:
            return False
        members = [*_session_members(self._leader), *self._descendants]
        living = [m for m in members if _lives(m)]
        for member in living:
            with contextlib.suppress(psutil.NoSuchProcess):
                member.kill()
        return bool(living)


def end_families(leaders: Mapping[int, float], grace_s: float) -> None:
    """Send TERM, wait at most ``grace_s``, then send KILL to processes of another parent.

    Args:
        leaders: Start time by process id.
    """
    families = [Family.of(pid, create_time) for pid, create_time in leaders.items()]
    for family in families:
        family.signal_leader(signal.SIGTERM)
    deadline = time.monotonic() + grace_s
    while time.monotonic() < deadline and any(is_alive(p, t) for p, t in leaders.items()):
        time.sleep(_POLL_S)
    for family in families:
        for _ in range(_SWEEPS):
            if not family.kill():
                break
            time.sleep(_POLL_S)


def is_alive(pid: int, create_time: float) -> bool:
    """Return whether the process with this id and start time still runs."""
    try:
        process = psutil.Process(pid)
        return _same_start(process, create_time) and _lives(process)
    except psutil.NoSuchProcess:
        return False


def last_lines(log: Path, count: int) -> list[str]:
    """Return the last non-empty lines of a log."""
    try:
        with log.open("rb") as file:
            file.seek(0, os.SEEK_END)
            file.seek(max(0, file.tell() - _TAIL_BYTES))
            text = file.read().decode(errors="replace")
    except OSError:
        return []
    return [line.rstrip() for line in text.splitlines() if line.strip()][-count:]


def describe_exit(status: int) -> str:
    """Describe the end of a process."""
    if status >= 0:
        return f"ended with status {status}"
    try:
        return f"was ended by {signal.Signals(-status).name}"
    except ValueError:
        return f"was ended by signal {-status}"


def _same_start(process: psutil.Process, create_time: float) -> bool:
    return abs(process.create_time() - create_time) < _SAME_START_S


def _create_time(pid: int) -> float:
    try:
        return psutil.Process(pid).create_time()
    except psutil.NoSuchProcess:
        return 0.0


def _lives(process: psutil.Process) -> bool:
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def _session_members(leader: int) -> list[psutil.Process]:
    """Return the living processes of the session, also if its leader is dead."""
    members = []
    for process in psutil.process_iter():
        try:
            if os.getsid(process.pid) == leader:
                members.append(process)
        except (ProcessLookupError, PermissionError):
            continue
    return members
