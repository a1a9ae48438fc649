"""Formats of documents that can be ingested, by file name and by media type."""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum
from pathlib import PurePosixPath
from typing import Final


class DocumentFormat(StrEnum):
    """How the bytes of a document are to be read."""

    TEXT = "text"
    MARKDOWN = "markdown"
    HTML = "html"
    PDF = "pdf"
    DOCX = "docx"
    PPTX = "pptx"
    XLSX = "xlsx"
    CSV = "csv"
    JSON = "json"
    MDX = "mdx"
    NOTEBOOK = "ipynb"
    RESTRUCTURED = "rst"
    JSON_LINES = "jsonl"
    """One JSON object per line, each one a document."""

    @property
    def is_plain(self) -> bool:
        """Whether the bytes are the text itself."""
        return self in (DocumentFormat.TEXT, DocumentFormat.MARKDOWN)

    @property
    def has_encoding(self) -> bool:
        """Whether the bytes are text in an encoding that a client may name."""
        return self in _ENCODED

    @property
    def media_type(self) -> str:
        """The media type that a client sends for it."""
        return next(name for name, one in FORMAT_OF_MEDIA_TYPE.items() if one is self)


_ENCODED: Final = frozenset(
    {
        DocumentFormat.TEXT,
        DocumentFormat.MARKDOWN,
        DocumentFormat.HTML,
        DocumentFormat.CSV,
        DocumentFormat.MDX,
        DocumentFormat.RESTRUCTURED,
    }
)
_FORMAT_OF_NAME: Final = {one.value: one for one in DocumentFormat}

FORMAT_OF_SUFFIX: Final[Mapping[str, DocumentFormat]] = {
    ".txt": DocumentFormat.TEXT,
    ".md": DocumentFormat.MARKDOWN,
    ".markdown": DocumentFormat.MARKDOWN,
    ".html": DocumentFormat.HTML,
    ".htm": DocumentFormat.HTML,
    ".xhtml": DocumentFormat.HTML,
    ".pdf": DocumentFormat.PDF,
    ".docx": DocumentFormat.DOCX,
    ".pptx": DocumentFormat.PPTX,
    ".xlsx": DocumentFormat.XLSX,
    ".csv": DocumentFormat.CSV,
    ".tsv": DocumentFormat.CSV,
    ".json": DocumentFormat.JSON,
    ".mdx": DocumentFormat.MDX,
    ".ipynb": DocumentFormat.NOTEBOOK,
    ".rst": DocumentFormat.RESTRUCTURED,
    ".jsonl": DocumentFormat.JSON_LINES,
    ".ndjson": DocumentFormat.JSON_LINES,
}

_OFFICE: Final = "application/vnd.openxmlformats-officedocument"

FORMAT_OF_MEDIA_TYPE: Final[Mapping[str, DocumentFormat]] = {
    "text/plain": DocumentFormat.TEXT,
    "text/markdown": DocumentFormat.MARKDOWN,
    "text/html": DocumentFormat.HTML,
    "application/xhtml+xml": DocumentFormat.HTML,
    "application/pdf": DocumentFormat.PDF,
    f"{_OFFICE}.wordprocessingml.document": DocumentFormat.DOCX,
    f"{_OFFICE}.presentationml.presentation": DocumentFormat.PPTX,
    f"{_OFFICE}.spreadsheetml.sheet": DocumentFormat.XLSX,
    "text/csv": DocumentFormat.CSV,
    "text/tab-separated-values": DocumentFormat.CSV,
    "application/json": DocumentFormat.JSON,
    "text/mdx": DocumentFormat.MDX,
    "application/x-ipynb+json": DocumentFormat.NOTEBOOK,
    "text/x-rst": DocumentFormat.RESTRUCTURED,
    "application/jsonl": DocumentFormat.JSON_LINES,
    "application/x-ndjson": DocumentFormat.JSON_LINES,
}


def suffix_of(name: str) -> str | None:
    """Return the suffix of a file name in lower case if its format is known."""
    suffix = PurePosixPath(name).suffix.lower()
    return suffix if suffix in FORMAT_OF_SUFFIX else None


def format_of_name(name: str) -> DocumentFormat | None:
    """Return the format that a file name tells, or None."""
    return FORMAT_OF_SUFFIX.get(PurePosixPath(name).suffix.lower())


def format_of_type(content_type: str) -> DocumentFormat | None:
    """Return the format of a name such as "html", or of a media type; None if it is unknown."""
    name = content_type.partition(";")[0].strip().lower()
    return _FORMAT_OF_NAME.get(name) or FORMAT_OF_MEDIA_TYPE.get(name)


_CODE_SUFFIXES: Final = frozenset(
    {".bash", ".c", ".cc", ".cfg", ".conf", ".cpp", ".cs", ".css", ".cue", ".go", ".gradle"}
    | {".graphql", ".h", ".hcl", ".hpp", ".ini", ".java", ".js", ".json", ".jsx", ".kt", ".lua"}
    | {".php", ".pl", ".properties", ".proto", ".ps1", ".py", ".r", ".rb", ".rs", ".scala", ".sh"}
    | {".sql", ".swift", ".tf", ".toml", ".ts", ".tsx", ".xml", ".yaml", ".yml", ".zsh"}
)


def is_code_name(name: str) -> bool:
    """Whether a file of this name has code or configuration, whose lines and indentation count."""
    return PurePosixPath(name).suffix.lower() in _CODE_SUFFIXES
