"""What the connector moves: loads into the right slots or reports what to recompute; saves."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import TYPE_CHECKING, cast

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from ragcache_core.errors import Unavailable  # noqa: E402
from ragcache_core.identity.keys import KVSpace, VariantKey  # noqa: E402
from ragcache_core.identity.variant import (  # noqa: E402
    Codec,
    Miss,
    Origin,
    Precision,
    Provenance,
    Tier,
    ValuePart,
    VariantInfo,
)
from ragcache_core.store_api import AsOf, NewVariant, PutOutcome  # noqa: E402
from ragcache_engine.kv_cache.device_event import DeviceEvent  # noqa: E402
from ragcache_engine.kv_cache.paged_cache import CacheShape, PagedCache  # noqa: E402
from ragcache_engine.kv_cache.value_tensors import decode, native_bytes, value_shape  # noqa: E402
from ragcache_engine.protocol.messages import (  # noqa: E402
    ComputedRange,
    LoadJob,
    LoadOutcome,
    SaveJob,
    StepJobs,
    VariantSpan,
)
from ragcache_engine.protocol.roles import EngineRole  # noqa: E402
from ragcache_engine.worker import worker as worker_module
from ragcache_engine.worker.worker import ConnectorWorker  # noqa: E402
from ragcache_kv.store_client.sharded import ShardedStore  # noqa: E402
from ragcache_kv.values.buffers import checksummed_parts, matches_checksums  # noqa: E402
from ragcache_kv.values.layout import FORMAT, value_bytes, value_parts  # noqa: E402
from ragcache_kv.values.outgoing_value import OutgoingValue, Runs  # noqa: E402
from ragcache_kv.values.stored_value import StoredValue  # noqa: E402
from ragcache_wire.settings import EngineSettings  # noqa: E402
from ragcache_wire.watched.members import FixedMembers  # noqa: E402

if TYPE_CHECKING:
    from ragcache_engine.blend.components import BlendComponents

INT8 = Precision(Codec.INT8, Codec.INT8)
SPACE = KVSpace("model", num_layers=2, num_kv_heads=1, head_dim=4, dtype="bfloat16")
BLOCK = 32
BLOCKS = (7, 3, 5, 1, 2)
TIMEOUT_S = 10.0


def key(number: int) -> VariantKey:
    return VariantKey(bytes([number]) * 16, bytes(16))


def spans(*ends: int) -> tuple[VariantSpan, ...]:
    starts = (0, *ends)
    return tuple(VariantSpan(key(n), starts[n], end) for n, end in enumerate(ends))


class FakeCache:
    """A paged cache without packing: slot -> token of [layers, 2, heads, dim]."""

    device = torch.device("cpu")

    def __init__(self) -> None:
        self.shape = CacheShape(1, BLOCK, 4, torch.bfloat16)
        self.num_layers = 2
        self.index_of = {"first": 0, "second": 1}
        self.slots_written: dict[int, torch.Tensor] = {}
        self.broken = False
        self.clock: Callable[[], float] = time.monotonic

    slots = PagedCache.slots

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

    def read_layer(
        self, index: int, blocks: Sequence[int], start: int, end: int, out: torch.Tensor
    ) -> None:
        if self.broken:
            raise RuntimeError("device error")
        out.copy_(self.read(blocks, start, end)[index])


class FakeStore:
    """Holds values; every way a store can fail can be asked for."""

    def __init__(self) -> None:
        self.values: dict[VariantKey, StoredValue | Miss] = {}
        self.outage_after: int | None = None
        self.gate = threading.Event()
        self.gate.set()
        self.put_gate = threading.Event()
        self.put_gate.set()
        self.puts: list[NewVariant] = []
        self.put_bytes: list[bytes] = []
        self.lock = threading.Lock()
        self.put_s = 0.0
        self.put_outages = 0
        self.runs: list[int] = []
        self.costs_s: list[float] = []
        self.asked: list[list[VariantKey]] = []
        self.asked_exact: list[bool] = []
        self.read_to_the_end = False
        self.noted: list[VariantKey] = []
        self.as_of: list[object] = []
        self.connects: Callable[[], object] = lambda: None

    def fill(self, wanted: Sequence[VariantSpan]) -> dict[VariantKey, torch.Tensor]:
        tensors = {}
        for span in wanted:
            length = span.end - span.start
            value = torch.randn(2, 2, length, 1, 4).bfloat16()
            raw = native_bytes(value)
            info = VariantInfo(length, len(raw), span.start, Provenance(exact=True))
            parts = checksummed_parts(raw, value_parts(SPACE, length))
            self.values[span.variant] = StoredValue(
                info, parts, value_shape(SPACE), FORMAT, raw, Tier.MEMORY
            )
            tensors[span.variant] = value
        return tensors

    def get(
        self, keys: Sequence[VariantKey], timeout_s: float, *, exact: bool, domain: str
    ) -> Iterator[tuple[VariantKey, StoredValue | Miss]]:
        self.asked.append(list(keys))
        self.asked_exact.append(exact)
        assert domain == "tenant"
        for number, wanted in enumerate(keys):
            self.gate.wait(TIMEOUT_S)
            if number == self.outage_after:
                raise Unavailable("cachestore", "gone")
            yield wanted, self.values.get(wanted, Miss.EVICTED)
        self.read_to_the_end = True

    def put(
        self, variant: NewVariant, value: OutgoingValue, timeout_s: float, *, as_of: object
    ) -> PutOutcome:
        self.put_gate.wait(TIMEOUT_S)
        with self.lock:
            if self.put_outages:
                self.put_outages -= 1
                raise Unavailable("cachestore", "gone")
        runs = Runs(variant, value, time.monotonic() + (self.put_s or timeout_s))
        came = b""
        for run in runs:
            came += run
            self.runs.append(len(runs.checksums))
        completion = runs.completion()
        parts = tuple(map(ValuePart, variant.part_bytes, completion.checksums))
        assert matches_checksums([memoryview(came)], parts)
        with self.lock:
            self.put_bytes.append(came)
            self.costs_s.append(completion.cost_s)
            self.as_of.append(as_of)
            self.puts.append(variant)
        return PutOutcome.STORED

    def note_reads(self, keys: Sequence[VariantKey]) -> None:
        self.noted += keys

    def connect(self, timeout_s: float) -> None:
        self.connects()

    def transports(self) -> dict[str, str]:
        return {"shard:1": "shared"}

    def close(self) -> None:
        pass


class Worker:
    """Plays vLLM's part: polls until the load has ended."""

    def __init__(
        self,
        config: EngineSettings | None = None,
        blender: BlendComponents | None = None,
        client: ShardedStore | None = None,
        role: EngineRole = EngineRole.BOTH,
    ) -> None:
        """client: of a real store, in place of the fake one."""
        self.cache, self.store = FakeCache(), FakeStore()
        self.side = ConnectorWorker(
            config or EngineSettings(cachestore=FixedMembers(())),
            SPACE,
            cast("PagedCache", self.cache),
            client or cast("ShardedStore", self.store),
            blender,
            role=role,
        )

    def load(self, job: LoadJob) -> LoadOutcome:
        self.side.start_loads(StepJobs(loads=(job,)))
        return self.until_ended(job.request_id)

    def until_ended(self, request_id: str) -> LoadOutcome:
        deadline = time.monotonic() + TIMEOUT_S
        while request_id not in self.side.take_received():
            assert time.monotonic() < deadline, "the load never ended"
            time.sleep(0.001)
            self.side.advance((), busy=False)
        report = self.side.take_report()
        assert report is not None
        (outcome,) = report.outcomes
        return outcome


