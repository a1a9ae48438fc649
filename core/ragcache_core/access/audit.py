"""What the audit log of a gateway has: who did what to which documents, and how it ended.

An event names documents and never has their text, nor that of questions and answers. Of a key that
is not known it has the first characters of the digest, which tell one key from another and nothing
of the key.
"""

from __future__ import annotations

import json
import math
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from enum import StrEnum
from typing import Any, Final

from ragcache_core.access.key_file import digest_of

STREAM_NAME: Final = "ragcache.audit"
"""Value of ``stream`` in every line. Collectors of standard output select the lines by it."""

MAX_LINE_DOCUMENTS: Final = 256
"""Documents of one line. An event with more of them has several lines."""

MAX_ID_CHARS: Final = 512
"""Characters of an id that a line has. Only ids that are refused are longer."""

KEY_DIGEST_CHARS: Final = 8
"""Of a SHA-256 in hexadecimal: too few to check a guess of a key against."""


class AuditAction(StrEnum):
    """What a request wants."""

    ANSWER = "answer"
    ANSWER_EXPLAIN = "answer.explain"
    SEARCH = "search"
    DOCUMENT_READ = "document.read"
    DOCUMENT_LIST = "document.list"
    DOCUMENT_WRITE = "document.write"
    DOCUMENT_BATCH = "document.batch"
    DOCUMENT_DELETE = "document.delete"
    DOCUMENT_ERASURE = "document.erasure"
    COLLECTION_READ = "collection.read"
    COLLECTION_WRITE = "collection.write"
    COLLECTION_DELETE = "collection.delete"
    BACKUP = "backup"
    RESTORE = "restore"
    QUALITY_WRITE = "quality.write"
    OTHER = "other"


CHANGES: Final = frozenset(
    {
        AuditAction.DOCUMENT_WRITE,
        AuditAction.DOCUMENT_BATCH,
        AuditAction.DOCUMENT_DELETE,
        AuditAction.COLLECTION_WRITE,
        AuditAction.COLLECTION_DELETE,
        AuditAction.BACKUP,
        AuditAction.RESTORE,
        AuditAction.QUALITY_WRITE,
    }
)
"""Actions that are refused while the log cannot be written: changes, and copies of all documents.
Other actions are recorded later."""

_EXACT: Final[Mapping[tuple[str, str], AuditAction]] = {
    ("POST", "/v1/chat/completions"): AuditAction.ANSWER,
    ("POST", "/v1/completions"): AuditAction.ANSWER,
    ("POST", "/v1/responses"): AuditAction.ANSWER,
    ("POST", "/v1/quality/captures"): AuditAction.ANSWER,
    ("POST", "/v1/search"): AuditAction.SEARCH,
    ("GET", "/v1/documents"): AuditAction.DOCUMENT_LIST,
    ("POST", "/v1/documents"): AuditAction.DOCUMENT_WRITE,
    ("POST", "/v1/documents:batch"): AuditAction.DOCUMENT_BATCH,
    ("POST", "/v1/erasure"): AuditAction.DOCUMENT_ERASURE,
    ("GET", "/v1/collections"): AuditAction.COLLECTION_READ,
    ("GET", "/v1/backup"): AuditAction.BACKUP,
    ("POST", "/v1/restore"): AuditAction.RESTORE,
    ("PUT", "/v1/quality/report"): AuditAction.QUALITY_WRITE,
}
_PREFIXES: Final[Sequence[tuple[str, Mapping[str, AuditAction]]]] = (
    (
        "/v1/documents/",
        {"GET": AuditAction.DOCUMENT_READ, "DELETE": AuditAction.DOCUMENT_DELETE},
    ),
    (
        "/v1/collections/",
        {
            "GET": AuditAction.COLLECTION_READ,
            "PUT": AuditAction.COLLECTION_WRITE,
            "PATCH": AuditAction.COLLECTION_WRITE,
            "DELETE": AuditAction.COLLECTION_DELETE,
        },
    ),
    ("/v1/requests/", {"GET": AuditAction.ANSWER_EXPLAIN}),
)


class AuditOutcome(StrEnum):
    """How a request ended."""

    DONE = "done"
    UNKNOWN_KEY = "unknown_key"
    FORBIDDEN = "forbidden"
    REFUSED = "refused"
    INVALID = "invalid"
    FAILED = "failed"
    DISCONNECTED = "disconnected"


_REFUSALS: Final = frozenset(
    {AuditOutcome.UNKNOWN_KEY, AuditOutcome.FORBIDDEN, AuditOutcome.REFUSED}
)


def action_of(method: str, path: str) -> AuditAction:
    """Return what a request wants. OTHER is recorded only if it is refused."""
    action = _EXACT.get((method, path))
    if action is not None:
        return action
    for prefix, by_method in _PREFIXES:
        if path.startswith(prefix):
            return by_method.get(method, AuditAction.OTHER)
    return AuditAction.OTHER


def outcome_of(status: int) -> AuditOutcome:
    """Return the outcome that an HTTP status tells; 499 is a client that has disconnected."""
    match status:
        case 401:
            return AuditOutcome.UNKNOWN_KEY
        case 403:
            return AuditOutcome.FORBIDDEN
        case 429:
            return AuditOutcome.REFUSED
        case 499:
            return AuditOutcome.DISCONNECTED
        case _ if status >= 500:
            return AuditOutcome.FAILED
        case _:
            return AuditOutcome.DONE if status < 400 else AuditOutcome.INVALID


