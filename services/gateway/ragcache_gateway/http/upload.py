"""Reads a document from the body of a request: JSON, or a file in a form."""

from __future__ import annotations

import json
from pathlib import PurePosixPath
from typing import Any

from pydantic import ValidationError
from starlette.datastructures import FormData, UploadFile
from starlette.formparsers import MultiPartException, MultiPartParser
from starlette.requests import Request

from ragcache_core.errors import InvalidInput
from ragcache_gateway.documents.schema import TEXT_SUFFIXES, DocumentIn
from ragcache_gateway.http.errors import from_validation

_FIELDS = ("file", "collection", "id", "title", "content_type", "metadata")


async def read_document(request: Request) -> DocumentIn:
    """Read the document of a request. Raises InvalidInput naming the field."""
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind == "multipart/form-data":
        return validate_document(form_fields(*await _read_form(request)))
    if kind == "application/json":
        return validate_document(json_object(await request.body()))
    raise InvalidInput(
        "Content-Type",
        f"is {kind!r}" if kind else "is missing",
        "send application/json, or a file as multipart/form-data",
    )


def validate_document(fields: dict[str, Any]) -> DocumentIn:
    """Validate the fields of a document. Raises InvalidInput naming the field."""
    try:
        return DocumentIn.model_validate(fields)
    except ValidationError as error:
        raise from_validation([dict(e) for e in error.errors()]) from error


def json_object(body: bytes) -> dict[str, Any]:
    """Parse a JSON object. Raises InvalidInput for anything else."""
    try:
        value = json.loads(body.decode())
    except UnicodeDecodeError as error:
        raise InvalidInput("body", "is not UTF-8", "send JSON in UTF-8") from error
    # Deeply nested JSON raises a RecursionError, which is not a ValueError.
    except (ValueError, RecursionError) as error:
        raise InvalidInput("body", f"is not valid JSON ({error})", "send a JSON object") from error
    if not isinstance(value, dict):
        raise InvalidInput("body", "is not a JSON object", "send a JSON object")
    return value


def form_fields(texts: dict[str, str], file_name: str, content: bytes) -> dict[str, Any]:
    """Convert the fields of a form to those of a document. Raises InvalidInput naming the field."""
    for name in texts:
        if name not in _FIELDS:
            raise InvalidInput(name, "is no field of this form", f"send {', '.join(_FIELDS)}")
    if PurePosixPath(file_name).suffix.lower() not in TEXT_SUFFIXES:
        raise InvalidInput(
            "file", f"is named {file_name!r}", f"send a file of {', '.join(TEXT_SUFFIXES)}"
        )
    # A form sends an empty text for a field that is left out.
    fields: dict[str, Any] = {name: text for name, text in texts.items() if text}
    if "metadata" in fields:
        fields["metadata"] = _metadata(fields["metadata"])
    # Without a type from the client the id decides it, and the id may have no suffix.
    fields.setdefault("content_type", _type_of(file_name))
    return {"id": file_name, **fields, "text": decode(content)}


def decode(content: bytes) -> str:
    """Decode the text of a file. Raises InvalidInput if it is not text."""
    try:
        text = content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise InvalidInput(
            "file",
            f"is not UTF-8 text (byte {error.start})",
            "send plain text or Markdown in UTF-8; convert other formats before",
        ) from error
    if "\0" in text:
        raise InvalidInput(
            "file", "is binary (it contains NUL bytes)", "send plain text or Markdown"
        )
    if not text.strip():
        raise InvalidInput("file", "is empty", "send a file with text")
    return text


def _type_of(file_name: str) -> str:
    return "text" if file_name.lower().endswith(".txt") else "markdown"


def _metadata(text: str) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        value = None
    if not isinstance(value, dict):
        raise InvalidInput("metadata", "is not a JSON object", 'send one, like {"team": "core"}')
    return value


class _MemoryParser(MultiPartParser):
    """Keeps files in memory: bodies are limited, and the file system may be read-only."""

    spool_max_size = 0  # no file is written to disk


async def _read_form(request: Request) -> tuple[dict[str, str], str, bytes]:
    parser = _MemoryParser(request.headers, request.stream(), max_files=1, max_fields=len(_FIELDS))
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


async def _split_form(form: FormData) -> tuple[dict[str, str], str, bytes]:
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
        raise InvalidInput("file", "is missing", "add a .txt, .md or .markdown file")
    return texts, upload.filename or "", await upload.read()
