"""Instruments of the retriever."""

from __future__ import annotations

from typing import Final

from ragcache_wire.telemetry.instrument import counter, gauge, histogram, one_of

_SECONDS: Final = (
    *(0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5),
    *(1.0, 2.5, 5.0, 10.0, 30.0, 60.0),
)
_OUTCOMES: Final = ("refused", "invalid", "unavailable", "cancelled", "failed")
"""refused: too many at once. invalid: the request is wrong, or names what does not exist."""

SEARCHES: Final = counter(
    "ragcache.retriever.searches",
    "{search}",
    "Searches by outcome. cancelled: the caller left before the final stage.",
    one_of("outcome", "answered", *_OUTCOMES),
)
SEARCH_DURATION: Final = histogram(
    "ragcache.retriever.search.duration",
    "s",
    "Time of the parts of an answered search: embed (the question), search (the index and the "
    "ranking), total (until the final stage was sent).",
    one_of("part", "embed", "search", "total"),
    buckets=_SECONDS,
)
SEARCH_STAGES: Final = counter(
    "ragcache.retriever.search.stages",
    "{stage}",
    "Stages of answered searches. A gateway can start to compute before the final one.",
    one_of("stage", "first", "between", "final"),
)
SEARCH_HITS: Final = counter(
    "ragcache.retriever.search.hits", "{chunk}", "Chunks that final stages returned."
)
UPSERTS: Final = counter(
    "ragcache.retriever.upserts",
    "{document}",
    "Documents written, by outcome. unchanged: the same content was stored already.",
    one_of("outcome", "changed", "unchanged", *_OUTCOMES),
)
UPSERT_DURATION: Final = histogram(
    "ragcache.retriever.upsert.duration",
    "s",
    "Time to split, embed and store a document that has changed.",
    buckets=_SECONDS,
)
INGESTED_CHUNKS: Final = counter(
    "ragcache.retriever.ingested.chunks", "{chunk}", "Chunks of documents that have changed."
)
INGESTED_SIZE: Final = counter(
    "ragcache.retriever.ingested.size", "By", "Bytes of the texts of documents that have changed."
)
DELETES: Final = counter(
    "ragcache.retriever.deletes",
    "{document}",
    "Documents deleted, by outcome.",
    one_of("outcome", "deleted", *_OUTCOMES),
)
SPLITTER_PROTECTIONS: Final = gauge(
    "ragcache.retriever.splitter_protections",
    "1",
    "Whether the processes that split documents run with a protection, 1 or 0: landlock keeps them "
    "from the files of the retriever, seccomp from the network and from other programs.",
    one_of("protection", "landlock", "seccomp"),
)
DOCUMENTS: Final = gauge(
    "ragcache.retriever.documents", "{document}", "Documents of all collections."
)
CHUNKS: Final = gauge("ragcache.retriever.chunks", "{chunk}", "Chunks that searches can find.")
TEXT_SIZE: Final = gauge("ragcache.retriever.text", "By", "Bytes of the texts of all documents.")
COLLECTIONS: Final = gauge("ragcache.retriever.collections", "{collection}", "Collections.")
REMAKE_WAITING: Final = gauge(
    "ragcache.retriever.remake.waiting",
    "{document}",
    "Documents that are still to be prepared again, after a change of chunking, tokenizer or "
    "embedder.",
)
INDEX_MISSED: Final = gauge(
    "ragcache.retriever.index.missed",
    "{vector}",
    "Vectors that indexes have yet to add or to remove, because they refused a change.",
)
DISK_USED: Final = gauge(
    "ragcache.retriever.disk.used", "By", "Bytes that the stored documents take."
)
DISK_FREE: Final = gauge(
    "ragcache.retriever.disk.free",
    "By",
    "Free space of the volume with the documents. PostgreSQL does not tell it.",
)
