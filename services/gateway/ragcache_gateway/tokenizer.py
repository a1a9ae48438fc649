"""The serving model's tokenizer, and token ids of chunks seen before."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Protocol

from ragcache_core.errors import InvalidInput
from ragcache_core.lru import LeastRecentlyUsed


class ChatTokenizer(Protocol):
    """The part of a Hugging Face tokenizer that prompts are built with."""

    def encode(
        self, text: str, *, add_special_tokens: bool, split_special_tokens: bool
    ) -> list[int]:
        """Token ids; split_special_tokens: text that spells a special token stays text."""

    def apply_chat_template(
        self,
        conversation: list[dict[str, str]],
        *,
        tokenize: bool,
        add_generation_prompt: bool,
    ) -> str:
        """A conversation as text."""


def load_tokenizer(folder: Path) -> ChatTokenizer:
    """Tokenizer of a model folder. Raises InvalidInput if it has no chat template."""
    # Not AutoTokenizer: importing it imports torch wherever torch is installed. This class reads
    # tokenizer.json as it is, and a folder without one has been refused before.
    from transformers import PreTrainedTokenizerFast  # noqa: PLC0415  slow to import
    from transformers.utils import logging  # noqa: PLC0415

    logging.set_verbosity_error()
    try:
        tokenizer: Any = PreTrainedTokenizerFast.from_pretrained(folder)
    except (OSError, ValueError) as error:
        raise InvalidInput(
            "RAGCACHE_MODEL", f"has no usable tokenizer: {error}", "repair the model folder"
        ) from error
    if not tokenizer.chat_template:
        raise InvalidInput(
            "RAGCACHE_MODEL", "has no chat template", "name an instruction-tuned model"
        )
    return tokenizer  # type: ignore[no-any-return]  # the library is untyped


class TokenCache:
    """Token ids by text, the least recently used forgotten beyond capacity_bytes.

    Not for several threads at once.
    """

    def __init__(self, encode: Callable[[str], Sequence[int]], capacity_bytes: int) -> None:
        self._encode = encode
        self._kept = LeastRecentlyUsed[str](capacity_bytes)
        self._ids: dict[str, array[int]] = {}

    def get(self, text: str) -> Sequence[int]:
        """Token ids of text."""
        ids = self._ids.get(text)
        if ids is not None:
            self._kept.touch(text)
            return ids
        ids = array("I", self._encode(text))
        # A Python string takes one to four bytes a character; four keeps the bound honest.
        admitted, evicted = self._kept.admit(text, 4 * len(text) + ids.itemsize * len(ids))
        for key in evicted:
            del self._ids[key]
        if admitted:
            self._ids[text] = ids
        return ids
