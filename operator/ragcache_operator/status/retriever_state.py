"""The state of the retriever, from what its pods answer."""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from typing import Final

from ragcache_core.errors import RagCacheError
from ragcache_operator.kube.resources import Object
from ragcache_wire.clients.retriever_client import RetrieverClient
from ragcache_wire.v1 import retriever_pb2 as pb

_TIMEOUT_S = 2.0


async def ask_pods(addresses: Iterable[str]) -> list[pb.RetrieverStatus | None]:
    """Return the answer of each pod, or None for a pod that does not answer in two seconds.

    Args:
        addresses: "host:port" of the gRPC ports.
    """
    return await asyncio.gather(*map(_ask, addresses))


async def _ask(address: str) -> pb.RetrieverStatus | None:
    # Pods come and go, and are asked a few times a minute. An open connection has no benefit.
    client = RetrieverClient(address)
    try:
        return await client.status(_TIMEOUT_S)
    except RagCacheError:
        return None
    finally:
        await client.close()


MAX_REMAKES: Final = 50
"""Most collections that a status lists, so that an object with thousands of them stays small."""
_MAX_TEXT_CHARS: Final = 200


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
    """The state of the retriever.

    Args:
        remakes: Collections whose documents are prepared again, by name.
        is_settled: Whether every pod has answered and nothing is in progress.
    """

    remakes: tuple[RemakeState, ...] = ()
    is_settled: bool = True

    def to_status(self) -> Object:
        """Return the fields of ``status.retriever``."""
        if not self.remakes:
            return {}
        num_done = sum(one.num_done for one in self.remakes)
        num_documents = sum(one.num_documents for one in self.remakes)
        return {
            "remakeProgress": f"{num_done} of {num_documents}",
            "remakes": [_remake_status(one) for one in self.remakes[:MAX_REMAKES]],
        }


def retriever_state(answers: Collection[pb.RetrieverStatus | None]) -> RetrieverState:
    """Return the state that follows from the answers of all pods, which share their documents.

    Args:
        answers: None: the pod did not answer.
    """
    answered = [answer for answer in answers if answer is not None]
    remakes = _remakes(answered[0]) if answered else ()
    return RetrieverState(remakes, len(answered) == len(answers) and not remakes)


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


def _remake_status(remake: RemakeState) -> Object:
    return {
        "collection": remake.collection,
        "documentsDone": remake.num_done,
        "documents": remake.num_documents,
        "reason": remake.reason,
    }
