"""Transports carry values between a client and a cache store. This is their common interface."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from ragcache_core.errors import Unavailable
from ragcache_core.identity.keys import VariantKey
from ragcache_core.store_api import Ack, NewVariant, PutOutcome
from ragcache_kv.transport.framing import ConnectionBroken, TooManyCalls
from ragcache_kv.values.outgoing_value import OutgoingValue
from ragcache_kv.values.stored_value import Allocate, ValueOrMiss
from ragcache_wire.status import NoAnswer

SERVICE = "cachestore"


@dataclass(frozen=True, slots=True)
class ValueRequest:
    """A call that reads values.

    Attributes:
        keys: The variants.
        deadline: On the clock of time.monotonic.
        exact: Whether to read only variants that equal a full computation.
        domain: Read only variants of this domain; "" for any.
        allocate: Returns the memory of each value; None for new memory.
        traceparent: The calling span. It may have ended when the last values are requested.
        fix_overheads: Cache-Craft's CFO of the use of each key; 0 for a key that it lacks.
    """

    keys: Sequence[VariantKey]
    deadline: float
    exact: bool = False
    domain: str = ""
    allocate: Allocate | None = None
    traceparent: str = ""
    fix_overheads: Mapping[VariantKey, float] = field(default_factory=dict)


class Transport(ABC):
    """Carries values. Safe for threads.

    A call raises ConnectionBroken if the connection breaks before the store has answered. The
    client may then repeat it. It raises NoAnswer if the connection breaks later or times out.
    """

    name: str

    @abstractmethod
    def get(self, request: ValueRequest) -> Iterator[ValueOrMiss]:
        """Send the request now, and return the values in the order of the keys."""

    @abstractmethod
    def put(
        self, variant: NewVariant, value: OutgoingValue, ack: Ack, deadline: float
    ) -> PutOutcome:
        """Store a value. Each part goes out as soon as it is ready. Raises IncompleteValue."""

    @abstractmethod
    def close(self) -> None:
        """Close every connection and end running calls."""


def to_unavailable(error: ConnectionBroken | OSError) -> Unavailable:
    """Return the error that a caller gets for a broken connection."""
    return (
        Unavailable(SERVICE, str(error))
        if isinstance(error, TooManyCalls)
        else NoAnswer(SERVICE, str(error))
    )
