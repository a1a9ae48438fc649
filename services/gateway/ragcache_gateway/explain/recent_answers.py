"""The latest answers, kept to explain them."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection

from ragcache_core.identity.keys import ChunkKey
from ragcache_gateway.explain.explanation import AnsweredPrompt, PromptPart

MAX_ANSWERS = 1024
MAX_PARTS = 65_536
"""Parts of all kept prompts together, about 300 bytes each."""


class RecentAnswers:
    """The latest answers by their ids, within bounds of their number and of their parts."""

    def __init__(self, max_answers: int = MAX_ANSWERS, max_parts: int = MAX_PARTS) -> None:
        self._answers: OrderedDict[str, AnsweredPrompt] = OrderedDict()
        self._max_answers, self._max_parts = max_answers, max_parts
        self._num_parts = 0

    def add(self, answered: AnsweredPrompt) -> None:
        """Keep an answer, and drop the oldest ones beyond the bounds."""
        self._drop(answered.id)
        self._answers[answered.id] = answered
        self._num_parts += len(answered.parts)
        while len(self._answers) > 1 and (
            len(self._answers) > self._max_answers or self._num_parts > self._max_parts
        ):
            self._drop(next(iter(self._answers)))

    def find(
        self, answer_id: str, tenant: str | None = None, *, of_any_tenant: bool = False
    ) -> AnsweredPrompt | None:
        """Return a kept answer. None: it is not kept, or is another tenant's.

        Args:
            tenant: Whose answer it has to be; None: that of a caller without a tenant.
            of_any_tenant: Whether it may be of any tenant.
        """
        answered = self._answers.get(answer_id)
        if answered is None or (answered.tenant != tenant and not of_any_tenant):
            return None
        return answered

    def parts_of(self, keys: Collection[ChunkKey]) -> dict[ChunkKey, PromptPart]:
        """Return a part of a kept prompt for each key in the knowledge tree that one has."""
        wanted = set(keys)
        found: dict[ChunkKey, PromptPart] = {}
        for answered in reversed(self._answers.values()):
            if not wanted:
                break
            for part in answered.parts:
                if part.key in wanted:
                    wanted.discard(part.key)
                    found[part.key] = part
        return found

    def __contains__(self, answer_id: str) -> bool:
        return answer_id in self._answers

    def __len__(self) -> int:
        return len(self._answers)

    def _drop(self, answer_id: str) -> None:
        dropped = self._answers.pop(answer_id, None)
        if dropped is not None:
            self._num_parts -= len(dropped.parts)
