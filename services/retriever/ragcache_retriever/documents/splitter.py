"""Splits documents in processes that can be ended, so that no document holds the retriever.

A thread could not be ended, and Python's lock would let it delay everything else. A process has a
limit of CPU time for each document, which a busy machine does not use up. Documents of ordinary
length and long ones have a process each: a short document never waits for a long one.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import signal
import sys
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any

from ragcache_core.errors import InvalidInput
from ragcache_retriever.documents.chunking import Chunk
from ragcache_retriever.documents.collection import Chunking
from ragcache_retriever.documents.tokenizer import ServingTokenizer

LONG_DOCUMENT_CHARS = 1 << 18
_WORKER = "ragcache_retriever.documents.splitter_worker"
_MAX_LINE_BYTES = 64 << 20
"""A chunk of one unbroken text. Documents are shorter."""
_GRACE_S = 5.0
"""Time until the system has the status of a process that has closed its output."""
_ATTEMPTS = 2
"""A process may be killed for want of memory that something else takes."""


@dataclass(frozen=True, slots=True)
class SplitLimit:
    """CPU time in which a document has to be split.

    The defaults are ten times what the slowest text takes on one core of a common server.
    """

    base_s: float = 5.0
    s_per_million_chars: float = 40.0

    def cpu_s(self, num_chars: int) -> float:
        """Return the limit for a document of a length, in seconds."""
        return self.base_s + self.s_per_million_chars * num_chars / 1e6


@dataclass(frozen=True, slots=True)
class SplitDocument:
    """The chunks of a document, and the digests of their tokens."""

    chunks: list[Chunk]
    digests: list[bytes]


class DocumentSplitter:
    """Splits documents and digests the tokens of their chunks.

    Args:
        limit: CPU time for each document.
    """

    def __init__(self, tokenizer: ServingTokenizer, limit: SplitLimit | None = None) -> None:
        limit = limit or SplitLimit()
        self._short = _SplitterProcess(tokenizer, limit, is_kept=True)
        self._long = _SplitterProcess(tokenizer, limit, is_kept=False)

    async def split(
        self, document_id: str, text: str, *, markdown: bool, chunking: Chunking
    ) -> SplitDocument:
        """Split a document. A caller that is cancelled ends the work.

        Args:
            document_id: Names the document in errors.
            markdown: Whether to recognize headings and code fences.

        Raises:
            InvalidInput: The document takes too much CPU time, or ends its process.
        """
        process = self._long if len(text) > LONG_DOCUMENT_CHARS else self._short
        return await process.split(document_id, text, markdown, chunking)

    async def close(self) -> None:
        """End the processes, and the work that they do."""
        await self._short.end()
        await self._long.end()


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
        self._process: asyncio.subprocess.Process | None = None
        self._turn = asyncio.Lock()
        self._num_callers = 0

    async def split(
        self, document_id: str, text: str, markdown: bool, chunking: Chunking
    ) -> SplitDocument:
        """See DocumentSplitter.split."""
        limit_s = self._limit.cpu_s(len(text))
        header = {
            "markdown": markdown,
            "size_tokens": chunking.size_tokens,
            "overlap_tokens": chunking.overlap_tokens,
            "cpu_limit_s": limit_s,
        }
        self._num_callers += 1
        try:
            async with self._turn:
                for attempt in range(1, _ATTEMPTS + 1):
                    try:
                        return await self._exchange(header, text)
                    except (OSError, EOFError):
                        status = await self.end(_GRACE_S)
                        if status == -signal.SIGXCPU:
                            raise _took_too_long(document_id, limit_s) from None
                        if attempt == _ATTEMPTS:
                            raise _ended_process(document_id, status) from None
                    except BaseException:
                        await self.end()  # what it still works on has no reader
                        raise
        finally:
            self._num_callers -= 1
            if not (self._is_kept or self._num_callers):
                await self.end()
        raise AssertionError("the last attempt returns or raises")

    async def end(self, grace_s: float = 0.0) -> int | None:
        """End the process, if there is one, and return its exit status.

        Args:
            grace_s: Time that it has to end by itself before it is killed.
        """
        process, self._process = self._process, None
        if process is None:
            return None
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(grace_s):
                return await process.wait()
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        return await process.wait()

    async def _exchange(self, header: dict[str, Any], text: str) -> SplitDocument:
        """Send a document and read its chunks. Raises OSError or EOFError if the process ends."""
        process = self._process or await self._start()
        await _write(process, header, text)
        found = SplitDocument([], [])
        async for chunk_text, heading_path, digest in _read_lines(process):
            found.chunks.append(Chunk(chunk_text, tuple(heading_path)))
            found.digests.append(bytes.fromhex(digest))
        return found

    async def _start(self) -> asyncio.subprocess.Process:
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", _WORKER),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            limit=_MAX_LINE_BYTES,
        )
        self._process = process
        identity = {"identity": self._tokenizer.identity}
        await _write(process, identity, self._tokenizer.content)
        return process


async def _write(process: asyncio.subprocess.Process, header: dict[str, Any], text: str) -> None:
    assert process.stdin is not None
    content = text.encode()
    line = json.dumps({**header, "num_bytes": len(content)})
    process.stdin.write(line.encode() + b"\n")
    process.stdin.write(content)
    await process.stdin.drain()


async def _read_lines(process: asyncio.subprocess.Process) -> AsyncIterator[list[Any]]:
    """Yield the values of lines up to an empty one. Raises EOFError if the process ends first."""
    assert process.stdout is not None
    while (line := await process.stdout.readline()) != b"\n":
        if not line.endswith(b"\n"):
            raise EOFError
        yield json.loads(line)


def _took_too_long(document_id: str, limit_s: float) -> InvalidInput:
    return InvalidInput(
        "document.text",
        f"of document {document_id!r} takes more than {limit_s:.0f} s of CPU time to split",
        "divide the document into shorter ones, or send it as plain text",
    )


def _ended_process(document_id: str, status: int | None) -> InvalidInput:
    return InvalidInput(
        "document.text",
        f"of document {document_id!r} ends the process that splits it (status {status})",
        "divide the document into shorter ones, and give the retriever more memory",
    )
