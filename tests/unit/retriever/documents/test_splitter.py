"""Documents are split in processes that end without harm to the retriever."""

from __future__ import annotations

import asyncio
import signal
import sys
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import psutil
import pytest
import pytest_asyncio
from tokenizers import Tokenizer
from tokenizers.models import WordLevel

from ragcache_core.documents.passages import passage_label
from ragcache_core.errors import InvalidInput, RagCacheError, Unavailable
from ragcache_core.identity.keys import token_digest
from ragcache_retriever.documents import splitter as splitter_module
from ragcache_retriever.documents.chunking import split_document
from ragcache_retriever.documents.collection import Chunking
from ragcache_retriever.documents.splitter import (
    LONG_DOCUMENT_CHARS,
    DocumentSplitter,
    SplitDocument,
    SplitLimit,
)
from ragcache_retriever.documents.tokenizer import ServingTokenizer
from ragcache_retriever.messages.requests import MAX_DOCUMENT_BYTES
from ragcache_wire.asking import asking
from ragcache_wire.clients.retriever_client import UPSERT_TIMEOUT_S
from tests.kit.retriever import tokenizer_of
from tests.kit.wait import until

CHUNKING = Chunking(64, 16)
TEXT = "# Über\n\n" + "It says something. It says more.\n" * 20 + "```\ncode\n```\n"
ENDLESS = "|\n" * (6 * LONG_DOCUMENT_CHARS)
"""Takes many seconds of CPU time."""


@pytest_asyncio.fixture
async def splitter(tiny_model: Path) -> AsyncIterator[DocumentSplitter]:
    splitter = DocumentSplitter(tokenizer_of(tiny_model), SplitLimit(3.0, 0.0))
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


def run_as_worker(monkeypatch: pytest.MonkeyPatch, folder: Path, script: str) -> None:
    """Have a shell script run in place of the process that splits documents."""
    program = folder / "worker"
    program.write_text(f"#!/bin/sh\n{script}\n")
    program.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(program))


async def test_a_process_returns_what_the_function_returns(
    splitter: DocumentSplitter, tiny_model: Path
) -> None:
    tokenizer = tokenizer_of(tiny_model)
    for text in (TEXT, "ü\u2028\u0085 \x1c🙂", "\n"):
        for markdown in (True, False):
            chunking = replace(CHUNKING, labels=False)
            found = await splitter.split("d", text, markdown=markdown, chunking=chunking)
            assert found.chunks == split_document(
                text, markdown=markdown, chunking=CHUNKING, count_tokens=tokenizer.count
            )
            assert found.token_ids == [tokenizer.token_ids(chunk.text) for chunk in found.chunks]
            ids = [np.frombuffer(packed, "<u4") for packed in found.token_ids]
            assert found.digests == [token_digest(one) for one in ids]


async def test_labels_are_in_the_tokens_and_not_in_the_text(
    splitter: DocumentSplitter, tiny_model: Path
) -> None:
    tokenizer = tokenizer_of(tiny_model)
    text = f"# Über\n\n## Teil\n\n{TEXT}"
    plain = await splitter.split(
        "d", text, title="P4", markdown=True, chunking=replace(CHUNKING, labels=False)
    )
    found = await splitter.split("d", text, title="P4", markdown=True, chunking=CHUNKING)
    assert found.chunks == plain.chunks, "the label is beside the size of a chunk"
    labels = [passage_label("P4", chunk.heading_path, chunk.text) for chunk in found.chunks]
    assert labels[0] == "[P4]\n"
    assert "[P4 > Über]\n" in labels
    assert found.token_ids == [
        tokenizer.token_ids(label + chunk.text)
        for label, chunk in zip(labels, found.chunks, strict=True)
    ]


async def test_a_plain_text_that_is_named_as_code_is_split_as_code(
    splitter: DocumentSplitter, tiny_model: Path
) -> None:
    text = "\n\n".join(f"def f{i}():\n    # Do it. Do more.\n    return {i}" for i in range(20))
    count = tokenizer_of(tiny_model).count
    for name, code in (("src/a.PY", True), ("a.txt", False)):
        found = await splitter.split(name, text, markdown=False, chunking=CHUNKING)
        assert found.chunks == split_document(
            text, markdown=False, chunking=CHUNKING, count_tokens=count, code=code
        )


