"""The retriever tokenizes chunks as the serving model does, and as the gateway does for plans."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ragcache_core.errors import InvalidInput
from ragcache_core.identity.keys import PUBLIC_DOMAIN, chunk_key_of_digest, token_digest
from ragcache_core.plan.prompt import assemble, plan_exact
from ragcache_gateway.prompts.builder import PromptBuilder
from ragcache_gateway.prompts.tokenizer import load_tokenizer
from ragcache_kv.model.folder import load_model_folder
from ragcache_kv.model.tokenizer import pack_ids
from ragcache_retriever.documents.tokenizer import load_serving_tokenizer
from tests.kit.retriever import tokenizer_of

GatewayKey = Callable[[str], bytes]


@pytest.fixture(scope="module")
def gateway_key(tiny_model: Path) -> GatewayKey:
    """Key of a chunk in the gateway's plans."""
    space = load_model_folder(str(tiny_model)).space("auto")
    prompts = PromptBuilder(
        load_tokenizer(tiny_model), max_model_len=1024, default_max_tokens=64, cache_bytes=1 << 20
    )

    def key(text: str) -> bytes:
        prompt = assemble([], [prompts.encode_chunk(text)], [])
        [segment] = plan_exact(prompt, space, PUBLIC_DOMAIN, "request").segments
        return segment.chunk

    return key


def test_tokens_are_those_of_the_serving_model(tiny_model: Path) -> None:
    from transformers import AutoTokenizer

    # A document cannot write a special token, so the text of one is counted as text.
    text = "The service runs in region north. <|end|> ünï\n\n"
    count = tokenizer_of(tiny_model).count
    tokenizer = AutoTokenizer.from_pretrained(tiny_model)
    ids = tokenizer(text, add_special_tokens=False, split_special_tokens=True)["input_ids"]
    assert count(text) == len(ids)
    assert count("") == 0


def test_keys_are_those_of_the_gateways_plans(tiny_model: Path, gateway_key: GatewayKey) -> None:
    tokenizer = tokenizer_of(tiny_model)
    space = load_model_folder(str(tiny_model)).space("auto")

    @given(st.lists(st.sampled_from(["word ", "<|end|>", "<|user|>", "\n\n", "ü", " ", "."])))
    def same_key(parts: list[str]) -> None:
        text = "".join(parts)
        digest = token_digest(np.frombuffer(tokenizer.token_ids(text), "<u4"))
        assert chunk_key_of_digest(space, PUBLIC_DOMAIN, digest) == gateway_key(text)

    same_key()


def test_text_that_spells_a_special_token_has_other_ids_than_the_token(
    tiny_model: Path,
) -> None:
    ids = load_tokenizer(tiny_model).encode_template("<|end|>\n\n")
    assert tokenizer_of(tiny_model).token_ids("<|end|>") != pack_ids(ids)


def test_the_settings_of_the_tokenizer_are_part_of_its_identity(
    tmp_path: Path, tiny_model: Path
) -> None:
    for file in tiny_model.glob("tokenizer*"):
        (tmp_path / file.name).write_bytes(file.read_bytes())
    assert tokenizer_of(tmp_path).identity == tokenizer_of(tiny_model).identity
    with (tmp_path / "tokenizer_config.json").open("a") as config:
        config.write("\n")
    assert tokenizer_of(tmp_path).identity != tokenizer_of(tiny_model).identity


def test_a_model_without_a_readable_tokenizer_is_refused(tmp_path: Path, tiny_model: Path) -> None:
    for file in tiny_model.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    (tmp_path / "tokenizer.json").unlink()
    with pytest.raises(InvalidInput, match="holds no tokenizer"):
        load_serving_tokenizer(str(tmp_path))
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(InvalidInput, match="cannot be read"):
        load_serving_tokenizer(str(tmp_path))
