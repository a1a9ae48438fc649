"""Reads the text of documents in other formats, outside the gateway's process.

Parsers of HTML, PDF and office files and guesses of encodings work on what strangers write. They
run in processes with limits of CPU time, memory and output for each document, and without the
gateway's environment and memory. Each document is read in a sandbox (``ragcache_wire.sandbox``)
without network, keys and programs. A document that takes too much is refused.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import signal
import sys
from asyncio.subprocess import PIPE, Process
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any, Final

from ragcache_core.documents.formats import DocumentFormat
from ragcache_core.errors import InvalidInput, TooLarge, Unavailable
from ragcache_gateway.extraction.extracted import ExtractedText
from ragcache_wire.sandbox import bare_environment

log = logging.getLogger(__name__)

NUM_PROCESSES: Final = 2
"""One long document does not delay all others."""

_WORKER: Final = "ragcache_gateway.extraction.worker"
_KILLED: Final = f"status {-signal.SIGKILL}"
"""The system kills with this signal when memory runs out, which another process may have taken."""


@dataclass(frozen=True, slots=True)
class ExtractionLimit:
    """What reading one document may take.

    The CPU time is about ten times what large documents of ordinary kinds take.

    Args:
        wall_s: Time since the document's turn.
        memory_bytes: Address space beside that of the loaded parsers.
        output_bytes: Size of the text, encoded as JSON.
    """

    base_cpu_s: float = 10.0
    cpu_s_per_mib: float = 10.0
    wall_s: float = 180.0
    memory_bytes: int = 512 << 20
    output_bytes: int = 32 << 20

    def cpu_s(self, num_bytes: int) -> float:
        """Return the limit of CPU time for a document of a size, in seconds."""
        return self.base_cpu_s + self.cpu_s_per_mib * num_bytes / (1 << 20)


class TextExtractor:
    """Reads documents in up to NUM_PROCESSES processes, which start with the first document.

    Args:
        limit: What each document may take.
    """

    def __init__(self, limit: ExtractionLimit | None = None) -> None:
        self._limit = limit or ExtractionLimit()
        self._idle: list[_WorkerProcess] = [_WorkerProcess() for _ in range(NUM_PROCESSES)]
        self._all = tuple(self._idle)
        self._slots = asyncio.Semaphore(NUM_PROCESSES)

    async def extract(self, content: bytes, kind: DocumentFormat, field: str) -> ExtractedText:
        """Read a document. A caller that is cancelled ends the work.

        Args:
            field: Names the document in errors.

        Raises:
            InvalidInput: It cannot be read, or takes too much time or memory.
            Unavailable: The process does not start.
        """
        request = {
            "format": kind.value,
            "num_bytes": len(content),
            "cpu_s": self._limit.cpu_s(len(content)),
            "memory_bytes": self._limit.memory_bytes,
            "output_bytes": self._limit.output_bytes,
        }
        async with self._worker() as worker:
            try:
                async with asyncio.timeout(self._limit.wall_s):
                    reply = await worker.ask(request, content)
            except TimeoutError:
                raise InvalidInput(
                    field, f"takes more than {self._limit.wall_s:g} s to read", "divide it"
                ) from None
            except (OSError, EOFError) as error:
                raise Unavailable("gateway", "its reader of documents does not start") from error
        if reply.get("ended") == _KILLED:
            raise Unavailable("gateway", "the process that reads a document was killed")
        if "ended" in reply:
            raise self._refusal(field, reply["ended"], request)
        if "problem" in reply:
            raise InvalidInput(field, reply["problem"], reply["fix"])
        return ExtractedText(**{**reply, "warnings": tuple(reply["warnings"])})

    async def close(self) -> None:
        """End the processes, and the work that they do."""
        for worker in self._all:
            await worker.end()

    @asynccontextmanager
    async def _worker(self) -> AsyncGenerator[_WorkerProcess, None]:
        async with self._slots:
            # The process that was used last is in memory; another one may never have to start.
            worker = self._idle.pop()
            try:
                yield worker
            finally:
                self._idle.append(worker)

    def _refusal(self, field: str, cause: str, request: dict[str, Any]) -> InvalidInput:
        match cause:
            case "cpu":
                problem = f"takes more than {request['cpu_s']:.0f} s of CPU time to read"
            case "memory":
                problem = f"takes more than {self._limit.memory_bytes >> 20} MiB of memory to read"
            case "output":
                limit_mib = self._limit.output_bytes >> 20
                return TooLarge(field, f"has more than {limit_mib} MiB of text", "divide it")
            case _:
                problem = f"ends the process that reads it ({cause})"
        return InvalidInput(field, problem, "divide it, or send its text")


class _WorkerProcess:
    """One process, which reads one document at a time."""

    def __init__(self) -> None:
        self._process: Process | None = None

    async def ask(self, request: dict[str, Any], content: bytes) -> dict[str, Any]:
        """Send a request and return the answer. Raises OSError or EOFError if the process ends."""
        try:
            process = self._process or await self._start()
            return await _exchange(process, request, content)
        except BaseException:
            await self.end()  # what it still works on has no reader
            raise

    async def end(self) -> None:
        """Kill the process and its child, if there is one."""
        process, self._process = self._process, None
        if process is None:
            return
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        # Unread output would keep the wait from its end.
        transport = process._transport  # type: ignore[attr-defined]
        transport.close()
        await process.wait()

    async def _start(self) -> Process:
        # A session of its own: signals of the gateway's terminal do not reach it, and its children
        # end with it.
        self._process = process = await asyncio.create_subprocess_exec(
            # -P: the working folder may have keys, and is no place of packages.
            *(sys.executable, "-P", "-m", _WORKER),
            stdin=PIPE,
            stdout=PIPE,
            env=bare_environment(),
            start_new_session=True,
        )
        await _read_line(process)
        return process


async def _exchange(process: Process, request: dict[str, Any], content: bytes) -> dict[str, Any]:
    assert process.stdin is not None
    assert process.stdout is not None
    process.stdin.write(json.dumps(request).encode() + b"\n")
    process.stdin.write(content)
    await process.stdin.drain()
    header = await _read_line(process)
    if errors := header.pop("errors"):
        log.warning("extraction: the reader of a document wrote errors=%s", errors)
    if "num_bytes" not in header:
        return header
    answer: dict[str, Any] = json.loads(await process.stdout.readexactly(header["num_bytes"]))
    return answer


async def _read_line(process: Process) -> dict[str, Any]:
    assert process.stdout is not None
    line = await process.stdout.readline()
    if not line.endswith(b"\n"):
        raise EOFError
    value: dict[str, Any] = json.loads(line)
    return value
