"""A worker explains the answers of all workers, over real sockets."""

from __future__ import annotations

import asyncio
import contextlib
import tempfile
from collections.abc import AsyncGenerator, Iterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

import pytest

from ragcache_core.errors import NotFound, Unavailable
from ragcache_gateway.explain.explanation import AnsweredPrompt, PromptPart, explain
from ragcache_gateway.explain.recent_answers import RecentAnswers
from ragcache_gateway.explain.schema import ExplainedPlan
from ragcache_gateway.explain.worker_answers import MAX_ID_CHARACTERS, WorkerAnswers

LIMIT_S = 60.0
"""Time in which workers of one process answer each other, however slow the machine is."""

PLAN = ExplainedPlan(engine="10.0.0.1:8000", order=[0], predicted_ms=None, next_best=None)


@pytest.fixture
def short_folder() -> Iterator[Path]:
    """A folder whose path leaves space for the name of a socket."""
    with tempfile.TemporaryDirectory(prefix="ragcache-") as folder:
        yield Path(folder)


def answered(answer_id: str, tenant: str | None = None, num_parts: int = 2) -> AnsweredPrompt:
    parts = tuple(PromptPart(n, n + 1, f"doc#{n}") for n in range(num_parts))
    return AnsweredPrompt(
        answer_id, 7, "model", "10.0.0.1:8000", tenant, "exact", parts, PLAN, None
    )


@asynccontextmanager
async def workers(
    folder: Path, *recent: RecentAnswers
) -> AsyncGenerator[list[WorkerAnswers], None]:
    async with AsyncExitStack() as stack:
        found = []
        for index, answers in enumerate(recent):
            worker = WorkerAnswers(answers, folder, index, timeout_s=LIMIT_S)
            await worker.start()
            stack.push_async_callback(worker.close)
            found.append(worker)
        yield found


async def test_a_worker_explains_the_answer_of_another_one(short_folder: Path) -> None:
    recent = [RecentAnswers() for _ in range(3)]
    large = answered("chatcmpl-1", num_parts=5000)
    recent[2].add(large)
    async with workers(short_folder, *recent) as all_workers:
        for worker in all_workers:
            assert await worker.explain("chatcmpl-1") == explain(large)


async def test_another_worker_keeps_to_the_tenant_of_the_caller(short_folder: Path) -> None:
    recent = [RecentAnswers(), RecentAnswers()]
    recent[1].add(answered("chatcmpl-1", "red"))
    async with workers(short_folder, *recent) as (first, _):
        assert (await first.explain("chatcmpl-1", "red")).id == "chatcmpl-1"
        assert (await first.explain("chatcmpl-1", of_any_tenant=True)).id == "chatcmpl-1"
        for tenant in (None, "blue"):
            with pytest.raises(NotFound):
                await first.explain("chatcmpl-1", tenant)


@pytest.mark.parametrize("answer_id", ["chatcmpl-0", 'a"\n{}', "", "x" * (MAX_ID_CHARACTERS + 1)])
async def test_what_no_worker_has_is_not_found(short_folder: Path, answer_id: str) -> None:
    async with workers(short_folder, RecentAnswers(), RecentAnswers()) as (first, _):
        with pytest.raises(NotFound, match=r"ragcache\.explain: true"):
            await first.explain(answer_id)


async def test_a_worker_alone_asks_no_other() -> None:
    alone = WorkerAnswers(RecentAnswers())
    await alone.start()
    with pytest.raises(NotFound):
        await alone.explain("chatcmpl-0")
    await alone.close()


async def test_a_worker_that_does_not_answer_is_not_waited_for(short_folder: Path) -> None:
    async def hang(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read()  # until the other side has closed the connection
        writer.close()

    recent = RecentAnswers()
    recent.add(answered("chatcmpl-1"))
    hung = await asyncio.start_unix_server(hang, short_folder / "answers-2.sock")
    async with hung, workers(short_folder, RecentAnswers(), recent):
        impatient = WorkerAnswers(RecentAnswers(), short_folder, 3, timeout_s=0.2)
        with pytest.raises(Unavailable, match="workers"):
            await impatient.explain("chatcmpl-0")
        patient = WorkerAnswers(RecentAnswers(), short_folder, 3, timeout_s=600)
        async with asyncio.timeout(LIMIT_S):
            assert (await patient.explain("chatcmpl-1")).id == "chatcmpl-1"


async def test_a_worker_that_has_ended_is_not_an_error(short_folder: Path) -> None:
    recent = RecentAnswers()
    recent.add(answered("chatcmpl-1"))
    async with workers(short_folder, RecentAnswers()) as (first,):
        async with workers_of_index_one(short_folder, recent):
            assert (await first.explain("chatcmpl-1")).id == "chatcmpl-1"
        with pytest.raises(NotFound):
            await first.explain("chatcmpl-1")
        async with workers_of_index_one(short_folder, recent):  # its socket's file may be there
            assert (await first.explain("chatcmpl-1")).id == "chatcmpl-1"


@asynccontextmanager
async def workers_of_index_one(folder: Path, recent: RecentAnswers) -> AsyncGenerator[None, None]:
    worker = WorkerAnswers(recent, folder, 1, timeout_s=LIMIT_S)
    await worker.start()
    yield
    await worker.close()


async def test_nonsense_from_a_socket_does_not_end_a_worker(short_folder: Path) -> None:
    recent = RecentAnswers()
    recent.add(answered("chatcmpl-1"))
    async with workers(short_folder, RecentAnswers(), recent) as (first, _):
        for sent in (b"", b"nonsense\n", b"x" * 100_000):
            reader, writer = await asyncio.open_unix_connection(short_folder / "answers-1.sock")
            writer.write(sent)
            writer.write_eof()
            with contextlib.suppress(ConnectionResetError):  # it had not read everything
                assert await reader.read() == b""
            writer.close()
        assert (await first.explain("chatcmpl-1")).id == "chatcmpl-1"


async def test_a_path_that_is_too_long_only_loses_the_other_workers(tmp_path: Path) -> None:
    folder = tmp_path / ("x" * 100)
    folder.mkdir()
    recent = RecentAnswers()
    recent.add(answered("chatcmpl-1"))
    async with workers(folder, recent) as (worker,):
        assert (await worker.explain("chatcmpl-1")).id == "chatcmpl-1"
        with pytest.raises(NotFound):
            await worker.explain("chatcmpl-0")
