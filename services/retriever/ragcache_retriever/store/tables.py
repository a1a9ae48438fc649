"""The tables of documents, the same in SQLite and in PostgreSQL.

Words and vectors have other tables in each database.
"""

from __future__ import annotations

from sqlalchemy import (
    BigInteger,
    Boolean,
    Column,
    Double,
    ForeignKey,
    Identity,
    Index,
    Integer,
    LargeBinary,
    MetaData,
    Table,
    Text,
    UniqueConstraint,
    false,
    text,
    true,
)
from sqlalchemy.engine import Dialect
from sqlalchemy.schema import CreateIndex, CreateTable

from ragcache_core.access.usage import COUNT_NAMES
from ragcache_retriever.store.statements import Indexed

ZERO = text("0")
PLAIN_TEXT = Text(collation="C").with_variant(Text(), "sqlite")
"""Text that sorts by code points, as in Python."""

NUMBER = BigInteger().with_variant(Integer(), "sqlite")

_schema = MetaData()


def _row(*, is_chosen: bool = False) -> Column[int]:
    """Return the column of a number that is never reused.

    Args:
        is_chosen: Whether inserts may name it.
    """
    return Column("row", NUMBER, Identity(always=not is_chosen), primary_key=True)


def _count(name: str) -> Column[int]:
    return Column(name, NUMBER, nullable=False, server_default=ZERO)


collections = Table(
    "collections",
    _schema,
    _row(),
    Column("name", PLAIN_TEXT, nullable=False, unique=True),
    Column("size_tokens", Integer),  # NULL: the service's default
    Column("overlap_tokens", Integer),
    Column("window", Integer),
    Column("index_kind", Text),
    Column("max_documents", NUMBER, nullable=False),
    Column("max_text_bytes", NUMBER, nullable=False),
    Column("lexical_weight", Double, nullable=False),
    Column("labels", Boolean, nullable=False),
    _count("num_documents"),
    _count("text_bytes"),
    Column("is_deleting", Boolean, nullable=False, server_default=false()),
    sqlite_autoincrement=True,
)

generations = Table(
    "generations",
    _schema,
    _row(),
    Column("collection", ForeignKey(collections.c.row), nullable=False, index=True),
    Column("state", Text, nullable=False),  # serving, building, retired
    Column("splitter", Text, nullable=False),  # from here on: the fields of Recipe
    Column("size_tokens", Integer, nullable=False),
    Column("overlap_tokens", Integer, nullable=False),
    Column("labels", Boolean, nullable=False),
    Column("tokenizer", Text, nullable=False),
    Column("embedder", Text, nullable=False),
    Column("dimension", Integer, nullable=False),
    _count("num_documents"),
    _count("num_chunks"),
    _count("num_words"),  # of all chunks, with repeats; SQLite has them in its own tables
    sqlite_autoincrement=True,
)

documents = Table(
    "documents",
    _schema,
    _row(),
    Column("collection", ForeignKey(collections.c.row), nullable=False),
    Column("id", PLAIN_TEXT, nullable=False),
    Column("id_number", Double),  # NULL: it spells no number
    Column("id_instant", NUMBER),  # Unix microseconds; NULL: it is no ISO date
    Column("title", PLAIN_TEXT, nullable=False),
    Column("title_number", Double),
    Column("title_instant", NUMBER),
    Column("content_type", Integer, nullable=False),
    Column("metadata", Text, nullable=False),  # JSON object
    Column("content_hash", Text, nullable=False),
    Column("text_bytes", NUMBER, nullable=False),
    Column("updated_unix_ms", NUMBER, nullable=False),
    UniqueConstraint("collection", "id"),
    sqlite_autoincrement=True,
)


def _document(*, is_key: bool = False) -> Column[int]:
    owner = ForeignKey(documents.c.row, ondelete="CASCADE")
    return Column("document", NUMBER, owner, primary_key=is_key, autoincrement=False)


texts = Table(  # by itself, so that listings read no text
    "texts",
    _schema,
    _document(is_key=True),
    Column("text", Text, nullable=False),
)

document_fields = Table(
    "document_fields",
    _schema,
    _document(is_key=True),
    Column("collection", NUMBER, nullable=False),
    Column("name", PLAIN_TEXT, primary_key=True),
    Column("item", Integer, primary_key=True),  # index in a list, else 0
    Column("value", PLAIN_TEXT, nullable=False),
    Column("number", Double),  # NULL: the value spells no number
    Column("instant", NUMBER),  # Unix microseconds; NULL: the value is no ISO date
    sqlite_with_rowid=False,
)
Index(
    "fields_by_value",
    document_fields.c.collection,
    document_fields.c.name,
    Indexed(document_fields.c.value),
)
for _column in (document_fields.c.number, document_fields.c.instant):
    Index(
        f"fields_by_{_column.name}",
        document_fields.c.collection,
        document_fields.c.name,
        _column,
        sqlite_where=_column.is_not(None),
        postgresql_where=_column.is_not(None),
    )

prepared = Table(  # documents that have their chunks in a generation
    "prepared",
    _schema,
    _document(is_key=True),
    Column("generation", ForeignKey(generations.c.row), primary_key=True, index=True),
    Column("num_chunks", Integer, nullable=False),
    Column("tokenizer", Text, nullable=False),  # of digests and token ids
    sqlite_with_rowid=False,
)

