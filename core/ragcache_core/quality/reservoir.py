"""Recent questions to replay: a bounded number, for a bounded time, of documents that still exist.

The caller passes times as Unix milliseconds.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

from ragcache_core.cluster.recent_deletes import RecentDeletes
from ragcache_core.identity.keys import PUBLIC_DOMAIN
from ragcache_core.plan.prompt import Prompt

MAX_QUESTIONS = 16
MAX_AGE_MS = 600_000
"""Ten minutes, after which a question is forgotten: what clients ask changes.
"""


@dataclass(frozen=True, slots=True, eq=False)
class AskedQuestion:
    """A question that was answered.

    Attributes:
        documents: Name of each chunk's document.
        planned_at_ms: A time before the gateway searched for the chunks.
        domain: Access domain of its KV.
    """

    prompt: Prompt
    documents: tuple[str, ...]
    planned_at_ms: int
    domain: str = PUBLIC_DOMAIN


class QuestionReservoir:
    """Keeps the newest MAX_QUESTIONS questions and returns the newest first."""

    def __init__(self) -> None:
        self._questions: deque[AskedQuestion] = deque(maxlen=MAX_QUESTIONS)
        self._deletes = RecentDeletes()

    def __len__(self) -> int:
        return len(self._questions)

    def add(self, question: AskedQuestion, now_ms: int) -> None:
        """Keep an answered question, if it may be replayed."""
        if self.may_replay(question, now_ms):
            self._questions.append(question)

    def take_newest(self, now_ms: int) -> AskedQuestion | None:
        """Remove and return the newest question that may be replayed."""
        while self._questions:
            question = self._questions.pop()
            if self.may_replay(question, now_ms):
                return question
        return None

    def forget_document(self, document: str, now_ms: int) -> None:
        """Remove the questions about a document that was deleted or changed."""
        self._deletes.record(document, now_ms)
        self.remove_expired(now_ms)

    def forget_all(self, now_ms: int) -> None:
        """Remove every question, as any document may have been deleted or changed."""
        self._deletes.record_all(now_ms)
        self.remove_expired(now_ms)

    def remove_expired(self, now_ms: int) -> None:
        """Remove questions that may not be replayed any more. Call it periodically."""
        left = [question for question in self._questions if self.may_replay(question, now_ms)]
        self._questions = deque(left, maxlen=MAX_QUESTIONS)

    def may_replay(self, question: AskedQuestion, now_ms: int) -> bool:
        """Whether it is recent, and none of its documents was deleted since it was planned."""
        is_recent = now_ms - question.planned_at_ms <= MAX_AGE_MS
        return is_recent and not self._deletes.may_include(
            question.documents, question.planned_at_ms
        )
