"""Vector search by pgvector, in stages.

Vectors are in the documents' own transaction, so a commit is all that a change needs. A search sees
one snapshot. It scans small collections and small sets of allowed rows in parts. In a graph it
reads on from one cursor, so that no stage repeats the work of another. pgvector ends such a walk
after ``hnsw.max_scan_tuples`` vectors, dead ones included. If too few of them are allowed, all
allowed rows are compared. Cells of an IVF index are searched with growing ``ivfflat.probes``.
"""

from __future__ import annotations

import logging
import math
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

import psycopg

from ragcache_core.errors import RagCacheError, Unavailable
from ragcache_core.retrieval.index_kinds import IndexKind
from ragcache_core.retrieval.stage_counts import StageCounts
from ragcache_retriever.search.staged_hits import STAGE_SHARES, StagedHits, slices
from ragcache_retriever.search.vector_index import IndexStage, Rows, Vectors
from ragcache_retriever.store.postgres.binary_types import (
    BigintArray,
    RealArray,
    rows_of,
)
from ragcache_retriever.store.postgres.cancellation import CancellableConnection
from ragcache_retriever.store.postgres.database import PostgresDatabase
from ragcache_retriever.store.postgres.index_builder import build, built_kind
from ragcache_retriever.store.postgres.schema import vector_table

log = logging.getLogger(__name__)

GRAPH_BATCH = 40
"""Vectors of a graph that the server reads at a time (ef_search)."""
GRAPH_BEAM = 320
"""Vectors that a complete search of a graph reads."""
SCANNED_ALLOWED_ROWS = 20_000
"""Allowed rows up to which all of them are compared. A graph would mostly find others."""
EXACT_ROWS, MIN_SHARE = 20_000, 1 / 16
"""Vectors of the cells that a complete search of an IVF index reads: the larger of both."""
CHECK_EVERY = 1000
"""Added rows after which the kind of the index is checked."""


class PgvectorIndex:
    """The vectors of one generation. See RowIndex."""

    def __init__(
        self,
        database: PostgresDatabase,
        generation: int,
        dimension: int,
        kind: IndexKind,
        one_build: threading.Lock,
        recall: float | None,
    ) -> None:
        self._database = database
        self._generation = generation
        self._table = vector_table(generation)
        self._dimension = dimension
        self._kind = kind
        self._one_build = one_build
        self._recall = recall
        self._building: threading.Thread | None = None
        self._lock = threading.Lock()
        self._added = 0
        self._counts = StageCounts()
        self._check_kind()

    def __len__(self) -> int:
        found = self._database.read_one(f"SELECT count(*) FROM {self._table}")
        return 0 if found is None else int(found[0])

    @property
    def kind(self) -> IndexKind:
        """The kind in use."""
        with self._database.connection() as connection:
            return built_kind(connection, self._generation)

    @property
    def memory_bytes(self) -> int:
        """Memory in this process: none."""
        return 0

    @property
    def is_building(self) -> bool:
        """Whether this process builds or checks an index."""
        building = self._building
        return building is not None and building.is_alive()

    def rows(self) -> Rows:
        """Return the sorted rows."""
        found = self._database.read_one(
            f"SELECT array_send(array_agg(row ORDER BY row)) FROM {self._table}"
        )
        return rows_of(None if found is None else found[0])

    def load(self, batches: Iterable[tuple[Rows, Vectors]]) -> None:
        """Do nothing: the document store has put them into the table."""

    def set_kind(self, kind: IndexKind) -> None:
        """Change the kind. The index is built in the background."""
        self._kind = kind
        self._check_kind()

    def apply(self, removed: Sequence[int], added: Sequence[int], vectors: Vectors) -> None:
        """Do nothing but check the kind: the document store has changed the table."""
        self._added += len(added)
        if self._added >= CHECK_EVERY:
            self._added = 0
            self._check_kind()

    def wait_until_built(self, timeout_s: float) -> None:
        """Wait until the background work has ended."""
        building = self._building
        if building is not None:
            building.join(timeout_s)

    def close(self) -> None:
        """Do nothing: the server goes on building."""

    def search(
        self,
        query: Vectors,
        top_k: int,
        *,
        allowed: Rows | None = None,
        recall: float | None = None,
        cancelled: Callable[[], bool] | None = None,
    ) -> Iterator[IndexStage]:
        """Yield the stages of a search. See VectorIndex."""
        hits = StagedHits(self._counts, top_k, self._recall if recall is None else recall)
        try:
            with (
                self._database.snapshot() as connection,
                connection.cancelled_by(cancelled),
            ):
                parts = _Parts(connection, self._generation, query, top_k, allowed)
                for found, progress, num_scored, is_last in parts.search():
                    if cancelled is not None and cancelled():
                        return
                    stage = hits.stage(found, progress, num_scored, is_last=is_last)
                    yield stage
                    if stage.final:
                        return
        except Unavailable as error:
            is_wanted = cancelled is None or not cancelled()
            if is_wanted or not isinstance(error.__cause__, psycopg.errors.QueryCanceled):
                raise

    def _check_kind(self) -> None:
        with self._lock:
            if not self.is_building:
                # A daemon, so that a build of minutes does not keep the process from ending.
                self._building = threading.Thread(target=self._build, name="pgvector", daemon=True)
                self._building.start()

    def _build(self) -> None:
        try:
            with self._one_build:
                built = None
                while built is not self._kind:  # it can change during a build
                    built = self._kind
                    build(self._database, self._generation, self._dimension, built)
        except RagCacheError as error:
            # The next check tries again; until then a search reads more vectors.
            log.warning("index: not built generation=%d error=%s", self._generation, error)
        except Exception:
            # The thread has no caller that could see it.
            log.exception("index: not built generation=%d", self._generation)


