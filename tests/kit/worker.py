"""A ConnectorWorker over a fake paged cache and a fake store, for tests of the engine."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, cast

import torch

from ragcache_core.errors import Unavailable
from ragcache_core.identity.keys import KVSpace, VariantKey
from ragcache_core.identity.variant import (
    Miss,
    Origin,
    Provenance,
    Tier,
    ValuePart,
    VariantInfo,
)
from ragcache_core.store_api import AsOf, NewVariant, PutOutcome, ReportedUses
from ragcache_engine.kv_cache.device_event import DeviceEvent
from ragcache_engine.kv_cache.paged_cache import CacheShape, PagedCache, TokenRange
from ragcache_engine.kv_cache.value_tensors import native_bytes, value_shape
from ragcache_engine.protocol.context import EngineContext
from ragcache_engine.protocol.messages import (
    LoadJob,
    LoadOutcome,
    SaveJob,
    StepJobs,
    VariantSpan,
)
from ragcache_engine.worker.worker import ConnectorWorker
from ragcache_kv.store_client.sharded import ShardedStore
from ragcache_kv.values.buffers import checksummed_parts
from ragcache_kv.values.layout import FORMAT, value_bytes, value_parts
from ragcache_kv.values.outgoing_value import IncompleteValue, OutgoingRuns, OutgoingValue
from ragcache_kv.values.stored_value import Allocate, StoredValue
from ragcache_wire.settings import EngineSettings
from ragcache_wire.watched.members import FixedMembers
from tests.kit.store import matches_checksums
from tests.kit.wait import wait_until

if TYPE_CHECKING:
    from ragcache_engine.blend.components import BlendComponents
    from ragcache_engine.blend.joint_pass import JointPass

SPACE = KVSpace("model", num_layers=2, num_kv_heads=1, head_dim=4, dtype="bfloat16")
BLOCK = 32
BLOCKS = (7, 3, 5, 1, 2)
TIMEOUT_S = 60.0


def key(number: int) -> VariantKey:
    return VariantKey(bytes([number]) * 16, bytes(16))


def spans(*ends: int) -> tuple[VariantSpan, ...]:
    starts = (0, *ends)
    return tuple(VariantSpan(key(n), starts[n], end) for n, end in enumerate(ends))


def save_job(number: int, start: int, end: int) -> SaveJob:
    info = VariantInfo(end - start, value_bytes(SPACE, end - start), start, Provenance(exact=True))
    span = VariantSpan(key(number), start, end)
    origin = Origin((bytes(16),), None, "tenant", "c/a")
    return SaveJob("r", span, info, origin, {"shard:1": AsOf(bytes(16), number)}, BLOCKS)


class FakePagedCache:
    """A paged cache without packing. Each slot has a token [layers, 2, heads, dim]."""

    device = torch.device("cpu")

    def __init__(self) -> None:
        self.shape = CacheShape(1, BLOCK, 4, torch.bfloat16)
        self.num_layers = 2
        self.index_of = {"first": 0, "second": 1}
        self.slots_written: dict[int, torch.Tensor] = {}
        self.broken = False
        self.clock: Callable[[], float] = time.monotonic

    def slots(self, blocks: Sequence[int], start: int, end: int) -> torch.Tensor:
        return PagedCache.slots(cast("PagedCache", self), blocks, start, end)

    def record_event(self) -> DeviceEvent:
        return DeviceEvent(torch.device("cpu"), self.clock)

    def write(self, value: torch.Tensor, slots: torch.Tensor, first_layer: int = 0) -> None:
        if self.broken:
            raise RuntimeError("device error")
        for index, slot in enumerate(slots.tolist()):
            token = self.slots_written.setdefault(
                slot, torch.full((2, 2, 1, 4), torch.nan).bfloat16()
            )
            token[first_layer : first_layer + len(value)] = value[:, :, index]

    def read(self, blocks: Sequence[int], start: int, end: int) -> torch.Tensor:
        slots = self.slots(blocks, start, end).tolist()
        return torch.stack([self.slots_written[slot] for slot in slots], dim=2)

    def empty(self, num_tokens: int) -> torch.Tensor:
        return torch.zeros(2, 2, num_tokens, 1, 4, dtype=torch.bfloat16)

    def read_layers(
        self, tokens: Sequence[TokenRange], outs: Sequence[torch.Tensor], first_layer: int = 0
    ) -> None:
        if self.broken:
            raise RuntimeError("device error")
        for one, out in zip(tokens, outs, strict=True):
            value = self.read(one.blocks, one.start, one.end)
            out.copy_(value[first_layer : first_layer + len(out)])


class FakeStoreClient:
    """Holds values; every way a store can fail can be requested for."""

    def __init__(self) -> None:
        self.values: dict[VariantKey, StoredValue | Miss] = {}
        self.outage_after: int | None = None
        self.get_gate = threading.Event()
        self.get_gate.set()
        self.put_gate = threading.Event()
        self.put_gate.set()
        self.puts: list[NewVariant] = []
        self.put_bytes: list[bytes] = []
        self.lock = threading.Lock()
        self.put_s = 0.0
        self.put_outages = 0
        self.puts_timed_out = 0
        self.part_counts: list[int] = []
        self.costs_s: list[float] = []
        self.requested: list[list[VariantKey]] = []
        self.requested_exact: list[bool] = []
        self.was_read_to_end = False
        self.ended_gets = 0
        self.reported: list[ReportedUses] = []
        self.as_of: list[object] = []
        self.connects: Callable[[], object] = lambda: None

    def fill(self, wanted: Sequence[VariantSpan]) -> dict[VariantKey, torch.Tensor]:
        tensors = {}
        generator = torch.Generator().manual_seed(len(self.values))
        for span in wanted:
            length = span.end - span.start
            value = torch.randn(2, 2, length, 1, 4, generator=generator).bfloat16()
            raw = native_bytes(value)
            info = VariantInfo(length, len(raw), span.start, Provenance(exact=True))
            parts = checksummed_parts(raw, value_parts(SPACE, length))
            self.values[span.variant] = StoredValue(
                info, parts, value_shape(SPACE), FORMAT, raw, Tier.MEMORY
            )
            tensors[span.variant] = value
        return tensors

    def get(
        self,
        keys: Sequence[VariantKey],
        timeout_s: float,
        *,
        exact: bool,
        domain: str,
        fix_overheads: Mapping[VariantKey, float],
        allocate: Allocate | None = None,
    ) -> Iterator[tuple[VariantKey, StoredValue | Miss]]:
        self.requested.append(list(keys))
        self.requested_exact.append(exact)
        assert domain == "tenant"
        try:
            for number, wanted in enumerate(keys):
                self.get_gate.wait(TIMEOUT_S)
                if number == self.outage_after:
                    raise Unavailable("cachestore", "gone")
                yield wanted, self.values.get(wanted, Miss.EVICTED)
            self.was_read_to_end = True
        finally:
            self.ended_gets += 1

    def put(
        self, variant: NewVariant, value: OutgoingValue, timeout_s: float, *, as_of: object
    ) -> PutOutcome:
        self.put_gate.wait(TIMEOUT_S)
        with self.lock:
            if self.put_outages:
                self.put_outages -= 1
                raise Unavailable("cachestore", "gone")
        runs = OutgoingRuns(variant, value, time.monotonic() + (self.put_s or timeout_s))
        received = b""
        try:
            for run in runs:
                received += run
                self.part_counts.append(len(runs.checksums))
        except IncompleteValue:
            self.puts_timed_out += 1
            raise
        completion = runs.completion()
        parts = tuple(map(ValuePart, variant.part_bytes, completion.checksums))
        assert matches_checksums([memoryview(received)], parts)
        with self.lock:
            self.put_bytes.append(received)
            self.costs_s.append(completion.cost_s)
            self.as_of.append(as_of)
            self.puts.append(variant)
        return PutOutcome.STORED

    def report_uses(self, reports: Sequence[ReportedUses]) -> int:
        self.reported += reports
        return len(reports)

    def connect(self, timeout_s: float) -> None:
        self.connects()

    def transports(self) -> dict[str, str]:
        return {"shard:1": "shared"}

    def close(self) -> None:
        pass


class WorkerHarness:
    """Plays vLLM's part: polls until the load has ended."""

    def __init__(
        self,
        settings: EngineSettings | None = None,
        blend: BlendComponents | None = None,
        client: ShardedStore | None = None,
        joint_pass: JointPass | None = None,
        rank: int | None = None,
    ) -> None:
        """client: a client of a real store, instead of the fake one. rank: one of two."""
        self.cache, self.store = FakePagedCache(), FakeStoreClient()
        self.connector = ConnectorWorker(
            EngineContext(
                settings or EngineSettings(cachestore=FixedMembers(())),
                SPACE if rank is None else replace(SPACE, num_ranks=2),
                rank=rank or 0,
            ),
            cast("PagedCache", self.cache),
            client or cast("ShardedStore", self.store),
            blend,
            joint_pass,
        )

    def load(self, job: LoadJob) -> LoadOutcome:
        self.connector.start_loads(StepJobs(loads=(job,)))
        return self.wait_for_outcome(job.request_id)

    def wait_for_outcome(self, request_id: str, *, busy: bool = False) -> LoadOutcome:
        """Advance the load until it ends, as vLLM's steps do."""

        def has_ended() -> bool:
            if request_id in self.connector.take_received():
                return True
            self.connector.advance((), busy=busy)
            return False

        wait_until(has_ended, "the end of the load")
        report = self.connector.take_report()
        assert report is not None
        (outcome,) = report.outcomes
        return outcome


def wait_for_puts(store: FakeStoreClient, count: int) -> None:
    wait_until(lambda: len(store.puts) >= count)
