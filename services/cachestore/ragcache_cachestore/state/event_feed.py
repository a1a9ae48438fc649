"""What happens in a store, numbered, for whoever keeps a view of it."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable

from ragcache_core.identity.keys import VariantKey
from ragcache_core.identity.variant import Tier, VariantInfo
from ragcache_core.store_api import ID_BYTES, Event, EventKind

REMEMBERED = 16_384
"""Events that a watcher may lag behind before it needs a snapshot."""


class EventFeed:
    """The last events of one boot. Under the store's lock.

    boot: new at every start, so that a restart cannot be mistaken for a pause.
    """

    def __init__(self, remembered: int = REMEMBERED) -> None:
        self.boot = os.urandom(ID_BYTES)
        self.sequence = 0
        self._events: deque[Event] = deque(maxlen=remembered)
        self._watchers: list[Callable[[], None]] = []

    def publish(
        self, kind: EventKind, key: VariantKey, tier: Tier | None, info: VariantInfo
    ) -> None:
        """Number an event and wake the watchers. tier: where the variant is from now on."""
        self.sequence += 1
        self._events.append(Event(self.boot, self.sequence, kind, key, tier, info))
        for wake in self._watchers:
            wake()

    def after(self, sequence: int) -> list[Event] | None:
        """Events after sequence; None if they are not all remembered, or it is of no past event."""
        missing = self.sequence - sequence
        if not 0 <= missing <= len(self._events):
            return None
        return [self._events[place] for place in range(-missing, 0)]

    def watch(self, wake: Callable[[], None]) -> None:
        """Call wake at every event from now on; it must return at once and call nothing back."""
        self._watchers.append(wake)

    def unwatch(self, wake: Callable[[], None]) -> None:
        """Undo watch."""
        self._watchers.remove(wake)
