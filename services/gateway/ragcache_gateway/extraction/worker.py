"""Reads documents in a process of its own, which the gateway starts and ends (``extractor``).

It loads the parsers once. For each document it forks a child in a sandbox, with limits of CPU time,
memory and output. So no document can change how a later one is read, and the end of a child is an
answer. Documents and answers are in memory that both processes share, and never among the objects
of this process, which later children inherit. What a child has written when it ends early is
dropped.

A request is a line of JSON and then the document. An answer is a line of JSON with the problem, or
with the length of the JSON object that follows it. It also has the beginning of what the child has
written to its standard error.
"""

from __future__ import annotations

import errno
import json
import math
import mmap
import os
import resource
import signal
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any, Final

from ragcache_core.documents.formats import DocumentFormat
from ragcache_gateway.extraction.encodings import read_text
from ragcache_gateway.extraction.extracted import ExtractedText, UnreadableDocument
from ragcache_gateway.extraction.html.reader import read_html
from ragcache_gateway.extraction.json_text import read_json
from ragcache_gateway.extraction.markdown import read_markdown
from ragcache_gateway.extraction.mdx import read_mdx
from ragcache_gateway.extraction.notebook import read_notebook
from ragcache_gateway.extraction.office import read_office
from ragcache_gateway.extraction.pdf import read_pdf
from ragcache_gateway.extraction.restructured import read_restructured
from ragcache_gateway.extraction.tables import read_csv
from ragcache_wire.child_errors import ChildErrors
from ragcache_wire.sandbox import Sandbox

_INPUT, _OUTPUT, _ERRORS = 0, 1, 2
_DONE: Final = 0
_REFUSED: Final = 3
_NO_MEMORY: Final = 4
_TOO_MUCH_TEXT: Final = 5
_CAUSES: Final = {_NO_MEMORY: "memory", _TOO_MUCH_TEXT: "output", -signal.SIGXCPU: "cpu"}
_READERS: Final[Mapping[DocumentFormat, Callable[[bytes], ExtractedText]]] = {
    DocumentFormat.TEXT: read_text,
    DocumentFormat.MARKDOWN: read_markdown,
    DocumentFormat.HTML: read_html,
    DocumentFormat.PDF: read_pdf,
    DocumentFormat.CSV: read_csv,
    DocumentFormat.JSON: read_json,
    DocumentFormat.MDX: read_mdx,
    DocumentFormat.NOTEBOOK: read_notebook,
    DocumentFormat.RESTRUCTURED: read_restructured,
}
_NICE: Final = 5
"""Extraction gives way to questions."""


def main() -> None:
    """Answer requests until the input ends."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    os.nice(_NICE)
    # If memory runs out, the system is to end this process and not the gateway.
    Path("/proc/self/oom_score_adj").write_text("1000", encoding="ascii")
    sandbox = Sandbox()
    _answer({"ready": True})
    # Unbuffered, so that the document after the line is still to be read.
    with open(_INPUT, "rb", buffering=0, closefd=False) as source:
        while line := source.readline():
            _extract_in_child(json.loads(line), sandbox)


def _extract_in_child(request: dict[str, Any], sandbox: Sandbox) -> None:
    document, answer = os.memfd_create("document"), os.memfd_create("answer")
    errors = ChildErrors()
    try:
        _receive(document, request["num_bytes"])
        child = os.fork()
        if not child:
            # Nothing of the parent may run in the child, not even its exception handlers.
            os.dup2(errors.descriptor, _ERRORS)
            os._exit(_run_child(request, document, answer, sandbox))
        _, status = os.waitpid(child, 0)
        code = os.waitstatus_to_exitcode(status)
        if code in (_DONE, _REFUSED):
            num_bytes = os.fstat(answer).st_size
            _answer({"num_bytes": num_bytes, "errors": errors.text()})
            sent = 0
            while sent < num_bytes:
                sent += os.sendfile(_OUTPUT, answer, sent, num_bytes - sent)
        else:
            cause = _CAUSES.get(code, f"status {code}")
            _answer({"ended": cause, "errors": errors.text()})
    finally:
        errors.close()
        os.close(document)
        os.close(answer)


def _receive(document: int, num_bytes: int) -> None:
    """Write bytes of the input into shared memory. Raises EOFError if they end early."""
    if not num_bytes:
        return
    os.ftruncate(document, num_bytes)
    with mmap.mmap(document, num_bytes) as content, memoryview(content) as view:
        done = 0
        while done < num_bytes:
            with view[done:] as rest:
                received = os.readv(_INPUT, [rest])
            if not received:
                raise EOFError("the input ends within a document")
            done += received


def _run_child(request: dict[str, Any], document: int, answer: int, sandbox: Sandbox) -> int:
    """Write the answer into the shared memory. Return the exit status."""
    try:
        content = os.pread(document, request["num_bytes"], 0)
        # The input and the output of the parent would let it read and answer later requests.
        os.dup2(os.open(os.devnull, os.O_RDONLY), _INPUT)
        os.dup2(_ERRORS, _OUTPUT)
        _limit(request)
        sandbox.enter({_INPUT, _OUTPUT, _ERRORS, answer})
        found, code = _read_document(request["format"], content)
        data = json.dumps(found, ensure_ascii=False).encode("utf-8", "replace")
        with os.fdopen(answer, "wb") as written:
            written.write(data)
    except MemoryError:
        return _NO_MEMORY
    except OSError as error:
        print(f"extraction: {error}", file=sys.stderr)
        return _TOO_MUCH_TEXT if error.errno == errno.EFBIG else 1
    except BaseException as error:  # a parser's own exceptions have no common base
        print(f"extraction: {type(error).__name__}: {error}", file=sys.stderr)
        return 1
    return code


def _read_document(name: str, content: bytes) -> tuple[dict[str, Any], int]:
    try:
        return asdict(_read(DocumentFormat(name), content)), _DONE
    except UnreadableDocument as error:
        return {"problem": error.problem, "fix": error.fix}, _REFUSED


def _read(kind: DocumentFormat, content: bytes) -> ExtractedText:
    reader = _READERS.get(kind)
    return read_office(content, kind) if reader is None else reader(content)


def _limit(request: dict[str, Any]) -> None:
    """Have the system end this process for more CPU time, memory or output than it may take."""
    cpu_s = math.ceil(time.process_time() + request["cpu_s"])
    # The signal of the first limit tells the cause. The second one is SIGKILL.
    resource.setrlimit(resource.RLIMIT_CPU, (cpu_s, cpu_s + 1))
    pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[0])
    _lower(resource.RLIMIT_AS, pages * resource.getpagesize() + request["memory_bytes"])
    _lower(resource.RLIMIT_FSIZE, request["output_bytes"])
    # A write over the limit is to raise an error instead.
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)


def _lower(limit: int, value: int) -> None:
    _, hard = resource.getrlimit(limit)
    value = value if hard == resource.RLIM_INFINITY else min(value, hard)
    resource.setrlimit(limit, (value, value))


def _answer(header: dict[str, Any]) -> None:
    os.write(_OUTPUT, json.dumps(header).encode() + b"\n")


if __name__ == "__main__":
    main()
