"""Reads the documents of a batch from its body as it arrives.

A body is JSON lines with one document each, or a form with files, of which a file of JSON lines has
several documents. At most one document is in memory here. What is wrong with a document is an item
of the batch; what is wrong with the body ends it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from email.message import Message
from typing import Any, Protocol

from python_multipart.exceptions import MultipartParseError
from python_multipart.multipart import MultipartParser

from ragcache_core.documents.formats import DocumentFormat, format_of_name, format_of_type
from ragcache_core.errors import InvalidInput, RagCacheError, TooLarge
from ragcache_core.retrieval.metadata import name_of
from ragcache_gateway.documents.incoming import IncomingDocument
from ragcache_gateway.documents.schema import FileFields
from ragcache_gateway.http.json_body import json_object
from ragcache_gateway.http.upload import file_document, json_document

MAX_FIELD_BYTES = 1 << 16
"""Size of a form's field that is not a file."""

_MAX_HEADER_BYTES = 1 << 14


@dataclass(frozen=True, slots=True)
class RefusedDocument:
    """A document that cannot be read from the body.

    Args:
        id: Empty if it is unknown.
        line: Of a file of JSON lines, from 1.
    """

    id: str
    error: RagCacheError
    line: int | None = None


BatchItem = IncomingDocument | RefusedDocument


class BatchParser(Protocol):
    """Takes a body in pieces."""

    def feed(self, data: bytes) -> Iterator[BatchItem]:
        """Yield the documents that end in the next piece. Raises InvalidInput for a bad body."""
        ...

    def close(self) -> Iterator[BatchItem]:
        """Yield what is left at the end of the body. Raises InvalidInput if it is incomplete."""
        ...


class JsonLinesParser:
    """One JSON object per line; empty lines are skipped.

    Args:
        collection: Of documents that name none.
        max_bytes: Longest line.
    """

    def __init__(self, collection: str, max_bytes: int) -> None:
        self._collection = collection
        self._max_bytes = max_bytes
        self._line = bytearray()
        self._number = 1
        self._is_too_long = False

    def feed(self, data: bytes) -> Iterator[BatchItem]:
        """Yield the documents whose line ends in the next piece."""
        *ended, rest = data.split(b"\n")
        for part in ended:
            self._add(part)
            yield from self._end_line()
        self._add(rest)

    def close(self) -> Iterator[BatchItem]:
        """Yield the document of a last line without a line break."""
        yield from self._end_line()

    def _add(self, data: bytes) -> None:
        if len(self._line) + len(data) > self._max_bytes:
            self._is_too_long = True
            self._line.clear()
        if not self._is_too_long:
            self._line += data

    def _end_line(self) -> Iterator[BatchItem]:
        if self._is_too_long:
            yield RefusedDocument("", _too_large("line", self._max_bytes), self._number)
        elif self._line.strip():
            yield replace(self._document(bytes(self._line)), line=self._number)
        self._line.clear()
        self._number += 1
        self._is_too_long = False

    def _document(self, line: bytes) -> BatchItem:
        fields: dict[str, Any] = {}
        try:
            fields = json_object(line)
            return json_document({"collection": self._collection, **fields})
        except InvalidInput as error:
            return RefusedDocument(name_of(fields.get("id")) or "", error)


@dataclass(slots=True)
class _FormPart:
    """A part of a form while it arrives.

    Args:
        file_name: None for a field that is not a file.
    """

    name: str = ""
    file_name: str | None = None
    media_type: str = ""


