"""Splits documents in a process of its own, which the retriever starts and ends (``splitter``).

It imports only what splitting needs, so that it stays small. Its input is a tokenizer and then one
document after the other, each one a line of JSON and a text of the length that the line tells. It
writes an empty line when it has the tokenizer. For each chunk of a document it writes a line of
JSON and the chunk's token ids, whose length the line tells. An empty line ends the document. It
sends no pickles, so a document that takes over this process has not taken over the retriever. The
process has no network and no keys (``ragcache_wire.sandbox``).
"""

from __future__ import annotations

import json
import math
import resource
import signal
import sys
import time
from typing import Any, BinaryIO

from ragcache_core.documents.passages import passage_label
from ragcache_retriever.concurrency.cpu import lower_priority
from ragcache_retriever.documents.chunking import split_document
from ragcache_retriever.documents.collection import Chunking
from ragcache_retriever.documents.tokenizer import ServingTokenizer
from ragcache_wire.child_errors import limit_own_errors
from ragcache_wire.sandbox import Sandbox


def main() -> None:
    """Split documents until the input ends."""
    # Ctrl-C is meant for the retriever, which then closes the input.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    lower_priority()
    limit_own_errors()
    Sandbox().enter({0, 1, 2})  # its input, its output and its errors
    source, sink = sys.stdin.buffer, sys.stdout.buffer
    message = _read(source)
    assert message is not None, "the retriever sends its tokenizer first"
    tokenizer = ServingTokenizer(message[1], message[0]["identity"])
    tokenizer.count("")  # loads the vocabulary
    _end_reply(sink)
    while (message := _read(source)) is not None:
        header, text = message
        _limit_cpu_time(header["cpu_limit_s"])
        chunks = split_document(
            text,
            markdown=header["markdown"],
            code=header["code"],
            chunking=Chunking(header["size_tokens"], header["overlap_tokens"]),
            count_tokens=tokenizer.count,
        )
        name = header["name"]
        for chunk in chunks:
            label = "" if name is None else passage_label(name, chunk.heading_path, chunk.text)
            ids = tokenizer.token_ids(label + chunk.text)
            pages = chunk.page, chunk.page_end
            line = json.dumps([chunk.text, chunk.heading_path, pages, len(ids)], ensure_ascii=False)
            sink.write(line.encode() + b"\n" + ids)
        _end_reply(sink)


def _end_reply(sink: BinaryIO) -> None:
    sink.write(b"\n")
    sink.flush()


def _read(source: BinaryIO) -> tuple[dict[str, Any], str] | None:
    """Read a header and the text after it. Return None at the end of the input."""
    line = source.readline()
    if not line:
        return None
    header = json.loads(line)
    return header, source.read(header["num_bytes"]).decode()


def _limit_cpu_time(limit_s: float) -> None:
    """Have the system end this process (SIGXCPU) after more CPU time."""
    _, hard = resource.getrlimit(resource.RLIMIT_CPU)
    soft = math.ceil(time.process_time() + limit_s)
    resource.setrlimit(resource.RLIMIT_CPU, (soft if hard < 0 else min(soft, hard), hard))


if __name__ == "__main__":
    main()
