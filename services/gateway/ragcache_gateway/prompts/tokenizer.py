"""The serving model's tokenizer, and token ids of chunks seen before."""

from __future__ import annotations

from array import array
from collections import OrderedDict
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Protocol

from ragcache_core.errors import InvalidInput


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
        self._capacity_bytes = capacity_bytes
        self._used_bytes = 0
        self._ids: OrderedDict[str, array[int]] = OrderedDict()  # the least recently used first

    def get(self, text: str) -> Sequence[int]:
        """Token ids of text."""
        ids = self._ids.get(text)
        if ids is not None:
            self._ids.move_to_end(text)
            return ids
        ids = array("I", self._encode(text))
        num_bytes = _bytes_of(text, ids)
        if num_bytes <= self._capacity_bytes:
            while self._used_bytes + num_bytes > self._capacity_bytes:
                self._used_bytes -= _bytes_of(*self._ids.popitem(last=False))
            self._ids[text] = ids
            self._used_bytes += num_bytes
        return ids


def _bytes_of(text: str, ids: array[int]) -> int:
    # A Python string takes one to four bytes a character; four keeps the bound honest.
    return 4 * len(text) + ids.itemsize * len(ids)
