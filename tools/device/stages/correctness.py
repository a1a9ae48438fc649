"""Engine A: a small real model, not compiled. Are all bits right?

::

    python -m tools.device.stages.correctness --device cuda --folder DIR
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Callable
from typing import Any

from ragcache_core.plan.prompt import Prompt
from ragcache_kv.model.folder import load_model_folder
from ragcache_kv.rotation import KeyRotation, read_rope
from tools.device.engine import (
    GIB,
    InProcessEngine,
    Options,
    engine_arguments,
    frozen,
    running_engine,
)
from tools.device.packages import ROOT
from tools.device.prompts import HEAD_TOKENS, Scene
from tools.device.report import require, run_stage

MODEL = ROOT / "models" / "tinyrag" / "model"
VOCABULARY = 2438
LENGTHS = {"cuda": (2048, 3584), "cpu": (256, 512)}
NUM_CHUNKS = 4
ANSWER_TOKENS = 8

MIN_LEAD = 0.4
"""Lead in log-probability of a clear answer, several times the error of bfloat16."""

MAX_ERROR = 2e-2
"""Relative error of KV that is computed in batches of another shape, in bfloat16."""

LOAD_DEADLINE_S = 1.0


class Correctness:
    """The checks. They share the chunks that ``exact_reload`` computes and stores."""

    def __init__(self, engine: InProcessEngine, lengths: tuple[int, ...]) -> None:
        self.engine = engine
        self.scenes = [
            Scene.make(length, NUM_CHUNKS, VOCABULARY, seed) for seed, length in enumerate(lengths)
        ]

    def exact_reload(self) -> dict[str, Any]:
        """Save, empty vLLM's prefix cache, load: bits and tokens are equal."""
        found: dict[str, Any] = {}
        for scene in self.scenes:
            for number in range(2):
                prompt = self._clear(captured_by(scene, number))
                length = len(prompt.token_ids)
                # A plan of a blend computes and saves the chunks, and observes them for the blends.
                plan = self.engine.blend_plan(prompt, 0.0)
                computed = self.engine.ask(prompt, plan, max_tokens=ANSWER_TOKENS)
                end = prompt.chunk_ends[-1]
                before = self.engine.kv(computed.request, end)
                self.engine.wait_until_stored(prompt, observed=True)
                self.engine.reset()
                plan = self.engine.exact_plan(prompt)
                loaded = self.engine.ask(prompt, plan, max_tokens=ANSWER_TOKENS)
                after = self.engine.kv(loaded.request, end)
                record = self.engine.record(plan)
                name = f"{length}_{number}"
                found[name] = {
                    "loaded_tokens": record.loaded_tokens,
                    "transfer": sorted({one.source.tier for one in record.segments}),
                }
                require(record.miss == "", f"the load missed: {record.miss}")
                require(
                    record.loaded_tokens >= end - 256, f"{record.loaded_tokens} of {end} loaded"
                )
                require(same_bits(before, after), "KV after the load differs from the computed KV")
                saved = self._joined(prompt)
                require(same_bits(saved, after), "KV after the load differs from the saved bytes")
                require(loaded.token_ids == computed.token_ids, "the answer differs after a load")
        return found

    def blend_without_recomputation(self) -> dict[str, Any]:
        """Loaded chunks at other positions have the bits that the CPU's rotation gives."""
        found: dict[str, Any] = {}
        rope = read_rope(load_model_folder(str(MODEL)).config)
        rotation = KeyRotation(rope, "bfloat16")
        for scene in self.scenes:
            prompt = scene.blended("zero")
            plan = self.engine.blend_plan(prompt, 0.0)
            answer = self.engine.ask(prompt, plan)
            record, end = self.engine.record(plan), prompt.chunk_ends[-1]
            require(record.recomputed_tokens == 0, f"{record.recomputed_tokens} recomputed")
            require(record.blended_tokens == end - HEAD_TOKENS, f"{record.blended_tokens} blended")
            kv, equal = self.engine.kv(answer.request, end), []
            for value, start, shift in self._blended_values(scene, prompt):
                rotated = rotation.rotate_part(value.clone(), shift)
                equal.append(same_bits(rotated, kv[:, :, start : start + value.shape[2]]))
            require(all(equal), f"chunks with the bits of the CPU's rotation: {equal}")
            found[str(len(prompt.token_ids))] = {"chunks_equal": len(equal)}
        return found

    def blend_with_full_recomputation(self) -> dict[str, Any]:
        """A blend that recomputes all tokens is a full computation, up to rounding."""
        found: dict[str, Any] = {}
        for scene in self.scenes:
            prompt = self._clear(scene.blended)
            end = prompt.chunk_ends[-1]
            computed = self.engine.ask(prompt, max_tokens=ANSWER_TOKENS)
            wanted = self.engine.kv(computed.request, end)
            plan = self.engine.blend_plan(prompt, 1.0)
            answer = self.engine.ask(prompt, plan, max_tokens=ANSWER_TOKENS)
            kv, record = self.engine.kv(answer.request, end), self.engine.record(plan)
            error = float((kv.float() - wanted.float()).norm() / wanted.float().norm())
            found[str(len(prompt.token_ids))] = {
                "kv_error": round(error, 5),
                "recomputed_tokens": record.recomputed_tokens,
            }
            require(record.recomputed_tokens == end - HEAD_TOKENS, f"{record} {found}")
            require(error < MAX_ERROR, f"KV differs from a full computation by {error:.4f}")
            require(
                answer.token_ids == computed.token_ids, "the answer of a blend at 100 % differs"
            )
        return found

    def aborted_load(self) -> dict[str, Any]:
        """Aborting a request whose load has started frees its blocks and harms no other one."""
        engine, scene = self.engine, self.scenes[-1]
        engine.run_until(engine.is_idle, "earlier requests did not end")
        free, started = engine.num_free_blocks, []
        engine.on_load = lambda: started.append(True)
        prompt = scene.captured(0, "abort")
        request = engine.start(prompt.token_ids, engine.exact_plan(prompt), max_tokens=4)
        engine.run_until(lambda: bool(started), "the load did not start")
        engine.abort(request)
        engine.on_load = lambda: None
        engine.run_until(engine.is_idle, "the aborted request did not end")
        engine.run_until(lambda: engine.num_free_blocks == free, "blocks were not freed")
        self._answers_as_computed(self._clear(captured_by(scene, 1)))
        return {"free_blocks": free}

    def failed_load(self) -> dict[str, Any]:
        """A store that stops answering after the lookup costs its load, and no wrong token."""
        engine, scene = self.engine, self.scenes[-1]
        prompt = self._clear(captured_by(scene, 0))
        expected = engine.ask(prompt, max_tokens=ANSWER_TOKENS)
        plan = engine.exact_plan(prompt)
        engine.on_load = engine.store.service.freeze
        with frozen(engine.store.service):
            answer = engine.ask(prompt, plan, max_tokens=ANSWER_TOKENS)
            engine.on_load = lambda: None
            record = engine.record(plan)
        require(record.loaded_tokens == 0, f"{record.loaded_tokens} tokens loaded")
        require(bool(record.miss), "the record names no reason")
        require(answer.token_ids == expected.token_ids, "the answer differs after a failed load")
        return {"miss": record.miss, "ttft_s": round(answer.ttft_s, 3)}

    def _answers_as_computed(self, prompt: Prompt) -> None:
        expected = self.engine.ask(prompt, max_tokens=ANSWER_TOKENS)
        plan = self.engine.exact_plan(prompt)
        answer = self.engine.ask(prompt, plan, max_tokens=ANSWER_TOKENS)
        require(self.engine.record(plan).loaded_tokens > 0, "nothing was loaded")
        require(answer.token_ids == expected.token_ids, "the answer differs after a load")

    def _clear(self, make: Callable[[str], Prompt]) -> Prompt:
        """Return the first prompt whose answer does not depend on rounding."""
        for number in itertools.count():
            prompt = make(f"clear {number}")
            answer = self.engine.ask(prompt, max_tokens=ANSWER_TOKENS, logprobs=True)
            if answer.lead >= MIN_LEAD:
                return prompt
            require(number < 60, "no prompt with a clear answer was found")
        raise AssertionError

    def _joined(self, prompt: Prompt) -> Any:
        import torch  # noqa: PLC0415  slow to import

        return torch.cat(self.engine.stored(prompt), dim=2)

    def _blended_values(self, scene: Scene, prompt: Prompt) -> list[tuple[Any, int, int]]:
        """Return each chunk's stored value, its start in the prompt, and how far it moved."""
        computed: dict[tuple[int, ...], tuple[Any, int]] = {}
        for number in range(2):
            captured = scene.captured(number)
            values = self.engine.stored(captured)[1:]
            for ids, start, value in zip(*_chunks(captured), values, strict=True):
                computed[ids] = value, start
        moved = []
        for ids, start in zip(*_chunks(prompt), strict=True):
            value, base = computed[ids]
            moved.append((value, start, start - base))
        return moved


