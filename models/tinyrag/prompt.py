"""The prompt contract: how chunks and a question become token ids.

Every chunk is tokenized by itself, so its ids never depend on its neighbours and its KV cache
can be reused wherever it appears.
"""

from collections.abc import Sequence
from typing import Protocol

SYSTEM = (
    "Answer the question from the documents. If they do not contain the answer, "
    "reply: not in the documents."
)
SENTINEL = "\x00documents\x00"
SEPARATOR = "\n\n"


class ChatTokenizer(Protocol):
    """The part of a Hugging Face tokenizer that prompts are built with."""

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        """Token ids of a text."""
        ...

    def apply_chat_template(
        self,
        conversation: list[dict[str, str]],
        *,
        tokenize: bool,
        add_generation_prompt: bool,
    ) -> str:
        """The conversation as one text."""
        ...


def frame(tokenizer: ChatTokenizer, question: str) -> tuple[list[int], list[int]]:
    """Token ids of what stands before the chunks and of what stands after them."""
    messages = [
        {"role": "system", "content": f"{SYSTEM}\n\n{SENTINEL}"},
        {"role": "user", "content": question},
    ]
    text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    head, tail = text.split(SENTINEL)
    return (
        tokenizer.encode(head, add_special_tokens=False),
        tokenizer.encode(tail, add_special_tokens=False),
    )


def chunk_ids(tokenizer: ChatTokenizer, chunk: str) -> list[int]:
    """Token ids of one chunk and the separator that follows it."""
    return [
        *tokenizer.encode(chunk, add_special_tokens=False),
        *tokenizer.encode(SEPARATOR, add_special_tokens=False),
    ]


def prompt_ids(tokenizer: ChatTokenizer, chunks: Sequence[str], question: str) -> list[int]:
    """The whole prompt: head, each chunk with its separator, tail."""
    head, tail = frame(tokenizer, question)
    return [*head, *(i for chunk in chunks for i in chunk_ids(tokenizer, chunk)), *tail]
