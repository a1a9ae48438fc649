"""Runs each family in a real vLLM on the CPU with the connector, and compares tokens."""

from __future__ import annotations

import random
import re
import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final, NamedTuple

from bench.support.tiny_engines import DOMAIN, wait_until_stored
from harness.completion import complete, is_clear, record_of
from harness.processes import (
    COMPUTES_PLAIN,
    CacheStore,
    Engine,
    launch_engine,
    vllm_cache_root,
    wait_for_engine,
)
from ragcache_core.identity.keys import KVSpace
from ragcache_core.plan.prompt import Prompt, assemble, plan_blend, plan_exact
from ragcache_core.plan.segments import checked_segments
from ragcache_kv.model.folder import load_model_folder
from ragcache_wire.v1 import engine_pb2
from tools.models.families import MAX_LENGTH, Family
from tools.models.reference import rotation_error
from tools.models.tiny_family import make_tiny_family

BLEND, EXACT, REFUSED, FAILED = "blend", "exact", "refused", "failed"
REFERENCE = "reference"
"""vLLM cannot run the family here, and its keys are rotated as transformers does in float64."""

_VOCABULARY: Final = 340
_CHUNKS: Final = (131, 77, 160)
_HEAD, _QUESTION, _ANSWER = 41, 23, 2
_PROMPTS: Final = 3
"""Prompts that are compared for each family."""

_QUESTIONS: Final = 100
"""Questions that are tried for each prompt. Answers that rounding may change are passed over."""

_LACKING = re.compile(r"ModuleNotFoundError: (.+)")
_REFUSAL = re.compile(r"InvalidInput: (.+)")
_ERROR = re.compile(r"(\w*Error: .+)")
_ONLY_EXACT = re.compile(r"only exact reuse.* error=(.+)")


class Outcome(NamedTuple):
    """What a family can do, and why not more."""

    kind: str
    reason: str = ""


@dataclass(frozen=True, slots=True)
class _Platform:
    """An engine with a model of one family, and the store."""

    store: CacheStore
    engine: Engine
    space: KVSpace

    def compute(self, prompt: Prompt) -> Sequence[int]:
        """Answer without stored KV."""
        return self._complete(prompt, uuid.uuid4().hex, None)

    def ask(
        self, prompt: Prompt, recompute: float | None = None
    ) -> tuple[Sequence[int], engine_pb2.RequestRecord]:
        """Answer with stored KV, and without vLLM's own prefix cache.

        Args:
            prompt: The prompt.
            recompute: Share of moved tokens that is recomputed; None: reuse exact prefixes.
        """
        request = uuid.uuid4().hex
        if recompute is None:
            plan = plan_exact(prompt, self.space, DOMAIN, request)
        else:
            plan = plan_blend(prompt, self.space, DOMAIN, request, recompute)
        return self._complete(prompt, request, plan.encode()), record_of(self.engine, request)

    def wait_until_stored(self, prompt: Prompt) -> None:
        """Wait for the save, which follows the answer."""
        plan = plan_exact(prompt, self.space, DOMAIN, "probe")
        segments = checked_segments(plan, prompt.token_ids, self.space)
        wait_until_stored(self.store.address, [one.variant for one in segments])

    def _complete(self, prompt: Prompt, salt: str, plan: str | None) -> Sequence[int]:
        tokens = prompt.token_ids
        return complete(
            self.engine.url, tokens, max_tokens=_ANSWER, plan=plan, cache_salt=salt
        ).token_ids


