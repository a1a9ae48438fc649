"""From a conversation and retrieved chunks to the token ids of a prompt."""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import TypeVar

from ragcache_core.errors import InvalidInput
from ragcache_core.identity.keys import PUBLIC_DOMAIN
from ragcache_core.identity.packed_ids import PackedIds
from ragcache_core.plan.prompt import (
    CHUNK_SEPARATOR,
    CHUNKS_PLACEHOLDER,
    DEFAULT_SYSTEM_PROMPT,
    STABLE_PREFIX_END,
    Prompt,
    assemble,
)
from ragcache_core.plan.stable_prefix import StablePrefixes
from ragcache_gateway.prompts.conversation import Conversation, Layout
from ragcache_gateway.prompts.passages import (
    Passage,
    fit_to_budget,
    group_by_document,
    passage_text,
)
from ragcache_gateway.prompts.prompt_text import PromptText
from ragcache_gateway.prompts.tokenizer import (
    TEMPLATE_ERRORS,
    ChatTokenizer,
    ChunkTokens,
    TokenCache,
)
from ragcache_wire.v1 import retriever_pb2 as pb

log = logging.getLogger(__name__)

T = TypeVar("T")

MAX_CHARS_PER_TOKEN = 16
"""No ordinary text has more characters per token. Longer messages cannot fit the model, and
tokenizing them would block the tokenizer for other requests."""


@dataclass(frozen=True, slots=True)
class TemplateFrame:
    """Token ids of the rendered chat template before the chunks and after them.

    Attributes:
        head: Token ids before the chunks.
        tail: Token ids after the chunks.
        text: The same as text.
        stable_head: See ``Prompt``.
        comes_once: See ``Prompt``.
        own_head: See ``Prompt``.
    """

    head: Sequence[int]
    tail: Sequence[int]
    text: PromptText
    stable_head: int = 0
    comes_once: bool = False
    own_head: bool = True

    def without_tail(self) -> TemplateFrame:
        """Return what comes before the chunks alone."""
        return replace(self, tail=(), text=self.text.head())


@dataclass(frozen=True, slots=True)
class AnswerPrompt:
    """A prompt, the passages in it, and how many tokens the answer may have.

    Args:
        text: The prompt as text.
        warnings: What the prompt lacks of what was found, and the answer of its tokens.
    """

    prompt: Prompt
    text: PromptText
    max_tokens: int
    warnings: tuple[str, ...] = ()

    @property
    def passages(self) -> tuple[Passage, ...]:
        """The documents in the prompt."""
        return self.text.passages


@dataclass(frozen=True, slots=True)
class PromptParts:
    """What a prompt consists of, before its documents have an order.

    Args:
        documents: The passages of each document, best rank first.
        chunks: The tokens of each of these passages.
        warnings: As in ``AnswerPrompt``.
        own_chunks: See ``Prompt``.
    """

    frame: TemplateFrame
    documents: tuple[tuple[Passage, ...], ...]
    chunks: tuple[tuple[ChunkTokens, ...], ...]
    max_tokens: int
    warnings: tuple[str, ...] = ()
    own_chunks: bool = False

    def join(self, order: Sequence[int] | None = None) -> AnswerPrompt:
        """Return the prompt.

        Args:
            order: Rank of the document at each position. None: the order of the ranks.
        """
        ranks = range(len(self.documents)) if order is None else order
        chunks = [tokens for rank in ranks for tokens in self.chunks[rank]]
        passages = tuple(passage for rank in ranks for passage in self.documents[rank])
        frame = self.frame
        prompt = assemble(
            frame.head,
            [chunk.ids for chunk in chunks],
            frame.tail,
            frame.stable_head,
            [chunk.digest for chunk in chunks],
        )
        prompt = replace(
            prompt,
            comes_once=frame.comes_once,
            own_head=frame.own_head,
            own_chunks=self.own_chunks,
        )
        text = replace(frame.text, passages=passages)
        return AnswerPrompt(prompt, text, self.max_tokens, self.warnings)


