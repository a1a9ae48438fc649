"""No document ends its reader, keeps it from the next one, or costs memory for ever."""

from __future__ import annotations

import asyncio
import json
import random
import sys
from collections.abc import Iterator
from functools import partial
from typing import Any, Final

import psutil
import pytest

from ragcache_core.documents.formats import DocumentFormat
from ragcache_core.errors import InvalidInput
from ragcache_gateway.extraction.extracted import ExtractedText
from ragcache_gateway.extraction.extractor import NUM_PROCESSES, TextExtractor
from ragcache_wire.sandbox import bare_environment, sandbox_support
from tests.attack.fuzzed_process import MAX_GROWTH_BYTES, Usage
from tests.attack.fuzzed_readers import MAKERS
from tests.kit.wait import until

SUPPORT = sandbox_support()
pytestmark = pytest.mark.skipif(
    not (SUPPORT.landlock and SUPPORT.seccomp), reason="needs Landlock and libseccomp"
)

SEED: Final = 37
COUNT: Final = 10_000
SHARES: Final = {
    DocumentFormat.DOCX: 0.4,
    DocumentFormat.XLSX: 0.4,
    DocumentFormat.PPTX: 0.2,
    DocumentFormat.RESTRUCTURED: 0.3,
}
"""Of COUNT. The three office formats are read by about 10,000 documents together."""
FORKED: Final = 60


def runs() -> Iterator[Any]:
    """Yield each format with the number of its documents."""
    for kind in MAKERS:
        count = round(COUNT * SHARES.get(kind, 1))
        yield pytest.param(kind, count, marks=pytest.mark.timeout(300))
        slow = [pytest.mark.slow, pytest.mark.timeout(3600)]
        yield pytest.param(kind, 10 * count, marks=slow)


@pytest.mark.parametrize(("kind", "count"), list(runs()))
async def test_changed_documents_are_read_or_refused(kind: DocumentFormat, count: int) -> None:
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "tests.attack.fuzzed_readers", kind, str(count), str(SEED)),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        env=bare_environment(),
    )
    written, errors = await process.communicate()
    # A document over its limit of CPU time ends the process with SIGXCPU.
    assert process.returncode == 0, (process.returncode, errors.decode()[-3000:])
    outcome = json.loads(written)
    assert outcome["failures"] == 0, outcome["told"]
    assert outcome["read"] + outcome["refused"] == count
    assert min(outcome["read"], outcome["refused"]) > count / 100, outcome
    assert outcome["growth_bytes"] <= MAX_GROWTH_BYTES, outcome
    assert outcome["more_descriptors"] == 0, outcome


def uses_no_more(pid: int, descriptors: int) -> bool:
    return Usage.of(pid).descriptors <= descriptors


async def test_the_gateways_readers_go_on_after_changed_documents() -> None:
    rng = random.Random(SEED)
    makers = {kind: make() for kind, make in MAKERS.items()}
    rounds = range(FORKED // len(makers))
    changed = [(kind, make(rng)) for _ in rounds for kind, make in makers.items()]
    others = {one.pid for one in psutil.Process().children()}  # of tests before this one
    extractor = TextExtractor()
    counts = dict.fromkeys(("read", "refused", "ended"), 0)

    async def read_all() -> None:
        for kind, content in changed:
            try:
                found = await extractor.extract(content, kind, "file")
                assert isinstance(found, ExtractedText)
                counts["read"] += 1
            except InvalidInput as error:
                counts["ended" if "ends the process" in str(error) else "refused"] += 1

    try:
        await read_all()
        readers = {one.pid for one in psutil.Process().children()} - others
        started = {pid: Usage.of(pid) for pid in readers}
        await read_all()
        assert 0 < len(started) <= NUM_PROCESSES
        for pid, before in started.items():
            # A reader closes the pipes of a child a moment after the child's answer.
            await until(partial(uses_no_more, pid, before.descriptors))
            assert Usage.of(pid).memory_bytes - before.memory_bytes <= MAX_GROWTH_BYTES
    finally:
        await extractor.close()
    assert counts["ended"] == 0, counts
    assert min(counts["read"], counts["refused"]) > len(changed) / 10, counts
