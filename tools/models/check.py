"""Runs each family in a real vLLM on the CPU with the connector, and compares tokens."""

from __future__ import annotations

import contextlib
import itertools
import random
import re
import time
import uuid
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final, NamedTuple

from harness.completion import complete, record_of
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
from ragcache_core.plan.reuse_plan import ReusePlan
from ragcache_core.plan.segments import checked_segments
from ragcache_core.store_api import LookupKey
from ragcache_kv.model.folder import load_model_folder
from ragcache_kv.store_client.client import StoreClient
from ragcache_wire.v1 import engine_pb2
from tools.models.families import MAX_LENGTH, Family
from tools.models.reference import rotation_error
from tools.models.tiny_family import make_tiny_family

BLEND, EXACT, REFUSED, FAILED = "blend", "exact", "refused", "failed"
REFERENCE = "reference"
"""vLLM cannot run the family here, and its keys are rotated as transformers does in float64."""

_DOMAIN: Final = "public"
_VOCABULARY: Final = 340
_CHUNKS: Final = (131, 77, 160)
_HEAD, _QUESTION, _ANSWER = 41, 23, 8
_PROMPTS: Final = 3
"""Prompts that are compared for each family."""

_STORED_S: Final = 60.0
_LACKING = re.compile(r"ModuleNotFoundError: (.+)")
_REFUSALS = (
    re.compile(r"InvalidInput: (.+)"),
    re.compile(r"ERROR .*\] (\w*Error: .+)"),
    re.compile(r"(\w*Error: .+)"),
)
"""What an engine's log has of the error that ended it, the most exact first."""
_ONLY_EXACT = re.compile(r"only exact reuse: this model cannot blend error=(.+)")


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

    def ask(self, prompt: Prompt, recompute: float | None) -> tuple[Sequence[int], _Record]:
        """Answer with stored KV, and without vLLM's own prefix cache.

        Args:
            prompt: The prompt.
            recompute: Share of moved tokens that is recomputed; None: reuse exact prefixes.
        """
        request = uuid.uuid4().hex
        plan = self._plan(prompt, recompute, request).encode()
        answer = complete(
            *(self.engine.url, prompt.token_ids),
            max_tokens=_ANSWER,
            plan=plan,
            cache_salt=request,
        )
        return answer.token_ids, record_of(self.engine, request)

    def compute(self, prompt: Prompt) -> Sequence[int]:
        """Answer without stored KV."""
        salt = uuid.uuid4().hex
        return complete(
            self.engine.url, prompt.token_ids, max_tokens=_ANSWER, cache_salt=salt
        ).token_ids

    def wait_until_stored(self, prompt: Prompt) -> None:
        """Wait for the save, which follows the answer. Raises RuntimeError if it does not come."""
        plan = self._plan(prompt, None, "probe")
        segments = checked_segments(plan, prompt.token_ids, self.space)
        keys = [LookupKey.for_variant(one.variant) for one in segments]
        deadline = time.monotonic() + _STORED_S
        with contextlib.closing(StoreClient(self.store.address)) as client:
            while not all(found.stored for found in client.lookup(keys, timeout_s=5).variants):
                if time.monotonic() > deadline:
                    raise RuntimeError(f"the engine saved nothing within {_STORED_S} s")
                time.sleep(0.05)

    def _plan(self, prompt: Prompt, recompute: float | None, request: str) -> ReusePlan:
        if recompute is None:
            return plan_exact(prompt, self.space, _DOMAIN, request)
        return plan_blend(prompt, self.space, _DOMAIN, request, recompute)


_Record = engine_pb2.RequestRecord


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
            return _not_started(engine, folder / "model")
        space = load_model_folder(str(folder / "model")).space("bfloat16", max_length=MAX_LENGTH)
        return _compare(_Platform(store, engine, space))
    except Exception as error:
        return Outcome(FAILED, f"{type(error).__name__}: {error}")
    finally:
        engine.service.stop()


def _compare(platform: _Platform) -> Outcome:
    """Compare answers from stored KV with computed ones."""
    for prompt, reordered in itertools.islice(_prompts(), _PROMPTS):
        error = _exact_error(platform, prompt)
        if error:
            return Outcome(FAILED, error)
        reason = _ONLY_EXACT.search(platform.engine.service.log.read_text(errors="replace"))
        if reason:
            return Outcome(EXACT, reason[1])
        error = _blend_error(platform, reordered)
        if error:
            return Outcome(FAILED, error)
    return Outcome(BLEND)


def _exact_error(platform: _Platform, prompt: Prompt) -> str:
    """Save the KV of a prompt and load it. Return what is wrong; empty: nothing."""
    expected = platform.compute(prompt)
    saved, _ = platform.ask(prompt, None)
    if saved != expected:
        return "the answer while KV is saved differs"
    platform.wait_until_stored(prompt)
    loaded, record = platform.ask(prompt, None)
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


def _prompts() -> Iterator[tuple[Prompt, Prompt]]:
    """Yield prompts, each with one that has its chunks in another order."""
    for seed in itertools.count():
        rng = random.Random(f"families {seed}")

        def ids(count: int, rng: random.Random = rng) -> list[int]:
            return [rng.randrange(_VOCABULARY) for _ in range(count)]

        head, question = ids(_HEAD), ids(_QUESTION)
        chunks = [ids(count) for count in _CHUNKS]
        yield (
            assemble(head, chunks, question),
            assemble(head, [chunks[2], chunks[0], chunks[1]], question),
        )


def _not_started(engine: Engine, model: Path) -> Outcome:
    """Return why an engine has ended. One that lacks a package of vLLM's refuses nothing."""
    log = engine.service.log.read_text(errors="replace")
    if lacking := _LACKING.search(log):
        error = rotation_error(model)
        return Outcome(FAILED, error) if error else Outcome(REFERENCE, lacking[1])
    found = next(filter(None, (pattern.search(log) for pattern in _REFUSALS)), None)
    return Outcome(REFUSED, found[1].strip() if found else "the engine did not start")
