"""The state of the retriever, from the collections that a gateway lists."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from ragcache_operator.kube.resources import Object

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
        is_settled: Whether the gateway has answered and nothing is in progress.
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


def retriever_state(collections: Sequence[Object] | None) -> RetrieverState:
    """Return the state that follows from the collections.

    Args:
        collections: As ``GET /v1/collections`` lists them. None: the gateway did not answer.

    Raises:
        AttributeError, KeyError, TypeError, ValueError: The gateway's answer has another form.
    """
    found = (
        RemakeState(
            str(one["name"])[:_MAX_TEXT_CHARS],
            int(remake["documents_done"]),
            int(remake["documents"]),
            str(remake["reason"])[:_MAX_TEXT_CHARS],
        )
        for one in collections or ()
        if (remake := one.get("remake")) is not None
    )
    remakes = tuple(sorted(found, key=lambda one: one.collection))
    return RetrieverState(remakes, collections is not None and not remakes)


def _remake_status(remake: RemakeState) -> Object:
    return {
        "collection": remake.collection,
        "documentsDone": remake.num_done,
        "documents": remake.num_documents,
        "reason": remake.reason,
    }
