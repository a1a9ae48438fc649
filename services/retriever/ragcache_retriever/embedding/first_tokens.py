"""Finds the first tokens of a text without encoding all of it."""

from __future__ import annotations

import re
from typing import Any

from tokenizers import Tokenizer

CHARS_PER_TOKEN = 8
"""Characters of a text that are encoded first, for each token that is wanted. Most texts have fewer
for each token, so that one attempt suffices."""
SPARE_TOKENS = 64
"""Tokens that have to follow the wanted ones. Nearly all tokenizers divide texts into words first,
so that the end of a text changes no word before it. This is for those whose tokens span words."""
LONG_CHARS = 4096
"""Length above which encoding takes milliseconds."""
_GROWTH = 4

_END_OF_WORD = re.compile(r"(?<=[^\W_])[ \t\r\n]")
"""A letter or digit and ASCII whitespace: the end of a word for every tokenizer. Some join
punctuation with the line break after it."""


class FirstTokens:
    """Encodes texts, as many tokens as a model reads. Any thread may call it.

    Args:
        tokenizer: It then truncates and does not pad.
        max_tokens: Most tokens of a text, special ones included.
    """

    def __init__(self, tokenizer: Tokenizer, max_tokens: int) -> None:
        tokenizer.no_padding()
        tokenizer.enable_truncation(max_tokens)
        self._tokenizer = tokenizer
        self._first_chars = CHARS_PER_TOKEN * max_tokens

    def ids(self, text: str) -> list[int]:
        """Return the first token ids of a text.

        A long text is cut after a word. If that part has too few tokens, for example because of
        very long words, a longer part is encoded, and at last all of the text.
        """
        num_chars = self._first_chars
        while len(text) > num_chars:
            end = _END_OF_WORD.search(text, num_chars)
            if end is None:
                break
            encoding = self._encode(text[: end.start()])
            if sum(len(part.ids) for part in encoding.overflowing) >= SPARE_TOKENS:
                ids: list[int] = encoding.ids
                return ids
            num_chars = _GROWTH * end.start()
        ids = self._encode(text).ids
        return ids

    def _encode(self, text: str) -> Any:
        if len(text) <= LONG_CHARS:
            return self._tokenizer.encode(text)
        # The other function holds Python's lock for all of its time.
        return self._tokenizer.encode_batch([text])[0]
