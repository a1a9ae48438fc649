"""Checks inside a vLLM engine, in a process of its own. Writes the findings as one JSON object.

python -m tests.integration.engine.engine_inside MODEL_FOLDER DTYPE RESULT_FILE
"""

from __future__ import annotations

import json
import os
import random
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

BLOCKS_APART = 20
"""Distance between the first blocks of the tests' block tables."""

QUESTION = range(480, 520)

PIECE = 256
"""Tokens of a prompt in one pass of vLLM."""


def inside(worker: Any, token_ids: Sequence[int]) -> dict[str, Any]:
    """Return findings of a worker that has just prefilled token_ids."""
    import torch

    from ragcache_engine.blend.recomputer import Recomputer, access_model
    from ragcache_engine.kv_cache.paged_cache import PagedCache

    runner = worker.model_runner
    block_size = runner.attn_groups[0][0].kv_cache_spec.block_size
    model = access_model(runner, block_size)
    layers = runner.vllm_config.compilation_config.static_forward_context
    cache = PagedCache({name: layers[name] for name in model.layer_names}, model.device)
    recomputer = Recomputer(model)
    count = len(token_ids)

    def table(number: int) -> list[int]:
        return [BLOCKS_APART * number + i for i in range(-(-count // block_size))]

    def kv(blocks: Sequence[int]) -> torch.Tensor:
        return cache.read(blocks, 0, count)

    def error(found: torch.Tensor, expected: torch.Tensor) -> float:
        return float((found.float() - expected.float()).norm() / expected.float().norm())

    own_blocks = runner.input_batch.block_table[0].get_numpy_array()[0]
    prefilled = kv(own_blocks[: len(table(1))].tolist())
    found: dict[str, Any] = {}

    recomputer.recompute(token_ids, table(1), [range(count)])
    found["whole_equals_prefill"] = bool(torch.equal(kv(table(1)), prefilled))

    embedding = Recomputer(replace(model, embed=runner.model.embed_input_ids))
    embedding.recompute(token_ids, table(2), [range(count)])
    found["embedded_equals_prefill"] = bool(torch.equal(kv(table(2)), prefilled))

    for start, stop in ((0, 100), (100, 356), (356, 357), (357, count)):
        recomputer.recompute(token_ids, table(2), [range(start, stop)])
    found["slices_error"] = error(kv(table(2)), prefilled)

    corrupted = prefilled.clone()
    runs = [range(3, 9), range(50, 51), range(127, 131), range(300, 420), range(count - 1, count)]
    for run in runs:
        corrupted[:, :, run.start : run.stop] = 7.0
    found["corrupted_error"] = error(corrupted, prefilled)
    cache.write(corrupted, cache.slots(table(3), 0, count))
    recomputer.recompute(token_ids, table(3), runs)
    found["scattered_error"] = error(kv(table(3)), prefilled)

    cache.write(corrupted, cache.slots(table(3), 0, count))
    found["shared_pass_error"] = recompute_together(cache, recomputer, token_ids, table, runs)
    found["together_error"] = error(kv(table(3)), prefilled)

    try:
        recomputer.recompute([*token_ids] * 9, table(3), [range(recomputer.max_tokens + 1)])
    except ValueError as refused:
        found["refusal"] = str(refused)

    found |= check_rotations(runner, cache, recomputer)
    found |= shift_chunk(runner, cache, recomputer, token_ids, table(4), prefilled)
    found |= observe(cache, recomputer, token_ids, table(1))
    found["unchanged_by_observing"] = bool(torch.equal(kv(table(1)), prefilled))
    return found


def check_rotations(runner: Any, cache: Any, recomputer: Any) -> dict[str, Any]:
    """Check the model's rotation, and one with other frequencies, which must be refused."""
    from dataclasses import replace

    from ragcache_engine.blend.rotation_check import check_rotation
    from ragcache_kv.rotation import read_rope

    rope = read_rope(runner.vllm_config.model_config.hf_config.to_dict())
    check_rotation(rope, recomputer, cache)
    wrong = replace(rope, frequencies=tuple(one / 2 for one in rope.frequencies))
    try:
        check_rotation(wrong, recomputer, cache)
    except ValueError as refused:
        return {"wrong_rotation": str(refused)}
    return {"wrong_rotation": ""}


def shift_chunk(
    runner: Any,
    cache: Any,
    recomputer: Any,
    token_ids: Sequence[int],
    blocks: Sequence[int],
    prefilled: Any,
) -> dict[str, Any]:
    """Add the same vectors to all tokens of a chunk, recompute some, and shift the others.

    The KV of layer 0 does not depend on the tokens before. So its change is exactly these vectors.
    """
    import torch

    from ragcache_core.blend.token_selection import runs_outside
    from ragcache_engine.blend.chunk_shift import ChunkShift
    from ragcache_engine.protocol.messages import PromptSlice
    from ragcache_kv.rotation import KeyRotation, read_rope

    chunk, recomputed = range(100, 260), [range(110, 114), range(200, 230)]
    rope = read_rope(runner.vllm_config.model_config.hf_config.to_dict())
    rotation = KeyRotation(rope, str(cache.shape.dtype).removeprefix("torch."))
    moved = prefilled.clone()
    generator = torch.Generator().manual_seed(0)
    key, value = torch.randn((2, *prefilled.shape[3:]), generator=generator).to(prefilled.dtype)
    for position in chunk:
        moved[:, 0, position] += rotation.rotate_keys(key.clone(), position)
        moved[:, 1, position] += value
    count = len(token_ids)
    cache.write(moved, cache.slots(blocks, 0, count))
    recomputer.chunk_shift = ChunkShift(cache, rope)
    other = PromptSlice(token_ids[:50], [6 * BLOCKS_APART], [range(50)])
    recomputer.recompute_slices(
        [
            PromptSlice(token_ids, blocks, recomputed, [chunk], runs_outside([chunk], recomputed)),
            other,
        ]
    )
    recomputer.chunk_shift = None
    after = cache.read(blocks, 0, count)[0].float()
    shifted = [p for p in chunk if not any(p in run for run in recomputed)]
    outside = [*range(chunk.start), *range(chunk.stop, count)]
    left = after[:, shifted] - prefilled[0, :, shifted].float()
    added = moved[0, :, shifted].float() - prefilled[0, :, shifted].float()
    return {
        "left_of_shift": [float(a.norm() / b.norm()) for a, b in zip(left, added, strict=True)],
        "outside_of_shift_is_equal": torch.equal(
            after[:, outside], prefilled[0, :, outside].float()
        ),
    }


def observe(
    cache: Any, recomputer: Any, token_ids: Sequence[int], blocks: Sequence[int]
) -> dict[str, Any]:
    """Return what an observer measures of a prompt whose KV is in these blocks."""
    from bench.support.blending.lab import ChunkAttentionHook
    from ragcache_engine.blend.attention import AttentionObserver

    found: dict[str, Any] = {}
    segments = [range(41), range(41, 300), range(300, 301), range(301, 520)]
    observer = AttentionObserver(cache, recomputer)
    observation = observer.observe(token_ids, blocks, segments[-1], segments)
    found["observed"] = observation.mass.tolist()
    found["influence"] = observation.influence.tolist()
    alone = observer.observe(token_ids, blocks, range(41, 300), segments[:2])
    found["influence_of_nothing"] = float(alone.influence.max())
    found["question_attention"] = observer.question_attention(token_ids, blocks, QUESTION).tolist()
    chunks = [range(41), range(41, 301), range(301, 480)]
    hook = ChunkAttentionHook(cache, blocks, QUESTION, chunks)
    with hook.attached():
        again = observer.question_attention(token_ids, blocks, QUESTION).tolist()
    found["same_with_two_hooks"] = again == found["question_attention"]
    found["attention_by_layer"] = hook.by_layer
    return found


def inside_pieces(worker: Any, token_ids: Sequence[int]) -> dict[str, Any]:
    """Return findings of a worker that has just prefilled token_ids in passes of PIECE tokens."""
    import torch

    from ragcache_engine.blend.recomputer import Recomputer, access_model
    from ragcache_engine.kv_cache.paged_cache import PagedCache

    runner = worker.model_runner
    block_size = runner.attn_groups[0][0].kv_cache_spec.block_size
    model = access_model(runner, block_size)
    layers = runner.vllm_config.compilation_config.static_forward_context
    cache = PagedCache({name: layers[name] for name in model.layer_names}, model.device)
    recomputer, count = Recomputer(model), len(token_ids)
    num_blocks = -(-count // block_size)
    own = runner.input_batch.block_table[0].get_numpy_array()[0][:num_blocks].tolist()
    other = [5 * BLOCKS_APART + i for i in range(num_blocks)]
    for start in range(0, count, PIECE):
        recomputer.recompute(token_ids, other, [range(start, min(start + PIECE, count))])
    prefilled, computed = cache.read(own, 0, count), cache.read(other, 0, count)
    return {"pieces_equal_prefill": bool(torch.equal(computed, prefilled))}


def prepare_joint_pass(worker: Any, token_ids: Sequence[int]) -> float:
    """Let the next pass of vLLM recompute scattered tokens of a prompt; return their error now.

    Such as a step in which one request begins and the load of a blend has ended.
    """
    from ragcache_engine.blend.joint_pass import JointPass
    from ragcache_engine.blend.recomputer import Recomputer, access_model
    from ragcache_engine.kv_cache.paged_cache import PagedCache
    from ragcache_engine.protocol.messages import PromptSlice

    runner = worker.model_runner
    block_size = runner.attn_groups[0][0].kv_cache_spec.block_size
    model = access_model(runner, block_size)
    layers = runner.vllm_config.compilation_config.static_forward_context
    cache = PagedCache({name: layers[name] for name in model.layer_names}, model.device)
    recomputer, count = Recomputer(model), len(token_ids)
    blocks = [5 * BLOCKS_APART + i for i in range(-(-count // block_size))]
    recomputer.recompute(token_ids, blocks, [range(count)])
    computed = cache.read(blocks, 0, count)
    runs = [range(3, 9), range(50, 51), range(127, 131), range(300, 420)]
    corrupted = computed.clone()
    for run in runs:
        corrupted[:, :, run.start : run.stop] = 7.0
    cache.write(corrupted, cache.slots(blocks, 0, count))
    assert JointPass.supports(runner)
    JointPass(runner, recomputer).prepare([PromptSlice(token_ids, blocks, runs)])
    worker.joint_error = lambda: _error(cache.read(blocks, 0, count), computed)
    return float(worker.joint_error())


def prepare_broken_pass(worker: Any, token_ids: Sequence[int], fault: str) -> None:
    """Let the next pass of vLLM recompute a slice that fails, beside one that does not.

    Args:
        fault: ``blocks``: the inputs cannot be built. ``tokens``: the model raises an error.
            ``size``: the slices do not fit the pass, and the inputs of one cannot be built.
    """
    from ragcache_engine.blend.joint_pass import JointPass
    from ragcache_engine.blend.recomputer import Recomputer, access_model
    from ragcache_engine.protocol.messages import PromptSlice

    runner = worker.model_runner
    block_size = runner.attn_groups[0][0].kv_cache_spec.block_size
    recomputer, count = Recomputer(access_model(runner, block_size)), len(token_ids)
    if not hasattr(worker, "joint_pass"):
        worker.joint_pass = JointPass(runner, recomputer)
    broken_table, *tables = (
        [BLOCKS_APART * number + i for i in range(-(-count // block_size))] for number in (5, 6, 7)
    )
    if fault == "size":
        others = [PromptSlice(token_ids, table, [range(count)]) for table in tables]
    else:
        others = [PromptSlice(token_ids, tables[0], [range(9)])]
    runs = [range(count)] if fault == "size" else [range(300, 420)]
    broken = PromptSlice(token_ids, broken_table, runs, [range(299, 420)])
    if fault == "tokens":
        broken = replace(broken, token_ids=[1 << 30] * count)
    else:
        broken = replace(broken, blocks=broken_table[:1])
    worker.joint_pass.prepare([*others, broken])


def failed_slices(worker: Any) -> list[list[int]]:
    """Return the approximate ranges of what the last pass did not recompute."""
    failed = worker.joint_pass.take_failed()
    return [[one.approximate.start, one.approximate.stop] for one in failed]


def joint_error(worker: Any) -> float:
    """Return the error of the prompt of ``prepare_joint_pass``."""
    return float(worker.joint_error())


def _error(found: Any, expected: Any) -> float:
    return float((found.float() - expected.float()).norm() / expected.float().norm())


def recompute_together(
    cache: Any,
    recomputer: Any,
    token_ids: Sequence[int],
    table: Callable[[int], list[int]],
    runs: Sequence[range],
) -> float:
    """Recompute runs of a prompt in table 3 in one pass with a part of a shorter prompt.

    Return the error of the shorter prompt, compared with a pass of its own.
    """
    from ragcache_engine.protocol.messages import PromptSlice

    other, part = list(reversed(token_ids))[:300], range(100, 200)
    blocks = table(4)[: -(-len(other) // cache.shape.block_size)]
    recomputer.recompute(other, blocks, [range(len(other))])
    alone = cache.read(blocks, 0, len(other))
    corrupted = alone.clone()
    corrupted[:, :, part.start : part.stop] = 7.0
    cache.write(corrupted, cache.slots(blocks, 0, len(other)))
    recomputer.recompute_slices(
        [PromptSlice(token_ids, table(3), runs), PromptSlice(other, blocks, [part])]
    )
    found = cache.read(blocks, 0, len(other)).float()
    return float((found - alone.float()).norm() / alone.float().norm())


def reference(model: str, token_ids: Sequence[int]) -> dict[str, Any]:
    """Return the same observations by transformers, in float32."""
    import torch
    from transformers import AutoModelForCausalLM

    from ragcache_engine.blend.attention import question_layers

    llama = AutoModelForCausalLM.from_pretrained(
        model, dtype=torch.float32, attn_implementation="eager"
    )
    with torch.inference_mode():
        output = llama(torch.tensor([token_ids[:520]]), output_attentions=True, use_cache=True)
    weights = torch.stack(output.attentions)[:, 0, :, 301:]  # [layers, heads, 219, 520]
    mean = weights.mean((0, 1))
    sums = [mean[:, a:b].sum(1) for a, b in ((0, 41), (41, 300), (300, 301), (301, 520))]
    values = torch.stack([layer.values[0] for layer in output.past_key_values.layers])
    values = values.repeat_interleave(weights.shape[1] // values.shape[1], dim=1)
    added = weights[..., 41:301] @ values[:, :, 41:301]
    added = added[:-1]  # the last layer's output is in no KV
    influence = (added - added.mean(2, keepdim=True)).square().sum((0, 1, 3)).sqrt()
    asked = weights[:, :, QUESTION.start - 301 : QUESTION.stop - 301, : QUESTION.start].mean(2)
    taken = asked * values[:, :, : QUESTION.start].norm(dim=-1)
    question_attention = taken[list(question_layers(len(weights)))].mean((0, 1))
    return {
        "observed": torch.stack(sums, dim=1).tolist(),
        "influence": influence.tolist(),
        "question_attention": question_attention.tolist(),
    }


def main() -> None:
    """Run the command."""
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"  # so that the worker can run a function
    os.environ["VLLM_CPU_KVCACHE_SPACE"] = "1"
    from vllm import LLM, SamplingParams

    model, dtype, result = sys.argv[1:]
    engine = LLM(
        model, dtype=dtype, enforce_eager=True, max_num_batched_tokens=2048, disable_log_stats=True
    )
    rng = random.Random(1)
    token_ids = [rng.randrange(340) for _ in range(700)]
    asked = SamplingParams(temperature=0, max_tokens=1, ignore_eos=True)
    engine.generate({"prompt_token_ids": token_ids}, asked, use_tqdm=False)
    [found] = engine.collective_rpc(inside, args=(token_ids,))
    engine.reset_prefix_cache()
    core = engine.llm_engine.engine_core.engine_core
    core.scheduler.scheduler_config.long_prefill_token_threshold = PIECE
    engine.generate({"prompt_token_ids": token_ids}, asked, use_tqdm=False)
    [pieces] = engine.collective_rpc(inside_pieces, args=(token_ids,))
    core.scheduler.scheduler_config.long_prefill_token_threshold = 0
    answers = []
    for joins in (False, True):
        engine.reset_prefix_cache()
        if joins:
            [found["joint_error_before"]] = engine.collective_rpc(
                prepare_joint_pass, args=(token_ids,)
            )
        asked = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True, logprobs=0)
        prompt = {"prompt_token_ids": token_ids[::-1][:500]}
        [answer] = engine.generate(prompt, asked, use_tqdm=False)
        answers.append(answer.outputs[0].token_ids)
    found["same_answer_beside_joint_pass"] = answers[0] == answers[1]
    [found["joint_error"]] = engine.collective_rpc(joint_error)
    found["broken"] = {}
    for fault in ("blocks", "tokens", "size"):
        engine.reset_prefix_cache()
        engine.collective_rpc(prepare_broken_pass, args=(token_ids, fault))
        [answer] = engine.generate(prompt, asked, use_tqdm=False)
        [failed] = engine.collective_rpc(failed_slices)
        found["broken"][fault] = [answer.outputs[0].token_ids == answers[0], failed]
    found |= {**pieces, "reference": reference(model, token_ids)}
    Path(result).write_text(json.dumps(found))


if __name__ == "__main__":
    main()
