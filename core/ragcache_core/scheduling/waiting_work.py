"""The work that waits in an engine, by the priority of its requests.

An engine computes the request with the lowest priority first (``priority``). So a request waits for
those of better bands, and in its own band for those that have an earlier time. It does not wait for
the whole queue.
"""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager


class WaitingWork:
    """The requests of one gateway that wait in one engine. For one event loop.

    The engine publishes one queue for all gateways and priorities. The shares of the gateway's own
    requests stand for those of all.
    """

    def __init__(self) -> None:
        self._requests: dict[object, tuple[int, float]] = {}  # priority and seconds

    @contextmanager
    def counted(self, priority: int, seconds: float) -> Generator[None, None, None]:
        """Count a request until the end of the context.

        Args:
            priority: A lower one is computed first.
            seconds: Predicted, of its load and its prefill.
        """
        request = object()
        self._requests[request] = priority, seconds
        try:
            yield
        finally:
            del self._requests[request]

    def share_before(self, priority: int) -> float:
        """Return the share of the queue that a new request of a priority waits for."""
        before_s = total_s = 0.0
        for other, seconds in self._requests.values():
            total_s += seconds
            if other <= priority:
                before_s += seconds
        return before_s / total_s if total_s > 0 else 1.0
