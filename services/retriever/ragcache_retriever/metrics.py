"""The retriever's metrics: searches, writes, and the state of the knowledge base."""

from __future__ import annotations

import asyncio
import logging
from typing import Final

from ragcache_retriever.concurrency.background import attempted
from ragcache_retriever.knowledge_base.coordinator import KnowledgeBase
from ragcache_wire.sandbox import sandbox_support
from ragcache_wire.telemetry.catalogue import retriever as rows
from ragcache_wire.telemetry.metric_registry import Level, MetricRegistry

log = logging.getLogger(__name__)

PART: Final = "retriever"
LEVELS_INTERVAL_S: Final = 10.0
"""Interval of reads of the knowledge base's sizes. Prometheus usually reads as often."""


class Metrics:
    """The metrics of one retriever."""

    def __init__(self) -> None:
        registry = MetricRegistry(PART)
        self.collectors = registry.collectors
        self.searches = registry.counter(rows.SEARCHES)
        self.search_seconds = registry.histogram(rows.SEARCH_DURATION)
        self.search_stages = registry.counter(rows.SEARCH_STAGES)
        self.search_hits = registry.counter(rows.SEARCH_HITS)
        self.upserts = registry.counter(rows.UPSERTS)
        self.upsert_seconds = registry.histogram(rows.UPSERT_DURATION)
        self.ingested_chunks = registry.counter(rows.INGESTED_CHUNKS)
        self.ingested_bytes = registry.counter(rows.INGESTED_SIZE)
        self.deletes = registry.counter(rows.DELETES)
        protections = registry.gauge(rows.SPLITTER_PROTECTIONS)
        for name, has in sandbox_support().protections.items():
            protections.labels(name).set(has)
        # A size that is not known has no series: an alert would take 0 for a full disk.
        self._sizes: tuple[Level, ...] = ()
        registry.observe(lambda: self._sizes)

    async def follow(self, knowledge_base: KnowledgeBase) -> None:
        """Keep the sizes of a loaded knowledge base up to date until cancelled."""
        while True:
            await attempted(log, "metrics: sizes not read", self._read_sizes(knowledge_base))
            await asyncio.sleep(LEVELS_INTERVAL_S)

    async def _read_sizes(self, knowledge_base: KnowledgeBase) -> None:
        found = await knowledge_base.collections.infos()
        disk = await knowledge_base.disk()
        remakes = [one.remake for one in found]  # an empty message: there is none
        sizes = {
            rows.COLLECTIONS: len(found),
            rows.DOCUMENTS: sum(one.documents for one in found),
            rows.CHUNKS: sum(one.chunks for one in found),
            rows.TEXT_SIZE: sum(one.text_bytes for one in found),
            rows.REMAKE_WAITING: sum(one.documents - one.documents_done for one in remakes),
            rows.INDEX_MISSED: knowledge_base.num_missed,
            rows.DISK_USED: disk.used_bytes,
            rows.DISK_FREE: disk.free_bytes,
        }
        self._sizes = tuple((row, (), size) for row, size in sizes.items() if size is not None)
