"""Recent questions, kept to be asked again: a few, not for long, and none of a deleted document.

Times are Unix milliseconds, given by the caller.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

from ragcache_core.cluster.recent_deletes import RecentDeletes
from ragcache_core.plan.prompt import Prompt

MAX_QUESTIONS = 16
MAX_AGE_MS = 600_000
"""Ten minutes, after which a question is forgotten: a delete that another gateway was told of is
not known here, and the text of its document must not stay for long."""


@dataclass(frozen=True, slots=True, eq=False)
class AskedQuestion:
    """A prompt, the name of each chunk's document, and when nobody had looked for them yet."""

    prompt: Prompt
    documents: tuple[str, ...]
    planned_at_ms: int


class QuestionReservoir:
    """The newest comes first, and where there is no room the oldest goes."""

    def __init__(self) -> None:
        self._questions: deque[AskedQuestion] = deque(maxlen=MAX_QUESTIONS)
        self._deletes = RecentDeletes()

    def __len__(self) -> int:
        return len(self._questions)

    def add(self, question: AskedQuestion, now_ms: int) -> None:
        """Keep a question that has been answered, if it may still be asked."""
        if self.may_ask(question, now_ms):
            self._questions.append(question)

    def take(self, now_ms: int) -> AskedQuestion | None:
        """The newest that may be asked, which is not kept any longer."""
        while self._questions:
            question = self._questions.pop()
            if self.may_ask(question, now_ms):
                return question
        return None

    def delete(self, document: str, now_ms: int) -> None:
        """A document is gone, or some of its text: no question from before is asked again."""
        self._deletes.note(document, now_ms)
        self.prune(now_ms)

    def prune(self, now_ms: int) -> None:
        """Let go of what may not be asked any more; to be called now and then."""
        left = [question for question in self._questions if self.may_ask(question, now_ms)]
        self._questions = deque(left, maxlen=MAX_QUESTIONS)

    def may_ask(self, question: AskedQuestion, now_ms: int) -> bool:
        """Whether it is recent, and no document of it was deleted since it was planned."""
        is_recent = now_ms - question.planned_at_ms <= MAX_AGE_MS
        return is_recent and not self._deletes.cover(question.documents, question.planned_at_ms)