def is_recorded(action: AuditAction, outcome: AuditOutcome) -> bool:
    """Whether the log has a request."""
    return action is not AuditAction.OTHER or outcome in _REFUSALS


def key_digest(key: str) -> str:
    """Return the first characters of a key's SHA-256."""
    return digest_of(key).hex()[:KEY_DIGEST_CHARS]


@dataclass(frozen=True, slots=True)
class AuditedDocument:
    """A document that a request touched.

    Attributes:
        use: ``cited``, ``used`` in a prompt, or what a batch did with it. Empty: the action says
            it.
    """

    collection: str
    id: str
    use: str = ""

    def fields(self) -> dict[str, str]:
        """Return its fields in a line."""
        found = {"collection": self.collection, "id": self.id[:MAX_ID_CHARS]}
        return found | {"use": self.use} if self.use else found


@dataclass(frozen=True, slots=True)
class AuditEvent:
    """One request.

    Attributes:
        unix_s: When it ended.
        request_id: Of the response's header ``X-Request-Id``.
        key: Name of the caller's key; None: the key is not known.
        key_digest: Beginning of the digest of a key that is not known; None: none was sent.
        tenant: Of the caller.
        address: Of the client's connection. Behind a proxy it is that of the proxy.
        collection: That the request names.
        object: What the action is about, such as the id of an answer, or the path.
        documents: That were read, written or deleted.
        counts: Of documents, where they are more than the ids.
    """

    unix_s: float
    request_id: str
    action: AuditAction
    outcome: AuditOutcome
    status: int
    method: str
    route: str
    address: str
    key: str | None = None
    key_digest: str | None = None
    tenant: str | None = None
    collection: str | None = None
    object: str | None = None
    documents: Sequence[AuditedDocument] = ()
    counts: Mapping[str, int] | None = None

    def parts(self) -> Iterator[AuditEvent]:
        """Yield the event, or several with a part of its documents each."""
        for start in range(0, max(1, len(self.documents)), MAX_LINE_DOCUMENTS):
            part = self.documents[start : start + MAX_LINE_DOCUMENTS]
            yield replace(self, documents=part)

    def fields(self) -> dict[str, Any]:
        """Return the fields of its line, without those that are not known."""
        time = datetime.fromtimestamp(self.unix_s, UTC).isoformat(timespec="milliseconds")
        found: dict[str, Any] = {
            "time": time.replace("+00:00", "Z"),
            "request_id": self.request_id,
            "action": self.action,
            "outcome": self.outcome,
            "status": self.status,
            "method": self.method,
            "route": self.route,
            "address": self.address,
            "key": self.key,
            "key_digest": self.key_digest,
            "tenant": self.tenant,
            "collection": None if self.collection is None else self.collection[:MAX_ID_CHARS],
            "object": None if self.object is None else self.object[:MAX_ID_CHARS],
            "documents": [one.fields() for one in self.documents] or None,
            "counts": dict(self.counts) if self.counts else None,
        }
        return {name: value for name, value in found.items() if value is not None}


LINE_START: Final = json.dumps({"stream": STREAM_NAME}).encode()[:-1]
"""First bytes of each line."""


def encode_line(fields: Mapping[str, Any], **more: int | str) -> bytes:
    """Return one line of the log. JSON in ASCII escapes line breaks and control characters."""
    return json.dumps({"stream": STREAM_NAME, **more, **fields}).encode() + b"\n"


@dataclass(slots=True)
class _Bucket:
    """Tokens that come back with time."""

    tokens: float
    at_s: float

    def take(self, now_s: float, size: float, per_s: float) -> bool:
        self.tokens = min(size, self.tokens + (now_s - self.at_s) * per_s)
        self.at_s = now_s
        if self.tokens < 1.0:
            return False
        self.tokens -= 1.0
        return True


class RefusalThrottle:
    """Bounds the lines of refused requests, so that a flood of them cannot fill a disk.

    Each source has lines of its own, so that one that floods does not hide another one. A line that
    is left out is counted, and the next line of the source has the count.

    Args:
        source_burst: Lines of a source at once.
        source_per_s: Lines of a source that come back each second.
        total_burst: Lines of all sources at once.
        total_per_s: Lines of all sources that come back each second.
        max_sources: Sources that are remembered, those refused last.
    """

    def __init__(
        self,
        source_burst: float = 20.0,
        source_per_s: float = 0.5,
        total_burst: float = 200.0,
        total_per_s: float = 5.0,
        max_sources: int = 1024,
    ) -> None:
        self._limit = (source_burst, source_per_s)
        self._total_limit = (total_burst, total_per_s)
        self._max_sources = max_sources
        self._total = _Bucket(total_burst, -math.inf)
        self._sources: OrderedDict[str, tuple[_Bucket, int]] = OrderedDict()

    def admit(self, source: str, now_s: float) -> int | None:
        """Return how many lines of a source were left out before this one; None: this one is, too.

        Args:
            source: A key's name, or an address.
            now_s: On a monotonic clock.
        """
        bucket, left_out = self._sources.pop(source, (_Bucket(self._limit[0], now_s), 0))
        admitted = bucket.take(now_s, *self._limit) and self._total.take(now_s, *self._total_limit)
        self._sources[source] = (bucket, 0 if admitted else left_out + 1)
        if len(self._sources) > self._max_sources:
            self._sources.popitem(last=False)
        return left_out if admitted else None


def throttle_source(event: AuditEvent) -> str | None:
    """Return the source of a refused request's line; None: the line is not bounded."""
    if event.outcome not in _REFUSALS:
        return None
    return f"address {event.address}" if event.key is None else f"key {event.key}"
