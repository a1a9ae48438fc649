"""A writer whose disk stops to answer is replaced, although its process and its network go on."""

from __future__ import annotations

import asyncio
import shutil
import subprocess
from pathlib import Path

import pytest

from bench.support.retriever_replicas import Replicas, found, put, running_replicas
from ragcache_core.errors import Unavailable
from ragcache_wire.v1 import retriever_pb2 as pb

pytestmark = pytest.mark.timeout(600)

# Synchronizing hangs while a file exists, as on a disk that does not answer.
SHIM = r"""
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stdlib.h>
#include <unistd.h>

static int synchronize(const char *name, int fd) {
    const char *file = getenv("FREEZE_FILE");
    while (file && access(file, F_OK) == 0) usleep(20000);
    return ((int (*)(int))dlsym(RTLD_NEXT, name))(fd);
}
int fsync(int fd) { return synchronize("fsync", fd); }
int fdatasync(int fd) { return synchronize("fdatasync", fd); }
"""


@pytest.fixture
def shim(tmp_path: Path) -> Path:
    compiler = shutil.which("cc")
    if compiler is None:
        pytest.skip("no C compiler")
    source, library = tmp_path / "shim.c", tmp_path / "shim.so"
    source.write_text(SHIM)
    subprocess.run(
        [compiler, "-shared", "-fPIC", "-o", str(library), str(source), "-ldl"], check=True
    )
    return library


async def documents_of(replicas: Replicas) -> list[set[str]]:
    return [
        {d.id for d in (await replicas.client(one).list_documents("default", 1000)).documents}
        for one in replicas.processes
    ]


async def test_a_writer_whose_disk_freezes_is_replaced(
    tmp_path: Path, tiny_model: Path, shim: Path
) -> None:
    def env(i: int) -> dict[str, str]:
        return {"LD_PRELOAD": str(shim), "FREEZE_FILE": str(tmp_path / f"frozen-{i}")}

    async with running_replicas(tmp_path, tiny_model, env=env) as replicas:
        first = await replicas.writer()
        others = replicas.others(first)
        await put(replicas.client(first), "before", "The subject is before.")
        frozen = tmp_path / f"frozen-{replicas.processes.index(first)}"
        frozen.touch()
        delayed = asyncio.create_task(
            replicas.client(first).upsert_document(
                pb.Document(collection="default", id="delayed", text="The subject is delayed.")
            )
        )
        await replicas.writer(other_than=first)
        assert "the storage does not answer" in first.log
        await put(replicas.client(others[0]), "after", "The subject is after.")
        # Its process still answers searches.
        assert "before" in await found(replicas.client(first), "subject before")
        assert not delayed.done()
        frozen.unlink()
        with pytest.raises(Unavailable):
            await delayed
        await replicas.until_ready()
        await replicas.until_equal(replicas.processes)
        assert await documents_of(replicas) == [{"before", "after"}] * 3
