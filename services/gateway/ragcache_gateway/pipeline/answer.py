"""An answer of an engine, from its first token on."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterable, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field

from ragcache_gateway.audit.notes import note_documents, note_object
from ragcache_gateway.chat.schema import (
    AnswerQuality,
    Citation,
)
from ragcache_gateway.documents.search_schema import pages_of, updated_text
from ragcache_gateway.engines.client import Engine
from ragcache_gateway.engines.completion import with_engine_controls
from ragcache_gateway.engines.completion_stream import Completion, WholeCompletion
from ragcache_gateway.engines.resumption import Resumption, resumption_of, with_token_ids
from ragcache_gateway.pipeline.chat_services import ChatServices
from ragcache_gateway.pipeline.handoff import route
from ragcache_gateway.pipeline.inline_citations import InlineCiter
from ragcache_gateway.pipeline.metering import begin_output
from ragcache_gateway.pipeline.plan import PlannedQuestion, queue_position
from ragcache_gateway.prompts.passages import Passage
from ragcache_gateway.speculation.speculative_search import EndedPrefill

PREVIEW_CHARS = 200
_PREVIEW_SOURCE_CHARS = 4 * PREVIEW_CHARS


def cited_passages(passages: Sequence[Passage], *, with_neighbours: bool = False) -> list[Passage]:
    """Return the passages that are hits, best first.

    Args:
        with_neighbours: Whether passages beside a hit come after them.
    """
    hits = [passage for passage in passages if passage.score is not None]
    hits.sort(key=lambda passage: passage.hit_rank)
    neighbours = [passage for passage in passages if passage.score is None]
    return hits + neighbours if with_neighbours else hits


def cite(passages: Iterable[Passage]) -> list[Citation]:
    """Make a citation of each passage."""
    return [
        Citation(
            document_id=passage.chunk.document_id,
            title=passage.chunk.title,
            chunk=passage.chunk.id,
            heading_path=list(passage.chunk.heading_path),
            **pages_of(passage.chunk),
            score=None if passage.score is None else round(passage.score, 6),
            version=passage.chunk.content_hash,
            updated=updated_text(passage.chunk.updated_unix_ms),
            text_preview=preview(passage.chunk.text),
        )
        for passage in passages
    ]


def preview(text: str) -> str:
    """Return the beginning of a text on one line."""
    # Only the beginning is split: the rest of a long chunk cannot change the result.
    num_chars = _PREVIEW_SOURCE_CHARS
    line = " ".join(text[:num_chars].split())
    while len(line) <= PREVIEW_CHARS and num_chars < len(text):
        num_chars *= 4
        line = " ".join(text[:num_chars].split())
    return line if len(line) <= PREVIEW_CHARS else line[: PREVIEW_CHARS - 1] + "…"


@dataclass(frozen=True, slots=True)
class Answer:
    """An answer whose first token has come, or all of it.

    Args:
        first_token_s: Time from the request to the first token. None: the answer came in one piece.
        sent_s: When the request was sent, on the planner's clock.
        num_decoding: Answers that the engine generated at its first token, this one included.
        prefills: What engines computed during the search.
        created: Unix time in seconds.
        inline: Adds markers to the answer; None: none were requested.
        resumption: How another engine carries on a stream whose engine is lost. None: none does.
    """

    planned: PlannedQuestion
    model: str
    engine: Engine
    completion: Completion | WholeCompletion
    first_token_s: float | None
    sent_s: float
    num_decoding: int
    citations: list[Citation]
    prefills: tuple[EndedPrefill, ...] = ()
    created: int = field(default_factory=lambda: int(time.time()))
    inline: InlineCiter | None = None
    resumption: Resumption | None = None

    @property
    def shows_ids(self) -> bool:
        """Whether the client has asked for the ids of tokens."""
        return bool(self.planned.request.body.get("return_token_ids"))

    @property
    def id(self) -> str:
        """Id of the answer."""
        return self.planned.request.id

    @property
    def quality(self) -> AnswerQuality | None:
        """The measured quality of blends, if the question asked for one."""
        return self.planned.question.quality


async def generate(
    services: ChatServices,
    planned: PlannedQuestion,
    stack: AsyncExitStack,
    prefills: tuple[EndedPrefill, ...] = (),
) -> Answer:
    """Have an engine answer. It returns at the first token of a stream, or with the whole answer.

    Args:
        prefills: What engines computed during the search, for the explanation.

    Raises:
        Unavailable: No engine could answer.
        InvalidInput: The engine refused the request.
    """
    planner, question, reuse = services.planner, planned.question, planned.question.reuse
    is_inline = question.request.ragcache.cite == "inline"
    cited = cited_passages(planned.prompt.passages, with_neighbours=is_inline)
    # Splitting many chunks takes milliseconds, which would delay other streams.
    inline = await asyncio.to_thread(InlineCiter, cited) if is_inline else None
    sent_s = planner.now()
    body = with_engine_controls(planned.request.body, position=queue_position(services, planned))
    completion: Completion | WholeCompletion
    seconds = planned.plan.seconds
    work_s = seconds.total_s - seconds.queue_s if seconds is not None else 0.0
    first_token_s, resumption = None, None
    if question.request.stream:
        # It costs a little for each token.
        engines = services.engines.known
        if len(engines) > 1 and not question.is_trial:
            with_ids = all(one.takes_token_ids for one in engines)
            resumption = resumption_of(body, with_ids=with_ids)
        if resumption is Resumption.CONTINUE:
            body = with_token_ids(body)
        chosen = await route(services, planned, planned.plan, body)
        engine, completion = await services.engines.complete(
            body,
            stack,
            planned.request.id,
            chosen,
            on_accepted=question.progress.engine_accepted,
            work_s=work_s,
        )
        question.progress.first_token()
        first_token_s = time.perf_counter() - question.started
        tenant = question.caller.tenant_label
        services.metrics.observe_first_token(first_token_s, tenant)
    else:
        chosen = await route(services, planned, planned.plan, body)
        engine, completion = await services.engines.complete_whole(
            body, planned.prompt.max_tokens, stack, planned.request.id, chosen, work_s=work_s
        )
    begin_output(completion)
    _note_sources(planned, cited)
    if not question.is_trial and reuse.mode != "off":
        blends = reuse.mode == "blend"
        planner.computed(engine, planned.plan, blends=blends)
        if chosen.handoff is not None and chosen.handoff.prefill.failure is None:
            planner.record_prefilled(chosen.handoff.prefill, planned.plan, blends=blends)
    return Answer(
        planned=planned,
        model=services.model.name,
        engine=engine,
        completion=completion,
        first_token_s=first_token_s,
        sent_s=sent_s,
        num_decoding=services.slo.num_decoding(engine),
        citations=cite(cited),
        prefills=prefills,
        inline=inline,
        resumption=resumption,
    )


def _note_sources(planned: PlannedQuestion, cited: Iterable[Passage]) -> None:
    """Tell the audit log which documents an answer cites, and which are in its prompt beside."""
    note_object(planned.request.id)
    if planned.question.passages is not None:
        return
    collection = planned.question.request.ragcache.collection
    shown = dict.fromkeys(passage.chunk.document_id for passage in cited)
    used = dict.fromkeys(passage.chunk.document_id for passage in planned.prompt.passages)
    note_documents(collection, shown, "cited")
    note_documents(collection, (one for one in used if one not in shown), "used")
