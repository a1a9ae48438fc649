"""Chunks get the same token ids in the retriever and in the gateway, and no control tokens."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer
from tokenizers.models import Unigram

from ragcache_cli.models.cache import find_model
from ragcache_gateway.prompts.tokenizer import load_tokenizer
from ragcache_kv.model.tokenizer import ChunkTokenizer, pack_ids, tokenizer_identity
from ragcache_retriever.documents.tokenizer import load_serving_tokenizer

TINYRAG = Path(__file__).parents[4] / "models/tinyrag/model"
NASTY = (
    *("<|im_start|>", "<|im_end|>", "<|end|>", "<|endoftext|>", "<think>", "<file_sep>", "</s>"),
    *("<|", "|>", "[INST]", "\n", "\n\n", "\r\n", "\t", "  ", "\u00a0", "\u200b", "\u2028"),
    *("ü", "u\u0308", "漢字", "🙂", "👩\u200d👩\u200d👧", "\x00", "\ufffd", "\U0010fffd", "0123"),
    *("word", " the", "."),
)
nasty_texts = st.one_of(
    st.lists(st.sampled_from(NASTY), max_size=12).map("".join), st.text(max_size=40)
)


@pytest.fixture(scope="module", params=["tinyrag", "smollm2"])
def folder(request: pytest.FixtureRequest) -> Path:
    folder = TINYRAG if request.param == "tinyrag" else find_model(request.param)
    if folder is None:
        pytest.skip(f"run: ragcache model fetch {request.param}")
    return folder


def test_retriever_and_gateway_agree_on_every_text(folder: Path) -> None:
    retriever, gateway = load_serving_tokenizer(str(folder)), load_tokenizer(folder)
    assert retriever.identity == gateway.identity == tokenizer_identity(folder)
    separator = gateway.encode_chunk("")

    @settings(max_examples=200, deadline=None)
    @given(nasty_texts)
    def agree(text: str) -> None:
        ids = gateway.encode_chunk(text)
        packed = retriever.token_ids(text)
        assert packed == pack_ids(ids)
        assert list(gateway.unpack(packed) or ()) == ids
        assert retriever.count(text) + len(separator) == len(ids)
        # The template's tokens are read between chunks and do not change them.
        gateway.encode_template("<|im_end|>")

    agree()


def test_text_without_added_tokens_has_the_ids_of_the_library(folder: Path) -> None:
    chunks = ChunkTokenizer(Tokenizer.from_file(str(folder / "tokenizer.json")))
    library = Tokenizer.from_file(str(folder / "tokenizer.json"))

    @settings(max_examples=100, deadline=None)
    @given(st.text(st.characters(codec="utf-8", exclude_characters="<"), max_size=60))
    def agree(text: str) -> None:
        ids = library.encode(text, add_special_tokens=False).ids
        assert chunks.encode(text) == ids == chunks.encode_template(text)

    agree()


@pytest.fixture
def tokenizer() -> Tokenizer:
    """tinyrag's, with added tokens as other models have them, which are not special."""
    tokenizer = Tokenizer.from_file(str(TINYRAG / "tokenizer.json"))
    tokenizer.add_tokens([AddedToken("<think>"), AddedToken("    ", normalized=False)])
    return tokenizer


def test_no_added_token_but_white_space_is_read_in_documents(tokenizer: Tokenizer) -> None:
    think, indent = (tokenizer.token_to_id(token) for token in ("<think>", "    "))
    template = tokenizer.encode("<think>a    b<|end|>", add_special_tokens=False).ids
    chunks = ChunkTokenizer(tokenizer)
    assert chunks.encode_template("<think>a    b<|end|>") == template
    ids = chunks.encode("<think>a    b<|end|>")
    assert think not in ids
    assert indent in ids
    assert tokenizer.decode(ids) == "<think>a    b<|end|>"


def test_control_tokens_of_a_plain_vocabulary_are_spelled_out() -> None:
    vocabulary = [("<unk>", 0.0), ("<s>", 0.0), *((letter, -1.0) for letter in "<s>a\n")]
    tokenizer = Tokenizer(Unigram(vocabulary, unk_id=0))
    tokenizer.add_special_tokens(["<s>", "<unk>"])
    chunks = ChunkTokenizer(tokenizer)
    assert chunks.encode_template("a<s>") == [5, 1]
    assert chunks.encode("a<s>?") == [5, 2, 3, 4, 0], "the unknown character has its token"


@pytest.mark.parametrize(
    "packed",
    [b"", b"\0", b"\0" * 7, pack_ids([2**32 - 1]), pack_ids([7, 8])],
    ids=["empty", "one byte", "seven bytes", "beyond the vocabulary", "without a separator"],
)
def test_bytes_that_no_chunk_can_have_are_refused(tokenizer: Tokenizer, packed: bytes) -> None:
    assert ChunkTokenizer(tokenizer).unpack(packed) is None


def test_control_tokens_are_refused(tokenizer: Tokenizer) -> None:
    chunks = ChunkTokenizer(tokenizer)
    separator = chunks.encode_chunk("")
    for control in ("<|end|>", "<think>"):
        ids = [*chunks.encode("a"), *chunks.encode_template(control), *separator]
        assert chunks.unpack(pack_ids(ids)) is None
    indent = [*chunks.encode("    "), *separator]
    assert list(chunks.unpack(pack_ids(indent)) or ()) == indent


def test_no_control_token_is_spelled_in_a_text_for_a_server(folder: Path) -> None:
    chunks = ChunkTokenizer(Tokenizer.from_file(str(folder / "tokenizer.json")))

    @settings(max_examples=200, deadline=None)
    @given(nasty_texts)
    def is_plain(text: str) -> None:
        apart = chunks.spelled_apart(text)
        assert apart.replace("\u200b", "") == text.replace("\u200b", "")
        assert chunks._controls.isdisjoint(chunks.encode_template(apart))

    is_plain()


def test_each_file_of_a_tokenizer_changes_its_identity(tmp_path: Path) -> None:
    identities = {tokenizer_identity(tmp_path)}
    for name in ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json"):
        (tmp_path / name).write_text("{}")
        identities.add(tokenizer_identity(tmp_path))
        (tmp_path / name).write_text("{} ")
        identities.add(tokenizer_identity(tmp_path))
    assert len(identities) == 7
