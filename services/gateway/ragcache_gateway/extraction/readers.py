"""Reads the text of PDF and office files.

The libraries for office files are in an optional extra.
"""

from __future__ import annotations

import io
import zipfile
from collections.abc import Iterator
from typing import Any, Final

import pypdfium2
from pypdfium2 import raw

from ragcache_core.documents.formats import DocumentFormat
from ragcache_gateway.extraction.extracted import (
    ExtractedText,
    UnreadableDocument,
    cleaned,
    metadata_of,
    short_line,
)

EXTRA: Final = "ragcache[office]"

_CORE_PROPERTIES: Final = "docProps/core.xml"
_MAX_PROPERTIES_BYTES: Final = 1 << 16
_DUBLIN_CORE: Final = "{http://purl.org/dc/elements/1.1/}"


def read_office(content: bytes, kind: DocumentFormat) -> ExtractedText:
    """Read an office document.

    Raises:
        UnreadableDocument: The extra is missing, or the file is no document of this kind.
    """
    converter = _converter(kind)
    if not zipfile.is_zipfile(io.BytesIO(content)):
        # A document with a password is an OLE file.
        raise UnreadableDocument(
            f"is no {kind} file, or is encrypted", "save it without a password in this format"
        )
    from markitdown import StreamInfo  # noqa: PLC0415  in an optional extra

    try:
        result = converter.convert(io.BytesIO(content), StreamInfo(extension=f".{kind}"))
    except MemoryError:
        raise
    except Exception as error:  # the libraries raise what they like for a damaged file
        problem = f"cannot be read as {kind} ({type(error).__name__}: {short_line(str(error))})"
        raise UnreadableDocument(problem, "save it again") from error
    text = cleaned(result.markdown)
    if not text:
        raise UnreadableDocument("has no text", "send a document with text")
    about = _properties(content)
    return ExtractedText(
        text,
        markdown=True,
        title=short_line(about.get("title")),
        metadata=metadata_of(author=about.get("creator"), subject=about.get("subject")),
    )


def _converter(kind: DocumentFormat) -> Any:
    try:
        from markitdown import converters  # noqa: PLC0415  in an optional extra
    except ModuleNotFoundError as error:
        raise UnreadableDocument(
            f"is a {kind} file, whose reader is not installed",
            f"install {EXTRA} with the gateway, or save it as PDF",
        ) from error
    return {
        DocumentFormat.DOCX: converters.DocxConverter,
        DocumentFormat.PPTX: converters.PptxConverter,
        DocumentFormat.XLSX: converters.XlsxConverter,
    }[kind]()


def _properties(content: bytes) -> dict[str, str]:
    """Return what the file says of itself."""
    from defusedxml.ElementTree import ParseError, fromstring  # noqa: PLC0415  in an optional extra

    try:
        with zipfile.ZipFile(io.BytesIO(content)) as file, file.open(_CORE_PROPERTIES) as part:
            root = fromstring(part.read(_MAX_PROPERTIES_BYTES))
    except (KeyError, ParseError, ValueError, zipfile.BadZipFile):
        return {}
    named = [one for one in root if one.tag.startswith(_DUBLIN_CORE)]
    return {one.tag.removeprefix(_DUBLIN_CORE): one.text or "" for one in named}


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
