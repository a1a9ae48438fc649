"""A copy of the writer's documents waits for the next start only if it may replace the present."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from functools import partialmethod
from pathlib import Path
from typing import Any

import pytest

from ragcache_core.errors import InvalidInput
from ragcache_retriever.replication import copies
from ragcache_retriever.replication.copies import store_copy
from ragcache_retriever.replication.epoch import start_epoch
from ragcache_retriever.store.sqlite.document_store import SqliteDocumentStore
from ragcache_retriever.store.sqlite.files.backup import COPY_READY, IncomingCopy, backup_parts

EPOCH = 3


@pytest.fixture
def content(tmp_path: Path) -> Iterator[bytes]:
    store = SqliteDocumentStore(tmp_path / "writer")
    start_epoch(store, EPOCH, b"writer", 7)
    yield b"".join(backup_parts(store.database.path))
    store.close()


async def parts_of(content: bytes) -> AsyncIterator[bytes]:
    yield content


def left_in(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


async def test_a_copy_of_the_writer_waits_for_the_next_start(
    content: bytes, tmp_path: Path
) -> None:
    folder = tmp_path / "follower"
    folder.mkdir()
    await store_copy(folder, parts_of(content), EPOCH)
    assert left_in(folder) == [COPY_READY]


async def test_a_copy_of_an_earlier_writer_is_refused(content: bytes, tmp_path: Path) -> None:
    folder = tmp_path / "follower"
    folder.mkdir()
    with pytest.raises(InvalidInput, match="ends in epoch 3, before 4"):
        await store_copy(folder, parts_of(content), EPOCH + 1)
    assert left_in(folder) == []


class HeldStep:
    """A step of a copy whose thread has done its work and does not return yet."""

    def __init__(self, step: Callable[..., Any]) -> None:
        self._step = step
        self._is_done, self._may_return = threading.Event(), threading.Event()

    def __call__(self, *args: Any) -> Any:
        result = self._step(*args)
        self._is_done.set()
        assert self._may_return.wait(30)
        return result

    async def cancel(self, storing: asyncio.Task[None], times: int) -> None:
        """Cancel the copy during the step, and wait for its end."""
        assert await asyncio.to_thread(self._is_done.wait, 30)
        for _ in range(times):
            storing.cancel()
            for _ in range(5):  # until it waits for the thread again
                await asyncio.sleep(0)
        self._may_return.set()
        with pytest.raises(asyncio.CancelledError):
            await storing


@pytest.mark.parametrize("times", [1, 3])
async def test_a_cancelled_copy_is_gone_although_its_last_step_ended(
    content: bytes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, times: int
) -> None:
    folder = tmp_path / "follower"
    folder.mkdir()
    held = HeldStep(IncomingCopy.finish)
    monkeypatch.setattr(IncomingCopy, "finish", partialmethod(held))
    await held.cancel(asyncio.create_task(store_copy(folder, parts_of(content), EPOCH)), times)
    assert left_in(folder) == []


@pytest.mark.parametrize("times", [1, 3])
async def test_a_copy_that_is_cancelled_as_it_begins_hinders_no_later_one(
    content: bytes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, times: int
) -> None:
    folder = tmp_path / "follower"
    folder.mkdir()
    held = HeldStep(IncomingCopy)
    monkeypatch.setattr(copies, "IncomingCopy", held)
    await held.cancel(asyncio.create_task(store_copy(folder, parts_of(content), EPOCH)), times)
    assert left_in(folder) == []
    await store_copy(folder, parts_of(content), EPOCH)
    assert left_in(folder) == [COPY_READY]
