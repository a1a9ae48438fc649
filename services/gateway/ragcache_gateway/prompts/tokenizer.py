"""The serving model's tokenizer, and a cache of chunks' token ids."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jinja2 import TemplateError

from ragcache_core.errors import InvalidInput
from ragcache_core.identity.keys import token_digest
from ragcache_core.identity.packed_ids import PackedIds
from ragcache_gateway.prompts.chat_template import TemplateRenderer
from ragcache_kv.model.tokenizer import ChunkTokenizer, tokenizer_identity

_OBJECTS_BYTES = 400
"""Python's objects for one cached chunk."""

TEMPLATE_ERRORS = (TemplateError, TypeError, ValueError, LookupError, AttributeError)
"""What rendering raises for messages that a template does not expect."""


class ChatTokenizer:
    """The serving model's tokenizer and chat template. Not safe for several threads.

    Args:
        library: The model's tokenizer of the transformers library.
        identity: Equal for tokenizers that give a chunk the same tokens (``tokenizer_identity``).
    """

    def __init__(self, library: Any, identity: str) -> None:
        self._library = library
        self._chunks = ChunkTokenizer(library.backend_tokenizer)
        self._templates = TemplateRenderer(self._chunks, self._apply)
        self.identity = identity

    def render(
        self, messages: list[dict[str, Any]], arguments: Mapping[str, Any] | None = None
    ) -> str:
        """Render a conversation as text for ``encode_template``, up to where the answer begins.

        Control tokens that messages and arguments spell are not those of the text.

        Args:
            arguments: Further arguments of the template, such as tools.

        Raises:
            Exception: One of TEMPLATE_ERRORS, if the template refuses the conversation.
        """
        given = {"add_generation_prompt": True, **(arguments or {})}
        source: str = self._library.get_chat_template(tools=given.get("tools"))
        return self._templates.render(source, messages, given)

    def _apply(
        self, source: str, messages: list[dict[str, Any]], arguments: Mapping[str, Any]
    ) -> str:
        text: str = self._library.apply_chat_template(
            messages, chat_template=source, tokenize=False, **arguments
        )
        return text

    def beginning(self) -> list[int]:
        """Return the token ids that begin every prompt without a template; often none."""
        ids: list[int] = self._library("")["input_ids"]
        return ids

    def encode_template(self, text: str) -> list[int]:
        """Return the token ids of rendered text, in which the template's control tokens are read.

        Args:
            text: What ``render`` returns, or a part of it.
        """
        ids: list[int] = []
        for piece, is_plain in self._templates.pieces(text):
            ids += self._chunks.encode(piece) if is_plain else self._chunks.encode_template(piece)
        return ids

    def encode_plain(self, text: str) -> list[int]:
        """Return the token ids of a text in which no control token is read."""
        return self._chunks.encode(text)

    def encode_chunk(self, text: str) -> list[int]:
        """Return the token ids of a chunk by itself, with the separator that follows it.

        Text that spells a control token stays ordinary text. Otherwise a document could end the
        system prompt and add messages of its own.
        """
        return self._chunks.encode_chunk(text)

    def spelled_apart(self, text: str) -> str:
        """Return a text in which no control token is spelled, for servers that take text."""
        return self._chunks.spelled_apart(text)

    def unpack(self, packed: bytes) -> PackedIds | None:
        """Return a chunk's token ids from their bytes; None if no chunk can have them."""
        return self._chunks.unpack(packed)


def load_tokenizer(folder: Path) -> ChatTokenizer:
    """Load the tokenizer of a model folder.

    Raises:
        InvalidInput: The folder has no usable tokenizer, or the tokenizer has no chat template.
    """
    # AutoTokenizer would import torch wherever torch is installed. This class reads tokenizer.json
    # as it is; the model folder's own checks have refused a folder without that file.
    from transformers import PreTrainedTokenizerFast  # noqa: PLC0415  slow to import
    from transformers.utils import logging  # noqa: PLC0415

    logging.set_verbosity_error()
    try:
        library: Any = PreTrainedTokenizerFast.from_pretrained(folder)
        identity = tokenizer_identity(folder)
    except (OSError, ValueError) as error:
        raise InvalidInput(
            "RAGCACHE_MODEL", f"has no usable tokenizer: {error}", "restore the model folder"
        ) from error
    if not library.chat_template:
        raise InvalidInput(
            "RAGCACHE_MODEL", "has no chat template", "name an instruction-tuned model"
        )
    return ChatTokenizer(library, identity)


@dataclass(frozen=True, slots=True)
class ChunkTokens:
    """Token ids of a chunk, and their ``token_digest``."""

    ids: PackedIds
    digest: bytes


class TokenCache:
    """Least-recently-used cache of chunks' tokens. Not safe for several threads.

    Args:
        capacity_bytes: Most memory of the cached names and ids together.
    """

    def __init__(self, capacity_bytes: int) -> None:
        self._capacity_bytes = capacity_bytes
        self._used_bytes = 0
        self._tokens: OrderedDict[str, ChunkTokens] = OrderedDict()  # oldest use first

    def get(self, name: str, packed: bytes | None = None) -> ChunkTokens | None:
        """Return the tokens of a chunk, if the cache has them.

        Args:
            packed: Ids that they have to be equal to. None: any.
        """
        found = self._tokens.get(name)
        if found is None or (packed is not None and found.ids.packed != packed):
            return None
        self._tokens.move_to_end(name)
        return found

    def put(self, name: str, ids: PackedIds) -> ChunkTokens:
        """Keep and return the tokens of a chunk."""
        tokens = ChunkTokens(ids, token_digest(ids))
        if name in self._tokens:
            self._used_bytes -= _entry_bytes(name, self._tokens.pop(name))
        num_bytes = _entry_bytes(name, tokens)
        if num_bytes <= self._capacity_bytes:
            while self._used_bytes + num_bytes > self._capacity_bytes:
                self._used_bytes -= _entry_bytes(*self._tokens.popitem(last=False))
            self._tokens[name] = tokens
            self._used_bytes += num_bytes
        return tokens


def _entry_bytes(name: str, tokens: ChunkTokens) -> int:
    # A Python string takes one to four bytes per character; four never underestimates.
    return 4 * len(name) + len(tokens.ids.packed) + _OBJECTS_BYTES