@pytest.fixture
def worker() -> Iterator[Worker]:
    worker = Worker()
    yield worker
    worker.side.close()


def test_every_token_lands_in_its_own_slot(worker: Worker) -> None:
    wanted = spans(10, 50, 131)
    tensors = worker.store.fill(wanted)
    outcome = worker.load(LoadJob("r", wanted, 0, 131, BLOCKS, "tenant"))
    assert worker.store.asked_exact == [True]
    assert (outcome.tokens, outcome.missing_variant) == (131, None)
    assert outcome.num_bytes == value_bytes(SPACE, 131)
    assert worker.side.take_bad_blocks() == set()
    for span in wanted:
        read = worker.cache.read(BLOCKS, span.start, span.end)
        assert torch.equal(read, tensors[span.variant])


def test_an_engine_serves_when_a_first_load_need_not_wait() -> None:
    gate, store = threading.Event(), FakeStore()
    store.connects = lambda: gate.wait(TIMEOUT_S)
    worker = Worker(client=cast("ShardedStore", store))
    waiting = threading.Thread(target=worker.side.wait_until_warm, daemon=True)
    waiting.start()
    waiting.join(0.1)
    assert waiting.is_alive()
    gate.set()
    waiting.join(60.0)  # it compiles
    assert not waiting.is_alive()
    worker.side.close()


class NoCompiler:
    """Of a rotation: what it needs cannot be compiled."""

    def warm_up(self) -> None:
        raise RuntimeError("no compiler")


def test_what_a_first_load_needs_may_fail(caplog: pytest.LogCaptureFixture) -> None:
    unused = SimpleNamespace(max_tokens=64)
    blender = SimpleNamespace(rotation=NoCompiler(), recomputer=unused, observer=unused)
    worker = Worker(blender=cast("BlendComponents", blender))
    worker.side.wait_until_warm()
    assert "the first load may be slow" in caplog.text
    assert "no compiler" in caplog.text
    wanted = spans(40)
    worker.store.fill(wanted)
    assert worker.load(LoadJob("r", wanted, 0, 40, BLOCKS, "tenant")).tokens == 40
    worker.side.close()


