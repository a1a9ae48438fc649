"""What computing a chunk's KV took: its share of the forward passes that computed it."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial

from ragcache_engine.kv_cache.device_event import DeviceEvent
from ragcache_engine.protocol.messages import ComputedRange, VariantSpan


@dataclass(frozen=True, slots=True)
class _Pass:
    """A forward pass over num_tokens tokens."""

    began: DeviceEvent
    ended: DeviceEvent
    num_tokens: int

    def token_s(self) -> float:
        """Seconds that each of its tokens took; waits until it has ended."""
        return self.ended.seconds_since(self.began) / max(1, self.num_tokens)


@dataclass(frozen=True, slots=True)
class _Computed:
    """Prompt tokens [first, end) and the pass that computed them."""

    first: int
    end: int
    by: _Pass


class ComputeCosts:
    """Seconds by prompt tokens of the requests that are being computed.

    Tokens of one pass share its time alike: what passes differ in (attention to what is before)
    is small beside what they have in common, at the lengths of chunks.
    """

    def __init__(self) -> None:
        self._computed: dict[str, list[_Computed]] = {}

    def add(
        self, computing: Iterable[ComputedRange], num_tokens: int, began: DeviceEvent, ended: DeviceEvent
    ) -> None:
        """A forward pass over num_tokens tokens of all requests began and ended."""
        by = _Pass(began, ended, num_tokens)
        for one in computing:
            computed = _Computed(one.first, one.end, by)
            self._computed.setdefault(one.request_id, []).append(computed)

    def of(self, request_id: str, span: VariantSpan) -> Callable[[], float]:
        """Tells the seconds that span took, or would have if no token of it had been at hand.

        0: unknown. It waits until the passes that computed it have ended, on whatever thread.
        """
        return partial(_cost_s, tuple(self._computed.get(request_id, ())), span)

    def forget(self, request_id: str) -> None:
        """The request has ended."""
        self._computed.pop(request_id, None)


def _cost_s(computed: Iterable[_Computed], span: VariantSpan) -> float:
    tokens, seconds = 0, 0.0
    for one in computed:
        overlap = min(one.end, span.end) - max(one.first, span.start)
        if overlap > 0:
            tokens += overlap
            seconds += overlap * one.by.token_s()
    return seconds / tokens * (span.end - span.start) if tokens else 0.0
