"""What an answered question says about chunks: which it had, and what it computed of them.

Under ``blend`` a chunk that was computed right behind the template serves behind any prefix, so
that each is asked for by itself. Under ``exact`` it serves there only; what follows the template
most often is one document's chunks, best hit first, and what follows those seldom comes again. So
there the chunks of the first document are asked for, as one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from ragcache_core.precompute_queue import Prefill
from ragcache_core.prompt import Prompt
from ragcache_wire.v1 import engine_pb2


@dataclass(frozen=True, slots=True)
class Question:
    """A prompt as it was asked: its chunks' texts and documents, in order.

    mode: how it reused stored KV. asked_at_ms: Unix time before its chunks were searched.
    """

    mode: Literal["exact", "blend"]
    prompt: Prompt
    texts: Sequence[str]
    documents: Sequence[str]
    asked_at_ms: int


@dataclass(frozen=True, slots=True)
class Ask:
    """A prefill that would have served a question.

    num_tokens: of its chunks. saved_s: what the question spent on computing some of them.
    """

    prefill: Prefill
    num_tokens: int
    saved_s: float


def asks(
    question: Question, record: engine_pb2.RequestRecord, template: Sequence[int]
) -> list[Ask]:
    """What would have served a question, by the engine's record of it.

    template: token ids that a prefill's chunks stand behind.
    """
    prompt = question.prompt
    if question.mode == "exact" and prompt.token_ids[: prompt.head] != tuple(template):
        return []  # the client's own system prompt, behind which nothing is computed ahead
    at_hand = record.local_tokens + record.loaded_tokens
    token_s = record.prefill_s / max(1, record.prompt_tokens - at_hand)
    starts = (prompt.head, *prompt.chunk_ends)
    found = []
    for first, end in _runs(question):
        start, stop = starts[first], starts[end]
        missing = max(0, stop - max(start, at_hand))
        prefill = Prefill(
            tuple(question.texts[first:end]),
            question.documents[first],
            question.asked_at_ms,
            question.mode,
        )
        found.append(Ask(prefill, stop - start, missing * token_s))
    return found


def _runs(question: Question) -> list[tuple[int, int]]:
    """Chunks [first, end) of each prefill."""
    count = len(question.texts)
    if question.mode == "blend" or not count:
        return [(place, place + 1) for place in range(count)]
    others = (place for place in range(count) if question.documents[place] != question.documents[0])
    return [(0, next(others, count))]
