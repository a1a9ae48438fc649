"""The serving model's tokenizer, and a cache of chunks' token ids."""

from __future__ import annotations

from array import array
from collections import OrderedDict
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from ragcache_core.errors import InvalidInput
from ragcache_kv.chunk_tokenizer import ChunkTokenizer, tokenizer_identity


class ChatTokenizer:
    """The serving model's tokenizer and chat template. Not safe for several threads.

    Args:
        library: The model's tokenizer of the transformers library.
        identity: Equal for tokenizers that give a chunk the same tokens (``tokenizer_identity``).
    """

    def __init__(self, library: Any, identity: str) -> None:
        self._library = library
        self._chunks = ChunkTokenizer(library.backend_tokenizer)
        self.identity = identity

    def render(self, messages: list[dict[str, str]]) -> str:
        """Render a conversation as text, up to where the answer begins.

        Raises:
            TemplateError: The template refuses the conversation.
        """
        text: str = self._library.apply_chat_template(
            messages, tokenize=False, add_generation_prompt=True
        )
        return text

    def encode_template(self, text: str) -> list[int]:
        """Return the token ids of rendered text, in which control tokens are recognized."""
        return self._chunks.encode_template(text)

    def encode_chunk(self, text: str) -> list[int]:
        """Return the token ids of a chunk by itself, with the separator that follows it.

        Text that spells a control token stays ordinary text. Otherwise a document could end the
        system prompt and add messages of its own.
        """
        return self._chunks.encode_chunk(text)

    def unpack(self, packed: bytes) -> array[int] | None:
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


class TokenCache:
    """Least-recently-used cache of token ids by text. Not safe for several threads.

    Args:
        encode: Computes the token ids of a text that the cache does not have.
        capacity_bytes: Most memory of the cached texts and ids together.
    """

    def __init__(self, encode: Callable[[str], Sequence[int]], capacity_bytes: int) -> None:
        self._encode = encode
        self._capacity_bytes = capacity_bytes
        self._used_bytes = 0
        self._ids_by_text: OrderedDict[str, array[int]] = OrderedDict()  # oldest use first

    def get(self, text: str) -> Sequence[int]:
        """Return the token ids of a text, from the cache if it has them."""
        ids = self._ids_by_text.get(text)
        if ids is not None:
            self._ids_by_text.move_to_end(text)
            return ids
        ids = array("I", self._encode(text))
        num_bytes = _entry_bytes(text, ids)
        if num_bytes <= self._capacity_bytes:
            while self._used_bytes + num_bytes > self._capacity_bytes:
                self._used_bytes -= _entry_bytes(*self._ids_by_text.popitem(last=False))
            self._ids_by_text[text] = ids
            self._used_bytes += num_bytes
        return ids


def _entry_bytes(text: str, ids: array[int]) -> int:
    # A Python string takes one to four bytes per character; four never underestimates.
    return 4 * len(text) + ids.itemsize * len(ids)
