"""Blocks that the attention backend cuts into smaller ones, as some of a GPU's do: real vLLM.

vLLM's CPU backend takes blocks of any multiple of 32. A plugin has it say that it takes 32 only.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from bench.processes import COMPUTES_PLAIN, launch_engine, start_cachestore, wait_for_engine
from ragcache_kv.model_folder import load_model_folder
from tests.integration.test_engine_blend import LENGTHS, Blends, prompt_of

pytestmark = pytest.mark.timeout(600)

BLOCK, KERNEL_BLOCK = 128, 32

_PLUGIN = f"""
def register():
    from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend

    CPUAttentionBackend.get_supported_kernel_block_sizes = staticmethod(
        lambda kv_cache_spec=None: [{KERNEL_BLOCK}]
    )
"""


def plugin(folder: Path) -> Path:
    """A package that Python finds there, with an entry point of vLLM's."""
    known = folder / "cut_blocks-1.dist-info"
    known.mkdir(parents=True)
    (folder / "cut_blocks.py").write_text(_PLUGIN)
    (known / "METADATA").write_text("Metadata-Version: 2.1\nName: cut-blocks\nVersion: 1\n")
    (known / "entry_points.txt").write_text("[vllm.general_plugins]\ncut = cut_blocks:register\n")
    return folder


def launch(blends: Blends, *, cut: bool) -> None:
    path = os.environ.get("PYTHONPATH", "")
    if cut:
        path = f"{blends.folder / 'plugin'}{os.pathsep}{path}"
    blends.engine = launch_engine(
        *(blends.folder, blends.model, blends.store.address),
        *("--block-size", str(BLOCK), "--max-num-batched-tokens", "384"),
        settings={**COMPUTES_PLAIN, "PYTHONPATH": path},
    )
    wait_for_engine(blends.engine)


@pytest.fixture(scope="module")
def blends(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Blends]:
    """Of an engine whose blocks are cut, and which has filled the store."""
    folder = tmp_path_factory.mktemp("cut")
    plugin(folder / "plugin")
    store = start_cachestore(folder / "store")
    space = load_model_folder(str(tiny_model)).space("auto")
    blends = Blends(folder, tiny_model, store, None, space)  # type: ignore[arg-type]
    try:
        launch(blends, cut=True)
        for prompt in (prompt_of(0, 1, 2), prompt_of(3, 4, 5)):
            blends.ask(prompt)
            blends.wait_until_stored(prompt)
        yield blends
    finally:
        if blends.engine is not None:
            blends.engine.service.stop()
        blends.store.service.stop()


def test_its_blocks_are_cut(blends: Blends) -> None:
    said = blends.engine.service.log.read_text()
    assert f"blocks of {BLOCK} tokens are cut into blocks of {KERNEL_BLOCK}" in said
    assert "its kernel has blocks of" not in said, "it recomputes and blends all the same"


def test_what_was_saved_from_cut_blocks_is_loaded_into_cut_blocks(blends: Blends) -> None:
    prompt = prompt_of(0, 1, 2)
    answer, record = blends.ask_anew(prompt)
    assert record.loaded_tokens == prompt.chunk_ends[-1]
    assert answer.token_ids == blends.compute(prompt).token_ids


def test_a_blend_recomputed_in_whole_is_a_full_computation(blends: Blends) -> None:
    prompt = prompt_of(4, 1, 3, 0)
    answer, record = blends.blend(prompt, 1.0)
    assert record.repaired_tokens == sum(LENGTHS[n] for n in (4, 1, 3, 0))
    assert answer.token_ids == blends.compute(prompt).token_ids


def test_a_part_is_recomputed_in_its_place(blends: Blends) -> None:
    """With most of it recomputed, the rest is still somebody else's: the answer shows both."""
    prompt = prompt_of(5, 2, 0, question="a part")
    _, record = blends.blend(prompt, 0.5)
    assert record.blended_tokens == sum(LENGTHS[n] for n in (5, 2, 0))
    assert 0 < record.repaired_tokens <= record.blended_tokens // 2


def test_an_engine_that_cuts_no_blocks_reads_the_same_bytes(blends: Blends) -> None:
    """What a store holds knows nothing of blocks."""
    prompt = prompt_of(0, 1, 2)
    before = blends.values(prompt)
    blends.engine.service.stop()
    launch(blends, cut=False)
    assert "are cut into" not in blends.engine.service.log.read_text()
    answer, record = blends.ask_anew(prompt)
    assert record.loaded_tokens == prompt.chunk_ends[-1]
    assert answer.token_ids == blends.compute(prompt).token_ids
    assert blends.values(prompt) == before
