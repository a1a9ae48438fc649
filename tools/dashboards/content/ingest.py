"""Documents: how many are written, how long that takes, and what is stored."""

from __future__ import annotations

from typing import Final

from ragcache_wire.telemetry.catalogue import gateway, retriever
from tools.dashboards.dashboard import Dashboard, Section
from tools.dashboards.panel import Panel, Query
from tools.dashboards.promql import RAGCACHES, highest, quantile, rate, series, total

_BY_CACHE: Final = ("namespace", "ragcache")

DASHBOARD: Final = Dashboard(
    "ingest",
    "Ingest",
    "Documents that are written and deleted, and what is stored.",
    [
        Section(
            "Writes",
            [
                Panel(
                    "Documents written",
                    "By outcome. unchanged documents cost almost nothing.",
                    [Query(total(rate(retriever.UPSERTS, *RAGCACHES), "outcome"), "{{outcome}}")],
                    unit="ops",
                    stacked=True,
                ),
                Panel(
                    "Time to write a document",
                    "To split, embed and store it.",
                    [
                        Query(
                            quantile(share, retriever.UPSERT_DURATION, *RAGCACHES),
                            f"p{share * 100:g}",
                        )
                        for share in (0.5, 0.95)
                    ],
                    unit="s",
                ),
                Panel(
                    "Chunks and text written",
                    "Per second.",
                    [
                        Query(total(rate(retriever.INGESTED_CHUNKS, *RAGCACHES)), "chunks"),
                        Query(total(rate(retriever.INGESTED_SIZE, *RAGCACHES)), "bytes of text"),
                    ],
                ),
                Panel(
                    "Documents deleted",
                    "By outcome.",
                    [Query(total(rate(retriever.DELETES, *RAGCACHES), "outcome"), "{{outcome}}")],
                    unit="ops",
                ),
                Panel(
                    "Documents that are prepared again",
                    "After a change of chunking, tokenizer or embedder.",
                    [
                        Query(
                            highest(series(retriever.REMAKE_WAITING, *RAGCACHES), *_BY_CACHE),
                            "{{ragcache}}",
                        )
                    ],
                ),
                Panel(
                    "Vectors that an index has missed",
                    "The index refused a change. The retriever repeats it until it succeeds.",
                    [
                        Query(
                            highest(series(retriever.INDEX_MISSED, *RAGCACHES), *_BY_CACHE),
                            "{{ragcache}}",
                        )
                    ],
                ),
                Panel(
                    "Requests about documents",
                    "In the gateway now.",
                    [
                        Query(
                            total(
                                series(
                                    gateway.REQUESTS_IN_FLIGHT,
                                    *RAGCACHES,
                                    'pool=~"document|batch|backup"',
                                ),
                                "pool",
                            ),
                            "{{pool}}",
                        )
                    ],
                ),
            ],
        ),
        Section(
            "Stored",
            [
                Panel(
                    title,
                    text,
                    [Query(highest(series(row, *RAGCACHES), *_BY_CACHE), "{{ragcache}}")],
                    unit=unit,
                    kind="stat",
                    width=6,
                )
                for title, text, row, unit in (
                    ("Documents", "Of all collections.", retriever.DOCUMENTS, "short"),
                    ("Chunks", "That searches can find.", retriever.CHUNKS, "short"),
                    ("Text", "Of all documents.", retriever.TEXT_SIZE, "bytes"),
                    ("Collections", "Their number.", retriever.COLLECTIONS, "short"),
                )
            ]
            + [
                Panel(
                    "Space of the volume",
                    "Writes fail when none is free.",
                    [
                        Query(series(retriever.DISK_FREE, *RAGCACHES), "{{pod}}: free"),
                        Query(series(retriever.DISK_USED, *RAGCACHES), "{{pod}}: documents"),
                    ],
                    unit="bytes",
                    width=24,
                )
            ],
        ),
    ],
    retriever.UPSERTS,
)
