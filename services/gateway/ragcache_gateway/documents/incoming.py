"""A document as a client sends it, and its conversion to the text that the retriever stores."""

from __future__ import annotations

import json
from codecs import BOM_UTF8
from dataclasses import dataclass

from ragcache_core.documents.formats import DocumentFormat
from ragcache_core.errors import InvalidInput
from ragcache_gateway.documents.schema import DocumentFields
from ragcache_gateway.extraction.encodings import decode_named, decode_plain
from ragcache_gateway.extraction.extracted import (
    ExtractedText,
    UnreadableDocument,
    bounded_warnings,
)
from ragcache_gateway.extraction.extractor import TextExtractor
from ragcache_gateway.extraction.markdown import has_hidden_parts
from ragcache_wire.v1 import retriever_pb2 as pb

MARKUP_FORMATS = (
    DocumentFormat.TEXT,
    DocumentFormat.MARKDOWN,
    DocumentFormat.HTML,
    DocumentFormat.MDX,
    DocumentFormat.RESTRUCTURED,
)
"""Formats whose readers take any text."""
TEXT_FORMATS = (
    *MARKUP_FORMATS,
    DocumentFormat.CSV,
    DocumentFormat.JSON,
    DocumentFormat.NOTEBOOK,
)
"""Formats that JSON can carry."""


WARNINGS = "ragcache-warnings"
"""Metadata key of the warnings of a document."""


@dataclass(frozen=True, slots=True)
class ReadDocument:
    """A document as the retriever gets it.

    Args:
        warnings: What of it was not read, and what was assumed.
    """

    message: pb.Document
    warnings: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class IncomingDocument:
    """A document whose text has not been read yet.

    Args:
        field: Names the content in errors: ``file`` or ``text``.
        line: Of a file of JSON lines, from 1.
        encoding: Of the content, if the client names it.
    """

    fields: DocumentFields
    kind: DocumentFormat
    content: bytes
    field: str
    line: int | None = None
    encoding: str | None = None

    @property
    def num_bytes(self) -> int:
        """Size of the content."""
        return len(self.content)

    async def read(self, extractor: TextExtractor) -> ReadDocument:
        """Read the text and convert to the retriever's message.

        Raises:
            InvalidInput: The content has no text that can be read.
            Unavailable: The reader of its format does not start.
        """
        fields = self.fields
        read = await self._extract(extractor)
        warnings = bounded_warnings((*read.warnings, *_warnings_of(read.text)))
        # The client knows better than the document.
        metadata = {**read.metadata, **fields.metadata}
        if warnings:
            metadata[WARNINGS] = "\n".join(warnings)
        message = pb.Document(
            collection=fields.collection,
            id=fields.id,
            title=fields.title or read.title,
            text=read.text,
            content_type=pb.CONTENT_TYPE_MARKDOWN if read.markdown else pb.CONTENT_TYPE_TEXT,
            metadata=json.dumps(metadata, ensure_ascii=False),
        )
        return ReadDocument(message, warnings)

    async def _extract(self, extractor: TextExtractor) -> ExtractedText:
        content = self.content
        text: str | None = None
        try:
            if self.encoding is not None:
                text = decode_named(content, self.encoding)
            elif self.kind.is_plain:
                text = decode_plain(content)
        except UnreadableDocument as error:
            raise InvalidInput(self.field, error.problem, error.fix) from error
        is_markdown = self.kind is DocumentFormat.MARKDOWN
        if text is not None and is_markdown and has_hidden_parts(text):
            return await extractor.extract(text.encode(), self.kind, self.field)
        if text is not None and self.kind.is_plain:
            return ExtractedText(text, is_markdown)
        if text is not None:
            # The mark counts more than what a page says of its encoding.
            content = (BOM_UTF8 if self.kind is DocumentFormat.HTML else b"") + text.encode()
        return await extractor.extract(content, self.kind, self.field)


def _warnings_of(text: str) -> tuple[str, ...]:
    count = text.count("\ufffd")
    if not count:
        return ()
    return (f"the text has {count} replacement characters (U+FFFD) for characters that were lost",)


def text_document(fields: DocumentFields, text: str) -> IncomingDocument:
    """Return a document whose content came as JSON. Raises InvalidInput for a binary format."""
    kind = fields.format()
    # The id may end in .pdf or .ipynb though the client has read the text itself.
    if fields.content_type is None and kind not in MARKUP_FORMATS:
        kind = DocumentFormat.TEXT
    if kind not in TEXT_FORMATS:
        known = ", ".join(TEXT_FORMATS)
        raise InvalidInput(
            "content_type",
            f"{fields.content_type!r} cannot be sent in JSON",
            f"send a file as multipart/form-data, or text of one of {known}",
        )
    return IncomingDocument(fields, kind, text.encode(), "text", encoding="utf-8")
