"""KV computed after what a reader may not see changes no answer: a real engine and store."""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from bench.support.tiny_engines import wait_until_stored
from harness.completion import Completion, complete, is_clear, record_of
from harness.processes import (
    COMPUTES_PLAIN,
    Engine,
    running_cachestore,
    running_engine,
)
from ragcache_core.access.caller import Caller
from ragcache_core.access.reader import EVERYONE, Reader
from ragcache_core.identity.keys import KVSpace
from ragcache_core.plan.prompt import Prompt, assemble, plan_blend, plan_exact
from ragcache_core.plan.segments import checked_segments
from ragcache_core.retrieval.filters import In
from ragcache_kv.model.folder import load_model_folder
from ragcache_wire.v1 import engine_pb2

pytestmark = pytest.mark.timeout(600)

RED = Caller("red", filter=In("team", ("red",))).reader
RED_TOO = Caller("red-too", filter=In("team", ("red",))).reader
BLUE = Caller("blue", filter=In("team", ("blue",))).reader
HEAD, OWN_HEAD = range(10, 90), range(90, 170)
SECRET, PAGE, OTHER = range(30, 160), range(170, 300), range(200, 320)
PAGE_START = len(HEAD) + len(OTHER)
"""Of the page in a later reader's prompt."""

MAX_TOKENS = 8


@dataclass
class Attacked:
    """A running engine with its store."""

    engine: Engine
    store: str
    space: KVSpace

    def prompt(self, *chunks: range, head: range = HEAD, question: int = 0) -> Prompt:
        prompt = assemble(head, chunks, [20 + question, 21, 22, 23])
        return replace(prompt, own_head=head is not HEAD)

    def fill(self, prompt: Prompt, domain: str, asks: Reader) -> None:
        """Have a prompt computed and stored."""
        plan = replace(plan_exact(prompt, self.space, domain, uuid.uuid4().hex), reader=asks)
        complete(
            *(self.engine.url, prompt.token_ids),
            max_tokens=1,
            plan=plan.encode(),
            cache_salt=uuid.uuid4().hex,
        )
        named = checked_segments(plan, prompt.token_ids, self.space)
        wait_until_stored(self.store, [one.variant for one in named])

    def ask(
        self, prompt: Prompt, domain: str, asks: Reader
    ) -> tuple[Completion, engine_pb2.RequestRecord]:
        """Ask for a blend that recomputes nothing, as a trial: it stores nothing."""
        request = uuid.uuid4().hex
        plan = plan_blend(prompt, self.space, domain, request, 0.0)
        encoded = replace(plan, reader=asks, trial=True).encode()
        answer = complete(
            *(self.engine.url, prompt.token_ids),
            max_tokens=MAX_TOKENS,
            plan=encoded,
            cache_salt=request,
        )
        return answer, record_of(self.engine, request)

    def reused(
        self, prompt: Prompt, domain: str, asks: Reader
    ) -> tuple[tuple[int, ...], list[int]]:
        """Ask, and return the answer and the first positions of the chunks that were reused."""
        answer, record = self.ask(prompt, domain, asks)
        found = [one.start for one in record.segments if one.HasField("source")]
        return answer.token_ids, [start for start in found if start >= len(HEAD)]

    def compute(self, prompt: Prompt) -> Completion:
        salt = uuid.uuid4().hex
        url = self.engine.url
        return complete(url, prompt.token_ids, max_tokens=MAX_TOKENS, cache_salt=salt)

    def clear(self, *chunks: range, head: range = HEAD) -> Prompt:
        """Return a prompt whose answer does not depend on rounding."""
        for question in range(100):
            prompt = self.prompt(*chunks, head=head, question=question)
            if is_clear(self.engine.url, prompt, MAX_TOKENS):
                return prompt
        raise AssertionError("no answer is clear")


@pytest.fixture(scope="module")
def attacked(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Attacked]:
    folder = tmp_path_factory.mktemp("poison")
    space = load_model_folder(str(tiny_model)).space("auto")
    with (
        running_cachestore(folder / "store") as store,
        running_engine(folder, tiny_model, store.address, settings=COMPUTES_PLAIN) as engine,
    ):
        yield Attacked(engine, store.address, space)


def test_a_neighbour_that_a_reader_may_not_see_changes_no_answer(attacked: Attacked) -> None:
    domain = uuid.uuid4().hex
    attacked.fill(attacked.prompt(SECRET, PAGE), domain, RED)
    asked = attacked.clear(OTHER, PAGE)
    full = attacked.compute(asked).token_ids
    misled, reused = attacked.reused(asked, domain, EVERYONE)
    assert reused == [PAGE_START], "without the rule the page's KV is used"
    assert misled != full, "the attack works"
    assert attacked.reused(asked, domain, BLUE) == (full, [])


def test_readers_of_the_same_rights_and_prompts_with_the_neighbour_reuse_it(
    attacked: Attacked,
) -> None:
    domain = uuid.uuid4().hex
    attacked.fill(attacked.prompt(SECRET, PAGE), domain, RED)
    for asks in (RED, RED_TOO):
        _, reused = attacked.reused(attacked.prompt(OTHER, PAGE), domain, asks)
        assert reused == [PAGE_START]
    _, reused = attacked.reused(attacked.prompt(PAGE, SECRET), domain, BLUE)
    assert reused == [len(HEAD), len(HEAD) + len(PAGE)]


def test_a_system_prompt_of_another_key_changes_no_answer(attacked: Attacked) -> None:
    domain = uuid.uuid4().hex
    attacked.fill(attacked.prompt(PAGE, head=OWN_HEAD), domain, RED)
    asked = attacked.clear(OTHER, PAGE)
    full = attacked.compute(asked).token_ids
    _, reused = attacked.reused(asked, domain, RED)
    assert reused == [PAGE_START]
    assert attacked.reused(asked, domain, RED_TOO) == (full, [])
