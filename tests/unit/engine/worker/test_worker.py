"""The worker writes loads to the right slots, or reports which blocks to recompute."""

from __future__ import annotations

import threading
from dataclasses import replace
from types import SimpleNamespace
from typing import TYPE_CHECKING, cast

import numpy as np
import pytest

if TYPE_CHECKING:
    import torch
else:
    torch = pytest.importorskip("torch")

from ragcache_core.identity.variant import (
    Codec,
    Miss,
    Precision,
    Provenance,
    Tier,
    VariantInfo,
)
from ragcache_engine.blend.ranks import ONE_RANK
from ragcache_engine.kv_cache.value_tensors import decode, native_bytes, value_shape
from ragcache_engine.protocol.messages import (
    LoadJob,
    LoadOutcome,
    StepJobs,
)
from ragcache_engine.worker import worker as worker_module
from ragcache_kv.store_client.sharded import ShardedStore
from ragcache_kv.values.buffers import checksummed_parts
from ragcache_kv.values.layout import FORMAT, value_bytes
from ragcache_kv.values.stored_value import StoredValue
from tests.kit.wait import wait_until
from tests.kit.worker import (
    BLOCK,
    BLOCKS,
    SPACE,
    TIMEOUT_S,
    FakeStoreClient,
    WorkerHarness,
    key,
    spans,
)

if TYPE_CHECKING:
    from ragcache_engine.blend.components import BlendComponents

INT8 = Precision(Codec.INT8, Codec.INT8)


def test_every_token_lands_in_its_own_slot(worker: WorkerHarness) -> None:
    wanted = spans(10, 50, 131)
    tensors = worker.store.fill(wanted)
    outcome = worker.load(LoadJob("r", wanted, 0, 131, BLOCKS, "tenant"))
    assert worker.store.requested_exact == [True]
    assert (outcome.tokens, outcome.missing_variant) == (131, None)
    assert outcome.num_bytes == value_bytes(SPACE, 131)
    assert worker.connector.take_bad_blocks() == set()
    for span in wanted:
        read = worker.cache.read(BLOCKS, span.start, span.end)
        assert torch.equal(read, tensors[span.variant])


def test_an_engine_serves_after_its_warm_up() -> None:
    get_gate, store = threading.Event(), FakeStoreClient()
    store.connects = lambda: get_gate.wait(TIMEOUT_S)
    worker = WorkerHarness(client=cast("ShardedStore", store))
    waiting = threading.Thread(target=worker.connector.wait_until_warm, daemon=True)
    waiting.start()
    waiting.join(0.1)
    assert waiting.is_alive()
    get_gate.set()
    waiting.join(200.0)  # it compiles
    assert not waiting.is_alive()
    worker.connector.close()


class NoCompiler:
    """A rotation that cannot be compiled."""

    def warm_up(self) -> None:
        raise RuntimeError("no compiler")


def test_a_failed_warm_up_is_logged_and_loads_still_work(caplog: pytest.LogCaptureFixture) -> None:
    unused = SimpleNamespace(max_tokens=64, chunk_shift=None, ranks=ONE_RANK)
    blend = SimpleNamespace(rotation=NoCompiler(), recomputer=unused, observer=unused)
    worker = WorkerHarness(blend=cast("BlendComponents", blend))
    worker.connector.wait_until_warm()
    assert "the first load may be slow" in caplog.text
    assert "no compiler" in caplog.text
    wanted = spans(40)
    worker.store.fill(wanted)
    assert worker.load(LoadJob("r", wanted, 0, 40, BLOCKS, "tenant")).tokens == 40
    worker.connector.close()


