"""Token ids of chunks: computed alike in the retriever and in the gateway, and sent between them.

Text of a document never becomes a control token, such as one that ends a message. So each added
token is taken as plain text, whether its tokenizer calls it special (``<|im_end|>``) or not
(``<think>``). The exceptions are the token of unknown characters and tokens of white
space alone: some models read line breaks and indents with them.
"""

from __future__ import annotations

import functools
import hashlib
import itertools
import re
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt
from tokenizers import AddedToken, Encoding, Tokenizer

from ragcache_core.identity.packed_ids import ID_BYTES, PackedIds
from ragcache_core.plan.prompt import CHUNK_SEPARATOR

TOKENIZATION_VERSION = 1
"""Increase it when chunks would get other token ids. Stored documents are then prepared again."""

_UNKNOWN_TOKENS = frozenset({"<unk>", "[UNK]"})
_APART = "\u200b"
_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
)


class ControlTexts:
    """The texts of a model's control tokens, and where other texts have them.

    One expression looks for all of them along their common beginnings. So its time is linear in a
    text, also for the thousands of control tokens that some models have.

    Args:
        texts: Of the control tokens, in any order, without repetition.
    """

    def __init__(self, texts: Sequence[str]) -> None:
        self.texts = tuple(texts)
        self._any = re.compile(_one_of(sorted(self.texts)) if self.texts else "(?!)")

    def spans(self, text: str) -> list[tuple[int, int]]:
        """Return the bounds of each control token in a text, ascending: the longest from left."""
        return [match.span() for match in self._any.finditer(text)]


def _one_of(texts: Sequence[str]) -> str:
    """Return an expression for the longest of some texts, which are sorted and not empty."""
    ends_here = not texts[0]
    rest = texts[1:] if ends_here else texts
    branches = []
    for _, group in itertools.groupby(rest, key=lambda text: text[0]):
        same = list(group)
        # What the first and the last of sorted texts share, all of them share.
        alike = itertools.takewhile(
            lambda pair: pair[0] == pair[1], zip(same[0], same[-1], strict=False)
        )
        shared = sum(1 for _ in alike)
        inner = _one_of([text[shared:] for text in same]) if len(same) > 1 else ""
        branches.append(re.escape(same[0][:shared]) + inner)
    return f"(?:{'|'.join(branches)}){'?' if ends_here else ''}"


class ChunkTokenizer:
    """Tokenizes chunks and checks token ids of chunks. Not safe for several threads.

    Args:
        tokenizer: The serving model's. It is changed: its control tokens become special, so that
            the library can tell whether to recognize them. ``encode_template`` still does.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        # The file may ask for truncation or padding, which would change the ids of chunks.
        tokenizer.no_truncation()
        tokenizer.no_padding()
        unknown = {*_UNKNOWN_TOKENS, getattr(tokenizer.model, "unk_token", None)}
        controls = {
            number: token
            for number, token in tokenizer.get_added_tokens_decoder().items()
            if token.content.strip() and token.content not in unknown
        }
        tokenizer.add_special_tokens([_as_special(token) for token in controls.values()])
        self.control_texts = ControlTexts([one.content for one in controls.values()])
        self._normalizer = tokenizer.normalizer
        normalized = {
            self._normalizer.normalize_str(one.content)
            for one in controls.values()
            if self._normalizer is not None and one.normalized
        }
        self._normalized = ControlTexts(sorted(filter(None, normalized)))
        self._tokenizer = tokenizer
        self._controls = frozenset(controls)

    def encode(self, text: str) -> list[int]:
        """Return the token ids of a document's text."""
        encoding = self._encoding(text)
        ids: list[int] = encoding.ids
        return ids if self._controls.isdisjoint(ids) else self._spelled_out(text, encoding)

    def encode_chunk(self, text: str) -> list[int]:
        """Return the token ids of a chunk, with those of the separator after it."""
        return [*self.encode(text), *self._separator]

    def encode_template(self, text: str) -> list[int]:
        """Return the token ids of a chat template's text, control tokens included."""
        self._tokenizer.encode_special_tokens = False
        ids: list[int] = self._tokenizer.encode(text, add_special_tokens=False).ids
        return ids

    def spelled_apart(self, text: str) -> str:
        """Return a text with a zero-width space in each control token that it spells.

        A server that tokenizes the text then takes it as plain text. Safe for threads.
        """
        pieces: list[str] = []
        at = 0
        for start, end in [*self.control_texts.spans(text), (len(text), len(text))]:
            part = text[at:start]
            pieces.append(_APART.join(part) if self.is_disguised(part) else part)
            pieces += (text[start : start + 1], _APART, text[start + 1 : end]) * (start < end)
            at = end
        return "".join(pieces)

    def is_disguised(self, text: str) -> bool:
        """Whether a text becomes a control token only once the tokenizer has normalized it."""
        return bool(self._normalized.texts) and bool(
            self._normalized.spans(self._normalizer.normalize_str(text))
        )

    def unpack(self, packed: bytes) -> PackedIds | None:
        """Return the ids of ``pack_ids``; None unless they can be those of a chunk.

        A chunk has tokens of the vocabulary without control tokens, and ends with the separator.
        """
        if not packed or len(packed) % ID_BYTES:
            return None
        found = PackedIds(packed)
        ids = found.array
        if ids.max() >= len(self._is_allowed) or not self._is_allowed[ids].all():
            return None
        separator = self._separator
        if list(found[len(found) - len(separator) :]) != separator:
            return None
        return found

    @functools.cached_property
    def _separator(self) -> list[int]:
        return self.encode_template(CHUNK_SEPARATOR)

    @functools.cached_property
    def _is_allowed(self) -> npt.NDArray[np.bool_]:
        """Whether a chunk may have a token, by id."""
        ids = np.fromiter(self._tokenizer.get_vocab(with_added_tokens=True).values(), np.int64)
        allowed = np.zeros(ids.max() + 1, np.bool_)
        allowed[ids] = True
        allowed[list(self._controls)] = False
        return allowed

    def _encoding(self, text: str) -> Encoding:
        self._tokenizer.encode_special_tokens = True
        return self._tokenizer.encode(text, add_special_tokens=False)

    def _spelled_out(self, text: str, encoding: Encoding) -> list[int]:
        """Replace control tokens by the tokens of their characters.

        Some models (Unigram) have their control tokens in the vocabulary of plain text.
        """
        ids: list[int] = []
        for number, (start, end) in zip(encoding.ids, encoding.offsets, strict=True):
            if number not in self._controls:
                ids.append(number)
                continue
            for character in text[start:end]:
                ids += (one for one in self._encoding(character).ids if one not in self._controls)
        return ids


def pack_ids(ids: Sequence[int]) -> bytes:
    """Return token ids as bytes: uint32, little-endian."""
    return PackedIds.of(ids).packed


def tokenizer_identity(folder: Path) -> str:
    """Return 16 hex digits that are equal for tokenizers that give a chunk the same token ids.

    Raises:
        OSError: A file cannot be read.
    """
    hasher = hashlib.blake2b(f"{TOKENIZATION_VERSION}\0{CHUNK_SEPARATOR}".encode(), digest_size=8)
    for name in _FILES:
        file = folder / name
        content = file.read_bytes() if file.is_file() else b""
        hasher.update(len(content).to_bytes(8) + content)
    return hasher.hexdigest()


def _as_special(token: AddedToken) -> AddedToken:
    return AddedToken(
        token.content,
        single_word=token.single_word,
        lstrip=token.lstrip,
        rstrip=token.rstrip,
        normalized=token.normalized,
        special=True,
    )