_Part = tuple[list[tuple[int, float]], float, int, bool]
"""Rows with scores, progress, number of compared vectors, and whether it is the last part."""


class _Parts:
    """The queries of one search, in one snapshot."""

    def __init__(
        self,
        connection: CancellableConnection,
        generation: int,
        query: Vectors,
        top_k: int,
        allowed: Rows | None,
    ) -> None:
        self._connection = connection
        self._generation = generation
        self._table = vector_table(generation)
        self._query = RealArray(query)
        self._top_k = top_k
        self._allowed = allowed

    def search(self) -> Iterator[_Part]:
        """Yield at least one part."""
        if self._allowed is not None and len(self._allowed) <= SCANNED_ALLOWED_ROWS:
            return self._scan_allowed(self._allowed)
        match built_kind(self._connection, self._generation):
            case IndexKind.HNSW:
                return self._walk()
            case IndexKind.IVF:
                return self._probe()
            case _:
                return self._scan() if self._allowed is None else self._scan_allowed(self._allowed)

    def _scan_allowed(self, allowed: Rows) -> Iterator[_Part]:
        for first, end in slices(len(allowed)):
            found = self._best("WHERE row = ANY(%s)", (BigintArray(allowed[first:end]),), ", row")
            progress = end / len(allowed) if len(allowed) else 1.0
            yield found, progress, end, end == len(allowed)

    def _scan(self) -> Iterator[_Part]:
        self._set({"enable_indexscan": "off"})
        [(num_pages, num_rows)] = self._connection.execute(
            "SELECT pg_relation_size(oid) / current_setting('block_size')::bigint,"
            " greatest(reltuples, 0)::bigint FROM pg_class WHERE oid = %s::regclass",
            (self._table,),
        ).fetchall()
        for first, end in slices(num_pages):
            is_last = end == num_pages
            # Rows that are added during the scan are in no snapshot.
            condition = "WHERE ctid >= %s::tid" + ("" if is_last else " AND ctid < %s::tid")
            pages = [f"({first},0)"] if is_last else [f"({first},0)", f"({end},0)"]
            progress = end / num_pages if num_pages else 1.0
            yield (
                self._best(condition, pages, ", row"),
                progress,
                round(progress * num_rows),
                is_last,
            )

    def _walk(self) -> Iterator[_Part]:
        beam = max(GRAPH_BEAM, 4 * self._top_k)
        batch = max(GRAPH_BATCH, self._top_k // 2)
        self._set(
            {
                "enable_seqscan": "off",
                "enable_sort": "off",
                "enable_bitmapscan": "off",
                "hnsw.iterative_scan": "relaxed_order",
                "hnsw.ef_search": min(batch, 1000),
            }
        )
        condition = "" if self._allowed is None else "WHERE row = ANY(%s)"
        parameters = () if self._allowed is None else (BigintArray(self._allowed),)
        self._connection.execute(
            f"DECLARE found NO SCROLL CURSOR FOR SELECT row, -(vector <#> %s::real[]::vector)"
            f" FROM {self._table} {condition} ORDER BY vector <#> %s::real[]::vector",
            (self._query, *parameters, self._query),
        )
        for first, end in slices(beam):
            found = self._connection.execute(
                f"FETCH FORWARD {end - first} FROM found", binary=True
            ).fetchall()
            num_found = first + len(found)
            hits = [(row, score) for row, score in found]
            if num_found < min(end, self._top_k):
                yield from self._compare_all(hits, first / beam)
                return
            is_last = end == beam or num_found < end
            yield hits, end / beam, end, is_last
            if is_last:
                return

    def _compare_all(self, hits: list[tuple[int, float]], progress: float) -> Iterator[_Part]:
        """Go on after a walk that has ended early, by comparing all rows that may be found.

        Args:
            hits: Of the walk since its last part.
            progress: At the end of that part. The walk counts as no further progress.
        """
        # Without index scans, so that no query uses the graph again. A bitmap finds rows by number.
        self._set(
            {
                "enable_indexscan": "off",
                "enable_bitmapscan": "on",
                "enable_seqscan": "on",
                "enable_sort": "on",
            }
        )
        parts = self._scan() if self._allowed is None else self._scan_allowed(self._allowed)
        for found, share, num_scored, is_last in parts:
            so_far = 1.0 if is_last else progress + share * (1.0 - progress)
            yield hits + found, so_far, num_scored, is_last
            hits = []

    def _probe(self) -> Iterator[_Part]:
        [(num_rows,)] = self._connection.execute(f"SELECT count(*) FROM {self._table}").fetchall()
        num_cells = max(1, math.isqrt(num_rows))
        share = min(1.0, max(MIN_SHARE, EXACT_ROWS / max(1, num_rows)))
        num_probes = max(1, math.ceil(share * num_cells))
        scan = "off" if self._allowed is None else "relaxed_order"
        self._set({"enable_seqscan": "off", "enable_sort": "off", "ivfflat.iterative_scan": scan})
        condition = "" if self._allowed is None else "WHERE row = ANY(%s)"
        parameters = () if self._allowed is None else (BigintArray(self._allowed),)
        num_scored = 0
        # Each query begins again, so a stage in the middle would cost half of a search.
        for probes in sorted({max(1, round(STAGE_SHARES[0] * num_probes)), num_probes}):
            self._set({"ivfflat.probes": min(probes, 32768)})
            num_scored += round(probes / num_cells * num_rows)
            found = self._best(condition, parameters)
            yield found, probes / num_probes, num_scored, probes == num_probes

    def _set(self, settings: Mapping[str, str | int]) -> None:
        """Change settings until the end of the search, in one message."""
        self._connection.execute(
            "; ".join(f"SET LOCAL {name} = {value}" for name, value in settings.items()),
            prepare=False,
        )

    def _best(
        self, condition: str, parameters: Sequence[object], order: str = ""
    ) -> list[tuple[int, float]]:
        found = self._connection.execute(
            f"SELECT row, -(vector <#> %s::real[]::vector) FROM {self._table} {condition}"
            f" ORDER BY vector <#> %s::real[]::vector{order} LIMIT %s",
            (self._query, *parameters, self._query, self._top_k),
            binary=True,
        ).fetchall()
        return [(row, score) for row, score in found]


class PgvectorIndexes:
    """The indexes of a database. The document store creates and drops their tables.

    Args:
        recall: Of searches that declare none. None: they finish.
    """

    def __init__(self, database: PostgresDatabase, recall: float | None = None) -> None:
        self._database = database
        self._recall = recall
        self._one_build = threading.Lock()

    def open(self, generation: int, dimension: int, kind: IndexKind) -> PgvectorIndex:
        """Return the index of a generation."""
        return PgvectorIndex(
            self._database, generation, dimension, kind, self._one_build, self._recall
        )

    def remove(self, generation: int) -> None:
        """Do nothing: the document store drops the table."""

    def stored_generations(self) -> list[int]:
        """Return none: the document store knows them."""
        return []
