"""What is the default on a GPU and not on a CPU, with real vLLM.

A compiled model, blocks that the attention backend splits, and layer-wise loading. vLLM's CPU
backend supports blocks of any multiple of 32. A plugin makes it support 32 only.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from harness.processes import COMPUTES_PLAIN, running_cachestore, running_engine
from harness.vllm_plugin import plugin_settings
from ragcache_kv.model.folder import load_model_folder
from tests.integration.engine.test_blend import LENGTHS, Blends, make_blend_prompt

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

BLOCK, KERNEL_BLOCK = 128, 32
CAPTURED = (make_blend_prompt(0, 1, 2), make_blend_prompt(3, 4, 5))

_SPLITS_BLOCKS = f"""
def register():
    from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend

    CPUAttentionBackend.get_supported_kernel_block_sizes = staticmethod(
        lambda kv_cache_spec=None: [{KERNEL_BLOCK}]
    )
"""


@pytest.fixture(scope="module", params=["--no-enable-prompt-embeds", "--enable-prompt-embeds"])
def blends(
    request: pytest.FixtureRequest, tiny_model: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Blends]:
    """Such an engine, which has filled its store itself.

    With prompt embeds, vLLM compiles the model for embeddings in place of token ids, as it does
    with models that read images.
    """
    folder = tmp_path_factory.mktemp("compiled")
    space = load_model_folder(str(tiny_model)).space("auto")
    settings = {
        **COMPUTES_PLAIN,
        **plugin_settings(folder / "plugin", _SPLITS_BLOCKS),
        "RAGCACHE_LAYERWISE": "on",
        "VLLM_CACHE_ROOT": str(folder / "vllm"),  # an empty compile cache
    }
    with running_cachestore(folder / "store") as store:
        arguments = (
            *(folder, tiny_model, store.address, "--no-enforce-eager"),
            *("--block-size", str(BLOCK), "--max-num-batched-tokens", "384", request.param),
        )
        with running_engine(*arguments, settings=settings) as engine:
            blends = Blends(folder, tiny_model, store, engine, space)
            for prompt in CAPTURED:
                blends.ask(prompt)
                blends.wait_until_stored(prompt)
            yield blends


def test_the_model_is_compiled_and_its_blocks_are_split(blends: Blends) -> None:
    log = blends.engine.service.log.read_text()
    assert "saved AOT compiled function" in log
    assert f"block_size={BLOCK} kernel_block_size={KERNEL_BLOCK}" in log
    assert "connector: only exact reuse" not in log, "it recomputes and blends"


def test_saved_values_are_loaded_exactly(blends: Blends) -> None:
    for prompt in CAPTURED:
        answer, record = blends.ask_uncached(prompt)
        assert record.loaded_tokens == prompt.chunk_ends[-1]
        assert answer.token_ids == blends.compute(prompt).token_ids


def test_a_fully_recomputed_blend_equals_a_full_computation(blends: Blends) -> None:
    prompt = make_blend_prompt(4, 1, 3, 0)
    answer, record = blends.blend(prompt, 1.0)
    assert record.recomputed_tokens == sum(LENGTHS[n] for n in (4, 1, 3, 0))
    assert answer.token_ids == blends.compute(prompt).token_ids


def test_scattered_tokens_are_recomputed(blends: Blends) -> None:
    """Passes of any number of tokens. A compiled model does not check their shape."""
    prompt = make_blend_prompt(5, 2, 0, question="a part")
    for recompute_share in (0.1, 0.35, 0.5):
        _, record = blends.blend(prompt, recompute_share)
        blended = sum(LENGTHS[n] for n in (5, 2, 0))
        assert (record.blended_tokens, record.miss) == (blended, "")
        assert 0 < record.recomputed_tokens <= recompute_share * blended
