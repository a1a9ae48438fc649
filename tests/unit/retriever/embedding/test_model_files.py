"""What a model's files say, and that copies of a model have one fingerprint."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from ragcache_core.errors import InvalidInput
from ragcache_retriever.embedding.model_files import read_model_files
from tests.kit.embedding_models import BERT_CONFIG, POOLING, write_model_files


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write_model_files(tmp_path / "model")


def change(folder: Path, file: str, **values: Any) -> None:
    path = folder / file
    content = json.loads(path.read_text()) if path.is_file() else {}
    path.write_text(json.dumps(content | values))


def test_a_model_with_no_other_files_is_pooled_by_the_mean(folder: Path) -> None:
    files = read_model_files(folder)
    assert files.pooling == "mean"
    assert (files.query_prompt, files.document_prompt, files.lower_case) == ("", "", False)
    assert files.max_tokens == BERT_CONFIG["max_position_embeddings"]


@pytest.mark.parametrize(
    ("pooling", "found"),
    [
        (POOLING, "mean"),
        ({"pooling_mode": "mean"}, "mean"),
        ({"pooling_mode": "cls"}, "cls"),
        ({"pooling_mode_cls_token": True, "pooling_mode_mean_tokens": False}, "cls"),
        ({"pooling_mode_cls_token": True, "pooling_mode_mean_tokens": True}, None),
        ({"pooling_mode": "max"}, None),
        (POOLING | {"include_prompt": False}, None),
    ],
)
def test_pooling_decides_what_computes_the_model(
    folder: Path, pooling: dict[str, Any], found: str | None
) -> None:
    write_model_files(folder, modules=["Transformer", "Pooling", "Normalize"], pooling=pooling)
    assert read_model_files(folder).pooling == found


@pytest.mark.parametrize(
    "changes",
    [
        {"model_type": "roberta"},
        {"hidden_act": "relu"},
        {"position_embedding_type": "relative_key"},
        {"is_decoder": True},
    ],
)
def test_only_the_ordinary_bert_is_computed_without_the_library(
    folder: Path, changes: dict[str, Any]
) -> None:
    change(folder, "config.json", **changes)
    assert read_model_files(folder).pooling is None


def test_a_model_with_a_dense_layer_is_left_to_the_library(folder: Path) -> None:
    write_model_files(folder, modules=["Transformer", "Pooling", "Dense"], pooling=POOLING)
    assert read_model_files(folder).pooling is None


@pytest.mark.parametrize(
    ("prompts", "query", "document"),
    [
        ({"prompts": {"query": "q: ", "document": "d: "}}, "q: ", "d: "),
        ({"prompts": {"query": "q: ", "passage": "p: "}}, "q: ", "p: "),
        ({"prompts": {"query": "q: "}}, "q: ", ""),
        ({"prompts": {"s": "s: "}, "default_prompt_name": "s"}, "s: ", "s: "),
        ({"prompts": None}, "", ""),
    ],
)
def test_prompts_are_read(folder: Path, prompts: dict[str, Any], query: str, document: str) -> None:
    change(folder, "config_sentence_transformers.json", **prompts)
    files = read_model_files(folder)
    assert (files.query_prompt, files.document_prompt) == (query, document)


def test_the_smallest_limit_of_length_applies(folder: Path) -> None:
    change(folder, "tokenizer_config.json", model_max_length=100)
    assert read_model_files(folder).max_tokens == min(100, BERT_CONFIG["max_position_embeddings"])
    change(folder, "sentence_bert_config.json", max_seq_length=24, do_lower_case=True)
    files = read_model_files(folder)
    assert (files.max_tokens, files.lower_case) == (24, True)
    change(folder, "config.json", model_type="roberta", max_position_embeddings=18)
    assert read_model_files(folder).max_tokens == 16, "positions begin after the padding's"


def test_copies_have_one_fingerprint_and_other_models_another(folder: Path, tmp_path: Path) -> None:
    copy = Path(shutil.copytree(folder, tmp_path / "copy"))
    prints = {read_model_files(folder).fingerprint, read_model_files(copy).fingerprint}
    assert len(prints) == 1
    write_model_files(copy, seed=1)
    prints.add(read_model_files(copy).fingerprint)
    change(copy, "config_sentence_transformers.json", prompts={"query": "q: "})
    prints.add(read_model_files(copy).fingerprint)
    change(copy, "tokenizer.json", version="1.1")
    prints.add(read_model_files(copy).fingerprint)
    write_model_files(copy, seed=1, modules=["Transformer", "Pooling"], pooling=POOLING)
    prints.add(read_model_files(copy).fingerprint)
    assert len(prints) == 5
    (copy / "README.md").write_text("says nothing of the model")
    assert read_model_files(copy).fingerprint in prints


@pytest.mark.parametrize(
    ("missing", "problem"),
    [
        ("config.json", "holds no config.json"),
        ("tokenizer.json", "holds no tokenizer.json"),
        ("model.safetensors", "holds no .*safetensors"),
    ],
)
def test_a_folder_that_lacks_a_file_is_refused(folder: Path, missing: str, problem: str) -> None:
    (folder / missing).unlink()
    with pytest.raises(InvalidInput, match=problem) as caught:
        read_model_files(folder)
    assert caught.value.field == "RAGCACHE_EMBEDDER"


@pytest.mark.parametrize(
    ("file", "content", "problem"),
    [
        ("config.json", "{", "cannot be read"),
        ("config.json", "[]", "holds no config.json"),
        ("modules.json", '{"0": 1}', "unknown form"),
        ("sentence_bert_config.json", "[1]", "unknown form"),
    ],
)
def test_files_of_an_unknown_form_are_refused(
    folder: Path, file: str, content: str, problem: str
) -> None:
    (folder / file).write_text(content)
    with pytest.raises(InvalidInput, match=problem):
        read_model_files(folder)
