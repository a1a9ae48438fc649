"""The numbered events of a store, for clients that follow its contents."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable

from ragcache_core.identity.keys import VariantKey
from ragcache_core.identity.variant import Tier, VariantInfo
from ragcache_core.store_api import ID_BYTES, Event, EventKind

MAX_EVENTS = 16_384
"""Number of events that a watcher may lag behind before it needs a snapshot."""


class EventFeed:
    """The last events since the store started. The store's lock guards it.

    Attributes:
        boot: Random and new at every start, so that a watcher notices a restart.
        sequence: Number of the last event.
    """

    def __init__(self, max_events: int = MAX_EVENTS) -> None:
        self.boot = os.urandom(ID_BYTES)
        self.sequence = 0
        self._events: deque[Event] = deque(maxlen=max_events)
        self._watchers: list[Callable[[], None]] = []

    def publish(
        self, kind: EventKind, key: VariantKey, tier: Tier | None, info: VariantInfo
    ) -> None:
        """Number an event and wake the watchers.

        Args:
            tier: Where the variant is stored from now on.
        """
        self.sequence += 1
        self._events.append(Event(self.boot, self.sequence, kind, key, tier, info))
        for wake in self._watchers:
            wake()

    def after(self, sequence: int) -> list[Event] | None:
        """Return the events after sequence, or None if not all of them are kept."""
        missing = self.sequence - sequence
        if not 0 <= missing <= len(self._events):
            return None
        return [self._events[index] for index in range(-missing, 0)]

    def watch(self, wake: Callable[[], None]) -> None:
        """Call wake at every event from now on. It must not block and must not call back."""
        self._watchers.append(wake)

    def unwatch(self, wake: Callable[[], None]) -> None:
        """Stop calling wake."""
        self._watchers.remove(wake)
