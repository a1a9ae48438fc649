"""Splits documents in processes that can be ended, so that no document holds the retriever.

A thread could not be ended, and Python's lock would let it delay everything else. A process has a
limit of CPU time for each document, which a busy machine does not use up, and a longer limit of
wall time, which ends before the caller's deadline. Documents of ordinary length and long ones have
a process each: a short document never waits for a long one. The keys whose documents wait take
turns.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import signal
import sys
from asyncio.subprocess import Process, SubprocessStreamProtocol
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from ragcache_core.documents.formats import is_code_name
from ragcache_core.documents.passages import document_name
from ragcache_core.errors import InvalidInput, RagCacheError, Unavailable
from ragcache_core.identity.keys import token_digest
from ragcache_core.identity.packed_ids import ID_BYTES
from ragcache_retriever.concurrency.turn_lock import TurnLock
from ragcache_retriever.documents.chunking import Chunk
from ragcache_retriever.documents.collection import Chunking
from ragcache_retriever.documents.tokenizer import ServingTokenizer
from ragcache_wire.asking import asker
from ragcache_wire.child_errors import ChildErrors
from ragcache_wire.sandbox import bare_environment, sandbox_support

log = logging.getLogger(__name__)

LONG_DOCUMENT_CHARS = 1 << 18
_WORKER = "ragcache_retriever.documents.splitter_worker"
_MAX_LINE_BYTES = 64 << 20
"""A chunk of one unbroken text. Documents are shorter. It also bounds the token ids of a chunk."""
_GRACE_S = 5.0
"""Time until the system has the status of a process that has closed its output."""
_ATTEMPTS = 2
"""A process may be killed for want of memory that something else takes."""
_ENDED_FROM_OUTSIDE = frozenset({-signal.SIGKILL, -signal.SIGTERM})
"""Statuses that a document does not cause by itself. The system kills with SIGKILL when memory
runs out."""


@dataclass(frozen=True, slots=True)
class SplitLimit:
    """Time in which a document has to be split.

    The CPU time is ten times what the slowest text takes on one core of a common server, and three
    times for the longest documents. Both limits leave time to embed before the caller's deadline.

    Args:
        max_cpu_s: Limit of the CPU time of long documents.
        wall_s: Limit of the time since the document's turn, for every document.
    """

    base_s: float = 5.0
    s_per_million_chars: float = 40.0
    max_cpu_s: float = 120.0
    wall_s: float = 180.0

    def cpu_s(self, num_chars: int) -> float:
        """Return the limit of CPU time for a document of a length, in seconds."""
        return min(self.base_s + self.s_per_million_chars * num_chars / 1e6, self.max_cpu_s)


@dataclass(frozen=True, slots=True)
class SplitDocument:
    """The chunks of a document with their tokens.

    Attributes:
        token_ids: Of each chunk with its label before and the separator after it: uint32,
            little-endian.
        digests: Of the token ids of each chunk. The gateway computes the chunk's key from it.
    """

    chunks: list[Chunk]
    token_ids: list[bytes]
    digests: list[bytes]


class DocumentSplitter:
    """Splits documents and tokenizes their chunks.

    Args:
        limit: CPU time and wall time for each document.
    """

    def __init__(self, tokenizer: ServingTokenizer, limit: SplitLimit | None = None) -> None:
        limit = limit or SplitLimit()
        sandbox_support().warn("splitters of documents")
        self._short = _SplitterProcess(tokenizer, limit, is_kept=True)
        self._long = _SplitterProcess(tokenizer, limit, is_kept=False)

    async def split(
        self, document_id: str, text: str, *, title: str = "", markdown: bool, chunking: Chunking
    ) -> SplitDocument:
        """Split a document. A caller that is cancelled ends the work.

        Args:
            document_id: Names the document in errors. Its suffix tells code from other text.
            title: Names the document in labels, see ``document_name``. Empty: nothing does.
            markdown: Whether to recognize headings and code fences.

        Raises:
            InvalidInput: The document takes too much time, or crashes its process.
            Unavailable: The process does not start, or was killed.
        """
        process = self._long if len(text) > LONG_DOCUMENT_CHARS else self._short
        header = {
            "markdown": markdown,
            "code": is_code_name(document_id),
            "name": document_name(document_id, title) if chunking.labels else None,
            "size_tokens": chunking.size_tokens,
            "overlap_tokens": chunking.overlap_tokens,
        }
        return await process.split(document_id, header, text)

    async def close(self) -> None:
        """End the processes, and the work that they do."""
        await self._short.end()
        await self._long.end()


@dataclass(slots=True)
class _Worker:
    """A running process. It is ready when it has loaded the tokenizer."""

    process: Process
    transport: asyncio.SubprocessTransport
    errors: ChildErrors
    is_ready: bool = False


class _SplitterProcess:
    """A process that splits one document at a time. It starts with the first one.

    Args:
        is_kept: Whether the process stays when no document waits. It has the memory of a
            vocabulary.
    """

    def __init__(self, tokenizer: ServingTokenizer, limit: SplitLimit, *, is_kept: bool) -> None:
        self._tokenizer = tokenizer
        self._limit = limit
        self._is_kept = is_kept
        self._worker: _Worker | None = None
        self._turns = TurnLock()
        self._num_callers = 0

    async def split(self, document_id: str, header: dict[str, Any], text: str) -> SplitDocument:
        """Split a document, and raise what ``DocumentSplitter.split`` raises."""
        header = {**header, "cpu_limit_s": self._limit.cpu_s(len(text))}
        self._num_callers += 1
        try:
            async with self._turns.turn(asker()), asyncio.timeout(self._limit.wall_s):
                return await self._split(document_id, header, text)
        except TimeoutError:
            raise _took_too_long(document_id, f"{self._limit.wall_s:g} s") from None
        finally:
            self._num_callers -= 1
            if not (self._is_kept or self._num_callers):
                await self.end()

    async def end(self, grace_s: float = 0.0) -> int | None:
        """End the process, if there is one, and return its exit status.

        Args:
            grace_s: Time that it has to end by itself before it is killed.
        """
        worker, self._worker = self._worker, None
        if worker is None:
            return None
        try:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(grace_s):
                    return await worker.process.wait()
        finally:
            # This kills the process. It also closes pipes with unread output, which would keep
            # the wait from its end.
            worker.transport.close()
            if errors := worker.errors.text():
                log.warning("splitter: the splitter of documents wrote errors=%s", errors)
            worker.errors.close()
        return await worker.process.wait()

    async def _split(self, document_id: str, header: dict[str, Any], text: str) -> SplitDocument:
        for attempt in range(1, _ATTEMPTS + 1):
            try:
                return await self._exchange(header, text)
            except (OSError, EOFError) as error:
                is_ready = self._worker is not None and self._worker.is_ready
                status = await self.end(_GRACE_S)
                if status == -signal.SIGXCPU:
                    limit = f"{header['cpu_limit_s']:.0f} s of CPU time"
                    raise _took_too_long(document_id, limit) from None
                if attempt == _ATTEMPTS:
                    raise _ended(document_id, status, is_ready) from error
            except BaseException:
                await self.end()  # what it still works on has no reader
                raise
        raise AssertionError("the last attempt returns or raises")

    async def _exchange(self, header: dict[str, Any], text: str) -> SplitDocument:
        """Send a document and read its chunks. Raises OSError or EOFError if the process ends."""
        worker = self._worker or await self._start()
        await _write(worker.process, header, text)
        found = SplitDocument([], [], [])
        async for chunk_text, heading_path, pages, num_bytes in _read_lines(worker.process):
            found.chunks.append(Chunk(chunk_text, tuple(heading_path), *pages))
            packed = await _read_ids(worker.process, num_bytes)
            found.token_ids.append(packed)
            found.digests.append(token_digest(np.frombuffer(packed, "<u4")))
        return found

    async def _start(self) -> _Worker:
        """Start the process. Raises OSError or EOFError if it does not become ready."""
        loop, errors = asyncio.get_running_loop(), ChildErrors()
        try:
            transport, protocol = await loop.subprocess_exec(
                lambda: SubprocessStreamProtocol(limit=_MAX_LINE_BYTES, loop=loop),
                # -P: the working folder may have keys, and is no place of packages.
                *(sys.executable, "-P", "-m", _WORKER),
                stderr=errors.descriptor,
                env=bare_environment(),
            )
        except BaseException:
            errors.close()
            raise
        self._worker = worker = _Worker(Process(transport, protocol, loop), transport, errors)
        identity = {"identity": self._tokenizer.identity}
        await _write(worker.process, identity, self._tokenizer.content)
        async for _ in _read_lines(worker.process):
            pass  # it writes no values before it is ready
        worker.is_ready = True
        return worker


async def _write(process: Process, header: dict[str, Any], text: str) -> None:
    assert process.stdin is not None
    content = text.encode()
    line = json.dumps({**header, "num_bytes": len(content)})
    process.stdin.write(line.encode() + b"\n")
    process.stdin.write(content)
    await process.stdin.drain()


async def _read_lines(process: Process) -> AsyncIterator[list[Any]]:
    """Yield the values of lines up to an empty one. Raises EOFError if the process ends first."""
    assert process.stdout is not None
    while (line := await process.stdout.readline()) != b"\n":
        if not line.endswith(b"\n"):
            raise EOFError
        yield json.loads(line)


async def _read_ids(process: Process, num_bytes: int) -> bytes:
    """Read token ids. Raises EOFError if the process ends first."""
    assert process.stdout is not None
    if not 0 <= num_bytes <= _MAX_LINE_BYTES or num_bytes % ID_BYTES:
        raise ValueError(f"a chunk cannot have {num_bytes} bytes of token ids")
    return await process.stdout.readexactly(num_bytes)


def _took_too_long(document_id: str, limit: str) -> InvalidInput:
    return InvalidInput(
        "document.text",
        f"of document {document_id!r} takes more than {limit} to split",
        "divide the document into shorter ones, or send it as plain text",
    )


def _ended(document_id: str, status: int | None, is_ready: bool) -> RagCacheError:
    """Return the error of a process that has ended.

    Args:
        status: Its exit status; None if it never ran.
        is_ready: Whether it had begun with the document.
    """
    if status is None or status in _ENDED_FROM_OUTSIDE or not is_ready:
        return Unavailable(
            "retriever",
            f"the process that splits document {document_id!r} "
            + ("does not start" if status is None else f"ended with status {status}")
            + "; it may lack memory",
        )
    return InvalidInput(
        "document.text",
        f"of document {document_id!r} ends the process that splits it (status {status})",
        "divide the document into shorter ones, or send it as plain text",
    )
