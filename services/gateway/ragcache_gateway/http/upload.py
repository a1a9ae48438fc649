"""A document from the body of a request: JSON, or a file in a form."""

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
    """The document that a request brings. Raises InvalidInput naming the field."""
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind == "multipart/form-data":
        return document(form_fields(*await _read_form(request)))
    if kind == "application/json":
        return document(json_object(await request.body()))
    raise InvalidInput(
        "Content-Type",
        f"is {kind!r}" if kind else "is missing",
        "send application/json, or a file as multipart/form-data",
    )


def document(fields: dict[str, Any]) -> DocumentIn:
    """A checked document. Raises InvalidInput naming the field."""
    try:
        return DocumentIn.model_validate(fields)
    except ValidationError as error:
        raise from_validation([dict(e) for e in error.errors()]) from error


def json_object(body: bytes) -> dict[str, Any]:
    """A JSON object. Raises InvalidInput for anything else."""
    try:
        value = json.loads(body.decode())
    except UnicodeDecodeError as error:
        raise InvalidInput("body", "is not UTF-8", "send JSON in UTF-8") from error
    # Deeply nested JSON ends in a RecursionError, which is no ValueError.
    except (ValueError, RecursionError) as error:
        raise InvalidInput("body", f"is not valid JSON ({error})", "send a JSON object") from error
    if not isinstance(value, dict):
        raise InvalidInput("body", "is not a JSON object", "send a JSON object")
    return value


def form_fields(texts: dict[str, str], file_name: str, content: bytes) -> dict[str, Any]:
    """Fields of a document from those of a form. Raises InvalidInput naming the field."""
    for name in texts:
        if name not in _FIELDS:
            raise InvalidInput(name, "is no field of this form", f"send {', '.join(_FIELDS)}")
    if PurePosixPath(file_name).suffix.lower() not in TEXT_SUFFIXES:
        raise InvalidInput(
            "file", f"is named {file_name!r}", f"send a file of {', '.join(TEXT_SUFFIXES)}"
        )
    # A form sends an empty text for what was left out.
    fields: dict[str, Any] = {name: text for name, text in texts.items() if text}
    if "metadata" in fields:
        fields["metadata"] = _metadata(fields["metadata"])
    # The id names the type where the client does not, and it may have no suffix of its own.
    fields.setdefault("content_type", _type_of(file_name))
    return {"id": file_name, **fields, "text": decode(content)}


def decode(content: bytes) -> str:
    """Text of a file. Raises InvalidInput for what is not text."""
    try:
        text = content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise InvalidInput(
            "file",
            f"is not UTF-8 text (byte {error.start})",
            "send plain text or Markdown in UTF-8; convert other formats before",
        ) from error
    if "\0" in text:
        raise InvalidInput("file", "is binary (it holds NUL bytes)", "send plain text or Markdown")
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
    """Keeps files in memory: a body is bounded anyway, and the root may be read-only."""

    spool_max_size = 0  # of a spooled file: no bound


async def _read_form(request: Request) -> tuple[dict[str, str], str, bytes]:
    parser = _MemoryParser(request.headers, request.stream(), max_files=1, max_fields=len(_FIELDS))
    try:
        form = await parser.parse()
    except MultiPartException as error:
        raise InvalidInput(
            "body", f"is no usable form ({error.message})", "send one file and its fields"
        ) from error
    try:
        return await _take_apart(form)
    finally:
        await form.close()


async def _take_apart(form: FormData) -> tuple[dict[str, str], str, bytes]:
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