chunks = Table(
    "chunks",
    _schema,
    _row(is_chosen=True),
    Column("generation", ForeignKey(generations.c.row), nullable=False, index=True),
    Column("document", ForeignKey(documents.c.row), nullable=False),
    Column("ordinal", Integer, nullable=False),
    Column("token_digest", LargeBinary, nullable=False),  # the gateway computes the chunk's key
    Column("heading_path", Text, nullable=False),  # JSON array of strings
    Column("page", Integer, nullable=False),  # from 1; 0: the document has no pages
    Column("page_end", Integer, nullable=False),
    Column("text", Text, nullable=False),
    Column("token_ids", LargeBinary, nullable=False),  # uint32, little-endian
    UniqueConstraint("document", "generation", "ordinal"),
    Index("chunks_by_digest", "token_digest", "generation"),
    sqlite_autoincrement=True,
)

reports = Table(
    "reports",
    _schema,
    Column("name", Text, primary_key=True),
    Column("body", LargeBinary, nullable=False),
    Column("updated_unix_ms", NUMBER, nullable=False),
)

usage = Table(  # the same use counts in a row of its minute, of its day and of its month
    "usage",
    _schema,
    Column("period", Integer, primary_key=True, autoincrement=False),  # UsagePeriod
    Column("start_unix_s", NUMBER, primary_key=True, autoincrement=False),
    Column("tenant", PLAIN_TEXT, primary_key=True),  # "": the key has none
    Column("key", PLAIN_TEXT, primary_key=True),
    Column("model", PLAIN_TEXT, primary_key=True),  # "": the request named none
    *(Column(name, NUMBER, nullable=False) for name in COUNT_NAMES),
    sqlite_with_rowid=False,
)

usage_senders = Table(  # the last deltas of each gateway, so that none are added twice
    "usage_senders",
    _schema,
    Column("gateway", LargeBinary, primary_key=True),
    Column("sequence", NUMBER, nullable=False),
    Column("waiting", LargeBinary, nullable=False),  # its QueueLoad
    Column("updated_unix_ms", NUMBER, nullable=False),
    sqlite_with_rowid=False,
)

operations = Table(  # documents that are written later
    "operations",
    _schema,
    _row(),
    Column("id", Text, nullable=False, unique=True),
    Column("owner", PLAIN_TEXT, nullable=False),  # a tenant; "": callers without one
    Column("asker", PLAIN_TEXT, nullable=False),  # name of the key whose work it is
    Column("collection", PLAIN_TEXT, nullable=False),
    Column("document", PLAIN_TEXT, nullable=False),
    Column("packed", LargeBinary, nullable=False),  # the document; empty after the end
    Column("num_bytes", NUMBER, nullable=False),
    Column("state", Text, nullable=False),  # an OperationState
    Column("result", Text, nullable=False),  # JSON object
    Column("claimed_until_ms", NUMBER, nullable=False),
    Column("created_unix_ms", NUMBER, nullable=False),
    Column("updated_unix_ms", NUMBER, nullable=False),
    Index("operations_by_document", "collection", "document"),
    sqlite_autoincrement=True,
)
Index(
    "operations_pending",
    operations.c.asker,
    sqlite_where=operations.c.state == text("'pending'"),
    postgresql_where=operations.c.state == text("'pending'"),
)

outbox_position = Table(  # one row: the number of the last removal
    "outbox_position", _schema, Column("sequence", NUMBER, nullable=False)
)

outbox = Table(
    "outbox",
    _schema,
    Column("sequence", NUMBER, primary_key=True, autoincrement=False),
    Column("id", LargeBinary, nullable=False, unique=True),
    Column("collection", PLAIN_TEXT, nullable=False),
    Column("document", PLAIN_TEXT, nullable=False),
    Column("names_document", Boolean, nullable=False),
    Column("everything", Boolean, nullable=False, server_default=false()),
    Column("token_digests", LargeBinary, nullable=False),
    Column("removed_unix_ms", NUMBER, nullable=False),
    Column("claimed_until_ms", NUMBER, nullable=False, server_default=ZERO),
    _count("acknowledged_unix_ms"),
    Column("complete", Boolean, nullable=False, server_default=false()),
    Index("outbox_by_document", "collection", "document"),
)
_IS_PENDING = ~outbox.c.complete
for _name, _column, _condition in (
    ("outbox_pending", outbox.c.claimed_until_ms, _IS_PENDING),
    ("outbox_acknowledged", outbox.c.acknowledged_unix_ms, _IS_PENDING),
    ("outbox_complete", outbox.c.removed_unix_ms, outbox.c.complete == true()),
):
    Index(_name, _column, sqlite_where=_condition, postgresql_where=_condition)


def creation(dialect: Dialect) -> str:
    """Return the SQL that creates the tables."""
    statements = []
    for table in _schema.sorted_tables:
        statements.append(str(CreateTable(table).compile(dialect=dialect)))
        for index in sorted(table.indexes, key=lambda index: str(index.name)):
            statements.append(str(CreateIndex(index).compile(dialect=dialect)))
    statements.append("INSERT INTO outbox_position VALUES (0)")
    return ";\n".join(statements) + ";\n"
