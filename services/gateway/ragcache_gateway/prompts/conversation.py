"""A conversation as the prompt needs it: system prompt, then the turns."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from ragcache_core.plan.prompt import DEFAULT_SYSTEM_PROMPT

Layout = Literal["system-first", "documents-first"]
"""What a prompt begins with. The KV of documents depends on all tokens before them."""


@dataclass(frozen=True, slots=True)
class Turn:
    """A message after the system prompt, as chat templates take it.

    Attributes:
        fields: Further fields, such as tool_calls and tool_call_id.
    """

    role: str
    content: str
    fields: Mapping[str, Any] = field(default_factory=dict)

    def to_template(self) -> dict[str, Any]:
        """Return the message for the chat template."""
        return {"role": self.role, "content": self.content, **self.fields}


@dataclass(frozen=True, slots=True)
class Conversation:
    """The parts of a conversation around the documents.

    All turns come after the documents, and the system prompt as the layout says. So the tokens
    before the documents, which their KV depends on, stay the same from turn to turn.

    Attributes:
        system: The client's system prompt; None: it sent none.
        stable_prefix: Number of leading characters of the system prompt that other requests have,
            too. None: unknown.
        template: Further arguments of the chat template, such as tools.
        layout: Whether the system prompt follows the documents, but for its stable prefix. None:
            as the platform is set.
    """

    system: str | None
    turns: tuple[Turn, ...]
    stable_prefix: int | None = None
    template: Mapping[str, Any] = field(default_factory=dict)
    layout: Layout | None = None

    @classmethod
    def asking(cls, system: str | None, question: str) -> Conversation:
        """Make a conversation of one question."""
        return cls(system, (Turn("user", question),))

    @property
    def question(self) -> str:
        """The text of the user's last message; empty without one."""
        return next((turn.content for turn in reversed(self.turns) if turn.role == "user"), "")

    @property
    def system_with_documents(self) -> str:
        """The system prompt of an answer from documents."""
        return self.system or DEFAULT_SYSTEM_PROMPT

    def num_chars(self) -> int:
        """Length of all texts together."""
        texts = (self.system or "", *(turn.content for turn in self.turns))
        extra = [turn.fields for turn in self.turns if turn.fields]
        extra += [self.template] if self.template else []
        return sum(map(len, texts)) + sum(len(json.dumps(one)) for one in extra)
