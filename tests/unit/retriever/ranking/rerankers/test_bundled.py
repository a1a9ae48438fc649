"""The bundled ranker fits the features, and prefers what has all that a question asks for."""

from __future__ import annotations

from dataclasses import replace
from importlib.resources import files

import numpy as np
import pytest

from ragcache_core.errors import InvalidInput
from ragcache_core.retrieval.boosted_trees import trees_from_text
from ragcache_retriever.ranking.rerankers import bundled
from ragcache_retriever.ranking.rerankers.bundled import BundledRanker
from tests.unit.retriever.ranking.rerankers.test_endpoint import request_of


def test_a_text_with_the_words_of_the_question_gains() -> None:
    ranker = BundledRanker.load()
    request = request_of("nothing of it", "the disk cache is full", "bread")
    request = replace(request, words=["disk", "cache", "full"], fused=np.array([0.62, 0.6, 0.6]))
    scores = ranker.scores(request)
    assert np.argmax(scores) == 1
    assert scores.shape == (3,)


def test_its_file_names_what_it_was_trained_on() -> None:
    trees = trees_from_text(
        (files("ragcache_retriever.ranking.rerankers") / bundled.FILE_NAME).read_text()
    )
    assert "MuSiQue" in trees.provenance["collection"]
    assert trees.provenance["tool"] == "tools/train_ranker.py"


def test_trees_of_other_features_are_refused() -> None:
    trees = trees_from_text(
        (files("ragcache_retriever.ranking.rerankers") / bundled.FILE_NAME).read_text()
    )
    with pytest.raises(InvalidInput):
        BundledRanker(replace(trees, feature_names=trees.feature_names[::-1]))
