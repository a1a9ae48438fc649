"""Relays an answer to its client, and has another engine carry it on if its engine is lost."""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AsyncExitStack
from dataclasses import replace
from typing import Any

from ragcache_core.errors import RagCacheError, Unavailable
from ragcache_gateway.engines.client import Engine
from ragcache_gateway.engines.completion import ENGINE, with_engine_controls
from ragcache_gateway.engines.completion_stream import Completion
from ragcache_gateway.engines.resumption import (
    MAX_RESUMPTIONS,
    ResumedStream,
    Resumption,
    SentAnswer,
    continued_body,
    is_repeatable,
)
from ragcache_gateway.pipeline.answer import Answer
from ragcache_gateway.pipeline.chat_services import ChatServices
from ragcache_gateway.pipeline.handoff import route
from ragcache_gateway.pipeline.plan import queue_position
from ragcache_gateway.telemetry.spans import record_unavailable

log = logging.getLogger(__name__)

Deliver = Callable[[list[bytes]], bool]
Drain = Callable[[], Awaitable[None]]


async def relay_events(
    services: ChatServices,
    engine: Engine,
    completion: Completion,
    num_choices: int,
    deliver: Deliver,
    drain: Drain,
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


async def relay_answer(
    services: ChatServices, answer: Answer, deliver: Deliver, drain: Drain
) -> Answer:
    """Have the events of an answer delivered, if need be by several engines one after another.

    Returns:
        The answer, with the engine that ended it.

    Raises:
        Unavailable: The engine failed, and no other one could carry the answer on.
    """
    completion = answer.completion
    assert isinstance(completion, Completion)
    num_choices = answer.planned.question.request.num_choices()
    if answer.resumption is None:
        await relay_events(services, answer.engine, completion, num_choices, deliver, drain)
        return answer
    sent = SentAnswer(answer.resumption, shows_ids=answer.shows_ids)
    events = _Events(sent.take, deliver, drain)
    try:
        await relay_events(
            services, answer.engine, completion, num_choices, events.deliver, events.drain
        )
        events.raise_problem()
    except Unavailable as error:
        answer = await _carry_on(services, answer, sent, events, error)
    if answer.resumption is Resumption.CONTINUE and not answer.shows_ids:
        _hide_token_ids(completion.last_chunk)
    return answer


async def _carry_on(
    services: ChatServices, answer: Answer, sent: SentAnswer, events: _Events, lost: Unavailable
) -> Answer:
    """Have other engines carry an answer on until one has ended it. Raises Unavailable."""
    first = answer.completion
    assert isinstance(first, Completion)
    for _ in range(MAX_RESUMPTIONS):
        async with AsyncExitStack() as stack:
            engine, completion = await _resume(services, answer, sent, lost, stack)
            exact = answer.planned.question.reuse.mode != "blend"
            same_text = exact and is_repeatable(answer.planned.request.body)
            stream = ResumedStream(sent, same_text=same_text)
            events.transform = stream.take
            try:
                await relay_events(services, engine, completion, 1, events.deliver, events.drain)
                events.raise_problem()
            except Unavailable as error:
                lost = error
                continue
            assert completion.last_chunk is not None
            first.last_chunk = stream.adapt(completion.last_chunk)
            first.usage = None if completion.usage is None else stream.usage(completion.usage)
            return replace(answer, engine=engine)
    raise lost


async def _resume(
    services: ChatServices,
    answer: Answer,
    sent: SentAnswer,
    lost: Unavailable,
    stack: AsyncExitStack,
) -> tuple[Engine, Completion]:
    """Start an answer at another engine. Raises the loss if there is none, or no way to do it."""
    body: dict[str, Any] | None = answer.planned.request.body
    if sent.way is Resumption.CONTINUE:
        body = continued_body(answer.planned.request.body, sent.token_ids)
    if body is None or sent.has_more or not services.engines.healthy:
        raise lost
    log.warning(
        "answer: another engine carries it on answer=%s way=%s tokens=%d lost=%s",
        answer.id,
        sent.way.value,
        len(sent.token_ids),
        lost,
    )
    services.metrics.answers_resumed.labels(sent.way.value).inc()
    plan = services.planner.renew(
        answer.planned.plan, answer.planned.by_rank, answer.planned.question.reuse
    )
    body = with_engine_controls(body, position=queue_position(services, answer.planned))
    chosen = await route(services, answer.planned, plan, body)
    return await services.engines.complete(body, stack, answer.id, chosen)


class _Events:
    """Passes events on, and keeps what fails until the relay can raise it.

    Args:
        transform: Turns an engine's events into those for the client.
    """

    def __init__(
        self, transform: Callable[[Sequence[bytes]], list[bytes]], deliver: Deliver, drain: Drain
    ) -> None:
        self.transform = transform
        self._deliver = deliver
        self._drain = drain
        self._problem: Unavailable | None = None

    def deliver(self, events: list[bytes]) -> bool:
        """Deliver events. Return whether to call ``drain`` before more is read."""
        try:
            passed = self.transform(events)
        except RagCacheError as error:
            self._problem = error if isinstance(error, Unavailable) else None
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            self._problem = Unavailable(ENGINE, f"it sent an event that cannot be read: {error}")
        if self._problem is not None:
            return True
        return self._deliver(passed) if passed else False

    async def drain(self) -> None:
        """Wait until more can be delivered. Raises what has failed."""
        self.raise_problem()
        await self._drain()

    def raise_problem(self) -> None:
        """Raise what has failed, once."""
        problem, self._problem = self._problem, None
        if problem is not None:
            raise problem


def _hide_token_ids(chunk: dict[str, Any] | None) -> None:
    for choice in chunk["choices"] if chunk else ():
        if choice.get("token_ids"):
            choice["token_ids"] = None
