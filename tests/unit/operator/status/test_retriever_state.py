"""The state of the retriever that follows from what its pods say."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ragcache_operator.status.component import READY, ComponentState
from ragcache_operator.status.conditions import (
    CONDITION_OF,
    REPLICAS_FOLLOW,
    Replication,
    SelfTest,
    events_for,
    find,
    make_conditions,
    phase_of,
)
from ragcache_operator.status.retriever_state import (
    MAX_REMAKES,
    RetrieverState,
    replication_of,
    retriever_state,
)
from ragcache_wire.v1 import retriever_pb2 as pb

WRITER_ADDRESS = "docs-retriever-0.docs-retriever-replicas.team.svc:50051"
MAX_LAG_S = 30.0
NOW = "2026-01-01T00:00:00Z"
ALL_READY = [ComponentState(name, 1, 1, True, True, READY, "1 of 1") for name in CONDITION_OF]


def writer(sequence: int = 20, epoch: int = 2, **more: Any) -> pb.RetrieverStatus:
    return pb.RetrieverStatus(
        role=pb.RetrieverStatus.ROLE_WRITER,
        writer=WRITER_ADDRESS,
        sequence=sequence,
        writer_sequence=sequence,
        epoch=epoch,
        **more,
    )


def follower(sequence: int = 20, **more: Any) -> pb.RetrieverStatus:
    fields = {"epoch": 2, "writer_sequence": sequence, **more}
    # The address is that of the last writer, also after its end.
    return pb.RetrieverStatus(
        role=pb.RetrieverStatus.ROLE_FOLLOWER,
        writer=WRITER_ADDRESS,
        sequence=sequence,
        **fields,
    )


def index(collection: str, done: int, documents: int, reason: str = "embedder") -> pb.IndexStatus:
    remake = pb.Remake(documents_done=done, documents=documents, reason=reason)
    return pb.IndexStatus(collection=collection, remake=remake)


ENDED = "ended"
"""In the place of an answer: the pod does not run."""

Answer = pb.RetrieverStatus | str | None


def state_of(*answers: Answer) -> RetrieverState:
    named = {f"docs-retriever-{i}": answer for i, answer in enumerate(answers)}
    running = {name: answer for name, answer in named.items() if not isinstance(answer, str)}
    return retriever_state(running, named.keys() - running.keys())


def replication(*answers: Answer, wanted: int = 3) -> Replication:
    return replication_of(state_of(*answers), wanted, MAX_LAG_S)


def test_each_pod_has_its_role_and_its_lag() -> None:
    behind = follower(15, writer_sequence=18, lag_s=4.9)
    state = state_of(writer(), behind, None)
    assert state.to_status() == {
        "writer": "docs-retriever-0",
        "pods": [
            {"name": "docs-retriever-0", "role": "Writer", "lagChanges": 0, "lagSeconds": 0},
            # The writer has changes that the follower does not know of.
            {"name": "docs-retriever-1", "role": "Follower", "lagChanges": 5, "lagSeconds": 4},
            {"name": "docs-retriever-2"},
        ],
    }
    assert not state.is_settled


def test_without_the_writer_the_lag_is_what_the_follower_knows() -> None:
    [pod] = state_of(follower(15, writer_sequence=18, lag_s=2)).replicas
    assert (pod.lag_changes, pod.lag_s) == (3, 2)


def test_a_former_writer_is_not_the_writer() -> None:
    assert state_of(writer(epoch=1, sequence=90), writer(epoch=2)).writer == "docs-retriever-1"


def test_pods_that_share_their_documents_have_no_single_writer() -> None:
    shared = pb.RetrieverStatus(
        role=pb.RetrieverStatus.ROLE_WRITER, backend="postgres", indexes=[index("a", 1, 4)]
    )
    state = state_of(shared, shared)
    assert state.writer is None
    assert [one.role for one in state.replicas] == ["Writer", "Writer"]
    assert [one.collection for one in state.remakes] == ["a"]
    assert state_of(pb.RetrieverStatus(role=pb.RetrieverStatus.ROLE_WRITER)).is_settled


def test_remakes_are_those_of_the_writer() -> None:
    indexes = [
        index("wiki", 3, 10, "chunking"),
        pb.IndexStatus(collection="faq"),
        index("a", 9, 30),
    ]
    state = state_of(follower(indexes=[index("wiki", 1, 10)]), writer(indexes=indexes))
    status = state.to_status()
    assert status["remakeProgress"] == "12 of 40"
    assert status["remakes"] == [
        {"collection": "a", "documentsDone": 9, "documents": 30, "reason": "embedder"},
        {"collection": "wiki", "documentsDone": 3, "documents": 10, "reason": "chunking"},
    ]
    assert not state.is_settled


def test_without_a_writer_remakes_are_those_of_the_last_change() -> None:
    ahead, behind = (
        follower(20, indexes=[index("a", 2, 4)]),
        follower(9, indexes=[index("a", 1, 4)]),
    )
    for answers in ((ahead, behind), (behind, ahead)):
        [remake] = state_of(*answers).remakes
        assert remake.num_done == 2


def test_a_status_lists_a_bounded_number_of_remakes_and_counts_all() -> None:
    indexes = [index(f"c{i:03}", 1, 2) for i in range(MAX_REMAKES + 25)]
    status = state_of(writer(indexes=indexes)).to_status()
    assert len(status["remakes"]) == MAX_REMAKES
    assert status["remakeProgress"] == f"{MAX_REMAKES + 25} of {2 * (MAX_REMAKES + 25)}"


def test_no_pod_is_an_empty_state() -> None:
    assert retriever_state({}) == RetrieverState()
    assert RetrieverState().to_status() == {"pods": []}


@pytest.mark.parametrize(
    ("answers", "truth", "reason", "words"),
    [
        ((), "Unknown", "Waiting", "waiting"),
        ((None, None, None), "Unknown", "Waiting", "waiting"),
        ((writer(), follower(), follower()), "True", "Following", "follow docs-retriever-0"),
        # Less than the limit is part of a follower's work.
        ((writer(), follower(5, lag_s=30), follower()), "True", "Following", ""),
        (
            (writer(), follower(5, lag_s=31.5), follower()),
            "False",
            "Lagging",
            "docs-retriever-1 lacks changes of the last 31 s",
        ),
        ((writer(), follower(5, lag_s=99), ENDED), "False", "Lagging", "docs-retriever-1"),
        ((writer(), follower(), None), "Unknown", "NoAnswer", "2 of 3 pods answer, not docs"),
        ((writer(), follower(), ENDED), "Unknown", "NoAnswer", "not docs-retriever-2"),
        ((writer(), follower()), "Unknown", "NoAnswer", "2 of 3 pods answer"),
        ((follower(), follower(), follower()), "False", "NoWriter", "cannot change"),
        ((ENDED, follower(), follower()), "False", "NoWriter", "cannot change"),
        ((follower(), ENDED, ENDED), "False", "NoWriter", "cannot change"),
        # A pod that runs may be the writer, although it did not answer.
        ((None, follower(), follower()), "Unknown", "NoAnswer", "not docs-retriever-0"),
        ((None, follower(), ENDED), "Unknown", "NoAnswer", "1 of 3 pods answer"),
        ((ENDED, ENDED, ENDED), "Unknown", "Waiting", "waiting"),
        # A former writer has not noticed its successor yet.
        ((writer(epoch=1), writer(), follower()), "Unknown", "WriterChanges", "docs-retriever-0"),
    ],
)
def test_the_condition_tells_whether_replicas_follow(
    answers: tuple[Answer, ...], truth: str, reason: str, words: str
) -> None:
    found = replication(*answers)
    assert (found.truth, found.reason) == (truth, reason)
    assert words in found.message


def test_the_condition_is_one_of_the_rag_cache_and_its_loss_is_a_warning() -> None:
    passed = SelfTest(True, "Answered", "answered", 1)

    def made(found: Replication | None, before: Any = ()) -> Any:
        return make_conditions(ALL_READY, passed, 1, before, NOW, replication=found)

    assert find(made(None), REPLICAS_FOLLOW) is None
    good = made(replication(writer(), follower(), follower()))
    bad = made(replication(ENDED, follower(), follower()), good)
    condition = find(bad, REPLICAS_FOLLOW)
    assert condition is not None
    assert (condition["status"], condition["reason"]) == ("False", "NoWriter")
    # Searches go on, so the platform stays ready.
    assert phase_of(bad, ALL_READY, 1) == "Ready"
    assert [(event.kind, event.reason) for event in events_for(good, bad)] == [
        ("Warning", "NoWriter")
    ]
    order = [one["type"] for one in good]
    assert order.index(CONDITION_OF["retriever"]) < order.index(REPLICAS_FOLLOW)


ANSWERS = st.sampled_from([None, ENDED]) | st.builds(
    pb.RetrieverStatus,
    role=st.sampled_from([0, 1, 2]),
    writer=st.sampled_from(["", WRITER_ADDRESS]),
    sequence=st.integers(0, 50),
    writer_sequence=st.integers(0, 50),
    epoch=st.integers(0, 3),
    lag_s=st.floats(0, 100),
)


@given(st.lists(ANSWERS, max_size=5), st.integers(1, 5))
def test_every_pod_is_listed_and_a_settled_state_has_no_lag(
    answers: list[Answer], num_wanted: int
) -> None:
    state = state_of(*answers)
    status = state.to_status()
    assert [pod["name"] for pod in status["pods"]] == [
        f"docs-retriever-{i}" for i in range(len(answers))
    ]
    assert all(one.lag_changes >= 0 for one in state.replicas)
    if state.is_settled:
        assert {pod["lagChanges"] for pod in status["pods"]} <= {0}
    found = replication_of(state, num_wanted, MAX_LAG_S)
    if found.truth == "True":
        assert [one.pod for one in state.replicas if one.role == "Writer"] == [state.writer]
        assert all(one.role is not None and one.lag_s <= MAX_LAG_S for one in state.replicas)
