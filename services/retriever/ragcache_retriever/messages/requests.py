"""Checks requests and turns them into what the knowledge base takes."""

from __future__ import annotations

import base64
import json
import math
import unicodedata
from collections.abc import Sequence
from dataclasses import fields

from ragcache_core.errors import InvalidInput, TooLarge
from ragcache_core.retrieval.filters import (
    MAX_DEPTH,
    And,
    Exists,
    Filter,
    In,
    InPeriod,
    InRange,
    Not,
    Or,
    Prefix,
    check_size,
)
from ragcache_core.retrieval.fusion import DEFAULT_LEXICAL_WEIGHT
from ragcache_core.retrieval.metadata import MetadataValue, checked_metadata, texts_of
from ragcache_retriever.documents.chunking import first_heading
from ragcache_retriever.documents.collection import (
    CollectionSettings,
    checked_chunking,
    checked_lexical_weight,
    checked_name,
    checked_window,
)
from ragcache_retriever.knowledge_base.collections import INDEX_KINDS
from ragcache_retriever.ranking.search import Search, SearchMode
from ragcache_retriever.store.records import Document
from ragcache_wire.v1 import retriever_pb2 as pb

MAX_DOCUMENT_BYTES = 8 << 20
MAX_ID_CHARS = 512
MAX_TITLE_CHARS = 1024
MAX_METADATA_BYTES = 16 << 10
MAX_QUERY_CHARS = 8192
MAX_TEXTS_CHARS = 1_000_000
MAX_TOP_K = 1000
MAX_QUOTA = 1 << 53
_KINDS = {number: kind for kind, number in INDEX_KINDS.items()}
_MODES = {
    pb.SEARCH_MODE_AUTO: SearchMode.AUTO,
    pb.SEARCH_MODE_DENSE: SearchMode.DENSE,
    pb.SEARCH_MODE_LEXICAL: SearchMode.LEXICAL,
    pb.SEARCH_MODE_HYBRID: SearchMode.HYBRID,
}
MAX_FIELD_CHARS = 256
_ONE_TEST = "set one of one_of, range, period, exists and prefix"


def settings_of(message: pb.Collection) -> CollectionSettings:
    """Return the settings of a collection. Raises InvalidInput."""
    chunking = None
    if message.HasField("chunking"):
        chunking = checked_chunking(
            "collection.chunking.size_tokens",
            "collection.chunking.overlap_tokens",
            message.chunking.size_tokens,
            message.chunking.overlap_tokens,
        )
    window = None
    if message.HasField("window"):
        window = checked_window("collection.window", message.window)
    index = None
    if message.HasField("index"):
        index = _KINDS.get(message.index)
        if index is None:
            raise InvalidInput(
                "collection.index", f"{message.index} is unknown", "send a value of IndexKind"
            )
    lexical_weight = DEFAULT_LEXICAL_WEIGHT
    if message.HasField("lexical_weight"):
        lexical_weight = checked_lexical_weight("collection.lexical_weight", message.lexical_weight)
    return CollectionSettings(
        chunking,
        window,
        index,
        _quota("collection.max_documents", message.max_documents),
        _quota("collection.max_text_bytes", message.max_text_bytes),
        lexical_weight,
        labels=not message.HasField("labels") or message.labels,
    )


def unset_settings(message: pb.Collection) -> list[str]:
    """Return the fields of CollectionSettings that a message does not set."""
    given = {field.name for field, _ in message.ListFields()}
    return [field.name for field in fields(CollectionSettings) if field.name not in given]


def _quota(field: str, value: int) -> int:
    if value > MAX_QUOTA:
        raise InvalidInput(field, f"{value} is out of range", "set 0 for no limit")
    return value


def search_of(request: pb.SearchRequest) -> Search:
    """Return a search. Raises InvalidInput."""
    name = checked_name("collection", request.collection)
    text = checked_query(request.query)
    if not 1 <= request.top_k <= MAX_TOP_K:
        raise InvalidInput("top_k", f"{request.top_k} is out of range", f"ask for 1 to {MAX_TOP_K}")
    mode = _MODES.get(request.mode)
    if mode is None:
        raise InvalidInput("mode", f"{request.mode} is unknown", "send a value of SearchMode")
    if not 0 <= request.diversity <= 1:
        raise InvalidInput("diversity", f"{request.diversity:g} is out of range", "set 0 to 1")
    has_recall = request.HasField("recall")
    if has_recall and not 0 < request.recall <= 1:
        raise InvalidInput(
            "recall", f"{request.recall:g} is out of range", "set more than 0, up to 1"
        )
    min_score = request.min_score if request.HasField("min_score") else None
    if min_score is not None and not math.isfinite(min_score):
        raise InvalidInput("min_score", "is not a finite number", "send a number, or none")
    return Search(
        name,
        text,
        request.top_k,
        mode,
        filter=filter_of(request.filter) if request.HasField("filter") else None,
        min_score=min_score,
        diversity=request.diversity,
        recall=request.recall if has_recall else None,
    )


