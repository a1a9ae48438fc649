"""Generated documents are the same for a seed, and their words are as frequent as in a language."""

from __future__ import annotations

import json
import urllib.request
from collections import Counter

from bench.support.retrieval.embedding_server import DIMENSION, serving_embeddings
from bench.support.retrieval.generated_documents import ChunkTexts, make_pages


def test_pages_are_a_function_of_the_seed() -> None:
    assert make_pages(20_000, seed=3) == make_pages(20_000, seed=3)
    assert make_pages(20_000, seed=3) != make_pages(20_000, seed=4)
    pages = make_pages(20_000)
    assert sum(len(page.text) for page in pages) >= 20_000
    assert len({page.id for page in pages}) == len(pages)


def test_a_few_words_are_most_of_a_text() -> None:
    texts = list(ChunkTexts(1).texts(200))
    assert texts == list(ChunkTexts(1).texts(200))
    words = Counter(word for text in texts for word in text.split())
    assert sum(words.values()) == 200 * 120
    common = sum(count for _, count in words.most_common(100))
    assert 0.3 < common / sum(words.values()) < 0.6
    assert len(words) > 5000


def test_the_endpoint_answers_with_other_vectors_for_other_texts() -> None:
    with serving_embeddings() as url:
        body = json.dumps({"model": "m", "input": ["a", "b", "c"]}).encode()
        request = urllib.request.Request(f"{url}/embeddings", body)
        with urllib.request.urlopen(request, timeout=60) as response:
            rows = json.load(response)["data"]
    assert [row["index"] for row in rows] == [0, 1, 2]
    assert all(len(row["embedding"]) == DIMENSION for row in rows)
    assert len({tuple(row["embedding"]) for row in rows}) == 3
