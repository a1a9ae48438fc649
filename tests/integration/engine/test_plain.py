"""Requests without a plan, in real vLLM servers with a real cache store."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest

from harness.completion import complete
from harness.processes import CacheStore, Engine, running_cachestore, running_engine
from ragcache_core.identity.keys import KVSpace
from ragcache_core.plan.reuse_plan import NO_REUSE
from ragcache_core.plan.segments import PIECE_TOKENS, plain_domain, prefix_pieces
from ragcache_kv.model.folder import load_model_folder
from tests.kit.engine import is_stored, samples, total
from tests.kit.wait import wait_until

pytestmark = pytest.mark.timeout(600)

# Smaller than the prompts, so that every prefill runs in several pieces.
ENGINE_ARGUMENTS = ("--max-num-batched-tokens", "384")


def make_prompt(name: str, length: int = 3 * PIECE_TOKENS + 40) -> list[int]:
    rng = random.Random(name)
    return [rng.randrange(350) for _ in range(length)]


PROMPTS = {name: make_prompt(name) for name in ("open", "salted", "scored", "off")}


@dataclass
class Plain:
    """A store, and an engine that has computed none of its values."""

    store: CacheStore
    engine: Engine
    space: KVSpace

    def answer(self, prompt: Sequence[int], salt: str | None = None) -> tuple[int, ...]:
        return complete(self.engine.url, prompt, max_tokens=16, cache_salt=salt).token_ids

    def complete(self, prompt: Sequence[int], **more: Any) -> None:
        body = {"model": "model", "prompt": prompt, "max_tokens": 1, **more}
        reply = httpx.post(f"{self.engine.url}/v1/completions", json=body, timeout=120)
        assert reply.status_code == 200, reply.text

    def is_stored(self, prompt: Sequence[int], salt: str | None = None) -> bool:
        named = prefix_pieces(self.space, plain_domain(salt), prompt)
        return is_stored(self.store.address, [one.variant for one in named])

    def wait_until_stored(self, prompt: Sequence[int], salt: str | None = None) -> None:
        """Wait: values are saved after the answer."""
        wait_until(lambda: self.is_stored(prompt, salt), "not saved")

    def wait_for_saves(self, name: str) -> None:
        """Wait until a new prompt is saved. Saves are in order, so earlier ones have ended."""
        marker = make_prompt(f"marker {name}")
        self.answer(marker)
        self.wait_until_stored(marker)

    def loaded_tokens(self) -> int:
        """Return how many tokens the engine has loaded since its start."""
        found = samples(self.engine.url, "ragcache_engine_prompt_tokens_total")
        return int(total(line for line in found if 'kind="computed"' not in line))


@pytest.fixture(scope="module")
def expected() -> dict[str, tuple[int, ...]]:
    """Answers of the engine that computed PROMPTS."""
    return {}


@pytest.fixture(scope="module")
def plain(
    tiny_model: Path,
    tmp_path_factory: pytest.TempPathFactory,
    expected: dict[str, tuple[int, ...]],
) -> Iterator[Plain]:
    """A store with the prefixes of PROMPTS that a stopped engine saved, and a new engine."""
    folder = tmp_path_factory.mktemp("plain")
    space = load_model_folder(str(tiny_model)).space("auto")
    with running_cachestore(folder / "store") as store:
        arguments = (folder, tiny_model, store.address, *ENGINE_ARGUMENTS)
        with running_engine(*arguments) as engine:
            first = Plain(store, engine, space)
            for name, prompt in PROMPTS.items():
                salt = "tenant" if name == "salted" else None
                first.answer(prompt, salt)
                first.wait_until_stored(prompt, salt)
                # From vLLM's own prefix cache, so that the same tokens are computed.
                expected[name] = first.answer(prompt, salt)
            assert first.loaded_tokens() == 0
        with running_engine(*arguments) as engine:
            yield Plain(store, engine, space)


def test_a_new_engine_loads_saved_prefixes_and_gives_the_same_answer(
    plain: Plain, expected: dict[str, tuple[int, ...]]
) -> None:
    before = plain.loaded_tokens()
    assert plain.answer(PROMPTS["open"]) == expected["open"]
    assert plain.loaded_tokens() - before == 3 * PIECE_TOKENS


def test_a_prefix_is_found_only_with_its_own_salt(
    plain: Plain, expected: dict[str, tuple[int, ...]]
) -> None:
    before = plain.loaded_tokens()
    for salt in (None, "other"):
        plain.answer(PROMPTS["salted"], salt)
    assert plain.loaded_tokens() == before
    assert plain.answer(PROMPTS["salted"], "tenant") == expected["salted"]
    assert plain.loaded_tokens() - before == 3 * PIECE_TOKENS


def test_a_prompt_with_logprobs_is_computed_and_not_stored(plain: Plain) -> None:
    before = plain.loaded_tokens()
    new = make_prompt("never asked before")
    plain.complete(PROMPTS["scored"], prompt_logprobs=1)
    plain.complete(new, prompt_logprobs=1)
    plain.wait_for_saves("scored")
    assert plain.loaded_tokens() == before
    assert not plain.is_stored(new)


def test_a_prompt_whose_request_turns_reuse_off_is_computed_and_not_stored(plain: Plain) -> None:
    before = plain.loaded_tokens()
    new = make_prompt("asked without reuse")
    off = {"ragcache": NO_REUSE}
    plain.complete(PROMPTS["off"], kv_transfer_params=off)
    plain.complete(new, kv_transfer_params=off, cache_salt="of this request")
    plain.wait_for_saves("off")
    assert plain.loaded_tokens() == before
    assert not plain.is_stored(new, "of this request")
