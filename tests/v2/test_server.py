"""A vLLM server with model runner V2 and two steps in flight: loads next to blends."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from harness.completion import complete
from harness.processes import COMPUTES_PLAIN, launch_engine, start_cachestore, wait_for_engine
from ragcache_core.blend.observation import observation_key
from ragcache_core.store_api import LookupKey
from ragcache_kv.model.folder import load_model_folder
from ragcache_kv.store_client.client import StoreClient
from tests.integration.engine.test_blend import Blends, clear_prompt, make_blend_prompt
from tests.kit.wait import wait_until
from tests.v2.settings import v2_settings

pytestmark = [pytest.mark.v2, pytest.mark.timeout(900)]

WAIT_S = 120.0
ORDERS = ((2, 0), (1, 2), (1, 0))


@pytest.fixture(scope="module")
def blends(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Blends]:
    """An engine whose store has three chunks, computed and observed in one prompt."""
    folder = tmp_path_factory.mktemp("v2")
    store = start_cachestore(folder / "store")
    space = load_model_folder(str(tiny_model)).space("auto")
    engine = launch_engine(
        *(folder, tiny_model, store.address, "--max-num-batched-tokens", "1024"),
        settings={**COMPUTES_PLAIN, **v2_settings(asynchronous=True)},
    )
    prompt = make_blend_prompt(0, 1, 2)
    blends = Blends(folder, tiny_model, store, engine, space, [prompt])
    try:
        wait_for_engine(engine)
        blends.blend(prompt, 0.0)
        blends.wait_until_stored(prompt)
        wants = [
            LookupKey.for_variant(observation_key(key)) for key in blends.chunk_variants(prompt)
        ]
        client = StoreClient(store.address)
        wait_until(
            lambda: all(found.stored for found in client.lookup(wants, WAIT_S).variants),
            "observed chunks",
        )
        client.close()
        yield blends
    finally:
        engine.service.stop()
        store.service.stop()


def test_concurrent_blends_next_to_a_long_answer_equal_computed_answers(blends: Blends) -> None:
    prompts = [clear_prompt(blends, order, max_tokens=2) for order in ORDERS]
    expected = [blends.compute(prompt, max_tokens=2).token_ids for prompt in prompts]
    with ThreadPoolExecutor(4) as pool:
        other = pool.submit(complete, blends.engine.url, range(20, 60), max_tokens=60)
        found = list(pool.map(lambda prompt: blends.blend(prompt, 1.0, 2), prompts))
        assert len(other.result().token_ids) == 60
    assert [answer.token_ids for answer, _ in found] == expected
    assert all(record.recomputed_tokens > 0 for _, record in found)


def test_an_exact_load_gives_the_answer_of_a_computation(blends: Blends) -> None:
    answer, record = blends.ask_uncached(blends.captured[0])
    assert record.miss == ""
    assert record.loaded_tokens == blends.captured[0].chunk_ends[-1]
    assert answer.token_ids == blends.compute(blends.captured[0]).token_ids
