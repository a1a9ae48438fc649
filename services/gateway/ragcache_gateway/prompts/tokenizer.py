"""The serving model's tokenizer, and a cache of chunks' token ids."""

from __future__ import annotations

from array import array
from collections import OrderedDict
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Protocol

from ragcache_core.errors import InvalidInput


class ChatTokenizer(Protocol):
    """The part of a Hugging Face tokenizer that the prompt builder uses."""

    def encode(
        self, text: str, *, add_special_tokens: bool, split_special_tokens: bool
    ) -> list[int]:
        """Return the token ids of a text.

        Args:
            split_special_tokens: Whether text that spells a special token stays ordinary text.
        """

    def apply_chat_template(
        self,
        conversation: list[dict[str, str]],
        *,
        tokenize: bool,
        add_generation_prompt: bool,
    ) -> str:
        """Render a conversation as text."""


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
        tokenizer: Any = PreTrainedTokenizerFast.from_pretrained(folder)
    except (OSError, ValueError) as error:
        raise InvalidInput(
            "RAGCACHE_MODEL", f"has no usable tokenizer: {error}", "restore the model folder"
        ) from error
    if not tokenizer.chat_template:
        raise InvalidInput(
            "RAGCACHE_MODEL", "has no chat template", "name an instruction-tuned model"
        )
    # Other lists as long as a prompt would be made, and Python's lock be held meanwhile.
    tokenizer.model_input_names = ["input_ids"]
    return tokenizer  # type: ignore[no-any-return]  # the library is untyped


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
