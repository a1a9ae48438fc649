"""Values that the re-encoder has made smaller, in blends of a real vLLM server."""

from __future__ import annotations

import random
import uuid
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from harness.completion import Completion, complete, record_of
from harness.plans import blend_for_all
from harness.processes import COMPUTES_PLAIN, Engine, launch_engine, wait_for_engine
from ragcache_cachestore.background.re_encoder import Pace, ReEncoder
from ragcache_core.identity.keys import KVSpace, VariantKey
from ragcache_core.identity.store_key import StoreKey
from ragcache_core.identity.variant import Precision, PrecisionUse
from ragcache_core.plan.prompt import Prompt, assemble
from ragcache_core.plan.segments import checked_segments
from ragcache_core.store_api import LookupKey
from ragcache_core.tiering.precision_assignment import HaRagAssignment
from ragcache_core.tiering.precision_policy import PrecisionPolicy, Scheme
from ragcache_kv.model.folder import load_model_folder
from ragcache_wire.peers.credentials import NO_CREDENTIALS
from ragcache_wire.v1 import engine_pb2
from tests.integration.engine.test_vllm import VOCABULARY
from tests.kit.clock import ManualClock
from tests.kit.store import ServedStore, serving
from tests.kit.wait import wait_until

pytestmark = pytest.mark.timeout(900)

GRADES = tuple(map(Precision.parse, ("packed", "int8", "int8/e4m3", "gse8")))
POLICY = PrecisionPolicy(Scheme.HARAG, GRADES, (0.25, 0.25, 0.25))
LENGTHS = (131, 200, 177, 91)


def ids(name: str, count: int) -> list[int]:
    rng = random.Random(name)
    return [rng.randrange(VOCABULARY) for _ in range(count)]


def prompt_of(*chunks: int) -> Prompt:
    texts = [ids(f"chunk {n}", LENGTHS[n]) for n in chunks]
    return assemble(ids("head", 64), texts, ids("question", 23))


CAPTURED = prompt_of(0, 1, 2, 3)


@dataclass
class Platform:
    """A store with four chunks, each of another grade, and an engine."""

    store: ServedStore
    engine: Engine
    space: KVSpace

    def blend(
        self, prompt: Prompt, precision: PrecisionUse, *, trial: bool = True
    ) -> tuple[Completion, engine_pb2.RequestRecord]:
        request = uuid.uuid4().hex
        plan = replace(
            blend_for_all(prompt, self.space, "public", request, 0.0),
            trial=trial,
            precision=precision,
        )
        answer = complete(
            *(self.engine.url, prompt.token_ids),
            max_tokens=8,
            plan=plan.encode(),
            cache_salt=uuid.uuid4().hex,
        )
        return answer, record_of(self.engine, request, NO_CREDENTIALS)

    def chunks(self) -> list[VariantKey]:
        plan = blend_for_all(CAPTURED, self.space, "public", "probe", 0.0)
        return [one.variant for one in checked_segments(plan, CAPTURED.token_ids, self.space)][1:]

    def stored(self) -> dict[VariantKey, tuple[Precision, int]]:
        """Return precision and size of each chunk's value."""
        wanted = [LookupKey.for_variant(key) for key in self.chunks()]
        found = self.store.store.reads.lookup(wanted).variants
        infos = [one.stored[0].info if one.stored else None for one in found]
        return {
            key: (info.precision, info.num_bytes)
            for key, info in zip(self.chunks(), infos, strict=True)
            if info is not None
        }


@pytest.fixture(scope="module")
def platform(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Platform]:
    folder = tmp_path_factory.mktemp("precision")
    key_file = folder / "store-key"
    key_file.write_text("ab" * 32 + "\n")
    settings = {
        "RAGCACHE_STORE_KEY_FILE": str(key_file),
        "RAGCACHE_PRECISION": str(POLICY),
        **COMPUTES_PLAIN,
    }
    key = StoreKey.of_secret(bytes.fromhex("ab" * 32))
    space = load_model_folder(str(tiny_model)).space("auto", key)
    with serving(folder / "store") as store:
        engine = launch_engine(folder, tiny_model, store.address, settings=settings)
        try:
            wait_for_engine(engine)
            platform = Platform(store, engine, space)
            platform.blend(CAPTURED, PrecisionUse(), trial=False)
            wait_until(lambda: len(platform.stored()) == len(LENGTHS), "not saved")
            yield platform
        finally:
            engine.service.stop()


def re_encode(store: ServedStore) -> ReEncoder:
    """Do what the re-encoder's thread would do in an hour."""
    clock = ManualClock()
    pace = Pace(min_age_s=0, num_scans=1)
    re_encoder = ReEncoder(
        store.store.variants, HaRagAssignment(GRADES, POLICY.shares), pace, clock
    )
    for _ in range(360):
        clock.now += max(re_encoder.step(clock.now), 1.0)
    return re_encoder


def test_blends_use_re_encoded_values_only_where_the_gate_allows_it(platform: Platform) -> None:
    before = platform.stored()
    assert {precision for precision, _ in before.values()} == {Precision()}
    prompt, context = prompt_of(2, 0, 3, 1), sum(LENGTHS)
    native, record = platform.blend(prompt, PrecisionUse())
    assert (record.blended_tokens, record.miss) == (context, "")
    # A trial gives the loaded values a precision that none of them has yet.
    rounded, record = platform.blend(prompt, PrecisionUse(rounding=GRADES[3]))
    assert record.blended_tokens == context
    assert rounded.token_ids != [] != native.token_ids

    # No engine has asked for lossy values so far, so that none are made.
    re_encode(platform.store)
    assert {precision.lossless for precision, _ in platform.stored().values()} == {True}
    platform.blend(prompt, PrecisionUse(lossy=True))
    re_encode(platform.store)
    after = platform.stored()
    lossy = {key for key, (precision, _) in after.items() if not precision.lossless}
    assert len(lossy) == 3
    assert {precision for precision, _ in after.values()} <= {Precision(), *GRADES}
    for key in lossy:
        assert after[key][1] < 0.6 * before[key][1]

    # The gate is open: every chunk is authentic, decoded and blended. A template is loaded exactly
    # only, so one that has lost precision is computed.
    _, record = platform.blend(prompt, PrecisionUse(lossy=True))
    assert record.blended_tokens - record.recomputed_tokens == context
    # The gate is closed: the engine computes what lost precision.
    lengths = dict(zip(platform.chunks(), LENGTHS, strict=True))
    lossless = sum(lengths[key] for key in after.keys() - lossy)
    _, record = platform.blend(prompt, PrecisionUse())
    assert record.blended_tokens - record.recomputed_tokens <= lossless
    # No value was taken for a forged one.
    assert platform.stored() == after
