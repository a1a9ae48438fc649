"""Pure decisions of a sync: what to write, what to delete, and its result."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass

from ragcache_cli.clients.gateway_client import CollectionDocument, DocumentContent
from ragcache_cli.sources.documents import DocumentFile, read_content, read_fields
from ragcache_cli.sources.reading import SourceContents
from ragcache_core.documents.formats import DocumentFormat
from ragcache_core.errors import InvalidInput, RagCacheError
from ragcache_core.retrieval.metadata import texts_of

OWNER = "ragcache-source"
"""Metadata key of the RagCollection that owns a document, as NAMESPACE/NAME."""
ORIGIN = "ragcache-origin"
"""Metadata key of the source of a document."""
DIGEST = "ragcache-digest"
"""Metadata key of the digest of the document as sent."""
WARNINGS = "ragcache-warnings"
"""Metadata key of the warnings of the gateway, one a line."""

WELL, PARTLY, MISTAKE = 0, 1, 2
MOST_RESULT_BYTES = 4096
"""Kubernetes's limit for a container's termination message."""
_LONGEST_PROBLEM = 300


@dataclass(frozen=True, slots=True)
class Failure:
    """A failure or warning. ``source`` and ``document`` are empty if neither caused it."""

    source: str
    document: str
    problem: str


@dataclass(frozen=True, slots=True)
class Result:
    """The result of a sync.

    ``documents`` and ``chunks`` count what the owner has in the collection now. ``finished`` is
    False if the gateway was lost before every document was tried. ``revision`` names the content.
    ``skipped`` counts files of the sources that are no documents.
    ``warnings`` are of documents that are in the collection, written now or before.
    """

    finished: bool
    documents: int = 0
    chunks: int = 0
    written: int = 0
    unchanged: int = 0
    deleted: int = 0
    skipped: int = 0
    revision: str = ""
    failures: tuple[Failure, ...] = ()
    warnings: tuple[Failure, ...] = ()

    @property
    def exit_status(self) -> int:
        """Return 0 on success, else 1: a retry may succeed."""
        return PARTLY if self.failures or not self.finished else WELL

    def to_json(self, most_bytes: int = MOST_RESULT_BYTES) -> str:
        """Return one JSON object of bounded size: what fits of the failures and warnings."""
        whole = asdict(self) | {"failures": [], "warnings": []}
        whole["failureCount"] = len(self.failures)
        whole["warningCount"] = len(self.warnings)
        text = json.dumps(whole)
        lists = (("failures", self.failures), ("warnings", self.warnings))
        for name, one in ((name, one) for name, every in lists for one in every):
            whole[name].append({key: _short(value) for key, value in asdict(one).items()})
            longer = json.dumps(whole)
            if len(longer) > most_bytes:
                break
            text = longer
        return text


@dataclass(frozen=True, slots=True)
class Wanted:
    """A document of a source. ``id`` is its id in the collection; ``file`` has its text."""

    id: str
    origin: str
    file: DocumentFile


@dataclass(frozen=True, slots=True)
class Gathered:
    """All sources together.

    ``claimed`` are ids of documents that a source has, readable or not; these are not deleted.
    ``well`` are the sources that were read, and ``whole`` tells whether these are all.
    ``revision`` is that of a single source. ``skipped`` counts files that are no documents.
    """

    wanted: tuple[Wanted, ...]
    claimed: frozenset[str]
    failures: tuple[Failure, ...]
    well: frozenset[str]
    whole: bool
    revision: str
    skipped: int


def gather(readings: Iterable[tuple[str, str, SourceContents | RagCacheError]]) -> Gathered:
    """Combine the sources.

    An id is a document's path in its source, after the source's prefix if there are several. If
    two documents have the same id, the first one keeps it.

    Args:
        readings: Origin, prefix and contents of each source, or its error.
    """
    every = list(readings)
    holders: dict[str, Wanted] = {}
    claimed: dict[str, str] = {}
    failures: list[Failure] = []
    well: set[str] = set()
    skipped = 0
    for origin, prefix, reading in every:
        if isinstance(reading, RagCacheError):
            failures.append(Failure(origin, "", said(reading)))
            continue
        well.add(origin)
        skipped += reading.skipped
        before = f"{prefix}/" if len(every) > 1 else ""
        for refused in reading.refused:
            claimed.setdefault(f"{before}{refused.id}", origin)
            failures.append(Failure(origin, refused.id, refused.problem))
        for file in reading.files:
            key = f"{before}{file.id}"
            other = claimed.setdefault(key, origin)
            if key in holders or other != origin:
                problem = f"has the id {key!r}, as one of {other} has; rename one of them"
                failures.append(Failure(origin, file.id, problem))
            elif not _is_unicode(key):
                problem = "has a name that is not UTF-8; rename it"
                failures.append(
                    Failure(origin, file.id.encode("utf-8", "replace").decode(), problem)
                )
            else:
                holders[key] = Wanted(key, origin, file)
    sole = every[0][2] if len(every) == 1 else None
    return Gathered(
        tuple(holders[key] for key in sorted(holders)),
        frozenset(claimed),
        tuple(failures),
        frozenset(well),
        whole=len(well) == len({origin for origin, _, _ in every}),
        revision=sole.revision if isinstance(sole, SourceContents) else "",
        skipped=skipped,
    )


def obsolete(held: Mapping[str, OwnedDocument], owner: str, gathered: Gathered) -> list[str]:
    """Return the ids of the owner's documents that no source has any more.

    If a source cannot be read, only documents of the readable sources are obsolete. Documents of
    the unreadable source, and of sources that were removed, could be part of it.
    """
    return [
        key
        for key in sorted(held)
        if held[key].owner == owner
        and key not in gathered.claimed
        and (gathered.whole or held[key].origin in gathered.well)
    ]


@dataclass(frozen=True, slots=True)
class OwnedDocument:
    """A document of the collection. All fields are empty unless a sync wrote it."""

    owner: str
    origin: str
    digest: str
    chunks: int
    warnings: str = ""

    @classmethod
    def of(cls, held: CollectionDocument) -> OwnedDocument:
        """Read it from the document's metadata."""
        owner, origin, digest, warnings = (
            "\n".join(texts_of(held.metadata.get(key, "")))
            for key in (OWNER, ORIGIN, DIGEST, WARNINGS)
        )
        return cls(owner, origin, digest, held.chunks, warnings)


