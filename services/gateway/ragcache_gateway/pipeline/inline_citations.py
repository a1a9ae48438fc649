"""Markers in an answer that say which chunk supports which sentence.

They are set by comparing the answer with the chunks, not by the model. So they need no numbers in
the prompt, whose KV would then depend on the order of the chunks, and they work with any model.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import orjson

from ragcache_core.citations.marked_answer import Mark, MarkedAnswer
from ragcache_core.citations.support import SupportIndex
from ragcache_gateway.chat.schema import InlineCitation
from ragcache_gateway.prompts.passages import Passage


class InlineCiter:
    """Adds markers to the choices of one answer.

    Args:
        passages: Those of the answer's citations, in their order.
    """

    def __init__(self, passages: Sequence[Passage]) -> None:
        self._passages = passages
        index = SupportIndex([passage.chunk.text for passage in passages])
        self._choices: defaultdict[int, MarkedAnswer] = defaultdict(lambda: MarkedAnswer(index))

    def mark_event(self, event: bytes) -> bytes:
        """Return a chunk of a stream with markers, encoded in ASCII."""
        chunk = orjson.loads(event)
        self.mark_chunk(chunk)
        return json.dumps(chunk, separators=(",", ":")).encode()

    def mark_chunk(self, chunk: dict[str, Any]) -> None:
        """Add markers to a chunk of a stream."""
        for choice in chunk.get("choices") or ():
            delta = choice.get("delta") or {}
            text = self._marked(choice, delta.get("content"))
            if text:
                choice["delta"] = {**delta, "content": text}

    def mark_whole(self, answer: dict[str, Any]) -> None:
        """Add markers to an answer in one piece, and annotations of documents that are URLs."""
        for choice in answer["choices"]:
            message = choice["message"]
            if text := self._marked(choice, message.get("content")):
                message["content"] = text
        for citation in self.citations():
            if citation.is_url:
                message = answer["choices"][citation.choice]["message"]
                url = {"type": "url_citation", "url_citation": citation.url_fields()}
                message["annotations"] = [*(message.get("annotations") or ()), url]

    def citations(self) -> list[InlineCitation]:
        """Return what the markers so far stand for, by choice and position."""
        return [
            self._citation(choice, mark)
            for choice, answer in sorted(self._choices.items())
            for mark in answer.marks
        ]

    def _marked(self, choice: dict[str, Any], content: str | None) -> str:
        answer = self._choices[choice.get("index", 0)]
        text = answer.add(content) if content else ""
        # No text of a sentence follows a tool call.
        has_call = bool((choice.get("delta") or {}).get("tool_calls"))
        return text + answer.finish() if has_call or choice.get("finish_reason") else text

    def _citation(self, choice: int, mark: Mark) -> InlineCitation:
        support = mark.support
        chunk = self._passages[support.source].chunk
        return InlineCitation(
            choice=choice,
            marker=f"[{support.source + 1}]",
            start=mark.start,
            end=mark.end,
            document_id=chunk.document_id,
            title=chunk.title,
            chunk=chunk.id,
            page=chunk.page or None,
            quote=chunk.text[support.start : support.end],
            quote_start=support.start,
            quote_end=support.end,
        )
