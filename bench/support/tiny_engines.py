"""Engines of a model with random weights, in which computing a prompt takes most of the time."""

from __future__ import annotations

import contextlib
import random
import time
import uuid
from collections.abc import Iterable
from pathlib import Path

from harness.completion import Completion, complete
from harness.plans import blend_for_all, exact_for_all
from harness.processes import Engine, wait_for_engine
from harness.tiny_model import make_tiny_model
from ragcache_core.blend.observation import observation_key
from ragcache_core.identity.keys import VariantKey
from ragcache_core.plan.prompt import Prompt, assemble
from ragcache_core.plan.reuse_plan import ReusePlan
from ragcache_core.plan.segments import checked_segments
from ragcache_core.store_api import LookupKey
from ragcache_kv.model.folder import load_model_folder
from ragcache_kv.store_client.client import StoreClient

DOMAIN = "public"
HEAD_TOKENS = 48
QUESTION_TOKENS = 32
CHUNK_TOKENS = (256, 251, 240, 256, 197, 256, 249, 167)
"""Chunk sizes are no multiples of a block, as in practice. The whole context is one (1,920 = 15 x
128), so that vLLM's prefix cache, the control, leaves the same tokens to compute as the store."""

STORED_S = 300.0


class TinyModel:
    """The model in a folder, and prompts of random tokens for it."""

    def __init__(self, folder: Path, *, kv_heads: int = 4, max_length: int = 4096) -> None:
        self.folder = make_tiny_model(
            folder, layers=12, hidden=768, heads=12, kv_heads=kv_heads, max_length=max_length
        )
        loaded = load_model_folder(str(self.folder))
        self.space = loaded.space("auto")
        self.rng = random.Random(uuid.uuid4().int)
        self._vocabulary = int(loaded.config["vocab_size"]) - 8

    def ids(self, count: int) -> list[int]:
        return [self.rng.randrange(self._vocabulary) for _ in range(count)]

    def chunks(self, sizes: Iterable[int] = CHUNK_TOKENS) -> list[list[int]]:
        return [self.ids(count) for count in sizes]

    def prompt(self, chunks: list[list[int]], head: list[int] | None = None) -> Prompt:
        """Return a prompt with a new question, and with a new head if none is given."""
        return assemble(head or self.ids(HEAD_TOKENS), chunks, self.ids(QUESTION_TOKENS))

    def plan(self, prompt: Prompt, budget: float | None, request: str = "") -> ReusePlan:
        """Plan a request. A budget of None means exact."""
        request = request or uuid.uuid4().hex
        if budget is None:
            return exact_for_all(prompt, self.space, DOMAIN, request)
        return blend_for_all(prompt, self.space, DOMAIN, request, budget)

    def variants(self, prompt: Prompt, budget: float | None = None) -> list[VariantKey]:
        plan = self.plan(prompt, budget)
        return [named.variant for named in checked_segments(plan, prompt.token_ids, self.space)]


def ask_vllm_prefix_cache(engine: Engine, prompt: Prompt, max_tokens: int) -> Completion:
    """Complete without a plan over a prefix that vLLM has just computed and cached."""
    salt = uuid.uuid4().hex  # excludes blocks that were loaded for a plan
    complete(engine.url, prompt.token_ids, max_tokens=1, cache_salt=salt)
    return complete(engine.url, prompt.token_ids, max_tokens=max_tokens, cache_salt=salt)


def start_all(stack: contextlib.ExitStack, engines: Iterable[Engine]) -> None:
    """Wait until launched engines serve, and stop them with the stack."""
    launched = list(engines)
    for engine in launched:
        stack.callback(engine.service.stop)
    for engine in launched:
        wait_for_engine(engine)


def wait_until_stored(
    address: str, variants: Iterable[VariantKey], *, observed: bool = False
) -> None:
    """Wait for saves, which follow the answer, and for observations of the chunks if asked to."""
    keys = [
        LookupKey.for_variant(key)
        for variant in variants
        for key in ((variant, observation_key(variant)) if observed else (variant,))
    ]
    client = StoreClient(address)
    deadline = time.monotonic() + STORED_S
    while not all(found.stored for found in client.lookup(keys, timeout_s=5).variants):
        if time.monotonic() > deadline:
            raise RuntimeError(f"the engine did not save its variants within {STORED_S} s")
        time.sleep(0.05)
    client.close()
