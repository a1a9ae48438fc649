"""What a GPU's engine has and a CPU's has not, by default: a model that vLLM has compiled, blocks
that the attention backend cuts into smaller ones, loads that go on beside the pass. Real vLLM.

vLLM's CPU backend takes blocks of any multiple of 32. A plugin has it say that it takes 32 only.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from bench.support.processes import COMPUTES_PLAIN, launch_engine, start_cachestore, wait_for_engine
from bench.support.vllm_plugin import plugin_settings
from ragcache_kv.model_folder import load_model_folder
from tests.integration.engine.test_blend import LENGTHS, Blends, prompt_of

pytestmark = pytest.mark.timeout(600)

BLOCK, KERNEL_BLOCK = 128, 32
CAPTURED = (prompt_of(0, 1, 2), prompt_of(3, 4, 5))

_CUTS_BLOCKS = f"""
def register():
    from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend

    CPUAttentionBackend.get_supported_kernel_block_sizes = staticmethod(
        lambda kv_cache_spec=None: [{KERNEL_BLOCK}]
    )
"""


@pytest.fixture(scope="module")
def blends(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Blends]:
    """Of such an engine, which has filled its store itself."""
    folder = tmp_path_factory.mktemp("compiled")
    store = start_cachestore(folder / "store")
    space = load_model_folder(str(tiny_model)).space("auto")
    engine = launch_engine(
        *(folder, tiny_model, store.address, "--no-enforce-eager"),
        *("--block-size", str(BLOCK), "--max-num-batched-tokens", "384"),
        settings={
            **COMPUTES_PLAIN,
            **plugin_settings(folder / "plugin", _CUTS_BLOCKS),
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


def test_it_is_compiled_and_its_blocks_are_cut(blends: Blends) -> None:
    said = blends.engine.service.log.read_text()
    assert "saved AOT compiled function" in said
    assert f"block_size={BLOCK} kernel_block_size={KERNEL_BLOCK}" in said
    assert "its kernel has blocks of" not in said, "it recomputes and blends all the same"


def test_what_such_an_engine_has_saved_it_loads_exactly(blends: Blends) -> None:
    for prompt in CAPTURED:
        answer, record = blends.ask_anew(prompt)
        assert record.loaded_tokens == prompt.chunk_ends[-1]
        assert answer.token_ids == blends.compute(prompt).token_ids


def test_a_blend_recomputed_in_whole_is_a_full_computation(blends: Blends) -> None:
    prompt = prompt_of(4, 1, 3, 0)
    answer, record = blends.blend(prompt, 1.0)
    assert record.recomputed_tokens == sum(LENGTHS[n] for n in (4, 1, 3, 0))
    assert answer.token_ids == blends.compute(prompt).token_ids


def test_scattered_tokens_are_recomputed(blends: Blends) -> None:
    """Passes of any number of tokens: the compiled model has no guard against a wrong one."""
    prompt = prompt_of(5, 2, 0, question="a part")
    for budget in (0.1, 0.35, 0.5):
        _, record = blends.blend(prompt, budget)
        blended = sum(LENGTHS[n] for n in (5, 2, 0))
        assert (record.blended_tokens, record.miss) == (blended, "")
        assert 0 < record.recomputed_tokens <= budget * blended
