"""Reads office files, whose libraries are in an optional extra."""

from __future__ import annotations

import io
import re
import sys
import zipfile
from collections.abc import Callable
from types import ModuleType
from typing import Final

from ragcache_core.documents.formats import DocumentFormat
from ragcache_gateway.extraction.extracted import (
    ExtractedText,
    UnreadableDocument,
    cleaned,
    description,
    metadata_of,
    short_line,
)
from ragcache_gateway.extraction.sheets import read_sheets
from ragcache_gateway.extraction.slides import read_slides

EXTRA: Final = "ragcache[office]"

_CORE_PROPERTIES: Final = "docProps/core.xml"
_MAX_PROPERTIES_BYTES: Final = 1 << 16
_DUBLIN_CORE: Final = "{http://purl.org/dc/elements/1.1/}"
_IMAGE = re.compile(r"!\[([^\]]*)\]\(data:[^)]*\)")
_EMPTY_HEADER = re.compile(r"^\|(?: +\|)+\n(\|(?: --- \|)+)\n(\|.*\|)$", re.MULTILINE)
_FEW_CHARS: Final = 200


def read_office(content: bytes, kind: DocumentFormat) -> ExtractedText:
    """Read an office document.

    Raises:
        UnreadableDocument: The extra is missing, or the file is no document of this kind.
    """
    reader = _READERS[kind]
    try:
        if not zipfile.is_zipfile(io.BytesIO(content)):
            # A document with a password is an OLE file.
            raise UnreadableDocument(
                f"is no {kind} file, or is encrypted", "save it without a password in this format"
            )
        text, warnings = reader(content)
    except (MemoryError, UnreadableDocument):
        raise
    except ModuleNotFoundError as error:
        raise UnreadableDocument(
            f"is a {kind} file, whose reader is not installed",
            f"install {EXTRA} with the gateway, or save it as PDF",
        ) from error
    except Exception as error:  # the libraries raise what they like for a damaged file
        problem = f"cannot be read as {kind} ({type(error).__name__}: {short_line(str(error))})"
        raise UnreadableDocument(problem, "save it again") from error
    if not text:
        problem = f"has no text ({'; '.join(warnings)})" if warnings else "has no text"
        raise UnreadableDocument(problem, "send a document with text")
    about = _properties(content)
    return ExtractedText(
        text,
        markdown=True,
        title=short_line(about.get("title")),
        metadata=metadata_of(author=about.get("creator"), subject=about.get("subject")),
        warnings=tuple(warnings),
    )


def _read_word(content: bytes) -> tuple[str, list[str]]:
    """Return a Word file as Markdown, and what was not read."""
    # The package imports a model that guesses types of files, with a runtime that reports its use.
    # The type is known here, and the import would take most of the time of a document.
    sys.modules.setdefault("magika", ModuleType("magika"))
    from markitdown import StreamInfo, converters  # noqa: PLC0415  in an optional extra

    result = converters.DocxConverter().convert(io.BytesIO(content), StreamInfo(extension=".docx"))
    text, num_images = _IMAGE.subn(lambda match: description(match[1]), result.markdown)
    # Word marks no header row; the first row nearly always is one.
    text = cleaned(_EMPTY_HEADER.sub(r"\2\n\1", text))
    warnings = []
    if num_images and len(text) < _FEW_CHARS:
        several = "s" if num_images > 1 else ""
        warnings.append(f"{num_images} image{several} beside little text were not read")
    return text, warnings


_READERS: Final[dict[DocumentFormat, Callable[[bytes], tuple[str, list[str]]]]] = {
    DocumentFormat.DOCX: _read_word,
    DocumentFormat.PPTX: read_slides,
    DocumentFormat.XLSX: read_sheets,
}


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
