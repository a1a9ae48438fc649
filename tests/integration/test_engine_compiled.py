"""A model that vLLM has compiled, and which calls the connector from compiled code: real vLLM."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from bench.processes import COMPUTES_PLAIN, launch_engine, start_cachestore, wait_for_engine
from ragcache_kv.model_folder import load_model_folder
from tests.integration.test_engine_blend import LENGTHS, Blends, prompt_of

pytestmark = pytest.mark.timeout(600)

CAPTURED = (prompt_of(0, 1, 2), prompt_of(3, 4, 5))


@pytest.fixture(scope="module")
def blends(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Blends]:
    """Of a compiled engine that loads layer by layer, and has filled its store itself."""
    folder = tmp_path_factory.mktemp("compiled")
    store = start_cachestore(folder / "store")
    space = load_model_folder(str(tiny_model)).space("auto")
    engine = launch_engine(
        *(folder, tiny_model, store.address),
        *("--no-enforce-eager", "--max-num-batched-tokens", "384"),
        settings={
            **COMPUTES_PLAIN,
            "RAGCACHE_LAYERWISE": "on",
            "VLLM_CACHE_ROOT": str(folder / "vllm"),  # where nothing is compiled yet
        },
    )
    blends = Blends(folder, tiny_model, store, engine, space)
    try:
        wait_for_engine(engine)
        for prompt in CAPTURED:
            blends.ask(prompt)
            blends.wait_until_stored(prompt)
        yield blends
    finally:
        engine.service.stop()
        store.service.stop()


def test_it_is_compiled(blends: Blends) -> None:
    assert "saved AOT compiled function" in blends.engine.service.log.read_text()


def test_what_a_compiled_model_has_saved_is_loaded_exactly(blends: Blends) -> None:
    for prompt in CAPTURED:
        answer, record = blends.ask_anew(prompt)
        assert record.loaded_tokens == prompt.chunk_ends[-1]
        assert answer.token_ids == blends.compute(prompt).token_ids


def test_a_blend_recomputed_in_whole_is_a_full_computation(blends: Blends) -> None:
    prompt = prompt_of(4, 1, 3, 0)
    answer, record = blends.blend(prompt, 1.0)
    assert record.repaired_tokens == sum(LENGTHS[n] for n in (4, 1, 3, 0))
    assert answer.token_ids == blends.compute(prompt).token_ids


def test_scattered_tokens_are_recomputed(blends: Blends) -> None:
    """Passes of any number of tokens: the compiled model has no guard against a wrong one."""
    prompt = prompt_of(5, 2, 0, question="a part")
    for budget in (0.1, 0.35, 0.5):
        _, record = blends.blend(prompt, budget)
        blended = sum(LENGTHS[n] for n in (5, 2, 0))
        assert (record.blended_tokens, record.miss) == (blended, "")
        assert 0 < record.repaired_tokens <= budget * blended
