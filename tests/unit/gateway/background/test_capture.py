"""Prompts that compute chunks after others, and their plans."""

from __future__ import annotations

from collections.abc import Sequence

from ragcache_core.background.precompute_queue import Prefill, QueuedPrefill
from ragcache_core.identity.keys import KVSpace
from ragcache_core.identity.packed_ids import PackedIds
from ragcache_core.plan.reuse_plan import Action
from ragcache_gateway.background.capture import TokenizedPrefill, context_job, sequence_job
from ragcache_gateway.pipeline.captures import reversed_chunks
from ragcache_gateway.prompts.reuse_mode import ServedModel
from tests.unit.gateway.background.test_demand import question

HEAD = (1, 2, 3)
MODEL = ServedModel("m", 4096, KVSpace("m", 1, 1, 8, "bfloat16"))


def chunk(name: str, num_tokens: int = 150, at_ms: int = 100) -> TokenizedPrefill:
    prefill = Prefill((name,), (f"{name}.md",), at_ms)
    return TokenizedPrefill(QueuedPrefill(prefill, "written"), ([ord(name)] * num_tokens,))


def names(token_ids: Sequence[int]) -> str:
    """Return the order of the chunks in a prompt."""
    letters = [chr(token) for token in token_ids[len(HEAD) :]]
    return "".join(a for a, b in zip(letters, [*letters[1:], ""], strict=True) if a != b)


def test_a_first_sequence_ends_with_its_first_chunks_again() -> None:
    job = sequence_job(HEAD, [chunk(name) for name in "abcd"])
    assert names(job.prompt.token_ids) == "abcdab"
    assert job.documents == ("a.md", "b.md", "c.md", "d.md", "a.md", "b.md")
    # A repeated chunk is complete at its last position.
    assert job.ends == (3 + 750, 3 + 900, 3 + 450, 3 + 600)
    assert job.expected_cached == len(HEAD)


def test_a_later_sequence_begins_with_the_context() -> None:
    job = sequence_job(HEAD, [chunk("c"), chunk("d")], [chunk("a", at_ms=50), chunk("b")])
    assert names(job.prompt.token_ids) == "abcd"
    assert job.ends == (3 + 450, 3 + 600)
    assert job.expected_cached == 3 + 300
    assert job.planned_at_ms == 50


def test_a_beginning_has_the_segments_that_are_complete_there() -> None:
    job = sequence_job(HEAD, [chunk("a"), chunk("b")])
    assert job.beginning(2).head == 0
    assert job.beginning(100).chunk_ends == ()
    beginning = job.beginning(200)
    assert (len(beginning.token_ids), beginning.chunk_ends) == (200, (153,))
    plan = job.plan(beginning, MODEL)
    # What is stored must be exact, so nothing may be blended into it.
    assert [segment.action for segment in plan.segments] == [Action.EXACT, Action.EXACT]
    assert [segment.document for segment in plan.segments] == ["", "a.md"]


def test_a_questions_context_is_computed_as_it_is() -> None:
    prefill = Prefill(("x", "y"), ("x.md", "y.md"), 7, "exact")
    job = context_job(HEAD, TokenizedPrefill(QueuedPrefill(prefill, "asked"), ([8, 8], [9])))
    assert job.prompt.token_ids == PackedIds.of((*HEAD, 8, 8, 9))
    plan = job.plan(job.prompt, MODEL)
    assert {segment.action for segment in plan.segments} == {Action.EXACT}
    assert job.ends == (6,)


def test_a_questions_chunks_are_reversed_after_its_head() -> None:
    prompt = question().asked.prompt
    found = reversed_chunks(prompt)
    assert found.head == prompt.head
    assert found.token_ids[: prompt.head] == prompt.token_ids[: prompt.head]
    assert found.chunk_ends == (33, 53, 63)
    assert len(found.token_ids) == prompt.chunk_ends[-1]
    assert reversed_chunks(found).token_ids == prompt.token_ids[: prompt.chunk_ends[-1]]
