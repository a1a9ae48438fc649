"""An answer of an engine, from its first token on."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Iterable, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field

from ragcache_core.errors import Unavailable
from ragcache_gateway.chat.schema import (
    AnswerQuality,
    Citation,
)
from ragcache_gateway.documents.search_schema import pages_of, updated_text
from ragcache_gateway.engines.client import Engine
from ragcache_gateway.engines.completion import (
    ENGINE,
)
from ragcache_gateway.engines.completion_stream import Completion, WholeCompletion
from ragcache_gateway.pipeline.chat_services import ChatServices
from ragcache_gateway.pipeline.inline_citations import InlineCiter
from ragcache_gateway.pipeline.plan import PlannedQuestion
from ragcache_gateway.prompts.passages import Passage
from ragcache_gateway.speculation.speculative_search import EndedPrefill
from ragcache_gateway.telemetry.spans import record_unavailable

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
        prefills: What engines computed during the search.
        created: Unix time in seconds.
        inline: Adds markers to the answer; None: none were requested.
    """

    planned: PlannedQuestion
    model: str
    engine: Engine
    completion: Completion | WholeCompletion
    first_token_s: float | None
    sent_s: float
    citations: list[Citation]
    prefills: tuple[EndedPrefill, ...] = ()
    created: int = field(default_factory=lambda: int(time.time()))
    inline: InlineCiter | None = None

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
    preferred = planner.engine_of(planned.plan)
    sent_s = planner.now()
    completion: Completion | WholeCompletion
    first_token_s = None
    with planner.waiting(preferred, planned.plan):
        if question.request.stream:
            engine, completion = await services.engines.complete(
                planned.request.body,
                stack,
                planned.request.id,
                preferred=preferred,
                on_accepted=question.progress.engine_accepted,
            )
            question.progress.first_token()
            first_token_s = time.perf_counter() - question.started
            tenant = question.caller.tenant_label
            services.metrics.observe_first_token(first_token_s, tenant)
        else:
            engine, completion = await services.engines.complete_whole(
                planned.request.body,
                planned.prompt.max_tokens,
                stack,
                planned.request.id,
                preferred=preferred,
            )
    if not question.is_trial and reuse.mode != "off":
        planner.computed(engine, planned.plan, blends=reuse.mode == "blend")
    return Answer(
        planned=planned,
        model=services.model.name,
        engine=engine,
        completion=completion,
        first_token_s=first_token_s,
        sent_s=sent_s,
        citations=cite(cited),
        prefills=prefills,
        inline=inline,
    )


async def relay_events(
    services: ChatServices,
    engine: Engine,
    completion: Completion,
    num_choices: int,
    deliver: Callable[[list[bytes]], bool],
    drain: Callable[[], Awaitable[None]],
) -> None:
    """Have the engine's events delivered as they arrive, see ``Completion.relay``.

    Raises Unavailable.
    """
    try:
        await completion.relay(num_choices, deliver, drain)
    except Unavailable as error:
        engine.record_failure(error)
        services.metrics.upstream_failures.labels(ENGINE).inc()
        completion.span.fail(f"{type(error).__name__}: {error.component}")
        record_unavailable(error)
        raise