class FormParser:
    """A form with files. Fields before a file belong to it: ``id``, ``title`` and others.

    Args:
        boundary: Of the form's parts.
        collection: Of documents that name none.
        max_bytes: Largest file, or longest line of a file of JSON lines.
    """

    def __init__(self, boundary: bytes, collection: str, max_bytes: int) -> None:
        self._collection = collection
        self._max_bytes = max_bytes
        self._header_name = bytearray()
        self._header_value = bytearray()
        self._headers = Message()
        self._part = _FormPart()
        self._content = bytearray()
        self._is_too_large = False
        self._lines: JsonLinesParser | None = None
        self._fields: dict[str, str] = {}
        self._refusal: InvalidInput | None = None
        self._found: list[Iterator[BatchItem]] = []
        self._is_complete = False
        self._parser = MultipartParser(boundary, self._callbacks())

    def feed(self, data: bytes) -> Iterator[BatchItem]:
        """Yield the documents that end in the next piece. Raises InvalidInput for a bad form."""
        try:
            self._parser.write(data)
        except MultipartParseError as error:
            problem = f"is no usable form ({error})"
            raise InvalidInput("body", problem, "send files as multipart/form-data") from error
        found, self._found = self._found, []
        for items in found:
            yield from items

    def close(self) -> Iterator[BatchItem]:
        """Check that the form is complete."""
        if not self._is_complete:
            raise InvalidInput("body", "ends before the form does", "send the whole form")
        return iter(())

    def _callbacks(self) -> Any:
        def with_data(target: Callable[[bytes], None]) -> Callable[[bytes, int, int], None]:
            return lambda data, start, end: target(data[start:end])

        return {
            "on_part_begin": self._begin_part,
            "on_header_field": with_data(self._add_header_name),
            "on_header_value": with_data(self._add_header_value),
            "on_header_end": self._end_header,
            "on_headers_finished": self._end_headers,
            "on_part_data": with_data(self._add_content),
            "on_part_end": self._end_part,
            "on_end": self._end_form,
        }

    def _begin_part(self) -> None:
        self._headers = Message()
        self._content.clear()
        self._is_too_large = False
        self._lines = None

    def _add_header_name(self, data: bytes) -> None:
        self._header_name += data
        self._check_header()

    def _add_header_value(self, data: bytes) -> None:
        self._header_value += data
        self._check_header()

    def _check_header(self) -> None:
        if len(self._header_name) + len(self._header_value) > _MAX_HEADER_BYTES:
            raise InvalidInput("body", "has a part with large headers", "send shorter names")

    def _end_header(self) -> None:
        name = self._header_name.decode("latin-1")
        self._headers[name] = self._header_value.decode("utf-8", "replace")
        self._header_name.clear()
        self._header_value.clear()

    def _end_headers(self) -> None:
        name = self._headers.get_param("name", "", "content-disposition")
        media_type = "" if self._headers["content-type"] is None else self._headers["content-type"]
        self._part = _FormPart(str(name), self._headers.get_filename(), str(media_type))
        if self._is_json_lines():
            collection = self._fields.pop("collection", self._collection)
            unused = sorted(self._fields.keys() - {"content_type"})
            if unused and self._refusal is None:
                fix = "write it on each line"
                self._refusal = InvalidInput(unused[0], "is not for a file of JSON lines", fix)
            self._lines = JsonLinesParser(collection, self._max_bytes)

    def _is_json_lines(self) -> bool:
        if self._part.file_name is None:
            return False
        named = format_of_type(self._fields.get("content_type", ""))
        by_file = format_of_name(self._part.file_name) or format_of_type(self._part.media_type)
        return (named or by_file) is DocumentFormat.JSON_LINES

    def _add_content(self, data: bytes) -> None:
        if self._lines is not None:
            # Lines are read at once: a list of them would grow with the piece only.
            if self._refusal is None:
                self._found.append(iter(list(self._lines.feed(data))))
            return
        is_file = self._part.file_name is not None
        if len(self._content) + len(data) > (self._max_bytes if is_file else MAX_FIELD_BYTES):
            self._is_too_large = True
            self._content.clear()
        if not self._is_too_large:
            self._content += data

    def _end_part(self) -> None:
        part = self._part
        if self._lines is not None:
            refusal, self._refusal = self._refusal, None
            refused: list[BatchItem] = (
                [] if refusal is None else [RefusedDocument(part.file_name or "", refusal)]
            )
            self._found.append(iter(refused or list(self._lines.close())))
            self._fields = {}
        elif part.file_name is None:
            self._end_field(part.name)
        else:
            self._found.append(iter([self._file(part.file_name)]))
            self._fields = {}
            self._refusal = None

    def _end_field(self, name: str) -> None:
        if self._is_too_large:
            self._refusal = _too_large(name, MAX_FIELD_BYTES)
        elif name not in FileFields.model_fields:
            known = ", ".join(("file", *FileFields.model_fields))
            self._refusal = InvalidInput(name, "is no field of this form", f"send {known}")
        else:
            try:
                self._fields[name] = self._content.decode()
            except UnicodeDecodeError:
                self._refusal = InvalidInput(name, "is not UTF-8", "send the field in UTF-8")

    def _file(self, file_name: str) -> BatchItem:
        name = self._fields.get("id") or file_name
        if self._is_too_large:
            return RefusedDocument(name, _too_large("file", self._max_bytes))
        if self._refusal is not None:
            return RefusedDocument(name, self._refusal)
        fields = {"collection": self._collection, **self._fields}
        try:
            content = bytes(self._content)
            return file_document(fields, file_name, self._part.media_type, content)
        except InvalidInput as error:
            return RefusedDocument(name, error)

    def _end_form(self) -> None:
        self._is_complete = True


def batch_parser(content_type: str, collection: str, max_bytes: int) -> BatchParser:
    """Return the parser of a body. Raises InvalidInput for another type.

    Args:
        content_type: Header of the request.
        collection: Of documents that name none.
        max_bytes: Largest document.
    """
    headers = Message()
    headers["content-type"] = content_type
    kind = headers.get_content_type() if content_type else ""
    if format_of_type(kind) is DocumentFormat.JSON_LINES:
        return JsonLinesParser(collection, max_bytes)
    boundary = headers.get_param("boundary", "")
    if kind == "multipart/form-data" and isinstance(boundary, str) and boundary:
        return FormParser(boundary.encode("latin-1", "replace"), collection, max_bytes)
    raise InvalidInput(
        "Content-Type",
        f"is {content_type!r}" if content_type else "is missing",
        "send application/jsonl, or files as multipart/form-data",
    )


def _too_large(field: str, max_bytes: int) -> TooLarge:
    return TooLarge(field, f"is over {max_bytes >> 10} KiB", "divide it")
