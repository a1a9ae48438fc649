"""The first tokens of a text are the same, however little of it is encoded."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from tokenizers.normalizers import NFKC, BertNormalizer
from tokenizers.pre_tokenizers import BertPreTokenizer
from tokenizers.processors import BertProcessing

from ragcache_retriever.embedding import first_tokens
from ragcache_retriever.embedding.first_tokens import CHARS_PER_TOKEN, FirstTokens

SENTENCES = [
    "The volcano erupts again; lava flows over 1,234 fields.",
    "def f(x):\n    return x_1 + y  # unbelievable\r\n\r\n",
    "Ünïcödé — “quotes”…  naïve café, ΣΑΣ ΣΑΣ. 東京は日本の首都です。 안녕하세요",
    "a" * 30 + " " + "counterrevolutionaries " * 3,
]
MAX_TOKENS = 12


def word_pieces() -> Tokenizer:
    tokenizer = Tokenizer(models.WordPiece({}, unk_token="[UNK]"))
    tokenizer.normalizer = BertNormalizer()
    tokenizer.pre_tokenizer = BertPreTokenizer()
    trainer = trainers.WordPieceTrainer(
        vocab_size=300, special_tokens=["[PAD]", "[UNK]", "[CLS]", "[SEP]"], show_progress=False
    )
    tokenizer.train_from_iterator(SENTENCES, trainer)
    tokenizer.post_processor = BertProcessing(("[SEP]", 3), ("[CLS]", 2))
    return tokenizer


def bytes_of_words() -> Tokenizer:
    """As GPT-2 and its successors: punctuation is joined with line breaks after it."""
    tokenizer = Tokenizer(models.BPE())
    pattern = (
        r"[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
    )
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(pattern), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(SENTENCES, trainer)
    return tokenizer


def unigrams() -> Tokenizer:
    tokenizer = Tokenizer(models.Unigram())
    tokenizer.normalizer = NFKC()
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    trainer = trainers.UnigramTrainer(
        vocab_size=150, special_tokens=["<unk>"], unk_token="<unk>", show_progress=False
    )
    tokenizer.train_from_iterator(SENTENCES, trainer)
    return tokenizer


TOKENIZERS = {"words": word_pieces(), "bytes": bytes_of_words(), "unigrams": unigrams()}
EXPECTED = {name: Tokenizer.from_str(one.to_str()) for name, one in TOKENIZERS.items()}
for one in EXPECTED.values():
    one.enable_truncation(MAX_TOKENS)
FIRST = {name: FirstTokens(one, MAX_TOKENS) for name, one in TOKENIZERS.items()}

pieces = st.sampled_from(
    [
        *SENTENCES,
        " ",
        "\n",
        "!!!\n",
        "_\n",
        "\t\t",
        "x" * 150,
        "ab" * 90,
        "é" * 70,
        "é",
        "東京",
        "1234 ",
    ]
) | st.text(max_size=8)
texts = st.lists(pieces, max_size=60).map("".join)


@pytest.mark.parametrize("name", FIRST)
@given(text=texts)
def test_the_first_tokens_are_those_of_the_whole_text(name: str, text: str) -> None:
    assert FIRST[name].ids(text) == EXPECTED[name].encode(text).ids


class CountingTokenizer:
    """Counts the characters that are encoded."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self.lengths: list[int] = []

    def no_padding(self) -> None:
        self._tokenizer.no_padding()

    def enable_truncation(self, max_length: int) -> None:
        self._tokenizer.enable_truncation(max_length)

    def encode(self, text: str) -> Any:
        self.lengths.append(len(text))
        return self._tokenizer.encode(text)

    def encode_batch(self, texts: list[str]) -> Any:
        self.lengths += map(len, texts)
        return self._tokenizer.encode_batch(texts)


def encoded_lengths(text: str, max_tokens: int = 128) -> list[int]:
    tokenizer = CountingTokenizer(Tokenizer.from_str(TOKENIZERS["words"].to_str()))
    ids = FirstTokens(tokenizer, max_tokens).ids(text)  # type: ignore[arg-type]
    lengths = list(tokenizer.lengths)
    assert ids == tokenizer.encode(text).ids
    return lengths


def test_a_small_part_of_a_long_text_is_encoded() -> None:
    [length] = encoded_lengths("The volcano erupts. " * 50_000)
    assert length <= CHARS_PER_TOKEN * 128 + 20
    assert encoded_lengths("short") == [5]


def test_longer_parts_of_a_text_with_long_words_are_encoded() -> None:
    # A word of more than 100 letters is one unknown token.
    lengths = encoded_lengths(("x" * 400 + " ") * 1000)
    assert lengths[0] <= CHARS_PER_TOKEN * 128 + 400
    assert 1 < len(lengths) <= 5
    assert sum(lengths) < 300_000
    # There is no end of a word to cut at.
    assert encoded_lengths("x" * 100_000) == [100_000]


def test_long_parts_do_not_hold_the_lock_of_python(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(first_tokens, "LONG_CHARS", 10)
    tokenizer = CountingTokenizer(Tokenizer.from_str(TOKENIZERS["words"].to_str()))
    monkeypatch.setattr(tokenizer, "encode", None)
    assert FirstTokens(tokenizer, 8).ids("The volcano erupts.")  # type: ignore[arg-type]