def document_of(message: pb.Document) -> Document:
    """Return a document. Raises InvalidInput."""
    document_id = checked_id("document.id", message.id)
    num_bytes = len(message.text.encode())
    if num_bytes > MAX_DOCUMENT_BYTES:
        raise TooLarge(
            "document.text",
            f"{num_bytes} bytes are more than {MAX_DOCUMENT_BYTES}",
            "split the document",
        )
    _refuse_nul("document.text", message.text)
    if not message.text.strip().strip("\ufeff"):
        raise InvalidInput("document.text", "is empty", "send the document's text")
    if message.content_type not in pb.ContentType.values():
        raise InvalidInput(
            "document.content_type",
            f"{message.content_type} is unknown",
            "send CONTENT_TYPE_TEXT or CONTENT_TYPE_MARKDOWN",
        )
    content_type = message.content_type or pb.CONTENT_TYPE_TEXT
    return Document(
        id=document_id,
        title=_title(message, content_type, document_id),
        text=message.text,
        content_type=content_type,
        metadata=_metadata(message),
    )


def _title(message: pb.Document, content_type: int, document_id: str) -> str:
    _refuse_nul("document.title", message.title)
    title = _one_line(message.title)
    if len(title) > MAX_TITLE_CHARS:
        raise InvalidInput(
            "document.title",
            f"{len(title)} characters are too many",
            f"send at most {MAX_TITLE_CHARS}",
        )
    if not title and content_type == pb.CONTENT_TYPE_MARKDOWN:
        title = _one_line(first_heading(message.text) or "")
    return title or document_id


def _one_line(text: str) -> str:
    """Return text with single spaces and without control characters, which act on terminals."""
    words = " ".join(text.split())
    return "".join(c for c in words if not _is_control(c)).strip()


def _is_control(character: str) -> bool:
    return unicodedata.category(character) == "Cc"


def _metadata(message: pb.Document) -> dict[str, MetadataValue]:
    field = "document.metadata"
    num_bytes = len(message.metadata.encode())
    if num_bytes > MAX_METADATA_BYTES:
        raise TooLarge(
            field,
            f"{num_bytes} bytes are more than {MAX_METADATA_BYTES}",
            "keep only what names the document",
        )
    try:
        found = json.loads(message.metadata or "{}")
    except (ValueError, RecursionError) as error:
        raise InvalidInput(field, "is not valid JSON", "send a JSON object") from error
    if not isinstance(found, dict):
        raise InvalidInput(field, "is not a JSON object", "send a JSON object")
    metadata = checked_metadata(field, found)
    for name, value in metadata.items():
        if len(name) > MAX_FIELD_CHARS:
            raise TooLarge(
                field,
                f"the name {name[:40]!r}... has {len(name)} characters",
                f"use at most {MAX_FIELD_CHARS} characters in a name",
            )
        for text in (name, *texts_of(value)):
            _refuse_unstorable(field, text)
    return metadata


def checked_id(field: str, document_id: str) -> str:
    """Return the id of a document. Raises InvalidInput if it is not valid."""
    has_control = any(map(_is_control, document_id[: MAX_ID_CHARS + 1]))
    if not 1 <= len(document_id) <= MAX_ID_CHARS or has_control:
        raise InvalidInput(
            field,
            f"{document_id[:80]!r} is not a valid document id",
            f"use 1 to {MAX_ID_CHARS} characters, none of them a control character",
        )
    return document_id


def checked_query(query: str) -> str:
    """Return a question. Raises InvalidInput for an empty or a long one."""
    _refuse_nul("query", query)
    if not query.strip():
        raise InvalidInput("query", "is empty", "ask something")
    if len(query) > MAX_QUERY_CHARS:
        raise TooLarge(
            "query", f"{len(query)} characters are too many", f"send at most {MAX_QUERY_CHARS}"
        )
    return query