def said(error: RagCacheError) -> str:
    """Format an error without the name of its field."""
    if isinstance(error, InvalidInput):
        return f"{error.problem}; {error.fix}"
    return str(error)


def _short(text: str) -> str:
    return text if len(text) <= _LONGEST_PROBLEM else f"{text[: _LONGEST_PROBLEM - 3]}..."


def _is_unicode(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


_OWN_FIELDS = frozenset({"collection", "id"})
"""Fields of a line of JSON that the sync sets itself."""


def read_document(file: DocumentFile) -> tuple[DocumentContent, str]:
    """Read a document; return its content and its digest. Raises InvalidInput."""
    if file.kind is DocumentFormat.JSON_LINES:
        named = read_fields(file)
        fields = {name: value for name, value in named.items() if name not in _OWN_FIELDS}
        if not isinstance(fields.get("metadata", {}), dict):
            raise InvalidInput(file.where, "has metadata that is no JSON object", "correct it")
        canonical = json.dumps(fields, sort_keys=True).encode()
        return DocumentContent(fields), _digest(file.kind.media_type, canonical)
    media_type = file.kind.media_type
    content = read_content(file)
    return DocumentContent({"content_type": media_type}, content), _digest(media_type, content)


def _digest(media_type: str, content: bytes) -> str:
    return hashlib.blake2b(media_type.encode() + b"\0" + content, digest_size=16).hexdigest()
