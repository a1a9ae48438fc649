"""Weights are chosen on sentences that a collection's chunks lack."""

from __future__ import annotations

import random
from pathlib import Path

import numpy as np
import pytest

from ragcache_core.retrieval.fusion import DEFAULT_LEXICAL_WEIGHT
from ragcache_retriever.ranking.rerankers.bundled import BundledRanker
from ragcache_retriever.ranking.tuning import TuningSample
from ragcache_retriever.search.vector_index import Vectors
from ragcache_retriever.store.sqlite.document_store import SqliteDocumentStore
from ragcache_retriever.store.sqlite.files.reserve import DiskReserve
from tests.kit.ranked_collection import ranked_collection, unit

NUM_PAGES = 80
WORDS = [f"word{i}" for i in range(60)]


def page(i: int, *, with_name: bool) -> str:
    """Return sentences of random words; with the page's own name, if words are to find it."""
    source = random.Random(i)
    name = f"name{i} " if with_name else ""
    sentences = [name + " ".join(source.choices(WORDS, k=8)) + "." for _ in range(4)]
    return " ".join(sentences)


def topic_vector(i: int) -> Vectors:
    """Return a vector that depends on the page alone, so that the dense leg finds it."""
    return unit(*np.random.default_rng(i).normal(size=4))


def sample(folder: Path, *, with_names: bool) -> TuningSample:
    store = SqliteDocumentStore(folder, DiskReserve(folder, 0))
    texts = [page(i, with_name=with_names) for i in range(NUM_PAGES)]
    vectors = [topic_vector(i) for i in range(NUM_PAGES)]
    pages = ranked_collection(store, texts, vectors)
    found = TuningSample(store, pages.generation, lambda title, chunk: f"{title}: {chunk.text}")
    store.close()
    return found


def test_a_question_is_no_part_of_the_text_that_answers_it(tmp_path: Path) -> None:
    found = sample(tmp_path, with_names=True)
    count = len(found.questions)
    assert count == NUM_PAGES
    assert len({question.answer for question in found.questions}) == count
    for question, text in zip(found.questions, found.texts[:count], strict=True):
        assert question.text not in text
        assert question.text.split()[0] in text
    assert found.texts[count:] == [question.text for question in found.questions]


@pytest.mark.parametrize("words_find_it", [False, True])
def test_the_leg_that_finds_the_answers_gets_the_weight(
    tmp_path: Path, words_find_it: bool
) -> None:
    found = sample(tmp_path, with_names=words_find_it)
    count = len(found.questions)
    answers = [topic_vector(question.answer) for question in found.questions]
    noise = [topic_vector(10_000 + i) for i in range(count)]
    questions = noise if words_find_it else answers
    weights = found.choose(np.array(answers + questions, np.float32), None)
    assert weights.num_questions == count
    assert weights.num_chunks == NUM_PAGES
    assert weights.uses_ranker is None
    if words_find_it:
        assert weights.lexical > DEFAULT_LEXICAL_WEIGHT
    else:
        assert weights.lexical < DEFAULT_LEXICAL_WEIGHT


def test_a_ranker_is_chosen_or_refused(tmp_path: Path) -> None:
    found = sample(tmp_path, with_names=True)
    answers = [topic_vector(question.answer) for question in found.questions]
    # Both legs are perfect, so that no ranker can gain.
    weights = found.choose(np.array(answers * 2, np.float32), BundledRanker.load())
    assert weights.uses_ranker is False


def test_a_choice_is_repeatable(tmp_path: Path) -> None:
    found = sample(tmp_path, with_names=False)
    vectors = np.array([topic_vector(i) for i in range(2 * len(found.questions))], np.float32)
    assert found.choose(vectors, None) == found.choose(vectors, None)


def test_an_empty_collection_keeps_the_defaults(tmp_path: Path) -> None:
    store = SqliteDocumentStore(tmp_path, DiskReserve(tmp_path, 0))
    pages = ranked_collection(store, ["short", "texts"], [topic_vector(0), topic_vector(1)])
    found = TuningSample(store, pages.generation, lambda title, chunk: chunk.text)
    store.close()
    assert found.texts == []
    weights = found.without_choice()
    assert (weights.lexical, weights.num_questions) == (DEFAULT_LEXICAL_WEIGHT, 0)
    assert (weights.generation, weights.num_chunks) == (pages.generation, 2)
