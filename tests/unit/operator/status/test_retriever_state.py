"""The state of the retriever that follows from what its pods say."""

from __future__ import annotations

import pytest

from ragcache_operator.status.retriever_state import (
    MAX_REMAKES,
    RemakeState,
    RetrieverState,
    retriever_state,
)
from ragcache_wire.v1 import retriever_pb2 as pb


def index(collection: str, done: int, documents: int, reason: str = "embedder") -> pb.IndexStatus:
    remake = pb.Remake(documents_done=done, documents=documents, reason=reason)
    return pb.IndexStatus(collection=collection, remake=remake)


def answer(*indexes: pb.IndexStatus) -> pb.RetrieverStatus:
    return pb.RetrieverStatus(indexes=indexes)


def test_remakes_are_listed_by_collection_and_summed() -> None:
    state = retriever_state([answer(index("b", 3, 10), index("a", 4, 30, "chunking"))])
    assert state.remakes == (
        RemakeState("a", 4, 30, "chunking"),
        RemakeState("b", 3, 10, "embedder"),
    )
    status = state.to_status()
    assert status["remakeProgress"] == "7 of 40"
    assert status["remakes"][0] == {
        **{"collection": "a", "documentsDone": 4, "documents": 30, "reason": "chunking"}
    }


def test_an_index_without_a_remake_is_not_listed() -> None:
    assert retriever_state([answer(pb.IndexStatus(collection="a"))]) == RetrieverState()
    assert RetrieverState().to_status() == {}


def test_pods_share_their_documents_so_the_first_answer_counts() -> None:
    remaking = answer(index("a", 1, 2))
    assert retriever_state([None, remaking, remaking]).remakes == (
        RemakeState("a", 1, 2, "embedder"),
    )


@pytest.mark.parametrize(
    ("answers", "is_settled"),
    [
        ([], True),
        ([answer()], True),
        ([answer(), None], False),
        ([None], False),
        ([answer(index("a", 1, 2))], False),
    ],
)
def test_a_state_is_settled_when_all_have_answered_and_nothing_is_in_progress(
    answers: list[pb.RetrieverStatus | None], is_settled: bool
) -> None:
    assert retriever_state(answers).is_settled is is_settled


def test_a_status_lists_a_bounded_number_of_remakes_and_counts_all() -> None:
    indexes = [index(f"c{i:03}", 1, 2) for i in range(MAX_REMAKES + 25)]
    status = retriever_state([answer(*indexes)]).to_status()
    assert len(status["remakes"]) == MAX_REMAKES
    assert status["remakeProgress"] == f"{MAX_REMAKES + 25} of {2 * (MAX_REMAKES + 25)}"


def test_long_texts_of_a_pod_are_cut() -> None:
    [remake] = retriever_state([answer(index("c" * 900, 1, 2, "r" * 900))]).remakes
    assert (len(remake.collection), len(remake.reason)) == (200, 200)
