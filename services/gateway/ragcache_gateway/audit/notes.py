"""What the parts of the gateway tell the audit log of the request that they serve."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar

from ragcache_core.access.audit import MAX_LINE_DOCUMENTS, AuditedDocument, key_digest
from ragcache_core.access.caller import Caller

_notes: ContextVar[AuditNotes | None] = ContextVar("audit_notes", default=None)


class AuditNotes:
    """Of one request.

    Args:
        on_full: Is called when a line has no room for more documents, and takes them.

    Attributes:
        object: What the action is about, such as the id of an answer. None: the path tells it.
        status: HTTP status of a failure after the response began; None: there was none.
    """

    def __init__(self, on_full: Callable[[], None]) -> None:
        self._on_full = on_full
        self._documents: dict[AuditedDocument, None] = {}
        self.caller: Caller | None = None
        self.collection: str | None = None
        self.object: str | None = None
        self.counts: dict[str, int] = {}
        self.status: int | None = None
        self.key_digest: str | None = None

    def add(self, document: AuditedDocument) -> None:
        """Note a document, once."""
        self._documents[document] = None
        if len(self._documents) >= MAX_LINE_DOCUMENTS:
            self._on_full()

    def take_documents(self) -> tuple[AuditedDocument, ...]:
        """Return the documents that were noted since the last call."""
        taken = tuple(self._documents)
        self._documents.clear()
        return taken


@contextmanager
def current(notes: AuditNotes) -> Iterator[None]:
    """Have all work inside note what it does."""
    token = _notes.set(notes)
    try:
        yield
    finally:
        _notes.reset(token)


def note_caller(caller: Caller) -> None:
    """Note who asks. Does nothing without an audit log, as the functions below."""
    if (notes := _notes.get()) is not None:
        notes.caller = caller


def note_unknown_key(key: str) -> None:
    """Note the key of a request that is not let in."""
    if (notes := _notes.get()) is not None:
        notes.key_digest = key_digest(key)


def note_collection(name: str) -> None:
    """Note the collection that a request names. Call it before it is known whether it may."""
    if (notes := _notes.get()) is not None:
        notes.collection = name


def note_object(text: str) -> None:
    """Note what the action is about."""
    if (notes := _notes.get()) is not None:
        notes.object = text


def note_documents(collection: str, ids: Iterable[str], use: str = "") -> None:
    """Note documents that the request read, wrote or deleted.

    Args:
        use: What became of them, see ``AuditedDocument``.
    """
    if (notes := _notes.get()) is not None:
        for one in ids:
            notes.add(AuditedDocument(collection, one, use))


def note_counts(**counts: int) -> None:
    """Note numbers of documents."""
    if (notes := _notes.get()) is not None:
        notes.counts |= counts


def note_status(status: int) -> None:
    """Note the HTTP status of what failed after the response had begun."""
    if (notes := _notes.get()) is not None:
        notes.status = status
