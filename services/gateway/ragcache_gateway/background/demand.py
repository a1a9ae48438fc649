"""What an answered question says about chunks: which it had, and what it computed of them.

Under ``blend`` a chunk that was computed right behind the template serves behind any prefix, so
that each is asked for by itself; and so is the whole context in its order, to be reused exactly:
what is put together again and again need not be repaired each time. Under ``exact`` a chunk serves
in its own place only; what follows the template most often is one document's chunks, best hit
first, and what follows those seldom comes again. So there the chunks of the first document are
asked for, as one.

A blend repairs what it lacks between what it has (a *hole*): that was computed as much as what
came behind, only in the repair's time.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from ragcache_core.plan.prompt import Prompt
from ragcache_core.scheduling.precompute_queue import Prefill
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
    prompt, count = question.prompt, len(question.texts)
    at_hand = record.local_tokens + record.loaded_tokens
    token_s = record.prefill_s / max(1, record.prompt_tokens - at_hand)
    repaired_s = record.recompute_s / max(1, record.recomputed_tokens)
    starts = (prompt.head, *prompt.chunk_ends)
    template_segments = 1 if prompt.head else 0  # of the plan, before the chunks'
    holes = {place - template_segments for place in record.missing_chunks}

    def prefill(first: int, end: int, mode: Literal["exact", "blend"]) -> Prefill:
        texts, documents = question.texts[first:end], question.documents[first:end]
        return Prefill(tuple(texts), tuple(documents), question.asked_at_ms, mode)

    def ask(first: int, end: int, mode: Literal["exact", "blend"]) -> Ask:
        start, stop = starts[first], starts[end]
        missing = max(0, stop - max(start, at_hand))
        repaired = sum(
            max(0, min(starts[place + 1], at_hand) - max(starts[place], record.local_tokens))
            for place in range(first, end)
            if place in holes
        )
        saved_s = missing * token_s + repaired * repaired_s
        return Ask(prefill(first, end, mode), stop - start, saved_s)

    # Else it is the client's own system prompt, behind which nothing is computed ahead.
    is_ours = prompt.token_ids[: prompt.head] == tuple(template)
    found = []
    if question.mode == "blend":
        found = [ask(place, place + 1, "blend") for place in range(count)]
        if is_ours and record.recomputed_tokens:
            missing = max(0, starts[count] - at_hand)
            saved_s = record.recompute_s + missing * token_s
            found.append(Ask(prefill(0, count, "exact"), starts[count] - starts[0], saved_s))
    elif is_ours and count:
        others = (n for n in range(count) if question.documents[n] != question.documents[0])
        found.append(ask(0, next(others, count), "exact"))
    return found
