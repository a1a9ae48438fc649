"""The state of the retriever that follows from the collections of a gateway."""

from __future__ import annotations

from typing import Any

import pytest

from ragcache_operator.status.retriever_state import (
    MAX_REMAKES,
    RemakeState,
    RetrieverState,
    retriever_state,
)


def collection(name: str, done: int, documents: int, reason: str = "embedder") -> dict[str, Any]:
    remake = {"documents_done": done, "documents": documents, "reason": reason}
    return {"name": name, "remake": remake}


def test_remakes_are_listed_by_collection_and_summed() -> None:
    state = retriever_state([collection("b", 3, 10), collection("a", 4, 30, "chunking")])
    assert state.remakes == (
        RemakeState("a", 4, 30, "chunking"),
        RemakeState("b", 3, 10, "embedder"),
    )
    status = state.to_status()
    assert status["remakeProgress"] == "7 of 40"
    assert status["remakes"][0] == {
        **{"collection": "a", "documentsDone": 4, "documents": 30, "reason": "chunking"}
    }


def test_a_collection_without_a_remake_is_not_listed() -> None:
    assert retriever_state([{"name": "a", "remake": None}]) == RetrieverState()
    assert RetrieverState().to_status() == {}


@pytest.mark.parametrize(
    ("collections", "is_settled"), [([], True), (None, False), ([collection("a", 1, 2)], False)]
)
def test_a_state_is_settled_when_the_gateway_has_answered_and_nothing_is_in_progress(
    collections: list[dict[str, Any]] | None, is_settled: bool
) -> None:
    assert retriever_state(collections).is_settled is is_settled


def test_a_status_lists_a_bounded_number_of_remakes_and_counts_all() -> None:
    collections = [collection(f"c{i:03}", 1, 2) for i in range(MAX_REMAKES + 25)]
    status = retriever_state(collections).to_status()
    assert len(status["remakes"]) == MAX_REMAKES
    assert status["remakeProgress"] == f"{MAX_REMAKES + 25} of {2 * (MAX_REMAKES + 25)}"


def test_long_texts_are_cut() -> None:
    [remake] = retriever_state([collection("c" * 900, 1, 2, "r" * 900)]).remakes
    assert (len(remake.collection), len(remake.reason)) == (200, 200)
