"""Counts tokens the way the serving model does."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

from tokenizers import Tokenizer

from ragcache_core.errors import InvalidInput
from ragcache_kv.model_folder import tokenizer_file


@dataclass(frozen=True, slots=True)
class TokenCounter:
    """Token counts of one tokenizer. identity: equal for tokenizers that count alike."""

    identity: str
    tokenizer: Tokenizer

    def __call__(self, text: str) -> int:
        """Number of tokens of text by itself, without special tokens."""
        return len(self.tokenizer.encode(text, add_special_tokens=False))


def load_token_counter(model: str) -> TokenCounter:
    """Token counter of a model: a folder or a Hugging Face name. Raises InvalidInput."""
    path = tokenizer_file(model)
    try:
        content = path.read_bytes()
        tokenizer = Tokenizer.from_buffer(content)
    except Exception as error:  # the tokenizers library raises nothing narrower
        raise InvalidInput(
            "model.source", f"{path} cannot be read: {error}", "name a model with a fast tokenizer"
        ) from error
    # A tokenizer file may ask for truncation or padding, neither of which counts tokens.
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return TokenCounter(hashlib.blake2b(content, digest_size=8).hexdigest(), tokenizer)