def check_family(folder: Path, family: Family, store: CacheStore) -> Outcome:
    """Make a small model of a family, serve it, and return what it can do."""
    try:
        make_tiny_family(folder / "model", family)
    except (ImportError, KeyError, TypeError, ValueError) as error:
        return Outcome(FAILED, f"transformers: {error}")
    settings = {"VLLM_CACHE_ROOT": str(vllm_cache_root(folder)), **COMPUTES_PLAIN}
    arguments = ["--max-num-batched-tokens", str(MAX_LENGTH)]
    if family.reads_images:
        arguments += ["--limit-mm-per-prompt", '{"image": 0}', "--skip-mm-profiling"]
    engine = launch_engine(
        folder,
        folder / "model",
        store.address,
        *arguments,
        max_length=MAX_LENGTH,
        settings=settings,
    )
    try:
        try:
            wait_for_engine(engine)
        except RuntimeError:
            log = engine.service.log.read_text(errors="replace")
            return _not_started(log, folder / "model")
        space = load_model_folder(str(folder / "model")).space("bfloat16", max_length=MAX_LENGTH)
        return _compare(_Platform(store, engine, space))
    except Exception as error:
        return Outcome(FAILED, f"{type(error).__name__}: {error}")
    finally:
        engine.service.stop()


def _compare(platform: _Platform) -> Outcome:
    """Compare answers from stored KV with computed ones."""
    rng = random.Random("families")
    for _ in range(_PROMPTS):
        head, *chunks = (_ids(rng, count) for count in (_HEAD, *_CHUNKS))
        error = _exact_error(platform, _clear_prompt(platform.engine.url, head, chunks, rng))
        if error:
            return Outcome(FAILED, error)
        reason = _ONLY_EXACT.search(platform.engine.service.log.read_text(errors="replace"))
        if reason:
            return Outcome(EXACT, reason[1])
        moved = [chunks[-1], *chunks[:-1]]
        error = _blend_error(platform, _clear_prompt(platform.engine.url, head, moved, rng))
        if error:
            return Outcome(FAILED, error)
    return Outcome(BLEND)


def _exact_error(platform: _Platform, prompt: Prompt) -> str:
    """Save the KV of a prompt and load it. Return what is wrong; empty: nothing."""
    expected = platform.compute(prompt)
    saved, _ = platform.ask(prompt)
    if saved != expected:
        return "the answer while KV is saved differs"
    platform.wait_until_stored(prompt)
    loaded, record = platform.ask(prompt)
    if record.loaded_tokens != prompt.chunk_ends[-1]:
        return f"it loaded {record.loaded_tokens} tokens: {record.miss}"
    return "" if loaded == expected else "the answer from loaded KV differs"


def _blend_error(platform: _Platform, prompt: Prompt) -> str:
    """Recompute all that is loaded at another position. Return what is wrong; empty: nothing."""
    expected = platform.compute(prompt)
    blended, record = platform.ask(prompt, 1.0)
    context = prompt.chunk_ends[-1] - _HEAD
    if (record.blended_tokens, record.recomputed_tokens) != (context, context):
        return f"it blended {record.blended_tokens} tokens: {record.miss}"
    return "" if blended == expected else "the answer differs at 100 % recomputed"


def _ids(rng: random.Random, count: int) -> list[int]:
    return [rng.randrange(_VOCABULARY) for _ in range(count)]


def _clear_prompt(url: str, head: list[int], chunks: list[list[int]], rng: random.Random) -> Prompt:
    """Return a prompt with a question whose answer is clear. Raises LookupError if none is."""
    for _ in range(_QUESTIONS):
        prompt = assemble(head, chunks, _ids(rng, _QUESTION))
        if is_clear(url, prompt, _ANSWER):
            return prompt
    raise LookupError(f"none of {_QUESTIONS} answers is clear")


def _not_started(log: str, model: Path) -> Outcome:
    """Return why an engine has ended. One that lacks a package of vLLM's refuses nothing."""
    if refusal := _REFUSAL.search(log):
        return Outcome(REFUSED, refusal[1].strip())
    if lacking := _LACKING.search(log):
        error = rotation_error(model)
        return Outcome(FAILED, error) if error else Outcome(REFERENCE, lacking[1])
    errors = _ERROR.findall(log)
    return Outcome(FAILED, errors[-1] if errors else "the engine did not start")
