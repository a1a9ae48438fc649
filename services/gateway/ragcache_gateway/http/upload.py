"""Reads a document from the body of a request: JSON, or a file in a form."""

from __future__ import annotations

from typing import Any

from starlette.datastructures import FormData, UploadFile
from starlette.formparsers import MultiPartException, MultiPartParser
from starlette.requests import Request

from ragcache_core.documents.formats import (
    FORMAT_OF_SUFFIX,
    DocumentFormat,
    format_of_name,
    format_of_type,
)
from ragcache_core.errors import InvalidInput
from ragcache_gateway.documents.incoming import IncomingDocument, text_document
from ragcache_gateway.documents.schema import DocumentIn, FileFields
from ragcache_gateway.http.errors import validate
from ragcache_gateway.http.json_body import json_object, read_body

_MAX_FIELDS = len(FileFields.model_fields)


async def read_document(request: Request, collection: str) -> IncomingDocument:
    """Read the document of a request. Raises InvalidInput naming the field.

    Args:
        collection: Of a document that names none.
    """
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind == "multipart/form-data":
        texts, file_name, media_type, content = await _read_form(request)
        texts["collection"] = texts.get("collection") or collection
        return file_document(texts, file_name, media_type, content)
    if kind == "application/json":
        return await read_body(
            request, lambda body: json_document({"collection": collection, **json_object(body)})
        )
    raise InvalidInput(
        "Content-Type",
        f"is {kind!r}" if kind else "is missing",
        "send application/json, or a file as multipart/form-data",
    )


def json_document(fields: dict[str, Any]) -> IncomingDocument:
    """Return the document of a JSON object. Raises InvalidInput naming the field."""
    document = validate(DocumentIn, fields)
    return text_document(document, document.text)


def file_document(
    texts: dict[str, str], file_name: str, media_type: str, content: bytes
) -> IncomingDocument:
    """Return the document of a file in a form.

    Args:
        texts: The other fields of the form.
        media_type: What the form says of the file; it may be empty.

    Raises:
        InvalidInput: A field is wrong. The error names it.
    """
    for name in texts:
        if name not in FileFields.model_fields:
            known = ", ".join(("file", *FileFields.model_fields))
            raise InvalidInput(name, "is no field of this form", f"send {known}")
    # A form sends an empty text for a field that is left out.
    values: dict[str, Any] = {name: text for name, text in texts.items() if text}
    if "metadata" in values:
        fix = 'send one, like {"team": "core"}'
        values["metadata"] = json_object(values["metadata"].encode(), "metadata", fix)
    fields = validate(FileFields, {"id": file_name, **values})
    kind = _format(fields, file_name, media_type)
    if kind is DocumentFormat.JSON_LINES:
        raise InvalidInput("file", "has several documents", "send it to POST /v1/documents:batch")
    if fields.encoding is not None and not kind.has_encoding:
        raise InvalidInput("encoding", f"is for text, and the file is {kind}", "leave it out")
    return IncomingDocument(fields, kind, content, "file", encoding=fields.encoding)


def _format(fields: FileFields, file_name: str, media_type: str) -> DocumentFormat:
    """Return the format of a file: what the client names, else by file name, else by media type."""
    if fields.content_type is not None:
        return fields.format()
    # Browsers and curl know few types. They send application/octet-stream for the others.
    kind = format_of_name(file_name) or format_of_type(media_type)
    if kind is None:
        raise InvalidInput(
            "file",
            f"is named {file_name!r}",
            f"send a file of {', '.join(FORMAT_OF_SUFFIX)}, or its content_type",
        )
    return kind


class _MemoryParser(MultiPartParser):
    """Keeps files in memory: bodies are limited, and the file system may be read-only."""

    spool_max_size = 0  # no file is written to disk


async def _read_form(request: Request) -> tuple[dict[str, str], str, str, bytes]:
    parser = _MemoryParser(request.headers, request.stream(), max_files=1, max_fields=_MAX_FIELDS)
    try:
        form = await parser.parse()
    except MultiPartException as error:
        raise InvalidInput(
            "body", f"is no usable form ({error.message})", "send one file and its fields"
        ) from error
    try:
        return await _split_form(form)
    finally:
        await form.close()


async def _split_form(form: FormData) -> tuple[dict[str, str], str, str, bytes]:
    texts = {}
    upload = None
    for name, value in form.multi_items():
        if not isinstance(value, UploadFile):
            texts[name] = value
        elif name == "file":
            upload = value
        else:
            raise InvalidInput(name, "is a file", "send the file in the field named file")
    if upload is None:
        raise InvalidInput("file", "is missing", "add a file")
    return texts, upload.filename or "", upload.content_type or "", await upload.read()
