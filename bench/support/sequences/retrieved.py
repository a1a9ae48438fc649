"""Passages that a retriever returned for real questions (PSI-RAG), as texts."""

from __future__ import annotations

import json
from pathlib import Path

from tokenizers import Tokenizer

from bench.support.sequences.prompts import Part, PromptPart, SequenceRequest
from ragcache_core.plan.prompt import CHUNK_SEPARATOR, CHUNKS_PLACEHOLDER, DEFAULT_SYSTEM_PROMPT

FILES = {
    "multihoprag": "multihoprag_summary.json",
    "2wiki": "2wikimultihopqa_summary.json",
}


class RetrievedPassages:
    """One data set with the chat template of a model.

    The head is the same in all prompts. The data has no questions, so a prompt asks for the
    passages that name the recorded answer.

    Args:
        path: A file of the data set.
        model: Folder of the model, for its tokenizer and chat template.
    """

    def __init__(self, path: Path, model: Path) -> None:
        data = json.loads(path.read_text())
        self._passages: list[list[str]] = data["retrieved_docs"]
        self._answers: list[str] = data["answers"]
        self._tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))
        self._head, self._end = template_parts(model)

    def requests(self, first: int, count: int) -> list[SequenceRequest]:
        """Return requests of the data set, from an index on."""
        return [
            self._request(index) for index in range(first, min(first + count, len(self._passages)))
        ]

    def topics(self) -> list[str]:
        """Return the names of all passages in the order of their texts, which begin with titles."""
        return sorted({text for texts in self._passages for text in texts})

    def _request(self, index: int) -> SequenceRequest:
        question = f"Question {index + 1}: which documents mention {self._answers[index]}?"
        separator = self._ids(CHUNK_SEPARATOR)
        return SequenceRequest(
            (
                PromptPart("head", Part.STABLE, self._ids(self._head)),
                *(
                    PromptPart(text, Part.PASSAGE, self._ids(text) + separator)
                    for text in dict.fromkeys(self._passages[index])
                ),
                PromptPart(f"question {index}", Part.TAIL, self._ids(question + self._end)),
            )
        )

    def _ids(self, text: str) -> tuple[int, ...]:
        return tuple(self._tokenizer.encode(text, add_special_tokens=False).ids)


def template_parts(model: Path) -> tuple[str, str]:
    """Return what a model's chat template puts before the passages, and after the question."""
    from transformers import AutoTokenizer  # noqa: PLC0415  slow to import

    messages = [
        {"role": "system", "content": DEFAULT_SYSTEM_PROMPT},
        {"role": "user", "content": CHUNKS_PLACEHOLDER},
    ]
    tokenizer = AutoTokenizer.from_pretrained(str(model))
    text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    head, _, end = str(text).partition(CHUNKS_PLACEHOLDER)
    return head, end