def checked_texts(texts: Sequence[str], most: int) -> list[str]:
    """Return texts to embed or to score. Raises InvalidInput for none, an empty one or too many."""
    if not texts:
        raise InvalidInput("texts", "are none", "send at least one")
    if len(texts) > most:
        raise TooLarge("texts", f"{len(texts)} are too many", f"send at most {most}")
    num_chars = sum(map(len, texts))
    if num_chars > MAX_TEXTS_CHARS:
        raise TooLarge(
            "texts", f"{num_chars} characters are too many", f"send at most {MAX_TEXTS_CHARS}"
        )
    for i, text in enumerate(texts):
        _refuse_nul(f"texts[{i}]", text)
        if not text.strip():
            raise InvalidInput(f"texts[{i}]", "is empty", "leave it out")
    return list(texts)


def _refuse_nul(field: str, text: str) -> None:
    # The gateway's prompt placeholder contains one, and no text needs it.
    if "\0" in text:
        raise InvalidInput(field, "holds a NUL character", "send text, not a binary file")


def _refuse_unstorable(field: str, text: str) -> None:
    """Refuse what JSON can escape and no database stores."""
    _refuse_nul(field, text)
    try:
        text.encode()
    except UnicodeEncodeError as error:
        problem = "holds half of a surrogate pair"
        raise InvalidInput(field, problem, "send whole characters") from error


def after_of(page_token: str) -> str:
    """Return the id after which a page begins. Raises InvalidInput."""
    try:
        return base64.b64decode(page_token, altchars=b"-_", validate=True).decode()
    except ValueError as error:
        raise InvalidInput(
            "page_token",
            "is not a token of this service",
            "send next_page_token of the page before",
        ) from error


def filter_of(message: pb.Filter) -> Filter:
    """Return the filter that a message means.

    Raises:
        InvalidInput: It is incomplete, too large or too deep. The error names the path of the wrong
            part, such as ``filter.all[1].field.range``.
    """
    found = _filter(message, "filter", depth=1)
    check_size(found)
    return found


def _filter(message: pb.Filter, path: str, depth: int) -> Filter:
    if depth > MAX_DEPTH:
        raise InvalidInput(path, f"is nested deeper than {MAX_DEPTH}", "flatten the filter")
    match message.WhichOneof("condition"):
        case "all":
            return And(_filters(message.all.filters, f"{path}.all", depth))
        case "any":
            return Or(_filters(message.any.filters, f"{path}.any", depth))
        case "none":
            return Not(_filter(message.none, f"{path}.none", depth + 1))
        case "field":
            return _test(message.field, f"{path}.field")
        case _:
            raise InvalidInput(path, "has no condition", "set one of all, any, none and field")


def _filters(messages: Sequence[pb.Filter], path: str, depth: int) -> tuple[Filter, ...]:
    if not messages:
        raise InvalidInput(path, "is empty", "name at least one condition")
    return tuple(_filter(one, f"{path}[{i}]", depth + 1) for i, one in enumerate(messages))


def _test(message: pb.FieldFilter, path: str) -> Filter:
    name = message.name
    if not 1 <= len(name) <= MAX_FIELD_CHARS:
        raise InvalidInput(
            f"{path}.name",
            f"has {len(name)} characters",
            f"name a metadata field in 1 to {MAX_FIELD_CHARS}",
        )
    match message.WhichOneof("test"):
        case "one_of":
            if not message.one_of.values:
                raise InvalidInput(f"{path}.one_of", "is empty", "list at least one value")
            return In(name, tuple(message.one_of.values))
        case "range":
            return _range(name, message.range, f"{path}.range")
        case "period":
            return _period(name, message.period, f"{path}.period")
        case "exists":
            return Exists(name) if message.exists else Not(Exists(name))
        case "prefix":
            return Prefix(name, message.prefix)
        case _:
            raise InvalidInput(path, "has no test", _ONE_TEST)


def _range(name: str, message: pb.Range, path: str) -> InRange:
    bounds: dict[str, float] = {}
    for descriptor, value in message.ListFields():
        bounds[descriptor.name] = value
    if not bounds:
        raise InvalidInput(path, "has no bound", "set gt, gte, lt or lte")
    for bound, value in bounds.items():
        if math.isnan(value):
            raise InvalidInput(f"{path}.{bound}", "is not a number", "send a number")
    return InRange(name, **bounds)


def _period(name: str, message: pb.Period, path: str) -> InPeriod:
    bounds = {descriptor.name: value for descriptor, value in message.ListFields()}
    if not bounds:
        raise InvalidInput(path, "has no bound", "set start_us or end_us")
    return InPeriod(name, **bounds)
