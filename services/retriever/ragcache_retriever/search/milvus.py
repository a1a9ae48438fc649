"""Vector search by Milvus, with growing effort.

Documents stay in the document store. Milvus holds one of its collections for each generation, named
by the data folder's identity, and its owner completes it after each start. Milvus has no
transactions: rows are added before others are removed, and consistency level Strong lets each query
see all acknowledged changes.

A search of cells or of a graph has two queries, a small and a complete one. Milvus cannot continue
a query, so the small one is the price of an early result. A scan of all vectors has one query.

A query states the rows that may be found as ranges and a short list. Many scattered rows do not fit
into one condition. Then Milvus is asked for more hits without it, and the allowed ones are kept. If
even the most hits of a query have too few of them, several queries have a part of the rows each.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, Final, TypeVar
from urllib.parse import unquote, urlsplit

import grpc
import numpy as np
from pymilvus import DataType, MilvusClient, MilvusException
from typing_extensions import override

from ragcache_core.errors import InvalidInput, Unavailable
from ragcache_core.retrieval.index_kinds import IndexKind
from ragcache_core.retrieval.stage_counts import StageCounts
from ragcache_retriever.search.staged_hits import StagedHits
from ragcache_retriever.search.vector_index import (
    IndexStage,
    RowIndex,
    Rows,
    VectorIndexes,
    Vectors,
)

MAX_RANGES = 64
"""Most ranges in a condition. Milvus parses a chain of "or" recursively."""
MAX_LISTED_ROWS = 8192
"""Most rows that a condition lists."""
MIN_RANGE_ROWS = 32
"""A run of at least this many consecutive rows is a range. The rows of shorter ones are listed."""
T = TypeVar("T")
URL_SETTING = "RAGCACHE_BACKEND_URL"
SEARCH_LIMIT_S = 10.0
ROWS_LIMIT_S = 10.0
"""Longest time of a change of rows. A document waits for it, and the index can catch up later."""
CHANGE_LIMIT_S = 60.0
"""Longest time of a change of a collection or its index."""
FIRST_SHARE = 1 / 8
NUM_CELLS, PROBED_CELLS = 128, 64
GRAPH_LINKS, GRAPH_BUILD_BEAM, GRAPH_BEAM = 16, 128, 160
MAX_HITS = 16_384
"""Most hits of one query of Milvus."""
GROWTH = 4
"""Factor between the hits of two queries that are filtered after the search."""
BATCH_BYTES = 4 << 20
"""Bytes of vectors that one call inserts. A message has 64 MiB at most."""
READ_ROWS = 8192
_NOT_LOADED = 101
"""Code of Milvus for a collection that is in no memory, such as after some restarts."""
RECONNECT: Final = {"grpc.max_reconnect_backoff_ms": 5000}
"""gRPC waits up to two minutes before it connects again to a server that was away."""
NO_PINGS: Final = {
    "grpc.keepalive_time_ms": (1 << 31) - 1,
    "grpc.keepalive_permit_without_calls": False,
}
"""pymilvus pings its server every ten seconds. Milvus allows that, and milvus-lite closes a
connection that is idle meanwhile. Its server is a process of this machine, which needs no pings."""
_ROW, _VECTOR = "row", "vector"
_INDEX_TYPES = {IndexKind.FLAT: "FLAT", IndexKind.IVF: "IVF_FLAT", IndexKind.HNSW: "HNSW"}
_BUILD: dict[IndexKind, dict[str, int]] = {
    IndexKind.FLAT: {},
    IndexKind.IVF: {"nlist": NUM_CELLS},
    IndexKind.HNSW: {"M": GRAPH_LINKS, "efConstruction": GRAPH_BUILD_BEAM},
}


def row_conditions(field: str, rows: Rows) -> Iterator[str]:
    """Yield conditions that are true for the rows, each row by exactly one of them.

    Args:
        field: Name of the field that has the row.
        rows: Sorted, without repetitions.
    """
    if not len(rows):
        return
    breaks = np.flatnonzero(np.diff(rows) != 1) + 1
    first = np.concatenate([[0], breaks])
    end = np.concatenate([breaks, [len(rows)]])
    is_range = end - first >= MIN_RANGE_ROWS
    num_ranges = np.concatenate([[0], np.cumsum(is_range)])
    num_listed = np.concatenate([[0], np.cumsum(np.where(is_range, 0, end - first))])
    run = 0
    while run < len(first):
        last_run = min(
            int(np.searchsorted(num_ranges, num_ranges[run] + MAX_RANGES, side="right")),
            int(np.searchsorted(num_listed, num_listed[run] + MAX_LISTED_ROWS, side="right")),
        )
        part = slice(run, last_run - 1)
        yield _condition(field, rows, first[part], end[part], is_range[part])
        run = last_run - 1


def span(field: str, rows: Rows) -> str:
    """Return the condition for all rows from the first to the last one of a set."""
    return _between(field, int(rows[0]), int(rows[-1]))


def _condition(field: str, rows: Rows, first: Rows, end: Rows, is_range: Rows) -> str:
    """Return the condition for runs of consecutive rows.

    Args:
        first: Index of the first row of each run, shape (num_runs,).
        end: Index after its last row, shape (num_runs,).
        is_range: Whether the run is a range, shape (num_runs,).
    """
    parts: list[str] = []
    listed: list[int] = []
    for i, j, range_ in zip(first.tolist(), end.tolist(), is_range.tolist(), strict=True):
        if range_:
            parts.append(_between(field, int(rows[i]), int(rows[j - 1])))
        else:
            listed += rows[i:j].tolist()
    if listed:
        parts.append(f"{field} in [{','.join(map(str, listed))}]")
    return " or ".join(parts)


def _between(field: str, first: int, last: int) -> str:
    return f"({field} >= {first} and {field} <= {last})"


class MilvusIndex(RowIndex):
    """The vectors of one generation in a collection of Milvus."""

    def __init__(
        self,
        client: MilvusClient,
        name: str,
        dimension: int,
        kind: IndexKind,
        recall: float | None,
    ) -> None:
        self._client = client
        self._recall = recall
        self._name = name
        self._dimension = dimension
        self._kind = _used_kind(kind)
        self._counts = StageCounts()
        self._is_changing_kind = False
        with _errors():
            self._create()

    def __len__(self) -> int:
        found = self._loaded(
            lambda: self._client.query(
                self._name, filter="", output_fields=["count(*)"], timeout=SEARCH_LIMIT_S
            )
        )
        return int(found[0]["count(*)"])

    @property
    @override
    def kind(self) -> IndexKind:
        return self._kind

    @property
    @override
    def memory_bytes(self) -> int:
        return 0  # in this process

    @property
    @override
    def is_building(self) -> bool:
        return False  # Milvus builds by itself, and searches what is not indexed yet completely

    @override
    def rows(self) -> Rows:
        return np.array(sorted(self._loaded(self._read_rows)), np.int64)

    @override
    def load(self, batches: Iterable[tuple[Rows, Vectors]]) -> None:
        with _errors():
            self._client.drop_collection(self._name, timeout=CHANGE_LIMIT_S)
            self._create()
        for rows, vectors in batches:
            self._add(rows.tolist(), vectors)

    @override
    def set_kind(self, kind: IndexKind) -> None:
        # Searches of this collection are unavailable for a moment.
        wanted = _used_kind(kind)
        if wanted is self._kind:
            return
        self._is_changing_kind = True
        try:
            with _errors():
                self._client.release_collection(self._name, timeout=CHANGE_LIMIT_S)
                self._client.drop_index(self._name, _VECTOR, timeout=CHANGE_LIMIT_S)
                self._client.create_index(
                    self._name, self._index_of(wanted), timeout=CHANGE_LIMIT_S
                )
                self._client.load_collection(self._name, timeout=CHANGE_LIMIT_S)
        finally:
            self._is_changing_kind = False
        self._kind = wanted
        self._counts = StageCounts()

    @override
    def apply(self, removed: Sequence[int], added: Sequence[int], vectors: Vectors) -> None:
        gone = sorted(set(removed) - set(added))
        self._add(added, vectors)
        if gone:
            with _errors():
                self._client.delete(self._name, ids=gone, timeout=ROWS_LIMIT_S)

    @override
    def close(self) -> None:
        pass  # Milvus keeps the collection

    @override
    def search(
        self,
        query: Vectors,
        top_k: int,
        *,
        allowed: Rows | None = None,
        recall: float | None = None,
        cancelled: Callable[[], bool] | None = None,
    ) -> Iterator[IndexStage]:
        # Milvus ends no query early, so ``cancelled`` is asked between queries only.
        hits = StagedHits(self._counts, top_k, self._recall if recall is None else recall)
        if allowed is not None and not len(allowed):
            yield hits.stage([], 1.0, 0, is_last=True)
            return
        num_scored = 0
        efforts = self._efforts(top_k)
        for effort, parameters in efforts:
            if cancelled is not None and cancelled():
                return
            is_last = effort == efforts[-1][0]
            batches = self._batches(query, min(top_k, MAX_HITS), allowed, parameters, is_last)
            found: list[tuple[int, float]] = []
            for batch in batches:
                found += batch
                if cancelled is not None and cancelled():
                    return
            num_scored += effort
            stage = hits.stage(found, effort / efforts[-1][0], num_scored, is_last=is_last)
            yield stage
            if stage.final:
                return

    def _efforts(self, top_k: int) -> list[tuple[int, dict[str, int]]]:
        """Return the effort of each query, ascending, and its parameters."""
        match self._kind:
            case IndexKind.HNSW:
                beam = max(GRAPH_BEAM, 2 * top_k)
                first = max(round(FIRST_SHARE * beam), top_k)
                return [(first, {"ef": first}), (beam, {"ef": beam})]
            case IndexKind.IVF:
                probes = (round(FIRST_SHARE * PROBED_CELLS), PROBED_CELLS)
                return [(one, {"nprobe": one}) for one in probes]
            case _:
                return [(1, {})]

    def _batches(
        self,
        query: Vectors,
        top_k: int,
        allowed: Rows | None,
        parameters: dict[str, int],
        is_complete: bool,
    ) -> Iterator[list[tuple[int, float]]]:
        """Yield hits, after each query. The best ones of all are what one filtered query finds.

        Args:
            is_complete: Whether there have to be ``top_k`` hits if there are as many rows.
        """
        if allowed is None:
            yield self._best(query, top_k, "", parameters)
            return
        conditions = row_conditions(_ROW, allowed)
        first = next(conditions)
        second = next(conditions, None)
        if second is None:
            yield self._best(query, top_k, first, parameters)
            return
        limit = _first_limit(top_k, allowed)
        while True:
            found = self._best(query, limit, span(_ROW, allowed), parameters)
            kept = _only(found, allowed)
            if len(kept) >= top_k or not is_complete:
                yield kept[:top_k]
                return
            if limit == MAX_HITS:
                break
            yield kept
            limit = min(MAX_HITS, GROWTH * limit)
        for condition in itertools.chain((first, second), conditions):
            yield self._best(query, top_k, condition, parameters)

    def _best(
        self, query: Vectors, limit: int, condition: str, parameters: dict[str, int]
    ) -> list[tuple[int, float]]:
        if "ef" in parameters:  # no smaller than the number of hits
            parameters = {"ef": max(parameters["ef"], limit)}
        [found] = self._loaded(
            lambda: self._client.search(
                self._name,
                [query],
                filter=condition,
                limit=limit,
                output_fields=[_ROW],
                search_params={"metric_type": "IP", "params": parameters},
                timeout=SEARCH_LIMIT_S,
            )
        )
        return [(int(hit[_ROW]), float(hit["distance"])) for hit in found]

    def _read_rows(self) -> list[int]:
        pages = self._client.query_iterator(
            self._name, batch_size=READ_ROWS, filter=f"{_ROW} >= 0", output_fields=[_ROW]
        )
        found: list[int] = []
        try:
            while page := pages.next():
                found += [int(one[_ROW]) for one in page]
        finally:
            pages.close()
        return found

    def _loaded(self, read: Callable[[], T]) -> T:
        """Return what is read, and load the collection before if Milvus has released it."""
        with _errors():
            try:
                return read()
            except MilvusException as error:
                if error.code != _NOT_LOADED or self._is_changing_kind:
                    raise
            self._client.load_collection(self._name, timeout=SEARCH_LIMIT_S)
            return read()

    def _add(self, rows: Sequence[int], vectors: Vectors) -> None:
        step = max(1, BATCH_BYTES // (4 * self._dimension))
        for first in range(0, len(rows), step):
            pairs = zip(rows[first : first + step], vectors[first : first + step], strict=True)
            with _errors():
                # An upsert, because an interrupted change may have added some of them.
                self._client.upsert(
                    self._name,
                    [{_ROW: int(row), _VECTOR: vector} for row, vector in pairs],
                    timeout=ROWS_LIMIT_S,
                )

    def _create(self) -> None:
        if not self._client.has_collection(self._name, timeout=SEARCH_LIMIT_S):
            schema = MilvusClient.create_schema(auto_id=False, enable_dynamic_field=False)
            schema.add_field(_ROW, DataType.INT64, is_primary=True)
            schema.add_field(_VECTOR, DataType.FLOAT_VECTOR, dim=self._dimension)
            self._client.create_collection(
                self._name,
                schema=schema,
                index_params=self._index_of(self._kind),
                consistency_level="Strong",
                timeout=CHANGE_LIMIT_S,
            )
        self._client.load_collection(self._name, timeout=CHANGE_LIMIT_S)
        built = self._client.describe_index(self._name, _VECTOR, timeout=SEARCH_LIMIT_S)
        kinds = {index_type: kind for kind, index_type in _INDEX_TYPES.items()}
        wanted, self._kind = self._kind, kinds[built["index_type"]]
        self.set_kind(wanted)

    def _index_of(self, kind: IndexKind) -> Any:
        index = self._client.prepare_index_params()
        index.add_index(
            _VECTOR, index_type=_INDEX_TYPES[kind], metric_type="IP", params=_BUILD[kind]
        )
        return index


class MilvusIndexes(VectorIndexes):
    """The indexes of one data folder.

    Args:
        url: http(s)://USER:PASSWORD@HOST:PORT/DATABASE, or a file of milvus-lite, ending in ".db".
        identity: Of the data folder, letters and digits.
        recall: Of searches that declare none. None: they finish.

    Raises:
        InvalidInput: The URL is neither.
    """

    def __init__(self, url: str, identity: str, recall: float | None = None) -> None:
        self._recall = recall
        self._arguments = client_arguments(url)
        self._prefix = f"ragcache_{identity}_"
        self._connected: MilvusClient | None = None

    @override
    def open(self, generation: int, dimension: int, kind: IndexKind) -> MilvusIndex:
        name = f"{self._prefix}{generation}"
        return MilvusIndex(self._client, name, dimension, kind, self._recall)

    @override
    def remove(self, generation: int) -> None:
        with _errors():
            self._client.drop_collection(f"{self._prefix}{generation}", timeout=CHANGE_LIMIT_S)

    @override
    def stored_generations(self) -> list[int]:
        with _errors():
            names = self._client.list_collections(timeout=SEARCH_LIMIT_S)
        return sorted(
            int(name.removeprefix(self._prefix)) for name in names if name.startswith(self._prefix)
        )

    def close(self) -> None:
        """Close the connection."""
        if self._connected is not None:
            self._connected.close()

    @property
    def _client(self) -> MilvusClient:
        if self._connected is None:
            with _errors():
                self._connected = MilvusClient(timeout=SEARCH_LIMIT_S, **self._arguments)
        return self._connected


def _first_limit(top_k: int, allowed: Rows) -> int:
    """Return for how many hits to ask, so that about twice ``top_k`` are allowed ones."""
    num_rows = int(allowed[-1]) - int(allowed[0]) + 1
    return min(MAX_HITS, -(-2 * top_k * num_rows // len(allowed)))


def _only(found: list[tuple[int, float]], allowed: Rows) -> list[tuple[int, float]]:
    """Return the hits that are allowed, in their order."""
    rows = np.array([row for row, _ in found], np.int64)
    i = np.minimum(np.searchsorted(allowed, rows), len(allowed) - 1)
    return list(itertools.compress(found, allowed[i] == rows))


def _used_kind(kind: IndexKind) -> IndexKind:
    # Milvus scans segments without an index, so a graph serves small collections, too.
    return IndexKind.HNSW if kind is IndexKind.AUTO else kind


def client_arguments(url: str) -> dict[str, Any]:
    """Return the arguments of a client for a URL."""
    if url.endswith(".db") and "://" not in url:
        return {"uri": str(Path(url).absolute()), "grpc_options": RECONNECT | NO_PINGS}
    with contextlib.suppress(ValueError):
        parts = urlsplit(url)
        if parts.scheme in ("http", "https") and parts.hostname:
            port = parts.port or 19530
            arguments: dict[str, Any] = {
                "uri": f"{parts.scheme}://{parts.hostname}:{port}",
                "grpc_options": RECONNECT,
            }
            if parts.username:
                password = unquote(parts.password or "")
                arguments["token"] = f"{unquote(parts.username)}:{password}"
            if parts.path.strip("/"):
                arguments["db_name"] = parts.path.strip("/")
            return arguments
    raise InvalidInput(
        URL_SETTING, "is no URL of Milvus", "set http://USER:PASSWORD@HOST:19530/DATABASE"
    )


@contextlib.contextmanager
def _errors() -> Iterator[None]:
    try:
        yield
    except (MilvusException, grpc.RpcError) as error:
        problem = " ".join(str(error).split())
        if isinstance(error, grpc.Call):
            problem = str(error.code().name)  # its text has many lines
        raise Unavailable("Milvus", f"{problem} ({URL_SETTING})") from error
