"""The queue of one engine as one gateway knows it.

The engine publishes its queue. The gateway adds what it has sent and what the published queue does
not contain yet, so a request is never in both and never in neither. All gateways see one queue, and
each knows its own requests a moment earlier.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection
from dataclasses import replace
from typing import Final

from ragcache_core.cluster.pending_work import EngineLoad
from ragcache_core.cluster.sent_requests import AcceptedNumbers, SentRequest

MAX_SILENCE_S: Final = 3.0
"""The queue of an engine that has told nothing for longer, not even that nothing has changed, is
not known. Three of its heartbeats fit in."""


STALL_SILENCE_S: Final = 6.0
"""An engine that has requests, and neither answers nor heartbeats for so long, does not work."""

MIN_STALL_S: Final = 10.0
STALL_RATIO: Final = 3.0
"""Time without a change of the queue that an engine has, beside this many times what is pending."""


class EngineQueue:
    """The requests that a gateway has sent to an engine, and the queue that the engine published.

    Times are seconds on one clock.

    Args:
        sender: Random name that no other client of the engine has.
    """

    def __init__(self, sender: str) -> None:
        self.sender = sender
        self._numbers = itertools.count(1)
        # Requests without a first token, by number. Accepted ones are in the published queue.
        self._accepted: dict[int, SentRequest] = {}
        self._unaccepted: dict[int, SentRequest] = {}
        self._published: EngineLoad | None = None
        self._published_s = 0.0
        self._heard_s = 0.0

    @property
    def num_pending(self) -> int:
        """Requests of this gateway that have no first token."""
        return len(self._accepted) + len(self._unaccepted)

    def begin(self, work_s: float, *, is_background: bool) -> SentRequest:
        """Number a request that is about to be sent.

        Args:
            work_s: Predicted seconds of its load and its prefill; 0: not known.
            is_background: It has a low priority, so no question waits for it.
        """
        sent = SentRequest(self.sender, next(self._numbers), work_s, is_background)
        self._unaccepted[sent.number] = sent
        return sent

    def end(self, sent: SentRequest) -> None:
        """Record that a request has its first token, or has failed."""
        self._unaccepted.pop(sent.number, None)
        self._accepted.pop(sent.number, None)

    def publish(self, load: EngineLoad, accepted: AcceptedNumbers, now_s: float) -> None:
        """Take over the queue that the engine publishes now.

        Args:
            accepted: The requests of this gateway that it contains or that have left it.
        """
        self._published, self._published_s, self._heard_s = load, now_s, now_s
        for number in [one for one in self._unaccepted if one in accepted]:
            self._accepted[number] = self._unaccepted.pop(number)

    def hear(self, now_s: float) -> None:
        """Record that the engine has told that nothing has changed."""
        self._heard_s = now_s

    def is_published(self, now_s: float) -> bool:
        """Return whether the engine has published its queue, and has not gone silent since."""
        return self._published is not None and now_s - self._heard_s <= MAX_SILENCE_S

    def is_stalled(self, now_s: float, quiet_since_s: float) -> bool:
        """Tell whether an engine with requests has stopped to work.

        Its feed is silent, or its queue has stayed for much longer than the pending work takes. An
        engine that has published nothing is not judged.

        Args:
            quiet_since_s: Since when it has requests and has sent nothing of an answer.
        """
        if self._published is None:
            return False
        if now_s - self._heard_s > STALL_SILENCE_S:
            return now_s - quiet_since_s > STALL_SILENCE_S
        sent_s = sum(one.work_s for one in self._unaccepted.values())
        expected_s = self._published.pending_s + self._published.background_s + sent_s
        since_s = max(quiet_since_s, self._published_s)
        return now_s - since_s > MIN_STALL_S + STALL_RATIO * expected_s

    def load(self, now_s: float, in_flight: int) -> EngineLoad:
        """Return what the engine has to do now.

        An engine that publishes nothing has what this gateway has sent.

        Args:
            in_flight: Requests of this gateway that the engine is answering.
        """
        if self._published is not None and self.is_published(now_s):
            known = self._published.aged(now_s - self._published_s)
            return _with_requests(known, self._unaccepted.values())
        known = EngineLoad(num_decoding=max(0, in_flight - self.num_pending))
        return _with_requests(known, [*self._accepted.values(), *self._unaccepted.values()])


def _with_requests(load: EngineLoad, requests: Collection[SentRequest]) -> EngineLoad:
    if not requests:
        return load
    seconds, counts = {False: 0.0, True: 0.0}, {False: 0, True: 0}  # by whether of the background
    for one in requests:
        seconds[one.is_background] += one.work_s
        counts[one.is_background] += 1
    return replace(
        load,
        pending_s=load.pending_s + seconds[False],
        background_s=load.background_s + seconds[True],
        num_pending=load.num_pending + counts[False],
        num_background=load.num_background + counts[True],
    )