async def test_a_document_over_its_limit_is_refused_and_others_are_not(
    splitter: DocumentSplitter,
) -> None:
    endless = asyncio.create_task(split(splitter, ENDLESS, "tables/all"))
    assert (await split(splitter)).chunks
    with pytest.raises(
        InvalidInput, match="'tables/all' takes more than 3 s of CPU time"
    ) as caught:
        await endless
    assert caught.value.field == "document.text"
    assert (await split(splitter, "word " * (LONG_DOCUMENT_CHARS // 4))).chunks
    assert len(processes()) == 1, "the process for long documents ends when none waits"


async def test_a_cancelled_split_ends_its_process(splitter: DocumentSplitter) -> None:
    endless = asyncio.create_task(split(splitter, ENDLESS))
    await until(processes)
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
    without_unknown_words = Tokenizer(WordLevel({"a": 0}, unk_token="?"))
    splitter = DocumentSplitter(ServingTokenizer(without_unknown_words.to_str(), "identity"))
    with pytest.raises(InvalidInput, match="'d' ends the process that splits it"):
        await split(splitter)
    await splitter.close()


async def test_a_process_that_cannot_load_its_tokenizer_is_no_fault_of_the_document() -> None:
    splitter = DocumentSplitter(ServingTokenizer("no tokenizer", "identity"))
    with pytest.raises(Unavailable, match="ended with status 1"):
        await split(splitter)
    await splitter.close()


async def test_a_process_that_does_not_start_is_no_fault_of_the_document(
    splitter: DocumentSplitter, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    with monkeypatch.context() as patched:
        patched.setattr(sys, "executable", str(tmp_path / "missing"))
        with pytest.raises(
            Unavailable, match="the process that splits document 'd' does not start"
        ):
            await split(splitter)
    assert (await split(splitter)).chunks


@pytest.mark.parametrize(
    ("signal_number", "is_started", "error"),
    [
        (signal.SIGKILL, True, Unavailable),
        (signal.SIGTERM, True, Unavailable),
        (signal.SIGSEGV, True, InvalidInput),
        (signal.SIGSEGV, False, Unavailable),
    ],
)
async def test_only_a_crash_is_the_fault_of_the_document(
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    signal_number: signal.Signals,
    is_started: bool,
    error: type[RagCacheError],
) -> None:
    reads = "read tokenizer; echo; read document" if is_started else "read tokenizer"
    run_as_worker(monkeypatch, tmp_path, f"{reads}; kill -{signal_number} $$")
    splitter = DocumentSplitter(ServingTokenizer("of one line", "identity"))
    with pytest.raises(error):
        await split(splitter)
    await splitter.close()


async def test_a_document_has_a_limit_of_wall_time(tiny_model: Path) -> None:
    splitter = DocumentSplitter(tokenizer_of(tiny_model), SplitLimit(wall_s=0.0))
    with pytest.raises(InvalidInput, match="'d' takes more than 0 s to split"):
        await split(splitter)
    await splitter.close()
    assert not processes()


def test_the_limits_end_before_the_deadline_of_the_caller() -> None:
    limit = SplitLimit()
    assert limit.cpu_s(MAX_DOCUMENT_BYTES) < limit.wall_s < UPSERT_TIMEOUT_S
    assert limit.cpu_s(1_000_000) == 45


@pytest.mark.parametrize("num_bytes", [-4, 6, 1 << 40])
async def test_an_impossible_number_of_token_ids_is_refused(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, num_bytes: int
) -> None:
    reply = f"echo '[\"text\", [], [0, 0], {num_bytes}]'"
    run_as_worker(monkeypatch, tmp_path, f"read tokenizer; echo; read document; {reply}; cat")
    splitter = DocumentSplitter(ServingTokenizer("of one line", "identity"))
    with pytest.raises(ValueError, match="cannot have"):
        await split(splitter)
    assert not processes()


async def test_a_process_with_unread_output_ends(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(splitter_module, "_MAX_LINE_BYTES", 16)
    run_as_worker(monkeypatch, tmp_path, "read tokenizer; echo; read document; exec yes")
    splitter = DocumentSplitter(ServingTokenizer("of one line", "identity"))
    with pytest.raises(ValueError, match="Expecting value"):
        async with asyncio.timeout(60):
            await split(splitter)


async def test_keys_take_turns(splitter: DocumentSplitter) -> None:
    order: list[str] = []

    async def split_one(name: str) -> None:
        await split(splitter, TEXT, name)
        order.append(name)

    with asking("red"):
        waiting = [asyncio.create_task(split_one("red")) for _ in range(8)]
    with asking("blue"):
        waiting.append(asyncio.create_task(split_one("blue")))
    await asyncio.gather(*waiting)
    # After the one that is split, and one of the key that came first.
    assert order.index("blue") <= 2
