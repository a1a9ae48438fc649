"""Derives the state of the retriever from what each of its pods says."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Final

from ragcache_operator.kube.resources import Object
from ragcache_operator.status.conditions import Replication
from ragcache_wire.v1 import retriever_pb2 as pb

MAX_REMAKES: Final = 50
"""Most collections that a status lists, so that an object with thousands of them stays small."""
_MAX_TEXT_CHARS: Final = 200
_ROLES: Final = {
    pb.RetrieverStatus.ROLE_WRITER: "Writer",
    pb.RetrieverStatus.ROLE_FOLLOWER: "Follower",
}


@dataclass(frozen=True, slots=True)
class ReplicaState:
    """The state of one pod of the retriever.

    Args:
        is_running: Whether the pod runs. The operator asks no other pod.
        role: ``Writer`` or ``Follower``. None: the pod did not answer.
        lag_changes: Number of changes that the pod lacks.
        lag_s: Age of the oldest of them in whole seconds.
    """

    pod: str
    is_running: bool = True
    role: str | None = None
    lag_changes: int = 0
    lag_s: int = 0


@dataclass(frozen=True, slots=True)
class RemakeState:
    """How many documents of a collection have been prepared again.

    Args:
        reason: What has changed, like ``embedder``.
    """

    collection: str
    num_done: int
    num_documents: int
    reason: str


@dataclass(frozen=True, slots=True)
class RetrieverState:
    """The state of all pods of the retriever.

    Args:
        replicas: One for each pod, by name.
        writer: Name of the pod that writes. None: no pod does, or each of several does.
        remakes: Collections whose documents are prepared again, by name.
    """

    replicas: tuple[ReplicaState, ...] = ()
    writer: str | None = None
    remakes: tuple[RemakeState, ...] = ()

    @property
    def is_settled(self) -> bool:
        """Whether every pod has answered and nothing is in progress."""
        roles = {one.role for one in self.replicas}
        has_writer = self.writer is not None or "Follower" not in roles
        follows = all(one.lag_changes == 0 and one.lag_s == 0 for one in self.replicas)
        return None not in roles and has_writer and follows and not self.remakes

    def to_status(self) -> Object:
        """Return the fields of ``status.retriever``."""
        status: dict[str, Any] = {"pods": [_pod_status(one) for one in self.replicas]}
        if self.writer is not None:
            status["writer"] = self.writer
        if self.remakes:
            num_done = sum(one.num_done for one in self.remakes)
            num_documents = sum(one.num_documents for one in self.remakes)
            status["remakeProgress"] = f"{num_done} of {num_documents}"
            status["remakes"] = [_remake_status(one) for one in self.remakes[:MAX_REMAKES]]
        return status


def retriever_state(
    answers: Mapping[str, pb.RetrieverStatus | None], not_running: Iterable[str] = ()
) -> RetrieverState:
    """Return the state that follows from the answers of all pods.

    Args:
        answers: By name of the pod. None: the pod did not answer.
        not_running: Names of pods that do not run yet, or no longer.
    """
    answered = {name: answer for name, answer in answers.items() if answer is not None}
    writers = _writers(answered)
    sequence = max((answered[name].sequence for name in writers), default=0)
    # A follower may lack the last progress. Pods that share their documents all have the same.
    informed = writers or sorted(answered, key=lambda name: _position(answered[name]))[-1:]
    replicas = [_replica_state(name, answer, sequence) for name, answer in answers.items()]
    replicas += [ReplicaState(name, is_running=False) for name in not_running]
    return RetrieverState(
        tuple(sorted(replicas, key=lambda one: one.pod)),
        writers[0] if len(writers) == 1 else None,
        _remakes(answered[informed[0]]) if informed else (),
    )


def replication_of(state: RetrieverState, num_wanted: int, max_lag_s: float) -> Replication:
    """Return whether the replicas follow their writer.

    Args:
        state: Of a retriever whose replicas follow one writer.
        num_wanted: Desired number of replicas.
        max_lag_s: Lag from which a replica is not ready.
    """
    answered = [one for one in state.replicas if one.role is not None]
    if not answered:
        return Replication("Unknown", "Waiting", "waiting for an answer of the retriever's pods")
    writers = [one.pod for one in answered if one.role == "Writer"]
    running = [one for one in state.replicas if one.is_running]
    # A pod that runs and does not answer may be the writer.
    if not writers and len(answered) == len(running):
        return Replication("False", "NoWriter", "no pod writes, so documents cannot change")
    behind = [one for one in answered if one.lag_s > max_lag_s]
    if behind:
        texts = (f"{one.pod} lacks changes of the last {one.lag_s} s" for one in behind)
        return Replication("False", "Lagging", "; ".join(texts))
    num_pods = max(num_wanted, len(state.replicas))
    if len(answered) < num_pods:
        message = f"{len(answered)} of {num_pods} pods answer"
        silent = ", ".join(one.pod for one in state.replicas if one.role is None)
        return Replication("Unknown", "NoAnswer", f"{message}, not {silent}" if silent else message)
    if len(writers) > 1:
        return Replication("Unknown", "WriterChanges", f"writers: {', '.join(writers)}")
    return Replication("True", "Following", f"all replicas follow {writers[0]}")


def _writers(answered: Mapping[str, pb.RetrieverStatus]) -> list[str]:
    """Return the pods that write. A former writer may still call itself one, in an older epoch."""
    epochs = {
        name: answer.epoch
        for name, answer in answered.items()
        if answer.role == pb.RetrieverStatus.ROLE_WRITER
    }
    return sorted(name for name, epoch in epochs.items() if epoch == max(epochs.values()))


def _replica_state(
    name: str, answer: pb.RetrieverStatus | None, writer_sequence: int
) -> ReplicaState:
    if answer is None:
        return ReplicaState(name)
    # A replica that is cut off from the writer does not know its last changes.
    known_sequence = max(writer_sequence, answer.writer_sequence)
    is_writer = answer.role == pb.RetrieverStatus.ROLE_WRITER
    return ReplicaState(
        name,
        role=_ROLES.get(answer.role),
        lag_changes=0 if is_writer else max(0, known_sequence - answer.sequence),
        lag_s=0 if is_writer else int(answer.lag_s),
    )


def _position(answer: pb.RetrieverStatus) -> tuple[int, int]:
    return answer.epoch, answer.sequence


def _remakes(answer: pb.RetrieverStatus) -> tuple[RemakeState, ...]:
    found = (
        RemakeState(
            one.collection[:_MAX_TEXT_CHARS],
            one.remake.documents_done,
            one.remake.documents,
            one.remake.reason[:_MAX_TEXT_CHARS],
        )
        for one in answer.indexes
        if one.HasField("remake")
    )
    return tuple(sorted(found, key=lambda one: one.collection))


def _pod_status(replica: ReplicaState) -> Object:
    if replica.role is None:
        return {"name": replica.pod}
    return {
        "name": replica.pod,
        "role": replica.role,
        "lagChanges": replica.lag_changes,
        "lagSeconds": replica.lag_s,
    }


def _remake_status(remake: RemakeState) -> Object:
    return {
        "collection": remake.collection,
        "documentsDone": remake.num_done,
        "documents": remake.num_documents,
        "reason": remake.reason,
    }
