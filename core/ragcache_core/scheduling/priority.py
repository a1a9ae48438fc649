"""The priority of a request in an engine's queue: cache-aware reordering.

vLLM admits waiting requests by (priority, arrival), and the lowest priority first. The gateway
composes the priority when it sends a request:

    band * 2^44 + sent_ms + delay_ms
    delay_ms = window_ms * (1 - cached / length)

A band goes before all later ones. Inside a band, a request is delayed by the share of its prompt
that has to be computed. Of two requests sent at once, the one with more cached over computed tokens
goes first. A request sent more than a window later never goes before one that waits. That bounds
starvation without a queue of our own, and holds for all gateways whose clocks agree. If clocks
differ, the bound is the window and that difference.

vLLM preempts the highest priority when its blocks run out. That is a late request, so a request
that was admitted once is preempted by older ones or by those of its window only.

With several tenants, ``fair_queue`` adds to the delay. A request is then as late as it would end if
its tenant had its share of the engines.

Differences to the paper: the window is a time and slides, so two requests are never separated by a
border between windows. The ratio is that of the plan when the request is sent.

Source: RAGCache section 5.2.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from ragcache_core.access.key_file import MAX_PRIORITY

TIME_BITS: Final = 44
"""Bits for milliseconds of Unix time, which are enough until the year 2527. The 20 others of a
signed 64-bit number, as vLLM takes it, have the band."""

GUESS_BAND: Final = MAX_PRIORITY + 1
"""Band of prefills for searches that have not ended. They follow all questions."""

BACKGROUND_BAND: Final = MAX_PRIORITY + 2
"""Band of work that no client waits for."""


def compose(band: int, sent_ms: int, delay_ms: int) -> int:
    """Return a priority; a lower one goes first.

    Args:
        band: Goes before all higher bands.
        sent_ms: Unix time in milliseconds.
        delay_ms: By how much later the request counts as sent.
    """
    return (band << TIME_BITS) + sent_ms + delay_ms


@dataclass(frozen=True, slots=True)
class QueuePosition:
    """What decides when an engine admits a request.

    Attributes:
        band: Of the caller's key, or one of the bands above.
        window_ms: Requests sent this much later may go first. 0: requests keep their order.
        cached_share: Share of the prompt that is predicted to be cached or loaded.
        tenant_delay_ms: By how much later it counts as sent because of its tenant's other requests.
        tenant: Whose requests it waits with; None: those of all callers without a tenant.
        tenant_excess: The work before it grows by this factor, because tenants below their share
            may still send requests that go first.
    """

    band: int
    window_ms: int = 0
    cached_share: float = 0.0
    tenant_delay_ms: int = 0
    tenant: str | None = None
    tenant_excess: float = 1.0

    @property
    def delay_ms(self) -> int:
        """By how much later it counts as sent because of what it computes; at most the window."""
        return round(self.window_ms * (1 - self.cached_share))

    def priority(self, sent_ms: int) -> int:
        """Return the priority of a request that is sent at a Unix time in milliseconds."""
        return compose(self.band, sent_ms, self.delay_ms + self.tenant_delay_ms)
