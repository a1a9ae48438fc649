"""What computing a chunk's KV took: its share of the forward passes that computed it."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from ragcache_engine.transfer import Computing, Span


@dataclass(frozen=True, slots=True)
class _Computed:
    """Prompt tokens [first, end) and the seconds that each of them took."""

    first: int
    end: int
    token_s: float


class ComputeCosts:
    """Seconds by prompt tokens of the requests that are being computed.

    Tokens of one pass share its time alike: what passes differ in (attention to what is before)
    is small beside what they have in common, at the lengths of chunks.
    """

    def __init__(self) -> None:
        self._computed: dict[str, list[_Computed]] = {}

    def add(self, computing: Iterable[Computing], num_tokens: int, seconds: float) -> None:
        """A forward pass over num_tokens tokens of all requests took seconds."""
        for one in computing:
            computed = _Computed(one.first, one.end, seconds / max(1, num_tokens))
            self._computed.setdefault(one.request_id, []).append(computed)

    def cost_s(self, request_id: str, span: Span) -> float:
        """Seconds that span took, or would have if no token of it had been at hand; 0: unknown."""
        tokens, seconds = 0, 0.0
        for computed in self._computed.get(request_id, ()):
            overlap = min(computed.end, span.end) - max(computed.first, span.start)
            if overlap > 0:
                tokens += overlap
                seconds += overlap * computed.token_s
        return seconds / tokens * (span.end - span.start) if tokens else 0.0

    def forget(self, request_id: str) -> None:
        """The request has ended."""
        self._computed.pop(request_id, None)
