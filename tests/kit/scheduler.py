"""The connector's scheduler half over a fake store, for tests of the engine."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any, cast

from harness.plans import blend_for_all, exact_for_all
from ragcache_core.cluster.sent_requests import SENT_FIELD, SentRequest
from ragcache_core.cost.load_or_compute import ReuseCosts
from ragcache_core.cost.prefill_profile import PrefillProfile
from ragcache_core.identity.keys import KVSpace, VariantKey
from ragcache_core.identity.variant import (
    Miss,
    Tier,
    ValuePart,
)
from ragcache_core.plan.prompt import Prompt, assemble
from ragcache_core.plan.reuse_plan import Handoff
from ragcache_core.plan.segments import PIECE_TOKENS
from ragcache_core.store_api import AsOf, ChunkVariants, LookupKey, ReportedUses, StoredVariant
from ragcache_engine.protocol.context import EngineContext
from ragcache_engine.protocol.messages import (
    LoadJob,
    SaveJob,
)
from ragcache_engine.scheduler.load_publisher import ArrivedRequest
from ragcache_engine.scheduler.request import NewRequest
from ragcache_engine.scheduler.scheduler import ConnectorScheduler
from ragcache_engine.telemetry.engine_feed import EngineFeed
from ragcache_engine.telemetry.request_records import RequestRecord, RequestRecords
from ragcache_kv.store_client.shard_router import ShardedLookup
from ragcache_kv.store_client.sharded import ShardedStore
from ragcache_kv.values.stored_value import StoredValue
from ragcache_wire.settings import EngineSettings
from ragcache_wire.watched.members import FixedMembers
from ragcache_wire.watched.signing_keys import SigningKeys
from tests.kit.wait import wait_until

SPACE = KVSpace("model", num_layers=2, num_kv_heads=1, head_dim=4, dtype="bfloat16")
PROMPT = assemble(range(20), [range(100, 140), range(200, 250), range(300, 330)], range(9))
LENGTH = len(PROMPT.token_ids)
BLOCKS = tuple(range(10, 40))
PLAIN = [n * 7919 % 1000 for n in range(3 * PIECE_TOKENS + 30)]


AS_OF = {"shard:1": AsOf(bytes(16), 7)}
PROFILE = PrefillProfile((0,), (1, 1000), ((1e-3, 1.0),), 2048)
"""One millisecond per token."""


class FakeLookupStore:
    """Answers lookups of variants from a dict; an exception in ``outage`` is raised instead."""

    def __init__(self) -> None:
        self.stored: dict[VariantKey, StoredVariant] = {}
        self.misses: dict[VariantKey, Miss] = {}
        self.outage: Exception | None = None
        self.num_lookups = 0
        self.prefetched: list[list[VariantKey]] = []
        self.reported: list[ReportedUses] = []

    def lookup(
        self,
        wants: Sequence[LookupKey],
        timeout_s: float = 1.0,
        *,
        exact: bool = False,
        domain: str,
        lossy: bool = False,
    ) -> ShardedLookup:
        assert domain
        assert not lossy
        self.num_lookups += 1
        if self.outage is not None:
            raise self.outage
        return ShardedLookup(tuple(self._answer(want, exact) for want in wants), AS_OF)

    def _answer(self, want: LookupKey, exact: bool) -> ChunkVariants:
        assert exact
        assert want.prefix is not None
        key = VariantKey(want.chunk, want.prefix)
        if key in self.stored:
            return ChunkVariants((self.stored[key],))
        return ChunkVariants(miss=self.misses.get(key, Miss.NEVER_STORED))

    def prefetch(self, keys: Sequence[VariantKey], timeout_s: float, *, hold_s: float) -> int:
        assert hold_s > 0
        self.prefetched.append(list(keys))
        return len(keys)

    def report_uses(self, reports: Sequence[ReportedUses]) -> int:
        self.reported += reports
        return len(reports)

    def connect(self, timeout_s: float) -> None:
        pass

    def close(self) -> None:
        pass


class SchedulerHarness:
    """Calls the connector's scheduler half in vLLM's order."""

    def __init__(
        self,
        plan_keys: SigningKeys | None = None,
        *,
        plain_prefixes: bool = True,
        store: FakeLookupStore | None = None,
        handoff_wait_s: float = 60.0,
    ) -> None:
        self.store = store or FakeLookupStore()
        self.records = RequestRecords()
        config = EngineSettings(
            cachestore=FixedMembers(()),
            signing_key_file=plan_keys,
            lookup_wait_s=5.0,
            min_load_tokens=16,
            plain_prefixes=plain_prefixes,
        )
        self._handoff_wait_s = handoff_wait_s
        self.costs = ReuseCosts()
        sharded = cast("ShardedStore", self.store)
        engine = EngineContext(config, SPACE)
        self.feed = EngineFeed()
        self.scheduler = ConnectorScheduler(
            engine, self.records, sharded, self.costs, feed=self.feed
        )

    def arrive(
        self,
        request_id: str,
        prompt: Prompt = PROMPT,
        *,
        handoff: Handoff | None = None,
        sent: SentRequest | None = None,
    ) -> None:
        plan = exact_for_all(prompt, SPACE, "public", request_id)
        plan = replace(plan, handoff=handoff, handoff_wait_s=self._handoff_wait_s)
        params: dict[str, object] = {"ragcache": plan.encode()}
        if sent is not None:
            params[SENT_FIELD] = sent.to_field()
        self.scheduler.on_arrival(ArrivedRequest(request_id, len(prompt.token_ids), params))
        self.scheduler.on_new_request(NewRequest(request_id, prompt.token_ids, params))

    def loaded(self, request_id: str) -> int:
        """Ask until the lookup is complete, as vLLM does. Return the number of loaded tokens."""
        tokens: int | None = None

        def is_known() -> bool:
            nonlocal tokens
            tokens = self.scheduler.loadable_tokens(request_id, 0)
            return tokens is not None

        wait_until(is_known, "the lookup")
        assert tokens is not None
        self.scheduler.on_allocated(request_id, BLOCKS, tokens)
        return tokens

    def prefill(self, request_id: str, computed: int = 0, pieces: int = 1) -> list[VariantKey]:
        """Run the prefill in pieces. Return the saved variants in order."""
        return [job.span.variant for job in self.saves(request_id, computed, pieces)]

    def saves(self, request_id: str, computed: int = 0, pieces: int = 1) -> list[SaveJob]:
        """Run the prefill in pieces. Return the saves in order."""
        saved: list[SaveJob] = []
        size = -(-(LENGTH - computed) // pieces)
        while computed < LENGTH:
            scheduled = min(size, LENGTH - computed)
            jobs = self.scheduler.step([(request_id, computed, scheduled)], lambda _: BLOCKS)
            saved += jobs.saves
            for job in jobs.saves:
                assert job.span.end <= computed + scheduled
                key = job.span.variant
                self.store.stored[key] = StoredVariant(key, job.info, Tier.MEMORY)
            computed += scheduled
        return saved

    def plain(
        self,
        request_id: str,
        token_ids: Sequence[int] = PLAIN,
        params: object = None,
        **given: Any,
    ) -> tuple[int, list[VariantKey]]:
        """Run a request without a plan: load from the store, then compute in two passes.

        Return how many tokens are loaded, and the saved variants.
        """
        self.scheduler.on_new_request(NewRequest(request_id, token_ids, params, **given))
        loaded = self.scheduler.loadable_tokens(request_id, 0)
        assert loaded is not None
        self.scheduler.on_allocated(request_id, BLOCKS, loaded)
        saved = []
        for end in (len(token_ids) // 2, len(token_ids)):
            jobs = self.scheduler.step(
                [(request_id, loaded, max(1, end - loaded))], lambda _: BLOCKS
            )
            for job in jobs.saves:
                key = job.span.variant
                saved.append(key)
                self.store.stored[key] = StoredVariant(key, job.info, Tier.MEMORY)
        self.scheduler.on_finished(request_id, BLOCKS)
        return loaded, saved

    def record(self, request_id: str) -> RequestRecord:
        record = self.records.get(request_id)
        assert record is not None
        return record


TEMPLATE, TAIL = range(20), range(9)
A, B, C, D = range(100, 140), range(200, 250), range(300, 330), range(400, 460)
BLOCK = 16
BLOCKS = tuple(range(10, 40))


class FakeBlendStore(FakeLookupStore):
    """Answers lookups of variants and chunks, and stores observations of some."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: dict[VariantKey, bytes] = {}
        self.get_outage: Exception | None = None

    def _answer(self, want: LookupKey, exact: bool) -> ChunkVariants:
        found = [
            held
            for key, held in self.stored.items()
            if key.chunk == want.chunk and (want.takes_any or want.prefix == key.prefix)
            if held.info.serves_exact or not exact
        ]
        return ChunkVariants(tuple(found)) if found else ChunkVariants(miss=Miss.NEVER_STORED)

    def get(
        self, keys: Sequence[VariantKey], timeout_s: float, *, domain: str
    ) -> Iterator[tuple[VariantKey, StoredValue | Miss]]:
        for key in keys:
            if self.get_outage:
                raise self.get_outage
            raw = self.seen.get(key)
            if raw is None:
                yield key, Miss.NEVER_STORED
                continue
            info = next(iter(self.stored.values())).info
            part = ValuePart(len(raw), 0)
            yield key, StoredValue(info, (part,), None, 0, memoryview(raw), Tier.MEMORY)


