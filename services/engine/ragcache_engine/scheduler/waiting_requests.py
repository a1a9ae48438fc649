"""The requests in vLLM's queue, and what the store should keep for them.

A request that vLLM schedules at once loads what it needs itself. While it waits, other requests
make the store evict, so the store is told to bring what it needs into memory and to hold it there.
The hold is renewed while the request waits and ends by itself afterwards.

Source: Cache-Craft section 3.5.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from ragcache_core.identity.keys import VariantKey
from ragcache_engine.scheduler.request import RequestPhase, RequestState

HOLD_S = 10.0
"""Time for which the store holds what a waiting request needs, unless the hold is renewed."""
RENEW_S = 5.0


class WaitingRequests:
    """The requests that may still wait when a step begins. For vLLM's scheduler thread.

    Args:
        clock: Returns monotonic seconds.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._waiting: dict[str, RequestState] = {}
        self._due_s: dict[str, float] = {}

    def __len__(self) -> int:
        return len(self._waiting)

    def add(self, request_id: str, request: RequestState) -> None:
        """Add a request that vLLM has taken into its queue."""
        self._waiting[request_id] = request

    def remove(self, request_id: str) -> None:
        """Remove a request, if it is there."""
        self._waiting.pop(request_id, None)
        self._due_s.pop(request_id, None)

    def take_due(self) -> list[VariantKey]:
        """Return what to hold now, once each: of new requests, and of those due to be renewed.

        Requests that do not wait any more are forgotten.
        """
        now_s = self._clock()
        variants: dict[VariantKey, None] = {}
        for request_id, request in list(self._waiting.items()):
            lookup = request.lookup
            if request.phase is not RequestPhase.WAITING or lookup is None:
                self.remove(request_id)
            elif not lookup.done() or now_s < self._due_s.get(request_id, now_s):
                continue
            elif lookup.cancelled() or lookup.exception() is not None:
                self.remove(request_id)
            else:
                variants.update(dict.fromkeys(lookup.result().variants_to_load))
                self._due_s[request_id] = now_s + RENEW_S
        return list(variants)
