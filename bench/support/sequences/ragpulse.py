"""RAGPulse: the trace of a production RAG service. It has component ids and lengths, no text."""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from bench.support.sequences.prompts import Part, PromptPart, SequenceRequest, Vocabulary

_LENGTHS = (
    "1_sys_prompt.jsonl",
    "2_passages.jsonl",
    "3_history.jsonl",
    "4_user_input.jsonl",
    "5_web_search.jsonl",
)
_TAIL = ("history", "web_search", "user_input")
STABLE_SHARE = 0.01
"""A part of the system prompt that fewer of all requests have is one that changes."""


class RagPulse:
    """The trace in a folder.

    Args:
        folder: Has the files of the data set.
        vocabulary: Draws the tokens of a component by its id.
        scale: Factor of all lengths.
        max_tokens: Longest prompt. Longer ones lose what follows their passages, except the end.
    """

    def __init__(self, folder: Path, vocabulary: Vocabulary, scale: float, max_tokens: int) -> None:
        self._vocabulary = vocabulary
        self._scale = scale
        self._max_tokens = max_tokens
        self._lengths: dict[int, int] = {}
        for name in _LENGTHS:
            for record in _records(folder / name):
                length = record.pop("token_length")
                [component] = record.values()
                self._lengths[component] = length
        self._trace = [record["hash_ids"] for record in _records(folder / "0_trace.jsonl")]
        uses = Counter(component for ids in self._trace for component in ids["sys_prompt"])
        least = STABLE_SHARE * len(self._trace)
        self._stable = {component for component, count in uses.items() if count >= least}

    def requests(self, first: int, count: int) -> list[SequenceRequest]:
        """Return requests of the trace, from an index on."""
        return [self._request(ids) for ids in self._trace[first : first + count]]

    def topics(self) -> list[str]:
        """Return the names of all passages by id: passages of one document have close ids."""
        passages = {component for ids in self._trace for component in ids["passages_ids"]}
        return [_name(component) for component in sorted(passages)]

    def _request(self, ids: dict[str, list[int]]) -> SequenceRequest:
        role = Part.STABLE
        head = []
        for component in ids["sys_prompt"]:
            if component not in self._stable:
                role = Part.CHANGING
            head.append(self._part(role, component))
        passages = [self._part(Part.PASSAGE, component) for component in ids["passages_ids"]]
        tail = [self._part(Part.TAIL, component) for kind in _TAIL for component in ids[kind]]
        excess = sum(len(p.token_ids) for p in (*head, *passages, *tail)) - self._max_tokens
        while excess > 0 and len(tail) > 1:
            excess -= len(tail.pop(0).token_ids)
        return SequenceRequest((*head, *passages, *tail))

    def _part(self, role: Part, component: int) -> PromptPart:
        name = _name(component)
        length = max(1, math.ceil(self._lengths[component] * self._scale))
        return PromptPart(name, role, self._vocabulary.draw(name, length))


def _name(component: int) -> str:
    return f"component {component}"


def _records(path: Path) -> Iterator[dict[str, Any]]:
    with path.open() as lines:
        for line in lines:
            if line.strip():
                yield json.loads(line)
