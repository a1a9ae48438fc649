"""Reads of documents and chunks. Any thread calls them."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Collection

import numpy as np
from sqlalchemy import (
    BindParameter,
    ColumnElement,
    FromClause,
    Text,
    bindparam,
    cast,
    func,
    literal_column,
    select,
)

from ragcache_core.retrieval.filters import Filter
from ragcache_retriever.store.database import Database, Row
from ragcache_retriever.store.filters import condition_of
from ragcache_retriever.store.records import (
    Document,
    Neighbourhood,
    Rows,
    StoredChunk,
    StoredDocument,
)
from ragcache_retriever.store.statements import AllRows, OneOf, Statement
from ragcache_retriever.store.tables import (
    chunks,
    collections,
    documents,
    generations,
    prepared,
    reports,
    texts,
)

MAX_LISTING_CHARACTERS = 4 << 20
"""A page of a listing ends early, so that it fits into one message."""

NUM_KNOWN_FILTERS = 256
"""Filters whose statements are kept, because compiling one takes a millisecond."""

_ROW_LIST: BindParameter[object] = bindparam("rows")
_HOME = (
    select(collections.c.row).where(collections.c.name == bindparam("collection")).scalar_subquery()
)
_IN_COLLECTION = documents.c.collection == _HOME
_WITH_ID = documents.c.id == bindparam("document_id")
_AFTER = documents.c.id > bindparam("after")


def _document_columns(source: FromClause) -> list[ColumnElement[object]]:
    """Return the columns of ``_stored_document``.

    Args:
        source: The documents.
    """
    serving = select(generations.c.row).where(
        generations.c.collection == source.c.collection, generations.c.state == "serving"
    )
    of_document = prepared.c.document == source.c.row
    num_chunks = select(prepared.c.num_chunks).where(
        of_document, prepared.c.generation == serving.correlate(source).scalar_subquery()
    )
    numbers = func.aggregate_strings(cast(prepared.c.generation, Text), ",")
    return [
        source.c.id,
        source.c.title,
        source.c.content_type,
        source.c.metadata,
        source.c.content_hash,
        source.c.updated_unix_ms,
        func.coalesce(num_chunks.correlate(source).scalar_subquery(), 0),
        select(numbers).where(of_document).correlate(source).scalar_subquery(),
    ]


_DOCUMENT = _document_columns(documents)
_GET = Statement(
    select(*_DOCUMENT, texts.c.text)
    .join(texts, texts.c.document == documents.c.row)
    .where(_IN_COLLECTION, _WITH_ID)
)
_FIND = Statement(select(*_DOCUMENT).where(_IN_COLLECTION, _WITH_ID))
_UNPREPARED = Statement(
    select(documents.c.id)
    .where(
        _IN_COLLECTION,
        _AFTER,
        ~select(prepared.c.document)
        .where(
            prepared.c.document == documents.c.row,
            prepared.c.generation == bindparam("generation"),
        )
        .exists(),
    )
    .order_by(documents.c.id)
    .limit(bindparam("limit"))
)
_REPORT = Statement(
    select(reports.c.body, reports.c.updated_unix_ms).where(reports.c.name == bindparam("name"))
)
_HOME_OF_GENERATION = Statement(
    select(generations.c.collection).where(generations.c.row == bindparam("generation"))
)
_ROWS_VERSION = Statement(
    select(literal_column("xmin::text::bigint"))
    .select_from(generations)
    .where(generations.c.row == bindparam("generation"))
)
_POSITIONS = Statement(
    select(chunks.c.row, documents.c.id, chunks.c.ordinal)
    .join(documents, documents.c.row == chunks.c.document)
    .where(OneOf(chunks.c.row, _ROW_LIST))
)


_DOCUMENT_TEXT = Statement(
    select(texts.c.text)
    .join(chunks, chunks.c.document == texts.c.document)
    .where(chunks.c.row == bindparam("row"))
)


def _page() -> Statement:
    """Return the statement of a page, with one document more to show that it is not the last."""
    first = (
        select(documents)
        .where(_IN_COLLECTION, _AFTER)
        .order_by(documents.c.id)
        .limit(bindparam("limit"))
        .subquery("documents")
    )
    length = func.length(first.c.id) + func.length(first.c.title) + func.length(first.c.metadata)
    # Without the one before, so that one document is returned that no longer fits.
    earlier = func.sum(length).over(order_by=first.c.id, rows=(None, -2))
    counted = select(first, func.coalesce(earlier, 0).label("earlier")).subquery("documents")
    is_small = counted.c.earlier <= MAX_LISTING_CHARACTERS
    selected = select(*_document_columns(counted)).where(is_small)
    return Statement(selected.order_by(counted.c.id))


def _around() -> Statement:
    """Return the statement of chunks and their neighbours."""
    middle = chunks.alias("middle")
    first, last = middle.c.ordinal - bindparam("window"), middle.c.ordinal + bindparam("window")
    is_near = (
        (chunks.c.document == middle.c.document)
        & (chunks.c.generation == middle.c.generation)
        & chunks.c.ordinal.between(first, last)
    )
    is_prepared = (prepared.c.document == middle.c.document) & (
        prepared.c.generation == middle.c.generation
    )
    return Statement(
        select(
            middle.c.row,
            chunks.c.row,
            documents.c.id,
            documents.c.title,
            chunks.c.ordinal,
            chunks.c.text,
            chunks.c.heading_path,
            chunks.c.token_ids,
            prepared.c.tokenizer,
            documents.c.content_hash,
            documents.c.updated_unix_ms,
            generations.c.labels,
            chunks.c.page,
            chunks.c.page_end,
        )
        .select_from(middle)
        .join(chunks, is_near)
        .join(documents, documents.c.row == middle.c.document)
        .join(prepared, is_prepared)
        .join(generations, generations.c.row == middle.c.generation)
        .where(OneOf(middle.c.row, _ROW_LIST))
        .order_by(middle.c.row, chunks.c.ordinal)
    )


@functools.lru_cache(NUM_KNOWN_FILTERS)
def _allowed(wanted: Filter) -> Statement:
    """Return the statement of the rows that a filter allows."""
    passing = select(documents.c.row).where(
        documents.c.collection == bindparam("home"), condition_of(wanted)
    )
    allowed = select(AllRows(chunks.c.row)).where(
        chunks.c.generation == bindparam("generation"), chunks.c.document.in_(passing)
    )
    return Statement(allowed)


_PAGE = _page()
_AROUND = _around()


class DocumentReads:
    """Queries on documents and chunks."""

    def __init__(self, database: Database) -> None:
        self._database = database

    def get(self, collection: str, document_id: str) -> StoredDocument | None:
        """Return a document with its text, or None."""
        wanted = {"collection": collection, "document_id": document_id}
        row = self._database.read_one(_GET, wanted)
        return None if row is None else _stored_document(row, row[8])

    def find(self, collection: str, document_id: str) -> StoredDocument | None:
        """Return a document without its text, or None."""
        wanted = {"collection": collection, "document_id": document_id}
        row = self._database.read_one(_FIND, wanted)
        return None if row is None else _stored_document(row, "")

    def page(
        self, collection: str, after: str, limit: int
    ) -> tuple[list[StoredDocument], str | None]:
        """Return up to ``limit`` documents after an id, sorted by id and without their text.

        Returns:
            The documents, and the id after which the next page begins, or None.
        """
        wanted = {"collection": collection, "after": after, "limit": limit + 1}
        found: list[StoredDocument] = []
        num_characters = 0
        for row in self._database.read(_PAGE, wanted):
            if len(found) == limit or num_characters > MAX_LISTING_CHARACTERS:
                return found, found[-1].document.id
            num_characters += len(row[0]) + len(row[1]) + len(row[3])
            found.append(_stored_document(row, ""))
        return found, None

    def unprepared(self, collection: str, generation: int, after: str, limit: int) -> list[str]:
        """Return ids after one, sorted, of documents that have no chunks in a generation yet."""
        wanted = {
            "collection": collection,
            "generation": generation,
            "after": after,
            "limit": limit,
        }
        return [document_id for (document_id,) in self._database.read(_UNPREPARED, wanted)]

    def report(self, name: str) -> tuple[bytes, int] | None:
        """Return a report and the Unix milliseconds of its last change, or None."""
        row = self._database.read_one(_REPORT, {"name": name})
        return None if row is None else (row[0], row[1])

    # Searches

    def allowed_rows(
        self, generation: int, wanted: Filter, cancelled: Callable[[], bool] | None = None
    ) -> Rows:
        """Return the sorted rows of a generation whose documents pass a filter.

        Args:
            cancelled: Asked every few milliseconds. Once it returns True, the query is ended and
                Unavailable raised.
        """
        home = self._database.read_one(_HOME_OF_GENERATION, {"generation": generation})
        if home is None:
            return np.empty(0, np.int64)
        of_generation = {"generation": generation, "home": home[0]}
        found = self._database.read_one(_allowed(wanted), of_generation, cancelled)
        return self._database.rows_of(None if found is None else found[0])

    def rows_version(self, generation: int) -> int | None:
        """Return a number that changes with the rows of a generation, whichever process writes.

        It is the last transaction that counted the chunks.

        Returns:
            None where no other process changes the documents.
        """
        if not self._database.is_shared:
            return None
        found = self._database.read_one(_ROWS_VERSION, {"generation": generation})
        return -1 if found is None else int(found[0])

    def neighbourhoods(self, rows: Collection[int], window: int) -> dict[int, Neighbourhood]:
        """Return chunks by row, each with up to ``window`` neighbours on each side.

        Rows that no longer exist are left out.
        """
        around: dict[int, list[StoredChunk]] = {}
        if rows:
            wanted = {"rows": self._database.row_list(list(rows)), "window": window}
            for row in self._database.read(_AROUND, wanted):
                around.setdefault(row[0], []).append(_stored_chunk(row[1:]))
        found = {}
        for middle, near in around.items():
            i = next(i for i, chunk in enumerate(near) if chunk.row == middle)
            found[middle] = Neighbourhood(near[i], tuple(near[:i]), tuple(near[i + 1 :]))
        return found

    def document_text(self, row: int) -> str | None:
        """Return the text of the document that a chunk is from, or None."""
        found = self._database.read_one(_DOCUMENT_TEXT, {"row": row})
        return None if found is None else str(found[0])

    def positions(self, rows: Collection[int]) -> dict[int, tuple[str, int]]:
        """Return document id and ordinal of chunks, by row. Rows that do not exist are left out."""
        found = self._database.read(_POSITIONS, {"rows": self._database.row_list(list(rows))})
        return {row: (document_id, ordinal) for row, document_id, ordinal in found}


def _stored_chunk(row: Row) -> StoredChunk:
    chunk_row, document_id, title, ordinal, text, heading_path = row[:6]
    token_ids, tokenizer, content_hash, updated_unix_ms, labels, page, page_end = row[6:]
    return StoredChunk(
        chunk_row,
        document_id,
        title,
        ordinal,
        text,
        tuple(json.loads(heading_path)),
        token_ids,
        tokenizer,
        content_hash,
        updated_unix_ms,
        bool(labels),
        page,
        page_end,
    )


def _stored_document(row: Row, text: str) -> StoredDocument:
    document_id, title, content_type, metadata, content_hash, updated_unix_ms, num_chunks = row[:7]
    in_generations = frozenset(map(int, row[7].split(","))) if row[7] else frozenset()
    document = Document(document_id, title, text, content_type, json.loads(metadata))
    return StoredDocument(document, content_hash, num_chunks, updated_unix_ms, in_generations)
