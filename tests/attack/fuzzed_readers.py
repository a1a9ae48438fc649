"""Reads changed documents of one format in the sandbox of the gateway's readers.

Run it as a program: ``python -m tests.attack.fuzzed_readers FORMAT COUNT SEED``. It writes a line
of JSON (``Outcome``). The gateway forks a child for each document, which would take most of the
time.
"""

from __future__ import annotations

import io
import json
import math
import os
import random
import resource
import sys
import time
import zipfile
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any, Final

from ragcache_core.documents.formats import DocumentFormat
from ragcache_gateway.extraction.extracted import ExtractedText, UnreadableDocument
from ragcache_gateway.extraction.extractor import ExtractionLimit
from ragcache_gateway.extraction.worker import _limit, _read
from ragcache_wire.sandbox import Sandbox
from tests.attack.mutations import mutated_json, with_odd_bytes
from tests.kit.sources import HTML, docx, pdf

WARM_UP: Final = 200
HOURS_S: Final = 20_000.0
"""CPU time of all documents at most, as the hard limit."""

MAX_KEPT: Final = 5
"""Failures that are told in full."""

NOTEBOOK: Final = {
    "nbformat": 4,
    "metadata": {"kernelspec": {"language": "python"}, "title": "A"},
    "cells": [
        {"cell_type": "markdown", "source": ["# A\n", "text"]},
        {"cell_type": "code", "source": "print(1)", "outputs": [{"text": ["1\n"]}]},
    ],
}
MARKDOWN: Final = b"""---
title: Billing
tags: [a, b]
---
# Billing

Text with `code`, a [link](x) and <b>HTML</b>.

| Name | Price |
|---|---|
| Basic | 10 |

```python
print(1)
```
"""
RESTRUCTURED: Final = b"""Billing
=======

.. note:: Text with ``code`` and a `link <x>`_.

====  =====
Name  Price
====  =====
a     1
====  =====

.. code-block:: python

   print(1)
"""
CSV: Final = b'"name";"price"\n"a, b";1,5\n"c ""d""";2\n'
JSON: Final = {"title": "A", "rows": [{"name": "a", "price": 1.5}, {"name": None, "price": True}]}


@dataclass(frozen=True, slots=True)
class Outcome:
    """What became of the documents.

    Attributes:
        failures: Documents that ended their reader with an exception of its own.
        told: The first failures.
        growth_bytes: By how much more memory was needed after WARM_UP documents than before.
        more_descriptors: Files that were left open.
    """

    read: int
    refused: int
    failures: int
    told: list[str]
    growth_bytes: int
    more_descriptors: int


def _workbook() -> bytes:
    import openpyxl

    book, file = openpyxl.Workbook(), io.BytesIO()
    for row in (("Prices", None), ("name", "price"), ("a", 1.5), ("b", "=A1+1")):
        book.active.append(row)
    book.active.merge_cells("A1:B1")
    book.save(file)
    return file.getvalue()


def _presentation() -> bytes:
    import pptx

    made, file = pptx.Presentation(), io.BytesIO()
    slide = made.slides.add_slide(made.slide_layouts[1])
    slide.shapes.title.text, slide.placeholders[1].text = "Billing", "Text"
    table = slide.shapes.add_table(2, 2, 0, 0, 100, 100).table
    table.cell(0, 0).text = "Name"
    slide.notes_slide.notes_text_frame.text = "Notes"
    made.save(file)
    return file.getvalue()


def _with_odd_part(whole: bytes, rng: random.Random) -> bytes:
    """Change a part of an archive, or the bytes of the archive."""
    if rng.random() < 0.1:
        return with_odd_bytes(whole, rng)
    file = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(whole)) as source, zipfile.ZipFile(file, "w") as target:
        names = source.namelist()
        # Most text is in the first parts that are no layouts.
        likely = [one for one in names if "ayout" not in one and "theme" not in one]
        odd = rng.choice(likely if rng.random() < 0.9 else names)
        for name in names:
            content = source.read(name)
            target.writestr(name, with_odd_bytes(content, rng) if name == odd else content)
    return file.getvalue()


def _json(value: Any) -> Callable[[random.Random], bytes]:
    return lambda rng: mutated_json(value, rng)


def _bytes(whole: bytes) -> Callable[[random.Random], bytes]:
    return lambda rng: with_odd_bytes(whole, rng)


def _archive(whole: bytes) -> Callable[[random.Random], bytes]:
    return lambda rng: _with_odd_part(whole, rng)


MAKERS: Final[dict[DocumentFormat, Callable[[], Callable[[random.Random], bytes]]]] = {
    DocumentFormat.TEXT: lambda: _bytes("Text with ü and ¥.\n".encode("utf-16")),
    DocumentFormat.MARKDOWN: lambda: _bytes(MARKDOWN),
    DocumentFormat.MDX: lambda: _bytes(MARKDOWN + b"\nimport A from 'a'\n\n<A b={1}>c</A>\n"),
    DocumentFormat.RESTRUCTURED: lambda: _bytes(RESTRUCTURED),
    DocumentFormat.NOTEBOOK: lambda: _json(NOTEBOOK),
    DocumentFormat.JSON: lambda: _json(JSON),
    DocumentFormat.CSV: lambda: _bytes(CSV),
    DocumentFormat.HTML: lambda: _bytes(HTML),
    DocumentFormat.PDF: lambda: _bytes(pdf(["Billing", "Regions"], title="Guide")),
    DocumentFormat.DOCX: lambda: _archive(docx(["Billing", "Text"], title="A", author="B")),
    DocumentFormat.XLSX: lambda: _archive(_workbook()),
    DocumentFormat.PPTX: lambda: _archive(_presentation()),
}


def fuzz(kind: DocumentFormat, count: int, seed: int) -> Outcome:
    """Read changed documents, each with the limits of one document."""
    make, rng, limit = MAKERS[kind](), random.Random(seed), ExtractionLimit()
    sandbox = Sandbox()
    _limit({"cpu_s": HOURS_S, **asdict(limit)})
    sandbox.enter({0, 1, 2})
    before = (0, 0)
    read = refused = failures = 0
    told: list[str] = []
    for number in range(count):
        if number == WARM_UP:
            before = _usage()
        content = make(rng)
        _end_after(limit.cpu_s(len(content)))
        try:
            found = _read(kind, content)
            assert isinstance(found, ExtractedText)
            json.dumps(asdict(found), ensure_ascii=False).encode("utf-8", "replace")
            read += 1
        except UnreadableDocument:
            refused += 1
        except Exception as error:
            failures += 1
            if failures <= MAX_KEPT:
                told.append(f"number {number}: {error!r} of {content[:2000]!r}")
    growth, descriptors = (now - then for now, then in zip(_usage(), before, strict=True))
    return Outcome(read, refused, failures, told, growth, descriptors)


def _end_after(cpu_s: float) -> None:
    """Have the system end this process after more CPU time."""
    _, hard = resource.getrlimit(resource.RLIMIT_CPU)
    resource.setrlimit(resource.RLIMIT_CPU, (math.ceil(time.process_time() + cpu_s), hard))


def _usage() -> tuple[int, int]:
    """Return the most memory so far, in bytes, and the first free descriptor.

    The sandbox has no ``/proc``.
    """
    free = os.dup(0)
    os.close(free)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10, free


if __name__ == "__main__":
    print(json.dumps(asdict(fuzz(DocumentFormat(sys.argv[1]), *map(int, sys.argv[2:])))))
