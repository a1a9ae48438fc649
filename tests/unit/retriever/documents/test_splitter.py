"""Documents are split in processes that end without harm to the retriever."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import psutil
import pytest
import pytest_asyncio

from ragcache_core.errors import InvalidInput
from ragcache_retriever.documents.chunking import split_document
from ragcache_retriever.documents.collection import Chunking
from ragcache_retriever.documents.splitter import (
    LONG_DOCUMENT_CHARS,
    DocumentSplitter,
    SplitDocument,
    SplitLimit,
)
from ragcache_retriever.documents.tokenizer import ServingTokenizer
from tests.helpers.retriever_parts import tokenizer_of

CHUNKING = Chunking(64, 16)
TEXT = "# Über\n\n" + "It says something. It says more.\n" * 20 + "```\ncode\n```\n"
ENDLESS = "|\n" * (2 * LONG_DOCUMENT_CHARS)
"""Takes seconds of CPU time."""


@pytest_asyncio.fixture
async def splitter(tiny_model: Path) -> AsyncIterator[DocumentSplitter]:
    splitter = DocumentSplitter(tokenizer_of(tiny_model), SplitLimit(1.0, 0.0))
    yield splitter
    await splitter.close()
    assert not processes()


def processes() -> list[psutil.Process]:
    return [child for child in psutil.Process().children() if "splitter_worker" in cmdline(child)]


def cmdline(process: psutil.Process) -> str:
    try:
        return " ".join(process.cmdline())
    except psutil.NoSuchProcess:
        return ""


async def split(splitter: DocumentSplitter, text: str = TEXT, name: str = "d") -> SplitDocument:
    return await splitter.split(name, text, markdown=True, chunking=CHUNKING)


async def test_a_process_returns_what_the_function_returns(
    splitter: DocumentSplitter, tiny_model: Path
) -> None:
    tokenizer = tokenizer_of(tiny_model)
    for text in (TEXT, "ü\u2028\u0085 \x1c🙂", "\n"):
        for markdown in (True, False):
            found = await splitter.split("d", text, markdown=markdown, chunking=CHUNKING)
            assert found.chunks == split_document(
                text, markdown=markdown, chunking=CHUNKING, count_tokens=tokenizer.count
            )
            assert found.digests == [tokenizer.token_digest(chunk.text) for chunk in found.chunks]


async def test_a_document_over_its_limit_is_refused_and_others_are_not(
    splitter: DocumentSplitter,
) -> None:
    endless = asyncio.create_task(split(splitter, ENDLESS, "tables/all"))
    assert (await split(splitter)).chunks
    with pytest.raises(
        InvalidInput, match="'tables/all' takes more than 1 s of CPU time"
    ) as caught:
        await endless
    assert caught.value.field == "document.text"
    assert (await split(splitter, "word " * (LONG_DOCUMENT_CHARS // 4))).chunks
    assert len(processes()) == 1, "the process for long documents ends when none waits"


async def test_a_cancelled_split_ends_its_process(splitter: DocumentSplitter) -> None:
    endless = asyncio.create_task(split(splitter, ENDLESS))
    while not processes():  # noqa: ASYNC110  no event tells that it has started
        await asyncio.sleep(0.01)
    endless.cancel()
    with pytest.raises(asyncio.CancelledError):
        await endless
    assert not processes()
    assert (await split(splitter)).chunks


async def test_a_process_that_was_killed_is_started_again(splitter: DocumentSplitter) -> None:
    await split(splitter)
    [process] = processes()
    process.kill()
    assert (await split(splitter)).chunks
    assert process not in processes()


async def test_a_document_that_ends_two_processes_is_refused() -> None:
    splitter = DocumentSplitter(ServingTokenizer("no tokenizer", "identity"))
    with pytest.raises(InvalidInput, match="'d' ends the process that splits it"):
        await split(splitter)
    await splitter.close()
