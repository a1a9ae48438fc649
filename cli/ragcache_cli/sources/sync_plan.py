"""What a sync is to do, and what it did: pure decisions about sources and what is held already."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass

from ragcache_cli.clients.collection_client import Held
from ragcache_cli.commands.documents import DocumentFile
from ragcache_cli.sources.reading import Reading
from ragcache_core.errors import InvalidInput, RagCacheError

OWNER = "ragcache-source"
"""Metadata key that says which RagCollection a document belongs to, as NAMESPACE/NAME."""
ORIGIN = "ragcache-origin"
"""Metadata key that says which of its sources a document came from."""
DIGEST = "ragcache-digest"
"""Metadata key with a digest of what was sent."""

WELL, PARTLY, MISTAKE = 0, 1, 2
MOST_RESULT_BYTES = 4096
"""What Kubernetes keeps of a container's termination message."""
_LONGEST_PROBLEM = 300


@dataclass(frozen=True, slots=True)
class Failure:
    """Something that did not come over. source, document: empty where it was neither's fault."""

    source: str
    document: str
    problem: str


@dataclass(frozen=True, slots=True)
class Result:
    """What a sync did.

    documents, chunks: that the owner has in the collection now. finished: whether every source and
    document was tried; else the gateway was lost on the way. revision: names what was read.
    """

    finished: bool
    documents: int = 0
    chunks: int = 0
    written: int = 0
    unchanged: int = 0
    deleted: int = 0
    revision: str = ""
    failures: tuple[Failure, ...] = ()

    @property
    def exit_status(self) -> int:
        """0 when all went well, else 1: another try may do better."""
        return PARTLY if self.failures or not self.finished else WELL

    def to_json(self, most_bytes: int = MOST_RESULT_BYTES) -> str:
        """One JSON object within a bound: as many failures as fit, and the number of all."""
        whole = asdict(self)
        shown: list[dict[str, str]] = []
        whole["failures"] = shown
        whole["failureCount"] = len(self.failures)
        text = json.dumps(whole)
        for failure in self.failures:
            shown.append({name: _short(value) for name, value in asdict(failure).items()})
            longer = json.dumps(whole)
            if len(longer) > most_bytes:
                break
            text = longer
        return text


@dataclass(frozen=True, slots=True)
class Wanted:
    """A document that a source has. id: its own in the collection; file: where its text is."""

    id: str
    origin: str
    file: DocumentFile


@dataclass(frozen=True, slots=True)
class Gathered:
    """All sources as they were read.

    claimed: ids that a source has a document for, readable or not: what they hold stays.
    well: origins of the sources that were read; whole: whether that is all of them. revision: of
    a sole source that has one.
    """

    wanted: tuple[Wanted, ...]
    claimed: frozenset[str]
    failures: tuple[Failure, ...]
    well: frozenset[str]
    whole: bool
    revision: str


def gather(readings: Iterable[tuple[str, str, Reading | RagCacheError]]) -> Gathered:
    """Sources put together. readings: origin, prefix and contents of each, or why there are none.

    An id is a document's path in its source; where there are several sources the source's prefix
    comes before it. Of two documents that come to one id the first keeps it.
    """
    every = list(readings)
    holders: dict[str, Wanted] = {}
    claimed: dict[str, str] = {}
    failures: list[Failure] = []
    well: set[str] = set()
    for origin, prefix, reading in every:
        if isinstance(reading, RagCacheError):
            failures.append(Failure(origin, "", said(reading)))
            continue
        well.add(origin)
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
        revision=sole.revision if isinstance(sole, Reading) else "",
    )


def obsolete(held: Mapping[str, Holding], owner: str, gathered: Gathered) -> list[str]:
    """Ids of the owner's documents that no source has any more, by id.

    While a source cannot be read, only documents of the others go: those it had, and those of
    sources that are no longer named, may be what it will bring.
    """
    return [
        key
        for key in sorted(held)
        if held[key].owner == owner
        and key not in gathered.claimed
        and (gathered.whole or held[key].origin in gathered.well)
    ]


@dataclass(frozen=True, slots=True)
class Holding:
    """What a collection holds under an id. owner, origin, digest: empty for what no sync wrote."""

    owner: str
    origin: str
    digest: str
    chunks: int

    @classmethod
    def of(cls, held: Held) -> Holding:
        """As the document's metadata says."""
        owner, origin, digest = (held.metadata.get(key, "") for key in (OWNER, ORIGIN, DIGEST))
        return cls(owner, origin, digest, held.chunks)


def said(error: RagCacheError) -> str:
    """An error in words, without the name of what it is about."""
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
