"""Three retrievers as processes: a writer that is killed, frozen or robbed of its volume."""

from __future__ import annotations

import asyncio
import itertools
import json
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from bench.support.retriever_replicas import (
    Replicas,
    found,
    put,
    running_replicas,
)
from ragcache_core.errors import NotFound, Unavailable
from ragcache_retriever.store.sqlite.database import DAMAGE_MARKER
from ragcache_wire.clients.retriever_client import RetrieverClient
from ragcache_wire.v1 import retriever_pb2 as pb

pytestmark = pytest.mark.timeout(600)


@pytest.fixture
async def replicas(tmp_path: Path, tiny_model: Path) -> AsyncIterator[Replicas]:
    async with running_replicas(tmp_path, tiny_model) as running:
        yield running


class Writing:
    """Writes and deletes documents through one replica until it is stopped."""

    def __init__(self, client: RetrieverClient) -> None:
        self._client = client
        self.stored: set[str] = set()
        self.deleted: set[str] = set()
        self._task = asyncio.create_task(self._run())

    async def _run(self) -> None:
        for i in itertools.count():
            name = f"page-{i}"
            await put(self._client, name, f"# Page\n\nThe subject of this page is number{i}.")
            if i % 5 == 4:
                await self._delete(name)
                self.deleted.add(name)
            else:
                self.stored.add(name)

    async def _delete(self, name: str) -> None:
        while True:
            try:
                await self._client.delete_document("default", name)
            except Unavailable:
                await asyncio.sleep(0.05)
            except NotFound:
                return  # an attempt before succeeded, and its answer was lost
            else:
                return

    async def until_more(self, count: int = 10) -> None:
        """Wait until more documents are acknowledged."""
        before = len(self.stored)
        while len(self.stored) < before + count:
            assert not self._task.done(), self._task.exception()
            await asyncio.sleep(0.02)

    async def stop(self) -> None:
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)

    async def check(self, client: RetrieverClient) -> None:
        """Check that a replica has what was acknowledged, and nothing that was deleted."""
        present = set()
        token = ""
        while True:
            page = await client.list_documents("default", 1000, token)
            present |= {document.id for document in page.documents}
            token = page.next_page_token
            if not token:
                break
        assert self.stored <= present
        assert not self.deleted & present
        sample = sorted(self.stored - {"delayed"})[-1]
        subject = sample.replace("page-", "number")
        assert sample in await found(client, f"subject {subject}", 10)


class Searching:
    """Searches one replica until it is stopped. An error of a search ends it."""

    def __init__(self, client: RetrieverClient) -> None:
        self.num_searches = 0
        self._client = client
        self._task = asyncio.create_task(self._run())

    async def _run(self) -> None:
        while True:
            assert await found(self._client, "What is this page about?")
            self.num_searches += 1
            await asyncio.sleep(0.01)

    async def stop(self) -> None:
        """Raise the error of a search that failed."""
        self._task.cancel()
        [result] = await asyncio.gather(self._task, return_exceptions=True)
        assert isinstance(result, asyncio.CancelledError), result
        assert self.num_searches


async def test_a_killed_writer_loses_nothing_and_interrupts_no_search(replicas: Replicas) -> None:
    first = await replicas.writer()
    others = replicas.others(first)
    writing = Writing(replicas.client(others[0]))
    await writing.until_more()
    searching = [Searching(replicas.client(one)) for one in others]
    first.kill()
    second = await replicas.writer(other_than=first)
    await writing.until_more()
    for search in searching:
        await search.stop()
    first.start()
    await writing.until_more()
    await writing.stop()
    await replicas.until_ready()
    await replicas.until_equal(replicas.processes)
    assert second is await replicas.writer()
    for one in replicas.processes:
        await writing.check(replicas.client(one))


async def test_a_lost_volume_is_filled_again(replicas: Replicas) -> None:
    writer = await replicas.writer()
    lost = replicas.others(writer)[0]
    writing = Writing(replicas.client(writer))
    await writing.until_more()
    lost.kill()
    lost.wipe()
    await writing.until_more()
    lost.start()
    await replicas.until_ready([lost])
    await writing.until_more()
    await writing.stop()
    await replicas.until_equal(replicas.processes)
    await writing.check(replicas.client(lost))


async def test_a_frozen_follower_catches_up_and_delays_no_write(replicas: Replicas) -> None:
    writer = await replicas.writer()
    frozen = replicas.others(writer)[0]
    writing = Writing(replicas.client(writer))
    await writing.until_more()
    frozen.freeze()
    await writing.until_more(20)
    frozen.thaw()
    await writing.until_more()
    await writing.stop()
    await replicas.until_equal(replicas.processes)
    await writing.check(replicas.client(frozen))


async def test_a_frozen_writer_is_replaced_and_its_delayed_writes_are_discarded(
    replicas: Replicas,
) -> None:
    first = await replicas.writer()
    others = replicas.others(first)
    writing = Writing(replicas.client(others[0]))
    await writing.until_more()
    # This request is in the writer's buffers when it goes on.
    first.freeze()
    delayed = asyncio.create_task(
        replicas.client(first).upsert_document(
            pb.Document(collection="default", id="delayed", text="A delayed page.")
        )
    )
    await replicas.writer(other_than=first)
    await writing.until_more()
    first.thaw()
    await asyncio.wait((delayed,))
    await writing.until_more()
    await writing.stop()
    await replicas.until_ready()
    await replicas.until_equal(replicas.processes)
    # Either the new writer took it from the old one, or no replica has it.
    if delayed.exception() is None:
        writing.stored.add("delayed")
    for one in replicas.processes:
        await writing.check(replicas.client(one))
    listed = [
        {d.id for d in (await replicas.client(one).list_documents("default", 1000)).documents}
        for one in replicas.processes
    ]
    assert listed[0] == listed[1] == listed[2]


async def test_damaged_documents_are_replaced_by_those_of_the_writer(replicas: Replicas) -> None:
    writer = await replicas.writer()
    damaged = replicas.others(writer)[0]
    writing = Writing(replicas.client(writer))
    await writing.until_more()
    damaged.kill()
    (damaged.folder / DAMAGE_MARKER).write_text("found by a check")
    damaged.start()
    await writing.until_more()
    await writing.stop()
    await replicas.until_ready([damaged])
    await replicas.until_equal(replicas.processes)
    assert "document store: discarded" in damaged.log
    await writing.check(replicas.client(damaged))


async def test_a_writer_that_is_stopped_hands_over_without_waiting_for_its_lease(
    replicas: Replicas,
) -> None:
    first = await replicas.writer()
    service, first.service = first.service, None
    assert service is not None
    service.stop()
    await replicas.writer(other_than=first)
    assert "lease: left epoch=1 reason=the replica stops" in first.log
    lease = json.loads((first.folder.parent / "lease.json").read_text())
    # A released Lease was taken at once: the version after it is the next writer's.
    assert lease["epoch"] == 2
