"""The serving model's tokenizer: counts the tokens of chunks and computes the keys of chunks."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from ragcache_core.errors import InvalidInput
from ragcache_core.identity.keys import PUBLIC_DOMAIN, ChunkKey, KVSpace, chunk_key
from ragcache_core.plan.prompt import CHUNK_SEPARATOR
from ragcache_kv.model_folder import load_model_folder


class ServingTokenizer:
    """Tokenizes chunks as the gateway does for prompts. Not safe for several threads.

    Args:
        content: The model's tokenizer.json.
        chat_tokenizer: The same tokenizer as the gateway's prompts use it.
        space: KV space of the model.
        domain: Access domain of all KV.
    """

    def __init__(
        self, content: bytes, chat_tokenizer: Any, space: KVSpace, domain: str = PUBLIC_DOMAIN
    ) -> None:
        self._counter = Tokenizer.from_buffer(content)
        # The file may ask for truncation or padding. Neither counts tokens.
        self._counter.no_truncation()
        self._counter.no_padding()
        self._chat_tokenizer = chat_tokenizer
        self._space = space
        self._domain = domain
        self._separator = self._encode(CHUNK_SEPARATOR, split_special_tokens=False)
        self.identity = hashlib.blake2b(content, digest_size=8).hexdigest()
        """Equal for tokenizers that count alike."""
        self.key_space = f"{space.digest().hex()}:{domain}"
        """Equal for tokenizers that give a chunk the same key."""

    def count(self, text: str) -> int:
        """Return the number of tokens of a text by itself, without special tokens."""
        return len(self._counter.encode(text, add_special_tokens=False))

    def chunk_key(self, text: str) -> ChunkKey:
        """Return the key of a chunk, which is the one that the gateway's plans name.

        The key covers the separator after the chunk. Text that spells a special token stays
        ordinary text.
        """
        ids = self._encode(text, split_special_tokens=True)
        return chunk_key(self._space, self._domain, [*ids, *self._separator])

    def _encode(self, text: str, *, split_special_tokens: bool) -> list[int]:
        ids: list[int] = self._chat_tokenizer.encode(
            text, add_special_tokens=False, split_special_tokens=split_special_tokens
        )
        return ids


def load_serving_tokenizer(model: str, dtype: str) -> ServingTokenizer:
    """Load the tokenizer of a model, and fingerprint the model.

    Args:
        model: A folder or a Hugging Face name, whose snapshot is downloaded unless it is cached.
        dtype: Element type of the KV cache. auto: as the weights were saved.

    Raises:
        InvalidInput: There is no such model, or its tokenizer cannot be read.
    """
    folder = load_model_folder(model)
    try:
        content = (folder.path / "tokenizer.json").read_bytes()
        chat_tokenizer = _load_chat_tokenizer(folder.path)
        return ServingTokenizer(content, chat_tokenizer, folder.space(dtype))
    except InvalidInput:
        raise
    except Exception as error:  # the tokenizers library raises nothing narrower
        raise InvalidInput(
            "model.source",
            f"the tokenizer of {folder.path} cannot be read: {error}",
            "name a model with a fast tokenizer",
        ) from error


def _load_chat_tokenizer(folder: Path) -> Any:
    # The gateway loads the same class. AutoTokenizer would choose another one for some models.
    from transformers import PreTrainedTokenizerFast  # noqa: PLC0415  slow to import
    from transformers.utils import logging  # noqa: PLC0415

    logging.set_verbosity_error()
    return PreTrainedTokenizerFast.from_pretrained(folder)