def test_what_a_first_load_needs_may_be_late(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ragcache_engine.worker.worker._WARM_UP_S", 0.01)
    gate, store = threading.Event(), FakeStore()
    store.connects = lambda: gate.wait(TIMEOUT_S)
    worker = Worker(client=cast("ShardedStore", store))
    worker.side.wait_until_warm()
    assert "not ready for it" in caplog.text
    gate.set()
    worker.side.close()


def test_only_the_tokens_asked_for_are_written(worker: Worker) -> None:
    """What lies before ``first`` may be shared with other requests; past ``end`` is no block."""
    wanted = spans(50, 131)
    worker.store.fill(wanted)
    outcome = worker.load(LoadJob("r", wanted, 32, 130, BLOCKS, "tenant"))
    assert outcome.tokens == 98
    written = set(worker.cache.slots_written)
    assert written == set(worker.cache.slots(BLOCKS, 32, 130).tolist())


def test_a_missing_value_reports_the_blocks_from_it_on(worker: Worker) -> None:
    wanted = spans(10, 50, 131)
    worker.store.fill(wanted)
    del worker.store.values[key(1)]
    outcome = worker.load(LoadJob("r", wanted, 0, 131, BLOCKS, "tenant"))
    assert (outcome.tokens, outcome.missing_variant) == (0, key(1))  # its block is computed again
    assert worker.side.take_bad_blocks() == set(BLOCKS)


def test_good_blocks_before_a_missing_value_are_kept(worker: Worker) -> None:
    wanted = spans(70, 131)
    worker.store.fill(wanted)
    del worker.store.values[key(1)]
    outcome = worker.load(LoadJob("r", wanted, 0, 131, BLOCKS, "tenant"))
    # 70 lies in the third block, which is computed again; the first two hold
    assert outcome.tokens == 2 * BLOCK
    assert worker.side.take_bad_blocks() == set(BLOCKS[2:])


@pytest.mark.parametrize("damage", ["length", "tokens", "format", "shape"])
def test_a_value_of_another_layout_is_never_written(worker: Worker, damage: str) -> None:
    wanted = spans(40)
    worker.store.fill(wanted)
    stored = worker.store.values[key(0)]
    assert isinstance(stored, StoredValue)
    match damage:
        case "length":
            other = replace(stored, value=stored.value[:-2])
        case "tokens":
            other = replace(stored, info=replace(stored.info, num_tokens=41))
        case "format":
            other = replace(stored, value_format=FORMAT + 1)
        case "shape":
            other = replace(stored, shape=None)
    worker.store.values[key(0)] = other
    outcome = worker.load(LoadJob("r", wanted, 0, 40, BLOCKS, "tenant"))
    assert (outcome.tokens, outcome.missing_variant, outcome.reason) == (0, key(0), "other layout")
    assert worker.cache.slots_written == {}


@pytest.mark.parametrize("miss", [Miss.EVICTED, Miss.CORRUPT, Miss.OTHER_PRECISION])
def test_a_load_says_why_a_value_did_not_come(worker: Worker, miss: Miss) -> None:
    wanted = spans(40)
    worker.store.values[key(0)] = miss
    outcome = worker.load(LoadJob("r", wanted, 0, 40, BLOCKS, "tenant"))
    assert outcome.reason == miss.value.replace("_", " ")


def test_a_store_hears_of_damage_before_the_value_is_computed_and_put_anew(worker: Worker) -> None:
    wanted = spans(10, 40)
    worker.store.fill(wanted)
    worker.store.values[key(0)] = Miss.CORRUPT
    outcome = worker.load(LoadJob("r", wanted, 0, 40, BLOCKS, "tenant"))
    assert (outcome.tokens, outcome.reason) == (0, "corrupt")
    assert worker.store.read_to_the_end


def test_a_store_that_goes_while_it_hears_of_damage_changes_nothing(worker: Worker) -> None:
    wanted = spans(10, 40)
    worker.store.fill(wanted)
    worker.store.values[key(0)] = Miss.CORRUPT
    worker.store.outage_after = 1
    outcome = worker.load(LoadJob("r", wanted, 0, 40, BLOCKS, "tenant"))
    assert (outcome.tokens, outcome.reason) == (0, "corrupt")


@pytest.mark.parametrize("held_as", [Precision(Codec.PACKED, Codec.PACKED), INT8])
def test_a_value_held_in_another_form_is_decoded(held_as: Precision) -> None:
    part = pytest.importorskip("ragcache_kv.codecs")
    value = torch.randn(2, 2, 40, 1, 4).bfloat16()
    native = [np.frombuffer(native_bytes(layer), np.uint8) for layer in value]
    encoded = [part.encode_part(one, value_shape(SPACE), 40, held_as) for one in native]
    raw = memoryview(np.concatenate(encoded))
    info = VariantInfo(40, len(raw), 0, Provenance(exact=True), held_as)
    parts = checksummed_parts(raw, [len(one) for one in encoded])
    stored = StoredValue(info, parts, value_shape(SPACE), FORMAT, raw, Tier.MEMORY)
    decoded = decode(stored, 40, SPACE)
    assert decoded is not None
    if held_as.lossless:
        assert torch.equal(decoded, value)
    assert torch.allclose(decoded.float(), value.float(), atol=0.1)
    assert decode(replace(stored, value=raw[:-3], parts=(*parts[:-1],)), 40, SPACE) is None


def test_a_value_lands_where_the_engine_reads_it(worker: Worker) -> None:
    worker.store.fill(spans(40))
    stored = worker.store.values[key(0)]
    assert isinstance(stored, StoredValue)
    value = decode(stored, 40, SPACE)
    assert value is not None
    stored.value[0] ^= 1
    assert value.view(torch.uint8).flatten()[0] == stored.value[0]


@pytest.mark.parametrize("after", [0, 1, 2])
def test_an_outage_at_any_moment_ends_the_load(worker: Worker, after: int) -> None:
    wanted = spans(10, 50, 131)
    worker.store.fill(wanted)
    worker.store.outage_after = after
    outcome = worker.load(LoadJob("r", wanted, 0, 131, BLOCKS, "tenant"))
    assert outcome.missing_variant == key(after)
    assert (outcome.reason, outcome.timed_out) == ("store unavailable", False)
    assert outcome.tokens == (0, 0, BLOCK)[after]  # whole blocks of what had come


def test_a_store_that_falls_silent_is_given_up() -> None:
    worker = Worker()
    wanted = spans(10)
    worker.store.fill(wanted)
    worker.store.gate.clear()
    outcome = worker.load(LoadJob("r", wanted, 0, 10, BLOCKS, "tenant", deadline_s=0.05))
    assert (outcome.reason, outcome.timed_out) == ("load late", True)
    worker.store.gate.set()
    worker.side.close()


def load_all(worker: Worker, *jobs: LoadJob) -> dict[str, LoadOutcome]:
    """Loads that begin in one step, until all have ended."""
    worker.side.start_loads(StepJobs(loads=jobs))
    ended: dict[str, LoadOutcome] = {}
    deadline = time.monotonic() + TIMEOUT_S
    while len(ended) < len(jobs):
        assert time.monotonic() < deadline, "a load never ended"
        worker.side.advance((), busy=False)
        report = worker.side.take_report()
        for outcome in report.outcomes if report is not None else ():
            ended[outcome.request_id] = outcome
    return ended


ELSEWHERE = tuple(block + 100 for block in BLOCKS)


def test_loads_of_one_step_fetch_what_they_have_in_common_once(worker: Worker) -> None:
    wanted = spans(10, 50, 131)
    tensors = worker.store.fill(wanted)
    shorter = LoadJob("shorter", wanted[:2], 0, 50, ELSEWHERE, "tenant")
    ended = load_all(worker, LoadJob("r", wanted, 0, 131, BLOCKS, "tenant"), shorter)
    assert {name: one.reason for name, one in ended.items()} == {"r": "", "shorter": ""}
    assert worker.store.asked == [[span.variant for span in wanted]]
    for blocks, found in ((BLOCKS, wanted), (ELSEWHERE, wanted[:2])):
        for span in found:
            read = worker.cache.read(blocks, span.start, span.end)
            assert torch.equal(read, tensors[span.variant])
    # It counts for both: each has waited for it.
    assert [ended[name].num_bytes for name in ("r", "shorter")] == [
        value_bytes(SPACE, 131),
        value_bytes(SPACE, 50),
    ]


def test_loads_that_have_nothing_in_common_are_fetched_apart(worker: Worker) -> None:
    first, second = spans(10, 50)
    worker.store.fill([first, second])
    jobs = [
        LoadJob("one", (first,), 0, 10, BLOCKS, "tenant"),
        LoadJob("two", (second,), 10, 50, ELSEWHERE, "tenant"),
    ]
    assert all(not one.reason for one in load_all(worker, *jobs).values())
    assert sorted(worker.store.asked, key=repr) == sorted([[key(0)], [key(1)]], key=repr)


@pytest.mark.parametrize("after", [0, 1, 2])
def test_an_outage_ends_all_loads_that_go_together(worker: Worker, after: int) -> None:
    wanted = spans(16, 48, 131)
    worker.store.fill(wanted)
    worker.store.outage_after = after
    shorter = LoadJob("shorter", wanted[:2], 0, 48, ELSEWHERE, "tenant")
    ended = load_all(worker, LoadJob("r", wanted, 0, 131, BLOCKS, "tenant"), shorter)
    assert ended["r"].reason == "store unavailable"
    # What both want has come before what is the first one's alone, but goes out in their order.
    assert ended["shorter"].reason == "store unavailable"
    assert ended["shorter"].missing_variant == key(0)


def test_one_that_leaves_takes_no_other_along(worker: Worker) -> None:
    wanted = spans(10, 50, 131)
    worker.store.fill(wanted)
    worker.store.gate.clear()
    jobs = tuple(
        LoadJob(name, wanted, 0, 131, blocks, "tenant")
        for name, blocks in (("leaves", BLOCKS), ("stays", ELSEWHERE))
    )
    worker.side.start_loads(StepJobs(loads=jobs))
    worker.side.advance({"leaves"}, busy=False)
    assert worker.side.take_received() == {"leaves"}
    worker.store.gate.set()
    deadline = time.monotonic() + TIMEOUT_S
    while "stays" not in worker.side.take_received():
        assert time.monotonic() < deadline
        worker.side.advance((), busy=False)
    report = worker.side.take_report()
    assert report is not None
    assert [(one.request_id, one.reason) for one in report.outcomes] == [
        ("leaves", "cancelled"),
        ("stays", ""),
    ]


def test_a_load_that_could_not_be_said_is_computed(worker: Worker) -> None:
    outcome = worker.load(LoadJob("r", (), 10, 131, BLOCKS, "tenant"))
    assert (outcome.reason, outcome.tokens) == ("load failed", 0)
    assert worker.side.take_bad_blocks() == set(BLOCKS[: -(-131 // BLOCK)])


def test_a_load_nobody_wants_any_more_is_reported_so_that_its_blocks_are_freed(
    worker: Worker,
) -> None:
    wanted = spans(10)
    worker.store.fill(wanted)
    worker.store.gate.clear()
    worker.side.start_loads(StepJobs(loads=(LoadJob("r", wanted, 0, 10, BLOCKS, "tenant"),)))
    worker.side.advance({"r"}, busy=False)
    assert worker.side.take_received() == {"r"}
    worker.store.gate.set()
    time.sleep(0.05)
    worker.side.advance((), busy=False)
    assert worker.cache.slots_written == {}


def test_a_write_that_raises_fails_the_load_not_the_engine(worker: Worker) -> None:
    wanted = spans(10)
    worker.store.fill(wanted)
    worker.cache.broken = True
    outcome = worker.load(LoadJob("r", wanted, 0, 10, BLOCKS, "tenant"))
    assert (outcome.missing_variant, outcome.reason) == (key(0), "write failed")
    assert worker.side.take_bad_blocks() == {BLOCKS[0]}


def test_a_write_that_raises_leaves_other_loads_alone(worker: Worker) -> None:
    wanted = spans(10)
    worker.store.fill(wanted)
    worker.store.gate.clear()
    jobs = tuple(LoadJob(name, wanted, 0, 10, BLOCKS, "tenant") for name in ("a", "b"))
    worker.side.start_loads(StepJobs(loads=jobs))
    write, calls = worker.cache.write, iter((True, False))

    def only_the_first(value: torch.Tensor, slots: torch.Tensor, first_layer: int) -> None:
        worker.cache.broken = not next(calls)
        write(value, slots, first_layer)

    worker.cache.write = only_the_first  # type: ignore[method-assign]
    worker.store.gate.set()
    received: set[str] = set()
    deadline = time.monotonic() + TIMEOUT_S
    while received != {"a", "b"}:
        assert time.monotonic() < deadline, f"only {received} ended"
        worker.side.advance((), busy=False)
        received |= worker.side.take_received()
    report = worker.side.take_report()
    assert report is not None
    assert sorted(outcome.reason for outcome in report.outcomes) == ["", "write failed"]


def layerwise() -> Worker:
    """A worker that knows what writing takes."""
    worker = Worker(EngineSettings(cachestore=FixedMembers(()), layerwise=True))
    wanted = spans(40)
    worker.store.fill(wanted)
    for number in range(4):
        worker.load(LoadJob(str(number), wanted, 0, 40, BLOCKS, "tenant", compute_s=60.0))
    worker.cache.slots_written.clear()
    return worker


def is_whole(worker: Worker) -> bool:
    return not any(bool(token.isnan().any()) for token in worker.cache.slots_written.values())


def test_layers_that_were_put_off_come_in_the_pass() -> None:
    worker = layerwise()
    wanted = spans(10, 40)
    tensors = worker.store.fill(wanted)
    outcome = worker.load(LoadJob("r", wanted, 0, 40, BLOCKS, "tenant", compute_s=60.0))
    assert (outcome.tokens, outcome.reason) == (40, "")
    assert not is_whole(worker)
    jobs = StepJobs(num_tokens=8)
    worker.side.begin_step(jobs)
    for name in worker.cache.index_of:
        worker.side.wait_for_layer(name)
    worker.side.end_pass(jobs)
    for span in wanted:
        assert torch.equal(worker.cache.read(BLOCKS, span.start, span.end), tensors[span.variant])
    assert worker.side.take_bad_blocks() == set()
    worker.side.close()


def test_a_step_without_a_pass_completes_nothing() -> None:
    worker = layerwise()
    worker.load(LoadJob("r", spans(40), 0, 40, BLOCKS, "tenant", compute_s=60.0))
    worker.side.begin_step(StepJobs())
    worker.side.end_pass(StepJobs())
    assert not is_whole(worker)
    assert worker.side.take_bad_blocks() == set()
    worker.side.close()


def test_blocks_of_a_request_that_has_ended_are_whole_before_they_are_others() -> None:
    worker = layerwise()
    worker.load(LoadJob("r", spans(40), 0, 40, BLOCKS, "tenant", compute_s=60.0))
    worker.side.begin_step(StepJobs(num_tokens=8, finished_ids=("r",)))
    assert is_whole(worker)
    worker.side.close()


def test_what_came_before_a_value_that_did_not_is_whole() -> None:
    worker = layerwise()
    wanted = spans(BLOCK, 40)
    worker.store.fill(wanted)
    worker.store.values[key(1)] = Miss.EVICTED
    outcome = worker.load(LoadJob("r", wanted, 0, 40, BLOCKS, "tenant", compute_s=60.0))
    assert (outcome.tokens, outcome.reason) == (BLOCK, "evicted")
    assert is_whole(worker)
    worker.side.close()


def test_a_pass_without_its_layers_is_computed_again() -> None:
    worker = layerwise()
    worker.load(LoadJob("r", spans(40), 0, 40, BLOCKS, "tenant", compute_s=60.0))
    # One that was saved in good time, and one that the wrong pass has computed.
    worker.cache.slots_written.update(
        {slot: torch.zeros(2, 2, 1, 4).bfloat16() for slot in range(9 * BLOCK)}
    )
    worker.side.end_pass(StepJobs(saves=(save_job(7, 0, 10),)))
    jobs = StepJobs(num_tokens=8, saves=(save_job(8, 20, 40),))
    worker.side.begin_step(jobs)
    worker.cache.broken = True
    for name in worker.cache.index_of:
        worker.side.wait_for_layer(name)
    worker.cache.broken = False
    worker.side.end_pass(jobs)
    assert worker.side.take_bad_blocks() == set(BLOCKS[: -(-40 // BLOCK)])
    until_put(worker.store, 1)
    assert [new.key for new in worker.store.puts] == [key(7)], "of the wrong pass nothing is kept"
    worker.side.close()


def test_a_prefix_that_cannot_be_completed_is_not_taken_for_good() -> None:
    worker = layerwise()
    wanted = spans(BLOCK, 40)
    worker.store.fill(wanted)
    worker.store.values[key(1)] = Miss.EVICTED
    write = worker.cache.write

    def no_later_layer(value: torch.Tensor, slots: torch.Tensor, first_layer: int) -> None:
        if first_layer:
            raise RuntimeError("device error")
        write(value, slots, first_layer)

    worker.cache.write = no_later_layer  # type: ignore[method-assign]
    outcome = worker.load(LoadJob("r", wanted, 0, 40, BLOCKS, "tenant", compute_s=60.0))
    assert (outcome.tokens, outcome.reason) == (0, "evicted")
    assert worker.side.take_bad_blocks() == set(BLOCKS[: -(-40 // BLOCK)])
    worker.side.close()


def test_a_pass_that_layers_are_written_beside_teaches_no_costs() -> None:
    worker = layerwise()
    worker.load(LoadJob("r", spans(40), 0, 40, BLOCKS, "tenant", compute_s=60.0))
    for teaches in (False, True):
        jobs = StepJobs(num_tokens=100, prompt_tokens=100, work=1.0)
        worker.side.begin_step(jobs)
        for name in worker.cache.index_of:
            worker.side.wait_for_layer(name)
        worker.side.end_pass(jobs)
        report = worker.side.take_report()
        assert (report is not None and len(report.passes) == 1) is teaches
    worker.side.close()


def save_job(number: int, start: int, end: int) -> SaveJob:
    info = VariantInfo(end - start, value_bytes(SPACE, end - start), start, Provenance(exact=True))
    span = VariantSpan(key(number), start, end)
    origin = Origin((bytes(16),), None, "tenant", "c/a")
    return SaveJob("r", span, info, origin, {"shard:1": AsOf(bytes(16), number)}, BLOCKS)


def until_put(store: FakeStore, count: int) -> None:
    deadline = time.monotonic() + TIMEOUT_S
    while len(store.puts) < count:
        assert time.monotonic() < deadline
        time.sleep(0.001)


def test_a_variant_on_its_way_is_not_sent_twice(worker: Worker) -> None:
    wanted = spans(40)
    worker.store.fill(wanted)
    worker.load(LoadJob("r", wanted, 0, 40, BLOCKS, "tenant"))
    worker.store.put_gate.clear()
    for _ in range(3):
        worker.side.end_pass(StepJobs(saves=(save_job(5, 0, 20), save_job(6, 20, 40))))
        worker.side.begin_step(StepJobs())
    worker.store.put_gate.set()
    until_put(worker.store, 2)
    worker.side.close()
    assert sorted(put.key.chunk for put in worker.store.puts) == [key(5).chunk, key(6).chunk]


def test_the_first_token_does_not_wait_for_what_is_copied_out(worker: Worker) -> None:
    tensors = worker.store.fill(spans(40))
    worker.load(LoadJob("r", spans(40), 0, 40, BLOCKS, "tenant"))
    worker.cache.broken = True  # whoever reads now, fails
    worker.side.end_pass(StepJobs(saves=(save_job(5, 0, 40),), num_tokens=40))
    worker.side.advance(set(), busy=True)
    worker.cache.broken = False
    worker.side.begin_step(StepJobs(finished_ids=("r",)))  # before its blocks may be others'
    worker.cache.broken = True
    until_put(worker.store, 1)
    assert worker.store.put_bytes == [bytes(native_bytes(tensors[key(0)]))]


def test_a_worker_that_waits_sleeps(worker: Worker, monkeypatch: pytest.MonkeyPatch) -> None:
    slept: list[float] = []
    monkeypatch.setattr(worker_module, "time", SimpleNamespace(sleep=slept.append))
    worker.side.advance((), busy=True)
    assert slept == []
    worker.side.advance((), busy=False)
    assert len(slept) == 1
    assert slept[0] > 0


def test_a_slow_store_bounds_the_queue_and_not_the_engine() -> None:
    worker = Worker(EngineSettings(cachestore=FixedMembers(()), save_queue_bytes=value_bytes(SPACE, 50)))
    wanted = spans(40)
    worker.store.fill(wanted)
    worker.load(LoadJob("r", wanted, 0, 40, BLOCKS, "tenant"))
    worker.store.put_gate.clear()
    jobs = tuple(save_job(10 + n, 0, 20) for n in range(5))
    worker.side.end_pass(StepJobs(saves=jobs))
    worker.side.begin_step(StepJobs())
    worker.store.put_gate.set()
    until_put(worker.store, 2)
    worker.side.close()
    assert len(worker.store.puts) == 2  # 50 tokens' worth holds two variants of 20


@pytest.mark.parametrize("done", [("first", "second"), ("first",), ()])
def test_a_prefill_engine_saves_layers_as_they_were_when_they_ended(done: Sequence[str]) -> None:
    worker = Worker(role=EngineRole.PREFILL)
    tensors = worker.store.fill(spans(10, 40))
    worker.load(LoadJob("r", spans(10, 40), 0, 40, BLOCKS, "tenant"))
    jobs = StepJobs(saves=(save_job(5, 0, 10), save_job(6, 10, 40)), num_tokens=40)
    worker.side.begin_step(jobs)
    for name in done:
        worker.side.layer_done(name)
    # Layers that have been copied are not read again.
    for slot, token in worker.cache.slots_written.items():
        changed = token.clone()
        changed[: len(done)] = 0
        worker.cache.slots_written[slot] = changed
    worker.side.end_pass(jobs)
    until_put(worker.store, 2)
    wanted = {key(5 + n): bytes(native_bytes(tensors[key(n)])) for n in (0, 1)}
    found = zip(worker.store.puts, worker.store.put_bytes, strict=True)
    assert {put.key: raw for put, raw in found} == wanted
    worker.side.close()


def until(holds: Callable[[], bool]) -> None:
    deadline = time.monotonic() + TIMEOUT_S
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.001)


def prefill_engine() -> tuple[Worker, StepJobs]:
    """A worker whose cache holds 40 tokens, and a pass that is to save them as two variants."""
    worker = Worker(role=EngineRole.PREFILL)
    worker.store.fill(spans(10, 40))
    worker.load(LoadJob("r", spans(10, 40), 0, 40, BLOCKS, "tenant"))
    return worker, StepJobs(saves=(save_job(5, 0, 10), save_job(6, 10, 40)), num_tokens=40)


def test_layers_go_out_before_the_next_ones_are_computed() -> None:
    worker, jobs = prefill_engine()
    worker.side.begin_step(jobs)
    worker.side.layer_done("first")
    until(lambda: worker.store.runs == [1, 1])  # of both variants at once
    worker.side.layer_done("second")
    until(lambda: sorted(worker.store.runs) == [1, 1, 2, 2])
    assert not worker.store.puts  # before the pass has ended nobody knows that they are right
    worker.side.end_pass(jobs)
    until_put(worker.store, 2)
    worker.side.close()


@pytest.mark.parametrize("ended", ["failed", "lacked", "without a word"])
def test_what_a_pass_did_not_end_well_for_is_given_up(ended: str) -> None:
    worker, jobs = prefill_engine()
    worker.side.begin_step(jobs)
    for name in worker.cache.index_of:
        worker.side.layer_done(name)
    until(lambda: worker.store.runs.count(2) == 2)
    if ended == "failed":
        worker.side.end_pass(jobs, failed=True)
    elif ended == "lacked":  # a layer, so that nothing of it is kept
        worker.side.end_pass(StepJobs(num_tokens=40))
    else:  # vLLM's second runner says nothing of a pass that failed
        worker.side.begin_step(StepJobs())
    until(lambda: not worker.side._saver._pending)
    assert not worker.store.puts
    worker.side.begin_step(jobs)
    worker.side.end_pass(jobs)
    until_put(worker.store, 2)
    worker.side.close()


@pytest.mark.parametrize("role", [EngineRole.PREFILL, EngineRole.BOTH])
def test_nothing_of_a_pass_that_failed_is_saved(role: EngineRole) -> None:
    worker = Worker(role=role)
    worker.store.fill(spans(40))
    worker.load(LoadJob("r", spans(40), 0, 40, BLOCKS, "tenant"))
    jobs = StepJobs(saves=(save_job(5, 0, 10),), num_tokens=40)
    worker.side.begin_step(jobs)
    worker.side.end_pass(jobs, failed=True)
    worker.side.begin_step(StepJobs())
    until(lambda: not worker.side._saver._pending)
    worker.side.close()
    assert not worker.store.puts


def test_a_store_that_is_away_during_a_pass_is_asked_again_behind_it() -> None:
    worker, jobs = prefill_engine()
    worker.store.put_outages = 2
    worker.side.begin_step(jobs)
    worker.side.layer_done("first")
    until(lambda: worker.store.put_outages == 0)
    worker.side.end_pass(jobs)
    until_put(worker.store, 2)
    worker.side.close()


def test_a_layer_that_cannot_be_summed_up_costs_its_value(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(raw: object) -> int:
        raise RuntimeError("device error")

    worker, jobs = prefill_engine()
    monkeypatch.setattr("ragcache_engine.handoff.layer_staging.checksum", broken)
    worker.side.begin_step(jobs)
    worker.side.layer_done("first")
    worker.side.end_pass(jobs)
    until(lambda: not worker.side._saver._pending)
    assert not worker.store.puts
    worker.side.close()


def test_an_engine_that_ends_in_the_middle_of_a_pass_leaves_no_thread_behind() -> None:
    worker, jobs = prefill_engine()
    worker.side.begin_step(jobs)
    worker.side.layer_done("first")
    until(lambda: worker.store.runs == [1, 1])
    worker.side.close()
    until(lambda: not worker.side._saver._pending)
    assert not worker.store.puts


def test_a_pass_that_takes_longer_than_a_put_may_is_put_when_it_is_over() -> None:
    worker, jobs = prefill_engine()
    worker.store.put_s = 0.01
    worker.side.begin_step(jobs)
    worker.side.layer_done("first")
    time.sleep(0.1)
    worker.store.put_s = 0.0
    worker.side.end_pass(jobs)
    until_put(worker.store, 2)
    worker.side.close()


def test_passes_of_our_own_are_not_saved() -> None:
    worker = Worker(role=EngineRole.PREFILL)
    worker.store.fill(spans(40))
    worker.load(LoadJob("r", spans(40), 0, 40, BLOCKS, "tenant"))
    jobs = StepJobs(saves=(save_job(5, 0, 10),), num_tokens=40)
    worker.side.begin_step(jobs)
    worker.side.end_pass(jobs)
    worker.cache.broken = True  # whoever reads now, fails
    worker.side.layer_done("first")
    worker.side.layer_done("no such layer")
    until_put(worker.store, 1)
    worker.side.close()


def test_a_layer_that_cannot_be_copied_costs_its_early_copy_and_no_more() -> None:
    worker = Worker(role=EngineRole.PREFILL)
    worker.store.fill(spans(40))
    worker.load(LoadJob("r", spans(40), 0, 40, BLOCKS, "tenant"))
    jobs = StepJobs(saves=(save_job(5, 0, 10),), num_tokens=40)
    worker.side.begin_step(jobs)
    worker.cache.broken = True
    worker.side.layer_done("first")
    worker.cache.broken = False
    worker.side.end_pass(jobs)
    until_put(worker.store, 1)
    worker.side.close()


def test_the_queue_is_bounded_for_what_is_copied_early_too() -> None:
    config = EngineSettings(
        cachestore=FixedMembers(()), save_queue_bytes=value_bytes(SPACE, 50)
    )
    worker = Worker(config, role=EngineRole.PREFILL)
    worker.store.fill(spans(40))
    worker.load(LoadJob("r", spans(40), 0, 40, BLOCKS, "tenant"))
    worker.store.put_gate.clear()
    jobs = StepJobs(saves=tuple(save_job(10 + n, 0, 20) for n in range(5)))
    worker.side.begin_step(jobs)
    for name in worker.cache.index_of:
        worker.side.layer_done(name)
    worker.side.end_pass(jobs)
    worker.store.put_gate.set()
    until_put(worker.store, 2)
    worker.side.close()
    assert len(worker.store.puts) == 2


def test_a_save_carries_what_the_scheduler_side_knows_and_what_computing_cost() -> None:
    # The fifth and the seventh are when a value has been copied out.
    seconds = iter([10.0, 12.0, 20.0, 21.0, 22.0, 30.0, 31.0, 40.0])
    worker = Worker()
    worker.cache.clock = lambda: next(seconds)
    worker.store.fill(spans(40))
    worker.load(LoadJob("r", spans(40), 0, 40, BLOCKS, "tenant"))
    worker.side.begin_step(StepJobs())  # at 10
    # Two seconds for 100 tokens of all requests, 30 of them of this one, and then one for 10.
    worker.side.end_pass(StepJobs(computed=(ComputedRange("r", 0, 30),), num_tokens=100))
    worker.side.begin_step(StepJobs())
    job = save_job(3, 20, 40)
    worker.side.end_pass(StepJobs(saves=(job,), computed=(ComputedRange("r", 30, 40),), num_tokens=10))
    worker.side.begin_step(StepJobs())
    until_put(worker.store, 1)
    (put,) = worker.store.puts
    assert worker.store.costs_s == [pytest.approx(10 * 0.02 + 10 * 0.1)]
    assert put.origin == job.origin
    assert (put.shape, put.value_format, len(put.part_bytes)) == (value_shape(SPACE), FORMAT, 2)
    assert put.info.precision == Precision()
    assert worker.store.as_of == [job.as_of]
    worker.side.advance({"r"}, busy=False)
    worker.side.end_pass(StepJobs(saves=(save_job(4, 20, 40),)))  # none of it was computed here
    worker.side.begin_step(StepJobs())
    until_put(worker.store, 2)
    assert worker.store.costs_s[1] == 0
    worker.side.close()


def test_a_broken_device_clock_costs_the_cost_and_no_more(worker: Worker) -> None:
    def clock() -> float:
        raise RuntimeError("device error")

    worker.store.fill(spans(40))
    worker.load(LoadJob("r", spans(40), 0, 40, BLOCKS, "tenant"))  # begins a pass
    worker.cache.clock = clock
    computing = (ComputedRange("r", 20, 40),)
    worker.side.end_pass(StepJobs(saves=(save_job(3, 20, 40),), computed=computing, num_tokens=20))
    worker.side.begin_step(StepJobs())
    worker.side.end_pass(StepJobs(saves=(save_job(4, 20, 40),), computed=computing, num_tokens=20))
    worker.side.begin_step(StepJobs())
    until_put(worker.store, 2)
    assert worker.store.costs_s == [0, 0]


def test_what_passes_take_is_reported_when_they_compute_prompts(worker: Worker) -> None:
    """Of whomever, and whether or not anything of it is saved; not of many that decode."""
    seconds = iter([1.0, 1.5, 2.0, 2.1, 3.0, 3.1])
    worker.cache.clock = lambda: next(seconds)
    for prompt_tokens, num_tokens in ((100, 100), (5, 5), (0, 100)):
        jobs = StepJobs(num_tokens=num_tokens, prompt_tokens=prompt_tokens, work=2e-3 * num_tokens)
        worker.side.begin_step(jobs)
        worker.side.end_pass(jobs)
    report = worker.side.take_report()
    assert report is not None
    assert report.passes == [(0.2, pytest.approx(0.5))]
    assert worker.side.take_report() is None
