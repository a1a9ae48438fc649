"""A write to disk that is queued or under way."""

from __future__ import annotations

from concurrent.futures import CancelledError, Future
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from ragcache_core.errors import Unavailable

V = TypeVar("V")


@dataclass(slots=True, eq=False)
class WriteJob(Generic[V]):
    """The write of one variant to disk.

    Attributes:
        urgent: A caller waits for the write.
        queued_at: On the clock of the idle window.
    """

    variant: V
    urgent: bool
    queued_at: float
    done: Future[None] = field(default_factory=Future)

    def wait(self, timeout_s: float) -> None:
        """Wait until the variant is written.

        Raises:
            Unavailable: The write failed, was cancelled, or takes too long.
        """
        try:
            self.done.result(timeout_s)
        except TimeoutError:
            raise Unavailable(
                "cachestore", "its disk is slow: the write did not finish in time"
            ) from None
        except CancelledError:
            raise Unavailable(
                "cachestore", "the value was dropped, or the store closed, before the write"
            ) from None
