"""Reads the text of a PDF page by page."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

import pypdfium2
from pypdfium2 import raw

from ragcache_gateway.extraction.extracted import (
    ExtractedText,
    UnreadableDocument,
    cleaned,
    metadata_of,
    short_line,
)

_WORD_BREAK: Final = "\x02"
"""PDFium's mark of a hyphen at the end of a line, in place of the line break, too."""

_PASSWORD: Final = raw.FPDF_ERR_PASSWORD


def read_pdf(content: bytes) -> ExtractedText:
    """Read the text of every page, with an empty line after each. Raises UnreadableDocument."""
    document = _open(content)
    try:
        pages = [text for text in map(cleaned, _pages(document)) if text]
        if not pages:
            raise UnreadableDocument(*_no_text(document))
        about = document.get_metadata_dict()
        metadata = metadata_of(author=about.get("Author"), subject=about.get("Subject"))
        return ExtractedText(
            "\n\n".join(pages),
            markdown=False,
            title=short_line(about.get("Title")),
            metadata=metadata,
        )
    except pypdfium2.PdfiumError as error:
        raise UnreadableDocument(f"is damaged ({error})", "save the PDF again") from error
    finally:
        document.close()


def _open(content: bytes) -> pypdfium2.PdfDocument:
    try:
        return pypdfium2.PdfDocument(content)
    except pypdfium2.PdfiumError as error:
        if error.err_code == _PASSWORD:
            raise UnreadableDocument("is an encrypted PDF", "save it without a password") from error
        raise UnreadableDocument("is not a PDF, or is damaged", "save the PDF again") from error


def _pages(document: pypdfium2.PdfDocument) -> Iterator[str]:
    for page in document:
        text = page.get_textpage()
        yield text.get_text_range().replace(_WORD_BREAK, "")
        text.close()
        page.close()


def _no_text(document: pypdfium2.PdfDocument) -> tuple[str, str]:
    """Return problem and fix for a PDF without text."""
    for page in document:
        if any(page.get_objects(filter=(raw.FPDF_PAGEOBJ_IMAGE,), max_depth=2)):
            return (
                "has only images of text",
                "recognize its text first (OCR), for example with ocrmypdf",
            )
    return "is a PDF without text", "send one with text"
