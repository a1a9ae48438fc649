"""From a conversation and retrieved chunks to the token ids of a prompt."""

from __future__ import annotations

import itertools
import logging
from collections.abc import Sequence
from dataclasses import dataclass

from jinja2 import TemplateError

from ragcache_core.errors import InvalidInput
from ragcache_core.plan.prompt import (
    CHUNKS_PLACEHOLDER,
    STABLE_PREFIX_END,
    Prompt,
    assemble,
)
from ragcache_core.plan.stable_prefix import StablePrefixes
from ragcache_gateway.prompts.conversation import Conversation
from ragcache_gateway.prompts.passages import Passage, fit_to_budget, group_by_document
from ragcache_gateway.prompts.tokenizer import ChatTokenizer, TokenCache
from ragcache_wire.v1 import retriever_pb2 as pb

log = logging.getLogger(__name__)

MAX_CHARS_PER_TOKEN = 16
"""No ordinary text has more characters per token. Longer messages cannot fit the model, and
tokenizing them would block the tokenizer for other requests."""


@dataclass(frozen=True, slots=True)
class TemplateFrame:
    """Token ids of the rendered chat template before the chunks and after them.

    Attributes:
        head: Token ids before the chunks.
        tail: Token ids after the chunks.
        stable_head: See ``Prompt``.
    """

    head: Sequence[int]
    tail: Sequence[int]
    stable_head: int = 0


@dataclass(frozen=True, slots=True)
class AnswerPrompt:
    """A prompt, the passages in it, and how many tokens the answer may have."""

    prompt: Prompt
    passages: tuple[Passage, ...]
    max_tokens: int


class PromptBuilder:
    """Builds prompts for one model. Not safe for several threads, because its tokenizer is not.

    Args:
        max_model_len: Most tokens of prompt and answer together.
        default_max_tokens: Length of an answer for which the client sets none; at most a quarter
            of max_model_len.
        cache_bytes: Capacity of the cache of chunks' token ids.
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
        self._has_warned = False
        self._stable_prefixes = StablePrefixes()

    def build(
        self, conversation: Conversation, hits: Sequence[pb.Hit], max_tokens: int | None
    ) -> AnswerPrompt:
        """Build the prompt with as many documents as fit beside the messages and the answer.

        Raises:
            InvalidInput: The messages leave no space for the answer or for one chunk.
        """
        max_tokens = max_tokens or self._default_max_tokens
        self._check_length(conversation, max_tokens)
        frame = self.frame(conversation)
        frame_tokens = len(frame.head) + len(frame.tail)
        budget_tokens = self._max_model_len - max_tokens - frame_tokens
        if budget_tokens < 0:
            raise InvalidInput(
                "messages",
                f"take {frame_tokens} tokens, which with {max_tokens} for the answer is more than "
                f"the {self._max_model_len} of the model",
                "shorten them or lower max_tokens",
            )
        passages = fit_to_budget(
            group_by_document(hits), lambda chunk: len(self._ids(chunk)), budget_tokens
        )
        chunks = [self._ids(passage.chunk) for passage in passages]
        prompt = assemble(frame.head, chunks, frame.tail, frame.stable_head)
        return AnswerPrompt(prompt, tuple(passages), max_tokens)

    def frame(self, conversation: Conversation) -> TemplateFrame:
        """Render the chat template and tokenize what comes before and after the chunks.

        The stable part of the head is what the conversation marks, or else what heads before this
        one have in common with it.

        Raises:
            InvalidInput: The template does not accept this conversation.
        """
        stable, varying = conversation.system, ""
        if conversation.stable_prefix is not None:
            length = conversation.stable_prefix
            stable, varying = conversation.system[:length], conversation.system[length:]
        mark = STABLE_PREFIX_END if varying else ""
        system = f"{stable}{mark}{varying}\n\n{CHUNKS_PLACEHOLDER}"
        messages = [
            {"role": "system", "content": system},
            *({"role": turn.role, "content": turn.content} for turn in conversation.history),
            {"role": "user", "content": conversation.question},
        ]
        try:
            text = self._tokenizer.render(messages)
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
        before, *rest = (
            self._tokenizer.encode_template(part) for part in parts[0].split(STABLE_PREFIX_END)
        )
        head = [*before, *itertools.chain(*rest)]
        stable_head = len(before) if rest else self._stable_prefixes.split(head)
        return TemplateFrame(head, self._tokenizer.encode_template(parts[1]), stable_head)

    def encode_chunk(self, text: str) -> list[int]:
        """Return the token ids of a chunk, see ChatTokenizer.encode_chunk."""
        return self._tokenizer.encode_chunk(text)

    def _ids(self, chunk: pb.Chunk) -> Sequence[int]:
        """Return the token ids of a found chunk: those that the retriever has stored, if it has.

        It has none of this tokenizer while it prepares documents for a new one.
        """
        if chunk.token_ids and chunk.tokenizer_identity == self._tokenizer.identity:
            ids = self._tokenizer.unpack(chunk.token_ids)
            if ids is not None:
                return ids
            if not self._has_warned:
                self._has_warned = True
                log.warning("prompts: token ids of the retriever are invalid chunk=%r", chunk.id)
        return self._chunks.get(chunk.text)

    def _check_length(self, conversation: Conversation, max_tokens: int) -> None:
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