def _chunks(prompt: Prompt) -> tuple[list[tuple[int, ...]], list[int]]:
    """Return the token ids and the start of each chunk."""
    bounds = list(itertools.pairwise([prompt.head, *prompt.chunk_ends]))
    ids = list(prompt.token_ids)
    return [tuple(ids[start:end]) for start, end in bounds], [start for start, _ in bounds]


def captured_by(scene: Scene, number: int) -> Callable[[str], Prompt]:
    """Return what makes a captured prompt with a question."""
    return lambda question: scene.captured(number, question)


def same_bits(one: Any, other: Any) -> bool:
    """Compare two tensors of 16-bit numbers bit by bit."""
    import torch  # noqa: PLC0415  slow to import

    return torch.equal(one.view(torch.int16), other.view(torch.int16))


def main() -> int:
    """Run the stages."""
    given = engine_arguments().parse_args()
    lengths = LENGTHS[given.device]
    options = Options(
        model=MODEL,
        folder=given.folder,
        device=given.device,
        eager=True,
        max_length=4096,
        pass_tokens=4096,
        kv_bytes=GIB,
        store_bytes=GIB,
        shared_memory=False,  # a frozen store would still be read
        attention=given.attention,
        settings={"RAGCACHE_LOAD_DEADLINE_S": str(LOAD_DEADLINE_S)},
    )
    started: list[InProcessEngine] = []

    def start() -> dict[str, Any]:
        started.append(context.__enter__())
        return started[0].facts()

    context = running_engine(options)
    if not run_stage("engine A: start", start):
        return 3
    checks = Correctness(started[0], lengths)
    stages = {
        "engine A: save, reset, load": checks.exact_reload,
        "engine A: blend 0 %": checks.blend_without_recomputation,
        "engine A: blend 100 %": checks.blend_with_full_recomputation,
        "engine A: abort": checks.aborted_load,
        "engine A: failed load": checks.failed_load,
    }
    for name, check in stages.items():
        run_stage(name, check)

    def end() -> dict[str, Any]:
        context.__exit__(None, None, None)
        return {}

    run_stage("engine A: shutdown", end)
    return 0


if __name__ == "__main__":
    sys.exit(main())