class PromptThread:
    """The one thread that uses a prompt builder, so that building delays no stream."""

    def __init__(self, prompts: PromptBuilder) -> None:
        self._prompts = prompts
        self._thread = ThreadPoolExecutor(1, "tokenizing")

    async def run(self, work: Callable[[PromptBuilder], T]) -> T:
        """Return what work with the prompt builder returns."""
        return await asyncio.get_running_loop().run_in_executor(self._thread, work, self._prompts)

    def close(self) -> None:
        """Drop the work that waits."""
        self._thread.shutdown(wait=False, cancel_futures=True)


class PromptBuilder:
    """Builds prompts for one model. Not safe for several threads, because its tokenizer is not.

    Args:
        max_model_len: Most tokens of prompt and answer together.
        default_max_tokens: Length of an answer for which the client sets none; at most a quarter
            of max_model_len.
        cache_bytes: Capacity of the cache of chunks' token ids.
        layout: Of conversations that do not say it.
    """

    def __init__(
        self,
        tokenizer: ChatTokenizer,
        *,
        max_model_len: int,
        default_max_tokens: int,
        cache_bytes: int,
        layout: Layout = "system-first",
    ) -> None:
        self._tokenizer = tokenizer
        self._max_model_len = max_model_len
        self._default_max_tokens = min(default_max_tokens, max_model_len // 4)
        self._layout: Layout = layout
        self._chunks = TokenCache(cache_bytes)
        self._has_warned = False
        self._stable_prefixes = StablePrefixes()
        # Heads of the platform's own text, by layout.
        self._platform_heads: dict[Layout, list[int]] = {}
        # Such as those of prompts that write search queries, which come again with each question.
        self._heads_alone = StablePrefixes()

    @property
    def tokenizer_identity(self) -> str:
        """Equal for tokenizers that give a chunk the same tokens."""
        return self._tokenizer.identity

    def build(
        self,
        conversation: Conversation,
        hits: Sequence[pb.Hit],
        max_tokens: int | None,
        *,
        with_documents: bool = True,
        domain: str = PUBLIC_DOMAIN,
    ) -> AnswerPrompt:
        """Build the prompt with its documents in the order of their ranks. Raises as ``select``."""
        return self.select(
            conversation, hits, max_tokens, with_documents=with_documents, domain=domain
        ).join()

    def select(
        self,
        conversation: Conversation,
        hits: Sequence[pb.Hit],
        max_tokens: int | None,
        *,
        with_documents: bool = True,
        domain: str = PUBLIC_DOMAIN,
        is_early: bool = False,
    ) -> PromptParts:
        """Select as many documents as fit beside the messages and the answer.

        Args:
            with_documents: See ``frame``.
            domain: See ``frame``.
            is_early: See ``frame``.

        Raises:
            InvalidInput: The messages leave no space for the answer or for one chunk.
        """
        max_tokens = max_tokens or self._default_max_tokens
        frame = self.frame(
            conversation, with_documents=with_documents, domain=domain, is_early=is_early
        )
        return self._with_chunks(frame, hits, max_tokens)

    def select_for_text(
        self, text: str, hits: Sequence[pb.Hit], max_tokens: int | None
    ) -> PromptParts:
        """Select documents for a prompt in which a text follows them, without a chat template.

        Raises:
            InvalidInput: The text leaves no space for the answer or for one chunk.
        """
        max_tokens = max_tokens or self._default_max_tokens
        self._check_length(len(text))
        frame = TemplateFrame(
            self._tokenizer.beginning(),
            self._tokenizer.encode_plain(text),
            PromptText(None, text, None, clean=self._tokenizer.spelled_apart),
            own_head=False,
        )
        return self._with_chunks(frame, hits, max_tokens)

    def count_tokens(self, texts: Sequence[str]) -> int:
        """Return the number of tokens of texts."""
        return sum(len(self._tokenizer.encode_plain(text)) for text in texts)

    def _with_chunks(
        self, frame: TemplateFrame, hits: Sequence[pb.Hit], max_tokens: int
    ) -> PromptParts:
        frame_tokens = len(frame.head) + len(frame.tail)
        # A client that always sends a large limit must not lose its documents to it.
        kept_tokens = min(max_tokens, self._max_model_len // 4)
        budget_tokens = self._max_model_len - kept_tokens - frame_tokens
        if budget_tokens < 0:
            raise InvalidInput(
                "messages",
                f"take {frame_tokens} tokens, which with {kept_tokens} for the answer is more than "
                f"the {self._max_model_len} of the model",
                "shorten them or lower max_tokens",
            )
        # The cache may be too small to keep all of them until the end.
        tokens_of: dict[str, ChunkTokens] = {}

        def num_tokens(chunk: pb.Chunk) -> int:
            if len(chunk.text) > MAX_CHARS_PER_TOKEN * self._max_model_len:
                return len(chunk.text) // MAX_CHARS_PER_TOKEN
            tokens_of[chunk.id] = tokens = self._tokens(chunk)
            return len(tokens.ids)

        passages = fit_to_budget(group_by_document(hits), num_tokens, budget_tokens)
        documents = tuple(
            tuple(group)
            for _, group in itertools.groupby(passages, key=lambda one: one.chunk.document_id)
        )
        chunks = tuple(tuple(tokens_of[one.chunk.id] for one in group) for group in documents)
        used_tokens = frame_tokens + sum(len(one.ids) for group in chunks for one in group)
        left_tokens = min(max_tokens, self._max_model_len - used_tokens)
        warnings = []
        num_hits = len({hit.chunk.id for hit in hits})
        num_lost = num_hits - sum(one.score is not None for one in passages)
        if num_lost:
            warnings.append(
                f"passages: {num_lost} of {num_hits} left out, because {budget_tokens} tokens are "
                "left for documents; lower max_tokens or shorten the messages"
            )
        if left_tokens < max_tokens:
            warnings.append(
                f"max_tokens: lowered from {max_tokens} to {left_tokens}, because the prompt takes "
                f"{used_tokens} of the model's {self._max_model_len} tokens; send or "
                "retrieve less for a longer answer"
            )
        return PromptParts(frame, documents, chunks, left_tokens, tuple(warnings))

    def frame(
        self,
        conversation: Conversation,
        *,
        with_documents: bool = True,
        domain: str = PUBLIC_DOMAIN,
        is_early: bool = False,
    ) -> TemplateFrame:
        """Render the chat template and tokenize what comes before and after the chunks.

        The stable part of the head is what the conversation marks, or else what heads of its domain
        before this one have in common with it. With documents first, the head ends with what the
        conversation marks, and the rest of the system prompt begins the tail.

        Args:
            with_documents: Whether chunks follow the system prompt. Without them, the head ends
                with the system prompt, and a conversation without one has no head.
            domain: Access domain of the caller.
            is_early: The prompt is made before the question's search has ended.

        Raises:
            InvalidInput: The template does not accept this conversation, or it cannot fit the
                model.
        """
        self._check_length(conversation.num_chars())
        system = conversation.system_with_documents if with_documents else conversation.system
        text = system or ""
        length = conversation.stable_prefix
        layout = conversation.layout or self._layout
        if with_documents and layout == "documents-first":
            before, after = text[: length or 0], text[length or 0 :]
        elif length is not None and length < len(text):
            before, after = f"{text[:length]}{STABLE_PREFIX_END}{text[length:]}", ""
        else:
            before, after = text, ""
        separator = CHUNK_SEPARATOR if with_documents and before else ""
        plain = PromptText(
            None if system is None else before.replace(STABLE_PREFIX_END, "") + separator,
            after,
            conversation.turns,
            conversation.template,
            clean=self._tokenizer.spelled_apart,
        )
        messages = [turn.to_template() for turn in conversation.turns]
        if system is not None:
            content = f"{before}{separator}{CHUNKS_PLACEHOLDER}{after}"
            messages.insert(0, {"role": "system", "content": content})
        try:
            text = self._tokenizer.render(messages, conversation.template)
        except TEMPLATE_ERRORS as error:
            if system and not conversation.turns:
                # Some templates want a user's message, and some programs send instructions alone.
                asked = replace(Conversation.asking(None, system), template=conversation.template)
                return self.frame(asked, with_documents=False, domain=domain, is_early=is_early)
            raise InvalidInput(
                "messages",
                f"are refused by the model's chat template: {error}",
                "alternate user and assistant, starting with user",
            ) from error
        if system is None:
            return TemplateFrame((), self._tokenizer.encode_template(text), plain)
        parts = text.split(CHUNKS_PLACEHOLDER)
        if len(parts) != 2:
            raise InvalidInput(
                "RAGCACHE_MODEL",
                "has a chat template that does not write the system message once",
                "name a model whose chat template takes a system message",
            )
        first, *rest = (
            self._tokenizer.encode_template(part) for part in parts[0].split(STABLE_PREFIX_END)
        )
        head = [*first, *itertools.chain(*rest)]
        prefixes = self._stable_prefixes if with_documents else self._heads_alone
        found = prefixes.split(head, domain, is_early=is_early)
        stable_head = len(first) if rest else found
        comes_once = prefixes.comes_once(head, domain)
        tail = self._tokenizer.encode_template(parts[1])
        own_head = not (with_documents and self._is_platform_head(head, conversation, layout))
        return TemplateFrame(head, tail, plain, stable_head, comes_once, own_head)

    def _is_platform_head(
        self, head: Sequence[int], conversation: Conversation, layout: Layout
    ) -> bool:
        """Whether a head has no text of a request."""
        if head == self._platform_heads.get(layout):
            return True
        if layout in self._platform_heads and (conversation.system or conversation.template):
            return False
        # Templates may write the date, and then the head of the platform changes.
        before = DEFAULT_SYSTEM_PROMPT + CHUNK_SEPARATOR if layout == "system-first" else ""
        system = {"role": "system", "content": before + CHUNKS_PLACEHOLDER}
        text = self._tokenizer.render([system, {"role": "user", "content": "?"}])
        known = self._tokenizer.encode_template(text.partition(CHUNKS_PLACEHOLDER)[0])
        self._platform_heads[layout] = known
        return head == known

    def chunk_digest(self, chunk: pb.Chunk) -> bytes:
        """Return the ``token_digest`` of a found chunk."""
        return self._tokens(chunk).digest

    def encode_chunk(self, text: str) -> list[int]:
        """Return the token ids of a chunk, see ChatTokenizer.encode_chunk."""
        return self._tokenizer.encode_chunk(text)

    def _tokens(self, chunk: pb.Chunk) -> ChunkTokens:
        """Return the tokens of a found chunk: those that the retriever has stored, if it has.

        It has none of this tokenizer while it prepares documents for a new one.
        """
        packed = chunk.token_ids
        if packed and chunk.tokenizer_identity == self._tokenizer.identity:
            # The ids have been checked if they are equal to those in the cache.
            if (known := self._chunks.get(chunk.id, packed)) is not None:
                return known
            if (ids := self._tokenizer.unpack(packed)) is not None:
                return self._chunks.put(chunk.id, ids)
            if not self._has_warned:
                self._has_warned = True
                log.warning("prompts: token ids of the retriever are invalid chunk=%r", chunk.id)
        # A name of its own: no id of a chunk begins with NUL.
        text = passage_text(chunk)
        name = f"\0{text}"
        known = self._chunks.get(name)
        return known or self._chunks.put(name, PackedIds.of(self.encode_chunk(text)))

    def _check_length(self, num_chars: int) -> None:
        if num_chars > MAX_CHARS_PER_TOKEN * self._max_model_len:
            raise InvalidInput(
                "messages",
                f"have {num_chars} characters, far more than the {self._max_model_len} tokens of "
                "the model",
                "shorten them",
            )
