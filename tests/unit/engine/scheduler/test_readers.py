"""Which variants of other prompts the scheduler half takes for whom."""

from __future__ import annotations

import pytest

from ragcache_core.access.caller import ANYONE, Caller
from ragcache_core.access.reader import Reader
from ragcache_core.plan.prompt import Prompt, assemble
from ragcache_core.retrieval.filters import In
from ragcache_engine.protocol.messages import LoadJob
from tests.kit.scheduler import BLOCKS, TAIL, TEMPLATE, A, B, BlendHarness, C, D

TEAM = In("team", ("red",))
RED = Caller("red", filter=TEAM).reader
RED_TOO = Caller("red-too", filter=TEAM).reader
BLUE = Caller("blue", filter=In("team", ("blue",))).reader
ALL = ANYONE.reader


def make_prompt(*chunks: range, head: range = TEMPLATE) -> Prompt:
    return assemble(head, chunks, TAIL)


def store(engine: BlendHarness, prompt: Prompt, reader: Reader, *, own_head: bool = False) -> None:
    engine.run_first("first", prompt, reader=reader, own_head=own_head)
    engine.finish("first")
    engine.scheduler.step([], lambda _: BLOCKS)
    engine.scheduler.on_released(["first"])


def loaded(
    engine: BlendHarness, prompt: Prompt, reader: Reader, *, own_head: bool = False
) -> list[int]:
    """Return the first tokens of the chunks after the head that a prompt loads."""
    engine.arrive("asked", prompt, reader=reader, own_head=own_head)
    if not engine.scheduler.loadable_tokens("asked", 0):
        engine.finish("asked")
        return []
    job: LoadJob = engine.load("asked")
    engine.finish("asked")
    return [int(prompt.token_ids[s.start]) for s in job.spans if s.start >= len(TEMPLATE)]


@pytest.mark.parametrize(
    ("made_by", "asks", "takes"),
    [
        (RED, RED, True),
        (RED, RED_TOO, True),
        (RED, ALL, True),
        (RED, BLUE, False),
        (ALL, ALL, True),
        (ALL, RED, False),
    ],
)
def test_a_chunk_after_documents_that_a_prompt_lacks_needs_the_right_to_read_them(
    made_by: Reader, asks: Reader, takes: bool
) -> None:
    engine = BlendHarness()
    store(engine, make_prompt(A, B, C), made_by)
    # B was computed after A, and C after both.
    expected = [C.start, B.start] if takes else []
    assert loaded(engine, make_prompt(C, B), asks) == expected


def test_a_prompt_with_all_of_the_documents_takes_the_chunk_for_every_caller() -> None:
    engine = BlendHarness()
    store(engine, make_prompt(A, B, C), RED)
    assert loaded(engine, make_prompt(B, A), BLUE) == [B.start, A.start]
    assert loaded(engine, make_prompt(A, C), BLUE) == [A.start], "C was computed after B, too"


def test_the_same_prompt_is_exact_for_every_caller() -> None:
    engine = BlendHarness()
    store(engine, make_prompt(A, B, C), RED)
    assert loaded(engine, make_prompt(A, B, C), BLUE) == [A.start, B.start, C.start]


def test_a_chunk_after_another_keys_text_is_not_taken() -> None:
    engine = BlendHarness()
    own = range(700, 720)
    store(engine, make_prompt(A, B, head=own), RED, own_head=True)
    asked = make_prompt(B, A)
    assert loaded(engine, asked, RED_TOO) == []
    assert loaded(engine, asked, RED) == [B.start, A.start]
    same = make_prompt(B, A, head=own)
    assert loaded(engine, same, RED_TOO, own_head=True) == [B.start, A.start]


def test_what_is_saved_says_whose_rights_and_texts_it_depends_on() -> None:
    engine = BlendHarness()
    saves = engine.run_first("first", make_prompt(A, B), reader=RED, own_head=True)
    assert {one.origin.influence.rights for one in saves} == {RED.rights}
    assert {one.origin.influence.writer for one in saves} == {RED.key}
    assert {one.origin.influence.num_head for one in saves} == {1}
    engine.finish("first")
    other = make_prompt(D, head=range(800, 820))
    (_, saved) = engine.run_first("other", other, reader=BLUE, own_head=False)
    assert saved.origin.influence.writer == b""


@pytest.mark.parametrize("own_head", [False, True])
def test_a_text_influences_what_is_computed_after_a_blend(own_head: bool) -> None:
    """The platform's text is before it. But it attended to KV that a key's text had influenced."""
    engine = BlendHarness()
    store(engine, make_prompt(A, B, head=range(700, 720)), RED, own_head=own_head)
    asked = make_prompt(B, A, D)
    engine.arrive("asked", asked, recompute_share=0.2, reader=RED, own_head=False)
    job = engine.load("asked")
    assert job.recompute is not None
    saves = engine.compute("asked", asked, job.end)
    (last,) = (one for one in saves if one.span.start == asked.chunk_ends[1])
    assert not last.info.provenance.exact
    assert last.origin.influence.writer == (RED.key if own_head else b"")
    assert last.origin.influence.rights == RED.rights


def test_what_is_computed_after_a_blend_is_for_readers_of_the_same_rights() -> None:
    engine = BlendHarness()
    store(engine, make_prompt(A, B), RED)
    asked = make_prompt(B, D)
    engine.arrive("asked", asked, reader=RED, own_head=False)
    job = engine.load("asked")
    engine.compute("asked", asked, job.end)
    engine.finish("asked")
    # All chunks before D are in the prompt. But B depends on A.
    again = make_prompt(B, D)
    assert D.start not in loaded(engine, again, BLUE)
    assert D.start in loaded(engine, again, RED_TOO)