class FakeBlock:
    def __init__(self, block_id: int) -> None:
        self.block_id = block_id


class FakeBlockPool:
    """vLLM's block pool."""

    num_gpu_blocks = 400

    def __init__(self) -> None:
        self.free = [FakeBlock(n) for n in range(1000, 1100)]

    def get_num_free_blocks(self) -> int:
        return len(self.free)

    def get_new_blocks(self, num_blocks: int) -> list[Any]:
        taken, self.free = self.free[:num_blocks], self.free[num_blocks:]
        return taken

    def free_blocks(self, ordered_blocks: Iterable[Any]) -> None:
        self.free += ordered_blocks


class BlendHarness:
    """Calls the connector's scheduler half in vLLM's order."""

    def __init__(self, **settings: Any) -> None:
        self.store, self.pool, self.records = FakeBlendStore(), FakeBlockPool(), RequestRecords()
        config = EngineSettings(
            cachestore=FixedMembers(()),
            lookup_wait_s=5.0,
            load_deadline_s=5.0,
            min_load_tokens=32,
            **settings,
        )
        self.costs = ReuseCosts()
        store = cast("ShardedStore", self.store)
        self.scheduler = ConnectorScheduler(
            EngineContext(config, SPACE), self.records, store, self.costs
        )
        self.scheduler.bind(self.pool, BLOCK)

    def arrive(self, name: str, prompt: Prompt, recompute_share: float = 0.2, **given: Any) -> None:
        """given: fields of the plan."""
        plan = replace(blend_for_all(prompt, SPACE, "public", name, recompute_share), **given)
        params = {"ragcache": plan.encode()}
        self.scheduler.on_new_request(NewRequest(name, prompt.token_ids, params))

    def load(self, name: str, local: int = 0) -> LoadJob:
        """Allocate blocks for the load, and return its job."""
        tokens = self.scheduler.loadable_tokens(name, local)
        assert tokens
        self.scheduler.on_allocated(name, BLOCKS, tokens)
        (job,) = self.scheduler.step([], lambda _: BLOCKS).loads
        return job

    def compute(self, name: str, prompt: Prompt, computed: int = 0) -> list[SaveJob]:
        """Prefill the rest, and store the saves."""
        self.scheduler.on_allocated(name, BLOCKS, 0)
        left = len(prompt.token_ids) - computed
        saves = list(self.scheduler.step([(name, computed, left)], lambda _: BLOCKS).saves)
        for job in saves:
            key, origin = job.span.variant, job.origin
            self.store.stored[key] = StoredVariant(
                key,
                job.info,
                Tier.MEMORY,
                prefix_chunks=origin.prefix_chunks,
                influence=origin.influence,
            )
        return saves

    def run_first(self, name: str, prompt: Prompt, **given: Any) -> list[SaveJob]:
        self.arrive(name, prompt, **given)
        assert self.scheduler.loadable_tokens(name, 0) == 0
        return self.compute(name, prompt)

    def finish(self, name: str) -> bool:
        return self.scheduler.on_finished(name, BLOCKS)
