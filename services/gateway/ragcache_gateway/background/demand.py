"""What an answered question says about chunks: which ones it lacked and had to compute.

Under ``blend`` a chunk that was computed right after the template serves after any prefix, so each
chunk is requested by itself. The whole context is requested too, in its order, for exact reuse: a
context that questions combine repeatedly then needs no recomputation.

Under ``exact`` a chunk serves after one prefix only. What follows the template most often is the
best hit's document, and what follows its chunks seldom repeats. So the chunks of the first document
are requested, as one prefill.

A blend recomputes the missing chunks between those that it has. That costs as much as computing the
chunks after them, and counts in the record's recompute time.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from ragcache_core.background.precompute_queue import Prefill
from ragcache_core.identity.packed_ids import PackedIds
from ragcache_core.quality.controller import AskedQuestion
from ragcache_wire.v1 import engine_pb2

Mode = Literal["exact", "blend"]


@dataclass(frozen=True, slots=True)
class AnsweredQuestion:
    """A question that an engine has answered, with the text of each chunk in its prompt.

    Args:
        mode: How the question reused stored KV.
    """

    asked: AskedQuestion
    mode: Mode
    texts: Sequence[str]


@dataclass(frozen=True, slots=True)
class PrefillDemand:
    """A prefill that would have served a question.

    Args:
        num_tokens: Tokens of the prefill's chunks.
        saved_s: Seconds that the question spent on computing some of them.
    """

    prefill: Prefill
    num_tokens: int
    saved_s: float


class _Costs:
    """What an answered question spent on computing its chunks, by the engine's record.

    Chunks are counted from 0, and chunk i lies between boundaries i and i + 1.
    """

    def __init__(self, question: AnsweredQuestion, record: engine_pb2.RequestRecord) -> None:
        prompt = question.asked.prompt
        self.question = question
        self.boundaries = (prompt.head, *prompt.chunk_ends)
        self._local_tokens = record.local_tokens
        self._cached_tokens = record.local_tokens + record.loaded_tokens
        computed_tokens = max(1, record.prompt_tokens - self._cached_tokens)
        self._prefill_s_per_token = record.prefill_s / computed_tokens
        self._recompute_s = record.recompute_s
        self._recompute_s_per_token = record.recompute_s / max(1, record.recomputed_tokens)
        template_segments = len(prompt.head_ends)  # the plan counts the template, too
        self._missing_chunks = {index - template_segments for index in record.missing_chunks}

    def demand(self, first: int, end: int, mode: Mode) -> PrefillDemand:
        """Make the demand for the chunks from first to end, as one prefill."""
        recomputed_tokens = sum(
            self._recomputed_tokens(index)
            for index in range(first, end)
            if index in self._missing_chunks
        )
        computed_tokens = self._tokens_after_cached(first, end)
        saved_s = (
            computed_tokens * self._prefill_s_per_token
            + recomputed_tokens * self._recompute_s_per_token
        )
        return self._with_saving(first, end, mode, saved_s)

    def demand_for_context(self) -> PrefillDemand:
        """Make the demand for all chunks in their order, which blends recompute in part."""
        end = len(self.question.texts)
        computed_tokens = max(0, self.boundaries[end] - self._cached_tokens)
        saved_s = self._recompute_s + computed_tokens * self._prefill_s_per_token
        return self._with_saving(0, end, "exact", saved_s)

    def _tokens_after_cached(self, first: int, end: int) -> int:
        start, stop = self.boundaries[first], self.boundaries[end]
        return max(0, stop - max(start, self._cached_tokens))

    def _recomputed_tokens(self, index: int) -> int:
        start = max(self.boundaries[index], self._local_tokens)
        return max(0, min(self.boundaries[index + 1], self._cached_tokens) - start)

    def _with_saving(self, first: int, end: int, mode: Mode, saved_s: float) -> PrefillDemand:
        question = self.question
        texts, documents = question.texts[first:end], question.asked.documents[first:end]
        prefill = Prefill(
            tuple(texts),
            documents,
            question.asked.planned_at_ms,
            mode,
            domain=question.asked.domain,
        )
        num_tokens = self.boundaries[end] - self.boundaries[first]
        return PrefillDemand(prefill, num_tokens, saved_s)


def prefill_demands(
    question: AnsweredQuestion, record: engine_pb2.RequestRecord, template: Sequence[int]
) -> list[PrefillDemand]:
    """List the prefills that would have served a question, by the engine's record of it.

    Args:
        template: Token ids before the chunks of a prefill.
    """
    prompt, num_chunks = question.asked.prompt, len(question.texts)
    costs = _Costs(question, record)
    # Nothing is precomputed after a client's own system prompt.
    has_our_template = prompt.token_ids[: prompt.head] == PackedIds.of(template)
    if question.mode == "blend":
        demands = [costs.demand(index, index + 1, "blend") for index in range(num_chunks)]
        if has_our_template and record.recomputed_tokens:
            demands.append(costs.demand_for_context())
        return demands
    if has_our_template and num_chunks:
        documents = question.asked.documents
        others = (i for i in range(num_chunks) if documents[i] != documents[0])
        return [costs.demand(0, next(others, num_chunks), "exact")]
    return []
