"""The serving model's tokenizer: counts and digests the tokens of chunks."""

from __future__ import annotations

import functools
import hashlib
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from ragcache_core.errors import InvalidInput
from ragcache_core.identity.keys import token_digest
from ragcache_core.plan.prompt import CHUNK_SEPARATOR


class ServingTokenizer:
    """Tokenizes chunks as the gateway does for prompts. Not safe for several threads.

    Text that spells a special token stays ordinary text, in counts and in digests.

    Args:
        content: JSON of the tokenizers library. It takes the memory of a vocabulary when it is
            first used, so a process that only passes it on stays small.
        identity: Equal for tokenizers that give a chunk the same tokens.
    """

    def __init__(self, content: str, identity: str) -> None:
        self.content = content
        self.identity = identity

    @functools.cached_property
    def _tokenizer(self) -> Tokenizer:
        tokenizer = Tokenizer.from_str(self.content)
        # The file may ask for truncation or padding. Neither counts tokens.
        tokenizer.no_truncation()
        tokenizer.no_padding()
        tokenizer.encode_special_tokens = True
        return tokenizer

    @functools.cached_property
    def _separator(self) -> list[int]:
        # By the gateway's template, which has special tokens. The texts of chunks have none.
        self._tokenizer.encode_special_tokens = False
        ids: list[int] = self._tokenizer.encode(CHUNK_SEPARATOR, add_special_tokens=False).ids
        self._tokenizer.encode_special_tokens = True
        return ids

    def count(self, text: str) -> int:
        """Return the number of tokens of a text by itself."""
        return len(self._tokenizer.encode(text, add_special_tokens=False))

    def token_digest(self, text: str) -> bytes:
        """Return the digest of a chunk's tokens, from which the gateway computes the chunk's key.

        It covers the separator after the chunk.
        """
        encoding = self._tokenizer.encode(text, add_special_tokens=False)
        return token_digest([*encoding.ids, *self._separator])


def load_serving_tokenizer(model: str) -> ServingTokenizer:
    """Load the tokenizer of a model.

    Args:
        model: A folder or a Hugging Face name, whose tokenizer is downloaded unless it is cached.

    Raises:
        InvalidInput: There is no such model, or its tokenizer cannot be read.
    """
    # Not imported above, because the process that splits documents needs none of it.
    from ragcache_kv.model_folder import find_tokenizer  # noqa: PLC0415

    folder = find_tokenizer(model)
    try:
        files = [folder / "tokenizer.json", folder / "tokenizer_config.json"]
        contents = [file.read_bytes() if file.is_file() else b"" for file in files]
        identity = hashlib.blake2b(b"\0".join(contents), digest_size=8).hexdigest()
        return ServingTokenizer(_load_chat_tokenizer(folder).backend_tokenizer.to_str(), identity)
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
