"""Text is read from files in processes of their own, with limits."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncGenerator
from pathlib import Path

import psutil
import pytest

from ragcache_core.documents.formats import DocumentFormat
from ragcache_core.errors import InvalidInput, TooLarge
from ragcache_gateway.extraction.extractor import ExtractionLimit, TextExtractor
from tests.kit.sources import HTML, docx, pdf
from tests.kit.wait import until

LIMIT_S = 60.0


@pytest.fixture
async def extractor() -> AsyncGenerator[TextExtractor, None]:
    extractor = TextExtractor()
    yield extractor
    await extractor.close()


def _readers_of(extractor: TextExtractor) -> list[psutil.Process]:
    """Return the processes that read a document now: children of the extractor's own."""
    running = [one._process for one in extractor._all if one._process is not None]
    return [child for one in running for child in psutil.Process(one.pid).children()]


def _works(process: psutil.Process) -> bool:
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def _environment_of(process: int) -> bytes:
    return Path(f"/proc/{process}/environ").read_bytes()


async def refusal(extractor: TextExtractor, content: bytes, kind: DocumentFormat) -> InvalidInput:
    with pytest.raises(InvalidInput) as raised:
        await extractor.extract(content, kind, "file")
    assert raised.value.field == "file"
    return raised.value


async def test_the_main_part_of_a_page_becomes_markdown(extractor: TextExtractor) -> None:
    read = await extractor.extract(HTML, DocumentFormat.HTML, "file")
    assert read.markdown
    assert read.title == "Billing"
    assert read.metadata == {"author": "Jane Roe"}
    assert read.text.startswith("# Billing\n\nBilling runs in eu-north")
    assert "## Regions" in read.text
    assert "- us-east is second" in read.text
    assert "| Basic | 10 |" in read.text
    for other in ("Home", "Copyright", "alert"):
        assert other not in read.text


async def test_markdown_is_read_without_its_front_matter(extractor: TextExtractor) -> None:
    content = "---\ntitle: Über\n---\n<!-- no -->Text".encode()
    read = await extractor.extract(content, DocumentFormat.MARKDOWN, "file")
    assert (read.title, read.text, read.markdown) == ("Über", "Text", True)


async def test_a_fragment_of_a_page_is_read_too(extractor: TextExtractor) -> None:
    read = await extractor.extract(b"<p>short</p>", DocumentFormat.HTML, "file")
    assert read.text == "short"
    error = await refusal(extractor, b"<script>x</script>", DocumentFormat.HTML)
    assert "no text" in error.problem


async def test_pages_of_a_pdf_follow_each_other(extractor: TextExtractor) -> None:
    content = pdf(["Billing runs in eu-north.", "Page two."], title="Billing guide")
    read = await extractor.extract(content, DocumentFormat.PDF, "file")
    assert read.text == "Billing runs in eu-north.\n\fPage two."
    assert (read.markdown, read.title) == (False, "Billing guide")
    assert read.metadata == {"author": "Jane Roe"}


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        (pdf(["x"], encrypted=True), "is an encrypted PDF"),
        (pdf(["", ""]), "is a PDF without text"),
        (pdf(["x", "y"], image=True), "has only images of text (pages 1-2)"),
        (b"%PDF-1.4 and nothing else", "is not a PDF, or is damaged"),
        (b"", "is not a PDF, or is damaged"),
    ],
)
async def test_a_pdf_without_readable_text_is_refused_with_the_reason(
    extractor: TextExtractor, content: bytes, problem: str
) -> None:
    error = await refusal(extractor, content, DocumentFormat.PDF)
    assert error.problem == problem


async def test_a_word_file_becomes_markdown(extractor: TextExtractor) -> None:
    pytest.importorskip("markitdown")
    content = docx(["Billing runs in eu-north."], title="Billing guide", author="Jane Roe")
    read = await extractor.extract(content, DocumentFormat.DOCX, "file")
    assert read.text == "Billing runs in eu-north."
    assert (read.title, read.metadata) == ("Billing guide", {"author": "Jane Roe"})
    error = await refusal(extractor, b"PK no zip", DocumentFormat.XLSX)
    assert error.problem == "is no xlsx file, or is encrypted"
    error = await refusal(extractor, content, DocumentFormat.PPTX)
    assert error.problem.startswith("cannot be read as pptx")


async def test_a_missing_reader_names_the_extra(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # A module of this name that cannot be imported is what a missing package looks like.
    (tmp_path / "markitdown.py").write_text("raise ModuleNotFoundError('markitdown')\n")
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}{os.pathsep}{os.environ.get('PYTHONPATH', '')}")
    extractor = TextExtractor()
    try:
        error = await refusal(extractor, docx(["x"]), DocumentFormat.DOCX)
    finally:
        await extractor.close()
    assert "is not installed" in error.problem
    assert "ragcache[office]" in error.fix


async def test_a_document_over_a_limit_is_refused_and_the_next_one_is_read() -> None:
    nested = b"<a>" * 2_000_000  # takes seconds and a GiB on any machine
    wide = b"<p>word</p>" * 20_000
    cases = [
        (
            ExtractionLimit(base_cpu_s=0.9, cpu_s_per_mib=0, memory_bytes=4 << 30),
            nested,
            "of CPU time to read",
        ),
        (ExtractionLimit(memory_bytes=1 << 20), wide, "of memory to read"),
        (ExtractionLimit(wall_s=0.5), nested, "takes more than 0.5 s to read"),
    ]
    for limit, content, problem in cases:
        extractor = TextExtractor(limit)
        try:
            error = await refusal(extractor, content, DocumentFormat.HTML)
            assert error.problem.endswith(problem)
        finally:
            await extractor.close()
    extractor = TextExtractor(ExtractionLimit(output_bytes=1000))
    try:
        error = await refusal(extractor, wide, DocumentFormat.HTML)
        assert isinstance(error, TooLarge)
        read = await extractor.extract(b"<p>short</p>", DocumentFormat.HTML, "file")
        assert read.text == "short"
    finally:
        await extractor.close()


async def test_a_cancelled_caller_ends_the_work() -> None:
    extractor = TextExtractor()
    try:
        nested = b"<a>" * 2_000_000
        working = asyncio.create_task(extractor.extract(nested, DocumentFormat.HTML, "file"))
        readers = await until(lambda: _readers_of(extractor))
        working.cancel()
        with pytest.raises(asyncio.CancelledError):
            await working
        await until(lambda: not any(map(_works, readers)))
        read = await extractor.extract(b"<p>short</p>", DocumentFormat.HTML, "file")
        assert read.text == "short"
    finally:
        await extractor.close()


async def test_the_process_has_no_secrets_of_the_gateway(
    extractor: TextExtractor, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SECRET_TOKEN", "x")
    await extractor.extract(b"<p>short</p>", DocumentFormat.HTML, "file")
    (running,) = [one._process for one in extractor._all if one._process is not None]
    environment = _environment_of(running.pid)
    assert b"SECRET_TOKEN" not in environment
    assert b"PATH=" in environment
