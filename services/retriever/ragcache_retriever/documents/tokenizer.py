"""The serving model's tokenizer: the token ids of chunks."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from ragcache_core.errors import InvalidInput
from ragcache_kv.model.tokenizer import ChunkTokenizer, pack_ids, tokenizer_identity


class ServingTokenizer:
    """Tokenizes chunks as the gateway does for prompts. Not safe for several threads.

    Args:
        content: JSON of the tokenizers library. It takes the memory of a vocabulary when it is
            first used, so a process that only passes it on stays small.
        identity: Equal for tokenizers that give a chunk the same tokens (``tokenizer_identity``).
    """

    def __init__(self, content: str, identity: str) -> None:
        self.content = content
        self.identity = identity

    @functools.cached_property
    def _tokenizer(self) -> ChunkTokenizer:
        return ChunkTokenizer(Tokenizer.from_str(self.content))

    def count(self, text: str) -> int:
        """Return the number of tokens of a text by itself."""
        return len(self._tokenizer.encode(text))

    def token_ids(self, text: str) -> bytes:
        """Return the token ids of a chunk with the separator after it: uint32, little-endian."""
        return pack_ids(self._tokenizer.encode_chunk(text))


def load_serving_tokenizer(model: str) -> ServingTokenizer:
    """Load the tokenizer of a model.

    Args:
        model: A folder or a Hugging Face name, whose tokenizer is downloaded unless it is cached.

    Raises:
        InvalidInput: There is no such model, or its tokenizer cannot be read.
    """
    # Not imported above, because the process that splits documents needs none of it.
    from ragcache_kv.model.folder import find_tokenizer  # noqa: PLC0415

    folder = find_tokenizer(model)
    try:
        content = _load_chat_tokenizer(folder).backend_tokenizer.to_str()
        return ServingTokenizer(content, tokenizer_identity(folder))
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
