"""A checked request."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

from ragcache_core.access.caller import Caller
from ragcache_core.errors import InvalidInput
from ragcache_core.plan.reuse_plan import document_name
from ragcache_gateway.admission.slo import Arrival
from ragcache_gateway.audit.notes import note_collection
from ragcache_gateway.background.quality_gate import GatedReuse
from ragcache_gateway.chat.client_passages import ClientPassage
from ragcache_gateway.chat.completion_schema import CompletionRequest
from ragcache_gateway.chat.messages import question_field, read_conversation
from ragcache_gateway.chat.schema import (
    AnswerQuality,
    ChatRequest,
)
from ragcache_gateway.explain.progress import NO_PROGRESS, Progress
from ragcache_gateway.pipeline.chat_services import ChatServices
from ragcache_gateway.prompts.conversation import Conversation
from ragcache_gateway.prompts.passages import Passage
from ragcache_gateway.prompts.reuse_mode import ReuseMode, requested_reuse


@dataclass(frozen=True, slots=True)
class Question:
    """A checked request.

    Args:
        started: On the clock of time.perf_counter.
        progress: Tells the client what happens before the first token.
    """

    request: ChatRequest | CompletionRequest
    caller: Caller
    conversation: Conversation
    gated: GatedReuse
    started: float
    progress: Progress = NO_PROGRESS

    @property
    def retrieves(self) -> bool:
        """Whether documents are searched."""
        return self.request.retrieves()

    @property
    def passages(self) -> Sequence[ClientPassage] | None:
        """What the client has retrieved itself. None: it leaves that to the platform."""
        return self.request.ragcache.passages

    def document_names(self, passages: Iterable[Passage]) -> tuple[str, ...]:
        """Return the names of the documents of passages; empty for those of the client."""
        if self.passages is not None:
            return ("",) * sum(1 for _ in passages)
        collection = self.request.ragcache.collection
        return tuple(document_name(collection, one.chunk.document_id) for one in passages)

    @property
    def arrival(self) -> Arrival:
        """When it arrived, and until when its client waits."""
        return arrived(self.started, self.request)

    @property
    def reuse(self) -> ReuseMode:
        """How its answer may reuse KV."""
        return self.gated.reuse

    @property
    def is_trial(self) -> bool:
        """Whether the request measures quality, so that nothing is learned or stored from it."""
        return self.request.ragcache.trial

    @property
    def quality(self) -> AnswerQuality | None:
        """The measured quality of blends, if it asks for one."""
        if self.gated.verdict is None:
            return None
        reuse: Literal["exact", "blend"] = "exact" if self.gated.refused else "blend"
        return AnswerQuality(verdict=self.gated.verdict, reuse=reuse)


def read_question(
    services: ChatServices, request: ChatRequest | CompletionRequest, caller: Caller
) -> Question:
    """Check a request and decide how its answer may reuse KV.

    Raises NotAllowed, InvalidInput, or Refused if all engines are overloaded.
    """
    started = time.perf_counter()
    options = request.ragcache
    if request.retrieves():
        note_collection(options.collection)
        caller.check_collection(options.collection, "ragcache.collection")
    if isinstance(request, ChatRequest):
        conversation = read_conversation(request)
    else:
        conversation = Conversation.asking(None, request.question())
    if request.retrieves() and not conversation.question.strip():
        raise InvalidInput(text_field(request), "has no text", "send a question")
    reuse = requested_reuse(options.reuse, options.max_recompute_share, services.default_reuse)
    gated = services.gate.apply(
        reuse, is_trial=options.trial, rounding=options.rounding(reuse.mode)
    )
    position = services.tenant_queue.position(caller)
    services.slo.check_queues(arrived(started, request), position)
    return Question(request, caller, conversation, gated, started)


def arrived(started: float, request: ChatRequest | CompletionRequest) -> Arrival:
    """Return the arrival of a request.

    Args:
        started: On the clock of time.perf_counter.
    """
    deadline_ms = request.ragcache.deadline_ms
    deadline_s = None if deadline_ms is None else deadline_ms / 1e3
    return Arrival(lambda: time.perf_counter() - started, deadline_s)


def text_field(request: ChatRequest | CompletionRequest) -> str:
    """Return the field of a request that has its question, for errors."""
    return question_field(request.messages) if isinstance(request, ChatRequest) else "prompt"
