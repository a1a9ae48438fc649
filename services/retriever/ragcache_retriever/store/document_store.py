"""The document store, the source of truth for documents, chunks and embeddings."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Generic

from typing_extensions import TypeVar

from ragcache_retriever.store.collections import Collections
from ragcache_retriever.store.database import Database
from ragcache_retriever.store.documents import Documents
from ragcache_retriever.store.generation_tables import EmbeddingTables, LexicalTables
from ragcache_retriever.store.operations import OperationTable
from ragcache_retriever.store.outbox import Outbox
from ragcache_retriever.store.reads import DocumentReads
from ragcache_retriever.store.usage import UsageTable

D = TypeVar("D", bound=Database)
D_co = TypeVar("D_co", bound=Database, default=Database, covariant=True)


@dataclass(frozen=True)
class DocumentStore(Generic[D_co]):
    """The parts of the store of one database.

    Attributes:
        database: Its transactions, in which the other parts change something.
    """

    database: D_co
    lexical: LexicalTables
    embeddings: EmbeddingTables
    collections: Collections
    documents: Documents
    reads: DocumentReads
    outbox: Outbox
    usage: UsageTable
    operations: OperationTable


def store_in(database: D, lexical: LexicalTables, embeddings: EmbeddingTables) -> DocumentStore[D]:
    """Return the store of a database."""
    outbox = Outbox(database)
    collections = Collections(database, lexical, embeddings)
    documents = Documents(database, collections, lexical, embeddings, outbox)
    return DocumentStore(
        database,
        lexical,
        embeddings,
        collections,
        documents,
        DocumentReads(database),
        outbox,
        UsageTable(database),
        OperationTable(database),
    )