def test_a_warm_up_that_times_out_is_logged(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ragcache_engine.worker.worker._WARM_UP_S", 0.01)
    get_gate, store = threading.Event(), FakeStoreClient()
    store.connects = lambda: get_gate.wait(TIMEOUT_S)
    worker = WorkerHarness(client=cast("ShardedStore", store))
    worker.connector.wait_until_warm()
    assert "warm-up not finished" in caplog.text
    get_gate.set()
    worker.connector.close()


def test_only_the_requested_tokens_are_written(worker: WorkerHarness) -> None:
    """Blocks before ``first`` may be shared with other requests; after ``end`` there is none."""
    wanted = spans(50, 131)
    worker.store.fill(wanted)
    outcome = worker.load(LoadJob("r", wanted, 32, 130, BLOCKS, "tenant"))
    assert outcome.tokens == 98
    written = set(worker.cache.slots_written)
    assert written == set(worker.cache.slots(BLOCKS, 32, 130).tolist())


def test_a_missing_value_reports_the_blocks_from_it_on(worker: WorkerHarness) -> None:
    wanted = spans(10, 50, 131)
    worker.store.fill(wanted)
    del worker.store.values[key(1)]
    outcome = worker.load(LoadJob("r", wanted, 0, 131, BLOCKS, "tenant"))
    assert (outcome.tokens, outcome.missing_variant) == (0, key(1))  # its block is recomputed
    assert worker.connector.take_bad_blocks() == set(BLOCKS)


def test_good_blocks_before_a_missing_value_are_kept(worker: WorkerHarness) -> None:
    wanted = spans(70, 131)
    worker.store.fill(wanted)
    del worker.store.values[key(1)]
    outcome = worker.load(LoadJob("r", wanted, 0, 131, BLOCKS, "tenant"))
    # 70 is in the third block, which is recomputed; the first two are complete
    assert outcome.tokens == 2 * BLOCK
    assert worker.connector.take_bad_blocks() == set(BLOCKS[2:])


@pytest.mark.parametrize("damage", ["length", "tokens", "format", "shape"])
def test_a_value_of_another_layout_is_never_written(worker: WorkerHarness, damage: str) -> None:
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
def test_a_load_reports_why_a_value_did_not_arrive(worker: WorkerHarness, miss: Miss) -> None:
    wanted = spans(40)
    worker.store.values[key(0)] = miss
    outcome = worker.load(LoadJob("r", wanted, 0, 40, BLOCKS, "tenant"))
    assert outcome.reason == miss.value.replace("_", " ")


def test_a_store_hears_of_damage_before_the_value_is_put_again(worker: WorkerHarness) -> None:
    wanted = spans(10, 40)
    worker.store.fill(wanted)
    worker.store.values[key(0)] = Miss.CORRUPT
    outcome = worker.load(LoadJob("r", wanted, 0, 40, BLOCKS, "tenant"))
    assert (outcome.tokens, outcome.reason) == (0, "corrupt")
    assert worker.store.was_read_to_end


def test_an_outage_while_the_store_hears_of_damage_changes_nothing(worker: WorkerHarness) -> None:
    wanted = spans(10, 40)
    worker.store.fill(wanted)
    worker.store.values[key(0)] = Miss.CORRUPT
    worker.store.outage_after = 1
    outcome = worker.load(LoadJob("r", wanted, 0, 40, BLOCKS, "tenant"))
    assert (outcome.tokens, outcome.reason) == (0, "corrupt")


@pytest.mark.parametrize("precision", [Precision(Codec.PACKED, Codec.PACKED), INT8])
def test_an_encoded_value_is_decoded(precision: Precision) -> None:
    part = pytest.importorskip("ragcache_kv.codecs")
    generator = torch.Generator().manual_seed(40)
    value = torch.randn(2, 2, 40, 1, 4, generator=generator).bfloat16()
    native = [np.frombuffer(native_bytes(layer), np.uint8) for layer in value]
    encoded = [part.encode_part(one, value_shape(SPACE), 40, precision) for one in native]
    raw = memoryview(np.concatenate(encoded))
    info = VariantInfo(40, len(raw), 0, Provenance(exact=True), precision)
    parts = checksummed_parts(raw, [len(one) for one in encoded])
    stored = StoredValue(info, parts, value_shape(SPACE), FORMAT, raw, Tier.MEMORY)
    decoded = decode(stored, 40, SPACE)
    assert decoded is not None
    if precision.lossless:
        assert torch.equal(decoded, value)
    assert torch.allclose(decoded.float(), value.float(), atol=0.1)
    assert decode(replace(stored, value=raw[:-3], parts=(*parts[:-1],)), 40, SPACE) is None


def test_a_native_value_is_decoded_without_a_copy(worker: WorkerHarness) -> None:
    worker.store.fill(spans(40))
    stored = worker.store.values[key(0)]
    assert isinstance(stored, StoredValue)
    value = decode(stored, 40, SPACE)
    assert value is not None
    stored.value[0] ^= 1
    assert value.view(torch.uint8).flatten()[0] == stored.value[0]


@pytest.mark.parametrize("after", [0, 1, 2])
def test_an_outage_at_any_time_ends_the_load(worker: WorkerHarness, after: int) -> None:
    wanted = spans(10, 50, 131)
    worker.store.fill(wanted)
    worker.store.outage_after = after
    outcome = worker.load(LoadJob("r", wanted, 0, 131, BLOCKS, "tenant"))
    assert outcome.missing_variant == key(after)
    assert (outcome.reason, outcome.timed_out) == ("store unavailable", False)
    assert outcome.tokens == (0, 0, BLOCK)[after]  # whole blocks of the values that arrived


def test_a_load_from_a_silent_store_times_out() -> None:
    worker = WorkerHarness()
    wanted = spans(10)
    worker.store.fill(wanted)
    worker.store.get_gate.clear()
    outcome = worker.load(LoadJob("r", wanted, 0, 10, BLOCKS, "tenant", deadline_s=0.05))
    assert (outcome.reason, outcome.timed_out) == ("load timed out", True)
    worker.store.get_gate.set()
    worker.connector.close()


def load_all(worker: WorkerHarness, *jobs: LoadJob) -> dict[str, LoadOutcome]:
    """Loads that begin in one step, wait_until all have ended."""
    worker.connector.start_loads(StepJobs(loads=jobs))
    ended: dict[str, LoadOutcome] = {}

    def have_ended() -> bool:
        worker.connector.advance((), busy=False)
        report = worker.connector.take_report()
        for outcome in report.outcomes if report is not None else ():
            ended[outcome.request_id] = outcome
        return len(ended) == len(jobs)

    wait_until(have_ended, "the end of all loads")
    return ended


ELSEWHERE = tuple(block + 100 for block in BLOCKS)


def test_loads_of_one_step_fetch_shared_values_once(worker: WorkerHarness) -> None:
    wanted = spans(10, 50, 131)
    tensors = worker.store.fill(wanted)
    shorter = LoadJob("shorter", wanted[:2], 0, 50, ELSEWHERE, "tenant")
    ended = load_all(worker, LoadJob("r", wanted, 0, 131, BLOCKS, "tenant"), shorter)
    assert {name: one.reason for name, one in ended.items()} == {"r": "", "shorter": ""}
    assert worker.store.requested == [[span.variant for span in wanted]]
    for blocks, found in ((BLOCKS, wanted), (ELSEWHERE, wanted[:2])):
        for span in found:
            read = worker.cache.read(blocks, span.start, span.end)
            assert torch.equal(read, tensors[span.variant])
    # The shared bytes count for both loads, because each has waited for them.
    assert [ended[name].num_bytes for name in ("r", "shorter")] == [
        value_bytes(SPACE, 131),
        value_bytes(SPACE, 50),
    ]


def test_loads_without_shared_values_are_fetched_separately(worker: WorkerHarness) -> None:
    first, second = spans(10, 50)
    worker.store.fill([first, second])
    jobs = [
        LoadJob("one", (first,), 0, 10, BLOCKS, "tenant"),
        LoadJob("two", (second,), 10, 50, ELSEWHERE, "tenant"),
    ]
    assert all(not one.reason for one in load_all(worker, *jobs).values())
    assert sorted(worker.store.requested, key=repr) == sorted([[key(0)], [key(1)]], key=repr)


@pytest.mark.parametrize("after", [0, 1, 2])
def test_an_outage_ends_all_loads_that_share_values(worker: WorkerHarness, after: int) -> None:
    wanted = spans(16, 48, 131)
    worker.store.fill(wanted)
    worker.store.outage_after = after
    shorter = LoadJob("shorter", wanted[:2], 0, 48, ELSEWHERE, "tenant")
    ended = load_all(worker, LoadJob("r", wanted, 0, 131, BLOCKS, "tenant"), shorter)
    assert ended["r"].reason == "store unavailable"
    # The shared values have arrived first, but the fetcher yields them in the order of the jobs.
    assert ended["shorter"].reason == "store unavailable"
    assert ended["shorter"].missing_variant == key(0)


def test_a_cancelled_load_does_not_affect_others(worker: WorkerHarness) -> None:
    wanted = spans(10, 50, 131)
    worker.store.fill(wanted)
    worker.store.get_gate.clear()
    jobs = tuple(
        LoadJob(name, wanted, 0, 131, blocks, "tenant")
        for name, blocks in (("cancelled", BLOCKS), ("running", ELSEWHERE))
    )
    worker.connector.start_loads(StepJobs(loads=jobs))
    worker.connector.advance({"cancelled"}, busy=False)
    assert worker.connector.take_received() == {"cancelled"}
    worker.store.get_gate.set()

    def has_ended() -> bool:
        worker.connector.advance((), busy=False)
        return "running" in worker.connector.take_received()

    wait_until(has_ended)
    report = worker.connector.take_report()
    assert report is not None
    assert [(one.request_id, one.reason) for one in report.outcomes] == [
        ("cancelled", "cancelled"),
        ("running", ""),
    ]


def test_a_load_without_spans_is_computed(worker: WorkerHarness) -> None:
    outcome = worker.load(LoadJob("r", (), 10, 131, BLOCKS, "tenant"))
    assert (outcome.reason, outcome.tokens) == ("load failed", 0)
    assert worker.connector.take_bad_blocks() == set(BLOCKS[: -(-131 // BLOCK)])


def test_a_cancelled_load_is_reported_so_that_its_blocks_are_freed(
    worker: WorkerHarness,
) -> None:
    wanted = spans(10)
    worker.store.fill(wanted)
    worker.store.get_gate.clear()
    worker.connector.start_loads(StepJobs(loads=(LoadJob("r", wanted, 0, 10, BLOCKS, "tenant"),)))
    wait_until(lambda: worker.store.requested)
    worker.connector.advance({"r"}, busy=False)
    assert worker.connector.take_received() == {"r"}
    worker.store.get_gate.set()
    wait_until(lambda: worker.store.ended_gets == 1)
    worker.connector.advance((), busy=False)
    assert worker.cache.slots_written == {}


def test_a_write_that_raises_fails_the_load_not_the_engine(worker: WorkerHarness) -> None:
    wanted = spans(10)
    worker.store.fill(wanted)
    worker.cache.broken = True
    outcome = worker.load(LoadJob("r", wanted, 0, 10, BLOCKS, "tenant"))
    assert (outcome.missing_variant, outcome.reason) == (key(0), "write failed")
    assert worker.connector.take_bad_blocks() == {BLOCKS[0]}


def test_a_write_that_raises_does_not_affect_other_loads(worker: WorkerHarness) -> None:
    wanted = spans(10)
    worker.store.fill(wanted)
    worker.store.get_gate.clear()
    jobs = tuple(LoadJob(name, wanted, 0, 10, BLOCKS, "tenant") for name in ("a", "b"))
    worker.connector.start_loads(StepJobs(loads=jobs))
    write, calls = worker.cache.write, iter((True, False))

    def only_the_first(value: torch.Tensor, slots: torch.Tensor, first_layer: int = 0) -> None:
        worker.cache.broken = not next(calls)
        write(value, slots, first_layer)

    worker.cache.write = only_the_first  # type: ignore[method-assign]
    worker.store.get_gate.set()
    received: set[str] = set()

    def have_ended() -> bool:
        worker.connector.advance((), busy=False)
        received.update(worker.connector.take_received())
        return received == {"a", "b"}

    wait_until(have_ended)
    report = worker.connector.take_report()
    assert report is not None
    assert sorted(outcome.reason for outcome in report.outcomes) == ["", "write failed"]


def test_a_step_without_a_pass_sleeps(
    worker: WorkerHarness, monkeypatch: pytest.MonkeyPatch
) -> None:
    slept: list[float] = []
    monkeypatch.setattr(worker_module, "time", SimpleNamespace(sleep=slept.append))
    worker.connector.advance((), busy=True)
    assert slept == []
    worker.connector.advance((), busy=False)
    assert len(slept) == 1
    assert slept[0] > 0


def test_passes_that_compute_prompts_are_timed(worker: WorkerHarness) -> None:
    """Passes of any request are timed, saved or not. Passes that mostly decode are not."""
    seconds = iter([1.0, 1.5, 2.0, 2.1, 3.0, 3.1])
    worker.cache.clock = lambda: next(seconds)
    for prompt_tokens, num_tokens in ((100, 100), (5, 5), (0, 100)):
        jobs = StepJobs(num_tokens=num_tokens, prompt_tokens=prompt_tokens, work=2e-3 * num_tokens)
        worker.connector.begin_step(jobs)
        worker.connector.end_pass(jobs)
    report = worker.connector.take_report()
    assert report is not None
    [measured] = report.passes
    assert (measured.work, measured.seconds) == (0.2, pytest.approx(0.5))
    assert worker.connector.take_report() is None
