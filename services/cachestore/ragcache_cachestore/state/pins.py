"""Pins: variants that must not be evicted for some time, within a bound."""

from __future__ import annotations

from ragcache_core.identity.keys import VariantKey


class Pins:
    """Pinned keys and when their pins end; at most capacity_bytes of values. Under a lock."""

    def __init__(self, capacity_bytes: int) -> None:
        self.capacity_bytes = capacity_bytes
        self.used_bytes = 0
        self._pins: dict[VariantKey, tuple[float, int]] = {}

    def __contains__(self, key: object) -> bool:
        return key in self._pins

    def pin(self, key: VariantKey, num_bytes: int, until: float) -> bool:
        """Pin key, or its pin anew. False if it would be more than may be pinned."""
        _, before = self._pins.get(key, (0.0, 0))
        if self.used_bytes - before + num_bytes > self.capacity_bytes:
            return False
        self.used_bytes += num_bytes - before
        self._pins[key] = (until, num_bytes)
        return True

    def unpin(self, key: VariantKey) -> bool:
        """End the pin of key. False if there was none."""
        pin = self._pins.pop(key, None)
        if pin is None:
            return False
        self.used_bytes -= pin[1]
        return True

    def expire(self, now: float) -> None:
        """End the pins whose time is over."""
        for key in [key for key, (until, _) in self._pins.items() if until <= now]:
            self.unpin(key)
