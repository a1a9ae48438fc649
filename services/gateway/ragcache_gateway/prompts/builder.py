"""From a conversation and retrieved chunks to the token ids of a prompt."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from jinja2 import TemplateError

from ragcache_core.errors import InvalidInput
from ragcache_core.plan.prompt import CHUNK_SEPARATOR, CHUNKS_PLACEHOLDER, Prompt, assemble
from ragcache_gateway.prompts.passages import Passage, by_document, fit
from ragcache_gateway.prompts.conversation import Conversation
from ragcache_gateway.prompts.tokenizer import ChatTokenizer, TokenCache
from ragcache_wire.v1 import retriever_pb2 as pb

MAX_CHARS_PER_TOKEN = 16
"""No ordinary text has more. What has more characters than this allows for cannot fit the model,
and is not worth the seconds its tokenization would take from everybody else."""


@dataclass(frozen=True, slots=True)
class Frame:
    """Token ids before the chunks and after them."""

    head: Sequence[int]
    tail: Sequence[int]


@dataclass(frozen=True, slots=True)
class AnswerPrompt:
    """A prompt, the passages in it and how many tokens the answer may have."""

    prompt: Prompt
    passages: tuple[Passage, ...]
    max_tokens: int


class PromptBuilder:
    """Builds prompts for one model. Not for several threads at once (its tokenizer is not).

    max_model_len: tokens of prompt and answer together. default_max_tokens: length of an answer
    for which nobody asks another; a quarter of max_model_len if that is less.
    """

    def __init__(
        self,
        tokenizer: ChatTokenizer,
        *,
        max_model_len: int,
        default_max_tokens: int,
        cache_bytes: int,
    ) -> None:
        self._tokenizer = tokenizer
        self._max_model_len = max_model_len
        self._default_max_tokens = min(default_max_tokens, max_model_len // 4)
        self._chunks = TokenCache(self.encode_chunk, cache_bytes)
        self._separator = self._encode(CHUNK_SEPARATOR)

    def build(
        self, conversation: Conversation, hits: Sequence[pb.Hit], max_tokens: int | None
    ) -> AnswerPrompt:
        """The prompt for an answer of at most max_tokens, with as many documents as fit.

        Raises InvalidInput if the messages leave no room for them.
        """
        max_tokens = max_tokens or self._default_max_tokens
        if max_tokens >= self._max_model_len:
            raise InvalidInput(
                "max_tokens",
                f"is {max_tokens}, and question and answer together have {self._max_model_len}",
                "lower it",
            )
        num_chars = conversation.num_chars()
        if num_chars > MAX_CHARS_PER_TOKEN * self._max_model_len:
            raise InvalidInput(
                "messages",
                f"have {num_chars} characters, far more than the {self._max_model_len} tokens of "
                "the model",
                "shorten them",
            )
        frame = self.frame(conversation)
        fixed = len(frame.head) + len(frame.tail)
        budget = self._max_model_len - max_tokens - fixed
        if budget < 0:
            raise InvalidInput(
                "messages",
                f"take {fixed} tokens, which with {max_tokens} for the answer is more than the "
                f"{self._max_model_len} of the model",
                "shorten them or lower max_tokens",
            )
        passages = fit(by_document(hits), lambda text: len(self._chunks.get(text)), budget)
        chunks = [self._chunks.get(passage.chunk.text) for passage in passages]
        return AnswerPrompt(assemble(frame.head, chunks, frame.tail), tuple(passages), max_tokens)

    def frame(self, conversation: Conversation) -> Frame:
        """The chat template around the chunks.

        Raises InvalidInput if the template does not take this conversation.
        """
        system = f"{conversation.system}\n\n{CHUNKS_PLACEHOLDER}"
        messages = [
            {"role": "system", "content": system},
            *({"role": turn.role, "content": turn.content} for turn in conversation.history),
            {"role": "user", "content": conversation.question},
        ]
        try:
            text = self._tokenizer.apply_chat_template(
                messages, tokenize=False, add_generation_prompt=True
            )
        except TemplateError as error:
            raise InvalidInput(
                "messages",
                f"are refused by the model's chat template: {error}",
                "alternate user and assistant, starting with user",
            ) from error
        parts = text.split(CHUNKS_PLACEHOLDER)
        if len(parts) != 2:
            raise InvalidInput(
                "RAGCACHE_MODEL",
                "has a chat template that does not write the system message once",
                "name a model whose chat template takes a system message",
            )
        return Frame(self._encode(parts[0]), self._encode(parts[1]))

    def encode_chunk(self, text: str) -> list[int]:
        """Token ids of a chunk by itself, with the separator that follows it.

        Text of a document that spells a special token stays text: a document must not be able to
        end the system prompt and speak as somebody else.
        """
        ids = self._tokenizer.encode(text, add_special_tokens=False, split_special_tokens=True)
        return [*ids, *self._separator]

    def _encode(self, text: str) -> list[int]:
        return self._tokenizer.encode(text, add_special_tokens=False, split_special_tokens=False)
