"""Reads Word, PowerPoint and Excel files as Markdown, with the libraries of an optional extra."""

from __future__ import annotations

import io
import zipfile
from typing import Any, Final

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
