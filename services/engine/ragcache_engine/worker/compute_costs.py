"""Measure what it costs to compute a chunk's KV, as its share of forward passes."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial

from ragcache_engine.kv_cache.device_event import DeviceEvent
from ragcache_engine.protocol.messages import ComputedRange, VariantSpan


@dataclass(frozen=True, slots=True)
class _ForwardPass:
    """A forward pass over num_tokens tokens."""

    began: DeviceEvent
    ended: DeviceEvent
    num_tokens: int

    def token_s(self) -> float:
        """Return the seconds per token; waits until the pass has ended."""
        return self.ended.seconds_since(self.began) / max(1, self.num_tokens)


@dataclass(frozen=True, slots=True)
class _TimedRange:
    """Prompt tokens [first, end) and the pass that computed them."""

    first: int
    end: int
    forward_pass: _ForwardPass


class ComputeCosts:
    """Compute cost of the prompt tokens of running requests.

    All tokens of one pass get an equal share of its time. PGDSF has costs of its own, predicted
    from cached and computed tokens (``ReuseCosts.prefill_token_s``).
    """

    def __init__(self) -> None:
        self._ranges: dict[str, list[_TimedRange]] = {}

    def add(
        self,
        computed: Iterable[ComputedRange],
        num_tokens: int,
        began: DeviceEvent,
        ended: DeviceEvent,
    ) -> None:
        """Add a forward pass over num_tokens tokens of all requests."""
        forward_pass = _ForwardPass(began, ended, num_tokens)
        for one in computed:
            timed = _TimedRange(one.first, one.end, forward_pass)
            self._ranges.setdefault(one.request_id, []).append(timed)

    def cost_of(self, request_id: str, span: VariantSpan) -> Callable[[], float]:
        """Return a function that returns the seconds to compute a span without cached tokens.

        The function returns 0 if the cost is unknown. It waits until the passes that computed the
        span have ended, so any thread may call it.
        """
        return partial(_cost_s, tuple(self._ranges.get(request_id, ())), span)

    def remove(self, request_id: str) -> None:
        """Remove a request that has ended."""
        self._ranges.pop(request_id, None)


def _cost_s(ranges: Iterable[_TimedRange], span: VariantSpan) -> float:
    tokens, seconds = 0, 0.0
    for one in ranges:
        overlap = min(one.end, span.end) - max(one.first, span.start)
        if overlap > 0:
            tokens += overlap
            seconds += overlap * one.forward_pass.token_s()
    return seconds / tokens * (span.end - span.start) if tokens else 0.0
