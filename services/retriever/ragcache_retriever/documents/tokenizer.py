"""The serving model's tokenizer: counts and digests the tokens of chunks."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from ragcache_core.errors import InvalidInput
from ragcache_core.identity.keys import token_digest
from ragcache_core.plan.prompt import CHUNK_SEPARATOR
from ragcache_kv.model_folder import find_tokenizer


class ServingTokenizer:
    """Tokenizes chunks as the gateway does for prompts. Not safe for several threads.

    Args:
        content: The model's tokenizer.json.
        settings: The model's tokenizer_config.json, which may be empty.
        chat_tokenizer: The same tokenizer as the gateway's prompts use it.
    """

    def __init__(self, content: bytes, settings: bytes, chat_tokenizer: Any) -> None:
        self._counter = Tokenizer.from_buffer(content)
        # The file may ask for truncation or padding. Neither counts tokens.
        self._counter.no_truncation()
        self._counter.no_padding()
        self._chat_tokenizer = chat_tokenizer
        self._separator = self._encode(CHUNK_SEPARATOR, split_special_tokens=False)
        self.identity = hashlib.blake2b(content + b"\0" + settings, digest_size=8).hexdigest()
        """Equal for tokenizers that give a chunk the same tokens."""

    def count(self, text: str) -> int:
        """Return the number of tokens of a text by itself, without special tokens."""
        return len(self._counter.encode(text, add_special_tokens=False))

    def token_digest(self, text: str) -> bytes:
        """Return the digest of a chunk's tokens, from which the gateway computes the chunk's key.

        It covers the separator after the chunk. Text that spells a special token stays ordinary
        text.
        """
        return token_digest([*self._encode(text, split_special_tokens=True), *self._separator])

    def _encode(self, text: str, *, split_special_tokens: bool) -> list[int]:
        ids: list[int] = self._chat_tokenizer.encode(
            text, add_special_tokens=False, split_special_tokens=split_special_tokens
        )
        return ids


def load_serving_tokenizer(model: str) -> ServingTokenizer:
    """Load the tokenizer of a model.

    Args:
        model: A folder or a Hugging Face name, whose tokenizer is downloaded unless it is cached.

    Raises:
        InvalidInput: There is no such model, or its tokenizer cannot be read.
    """
    folder = find_tokenizer(model)
    try:
        settings = folder / "tokenizer_config.json"
        return ServingTokenizer(
            (folder / "tokenizer.json").read_bytes(),
            settings.read_bytes() if settings.is_file() else b"",
            _load_chat_tokenizer(folder),
        )
    except Exception as error:  # the tokenizers library raises nothing narrower
        raise InvalidInput(
            "model.source",
            f"the tokenizer of {folder} cannot be read: {error}",
            "name a model with a fast tokenizer",
        ) from error


def _load_chat_tokenizer(folder: Path) -> Any:
    # The gateway loads the same class. AutoTokenizer would choose another one for some models.
    from transformers import PreTrainedTokenizerFast  # noqa: PLC0415  slow to import
    from transformers.utils import logging  # noqa: PLC0415

    logging.set_verbosity_error()
    return PreTrainedTokenizerFast.from_pretrained(folder)
