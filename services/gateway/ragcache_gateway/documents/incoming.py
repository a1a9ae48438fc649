"""A document as a client sends it, and its conversion to the text that the retriever stores."""

from __future__ import annotations

import json
from dataclasses import dataclass

from ragcache_core.documents.formats import DocumentFormat
from ragcache_core.errors import InvalidInput
from ragcache_gateway.documents.schema import DocumentFields
from ragcache_gateway.extraction.extracted import ExtractedText
from ragcache_gateway.extraction.extractor import TextExtractor
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


@dataclass(frozen=True, slots=True)
class IncomingDocument:
    """A document whose text has not been read yet.

    Args:
        field: Names the content in errors: ``file`` or ``text``.
        line: Of a file of JSON lines, from 1.
    """

    fields: DocumentFields
    kind: DocumentFormat
    content: bytes
    field: str
    line: int | None = None

    @property
    def num_bytes(self) -> int:
        """Size of the content."""
        return len(self.content)

    async def to_message(self, extractor: TextExtractor) -> pb.Document:
        """Read the text and convert to the retriever's message.

        Raises:
            InvalidInput: The content has no text that can be read.
            Unavailable: The reader of its format does not start.
        """
        fields = self.fields
        if self.kind.is_plain:
            markdown = self.kind is DocumentFormat.MARKDOWN
            read = ExtractedText(decode(self.content, self.field), markdown)
        else:
            read = await extractor.extract(self.content, self.kind, self.field)
        return pb.Document(
            collection=fields.collection,
            id=fields.id,
            title=fields.title or read.title,
            text=read.text,
            content_type=pb.CONTENT_TYPE_MARKDOWN if read.markdown else pb.CONTENT_TYPE_TEXT,
            # The client knows better than the document.
            metadata=json.dumps({**read.metadata, **fields.metadata}, ensure_ascii=False),
        )


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
    return IncomingDocument(fields, kind, text.encode(), "text")


def decode(content: bytes, field: str) -> str:
    """Decode the text of a file. Raises InvalidInput if it is not text."""
    try:
        text = content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise InvalidInput(
            field,
            f"is not UTF-8 text (byte {error.start})",
            "send text in UTF-8, or name the format of the file",
        ) from error
    if "\0" in text:
        raise InvalidInput(
            field, "is binary (it contains NUL bytes)", "send text, or name the format of the file"
        )
    if not text.strip():
        raise InvalidInput(field, "is empty", "send a document with text")
    return text
