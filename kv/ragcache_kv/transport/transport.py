"""A way for values between a client and a store: what all ways have in common."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from ragcache_core.errors import Unavailable
from ragcache_core.identity.keys import VariantKey
from ragcache_core.store_api import Ack, NewVariant, PutOutcome
from ragcache_kv.transport.framing import ConnectionBroken, TooManyCalls
from ragcache_kv.values.outgoing_value import OutgoingValue
from ragcache_kv.values.stored_value import Allocate, LayeredValues, ValueOrMiss
from ragcache_wire.status import NoAnswer

PART = "cachestore"


@dataclass(frozen=True, slots=True)
class ValueRequest:
    """Which values are asked for, and by when. deadline: on time.monotonic's clock.

    exact: only what may stand for a computation. domain: only variants of it; "" for any.
    allocate: gives the memory for each; None for new memory. traceparent: the span that asks, which
    need not be the current one any more when the last values are asked for.
    """

    keys: Sequence[VariantKey]
    deadline: float
    exact: bool = False
    domain: str = ""
    allocate: Allocate | None = None
    traceparent: str = ""


class Transport(ABC):
    """Carries values. Safe to share between threads.

    Raises ConnectionBroken when the connection breaks before the store has answered, in which case the same
    call may be made again; NoAnswer for what breaks later, or does not come in time.
    """

    name: str

    @abstractmethod
    def get(self, asking: ValueRequest) -> Iterator[ValueOrMiss]:
        """Ask now; gives answers in the order of the keys."""

    @abstractmethod
    def get_layers(self, asking: ValueRequest) -> LayeredValues:
        """Ask now; gives values layer by layer."""

    @abstractmethod
    def put(
        self, variant: NewVariant, value: OutgoingValue, ack: Ack, deadline: float
    ) -> PutOutcome:
        """Store a value, each part of it as soon as that is there. Raises IncompleteValue."""

    def note_reads(self, keys: Sequence[VariantKey], deadline: float) -> None:  # noqa: B027
        """Tell the store of reads of copies that the client keeps, where it would believe that."""

    @abstractmethod
    def close(self) -> None:
        """End every connection; calls in flight end too."""


def to_unavailable(error: ConnectionBroken | OSError) -> Unavailable:
    """What a caller is told when a connection broke."""
    return (
        Unavailable(PART, str(error))
        if isinstance(error, TooManyCalls)
        else NoAnswer(PART, str(error))
    )
