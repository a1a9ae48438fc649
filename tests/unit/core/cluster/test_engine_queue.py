"""Gateways that know one queue of an engine: what it published, and what they have sent since."""

from __future__ import annotations

from collections import defaultdict, deque
from dataclasses import dataclass

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from ragcache_core.cluster.engine_queue import (
    MAX_SILENCE_S,
    MIN_STALL_S,
    STALL_RATIO,
    STALL_SILENCE_S,
    EngineQueue,
)
from ragcache_core.cluster.pending_work import EngineLoad, PendingWork
from ragcache_core.cluster.sent_requests import AcceptedNumbers, SentRequest

GATEWAYS = ("one", "two", "three")


def test_a_request_counts_until_the_engine_counts_it() -> None:
    queue = EngineQueue("gateway")
    queue.publish(EngineLoad(), AcceptedNumbers(), 0.0)
    sent = queue.begin(1.0, is_background=False)
    assert queue.load(0.0, 1) == EngineLoad(1.0, num_pending=1)
    queue.publish(EngineLoad(0.75, num_pending=1), AcceptedNumbers().add(sent.number), 0.5)
    assert queue.load(0.5, 1) == EngineLoad(0.75, num_pending=1)
    queue.end(sent)
    assert queue.load(0.5, 1) == EngineLoad(0.75, num_pending=1)


def test_a_published_queue_gets_shorter_and_own_requests_do_not() -> None:
    queue = EngineQueue("gateway")
    queue.publish(EngineLoad(1.0, num_pending=1), AcceptedNumbers(), 10.0)
    queue.begin(0.5, is_background=False)
    queue.begin(9.0, is_background=True)
    assert queue.load(10.25, 2) == EngineLoad(1.25, 9.0, num_pending=2, num_background=1)
    assert queue.load(12.0, 2).pending_s == 0.5


def test_a_silent_engine_has_what_the_gateway_has_sent() -> None:
    queue = EngineQueue("gateway")
    sent = queue.begin(1.0, is_background=False)
    assert queue.load(0.0, 3) == EngineLoad(1.0, num_pending=1, num_decoding=2)
    accepted = AcceptedNumbers().add(sent.number)
    queue.publish(EngineLoad(9.0, num_pending=5, free_tokens=7), accepted, 0.0)
    queue.hear(5.0)
    assert queue.is_published(5.0 + MAX_SILENCE_S)
    assert queue.load(5.0, 3) == EngineLoad(4.0, num_pending=5, free_tokens=7)
    assert not queue.is_published(5.1 + MAX_SILENCE_S)
    assert queue.load(5.1 + MAX_SILENCE_S, 3) == EngineLoad(1.0, num_pending=1, num_decoding=2)


def test_an_engine_that_has_restarted_knows_no_request() -> None:
    queue = EngineQueue("gateway")
    lost = queue.begin(1.0, is_background=False)
    queue.publish(EngineLoad(1.0, num_pending=1), AcceptedNumbers().add(lost.number), 0.0)
    queue.publish(EngineLoad(), AcceptedNumbers(), 1.0)  # it is new
    queue.end(lost)  # its connection broke
    again = queue.begin(2.0, is_background=False)
    assert queue.load(1.0, 1) == EngineLoad(2.0, num_pending=1)
    queue.publish(EngineLoad(2.0, num_pending=1), AcceptedNumbers().add(again.number), 1.0)
    assert queue.load(1.0, 1) == EngineLoad(2.0, num_pending=1)


@dataclass(frozen=True)
class Sent:
    gateway: str
    request: SentRequest

    @property
    def id(self) -> str:
        return f"{self.gateway} {self.request.number}"


class SharedQueue(RuleBasedStateMachine):
    """Gateways, an engine, and messages that take their time. Requests overtake each other."""

    def __init__(self) -> None:
        super().__init__()
        self.queues = {name: EngineQueue(name) for name in GATEWAYS}
        self.work = PendingWork()
        self.accepted: dict[str, AcceptedNumbers] = defaultdict(AcceptedNumbers)
        self.travelling: list[Sent] = []
        self.waiting: list[Sent] = []
        self.answered: list[Sent] = []  # the first token travels
        self.feeds: dict[str, deque[tuple[EngineLoad, AcceptedNumbers]]] = {
            name: deque() for name in GATEWAYS
        }
        self.publish()
        for name in GATEWAYS:
            self.deliver_all(name)

    @rule(name=st.sampled_from(GATEWAYS), seconds=st.integers(1, 8), background=st.booleans())
    def send(self, name: str, seconds: int, background: bool) -> None:
        request = self.queues[name].begin(seconds / 4, is_background=background)
        self.travelling.append(Sent(name, request))

    @precondition(lambda self: self.travelling)
    @rule(data=st.data())
    def accept(self, data: st.DataObject) -> None:
        sent = data.draw(st.sampled_from(self.travelling))
        self.travelling.remove(sent)
        request = sent.request
        self.work.accept(sent.id, 10, request.work_s, is_background=request.is_background)
        self.accepted[sent.gateway] = self.accepted[sent.gateway].add(request.number)
        self.waiting.append(sent)

    @precondition(lambda self: self.travelling)
    @rule(data=st.data())
    def lose(self, data: st.DataObject) -> None:
        sent = data.draw(st.sampled_from(self.travelling))
        self.travelling.remove(sent)
        self.queues[sent.gateway].end(sent.request)

    @precondition(lambda self: self.waiting)
    @rule(data=st.data(), share=st.integers(0, 4))
    def compute(self, data: st.DataObject, share: int) -> None:
        sent = data.draw(st.sampled_from(self.waiting))
        self.work.predict(sent.id, sent.request.work_s * share / 4)

    @precondition(lambda self: self.waiting)
    @rule(data=st.data())
    def first_token(self, data: st.DataObject) -> None:
        sent = data.draw(st.sampled_from(self.waiting))
        self.waiting.remove(sent)
        self.work.decode(sent.id)
        self.answered.append(sent)

    @precondition(lambda self: self.answered)
    @rule(data=st.data())
    def finish(self, data: st.DataObject) -> None:
        sent = data.draw(st.sampled_from(self.answered))
        self.answered.remove(sent)
        self.work.end(sent.id)
        self.queues[sent.gateway].end(sent.request)

    @rule()
    def publish(self) -> None:
        load = self.work.load(0.0)
        for name, feed in self.feeds.items():
            feed.append((load, self.accepted[name]))

    @rule(name=st.sampled_from(GATEWAYS), latest_only=st.booleans())
    def deliver(self, name: str, latest_only: bool) -> None:
        feed = self.feeds[name]
        if latest_only:
            while len(feed) > 1:
                feed.popleft()
        if feed:
            self.queues[name].publish(*feed.popleft(), 0.0)

    def deliver_all(self, name: str) -> None:
        while self.feeds[name]:
            self.queues[name].publish(*self.feeds[name].popleft(), 0.0)

    @invariant()
    def what_a_gateway_has_sent_is_never_missing(self) -> None:
        """A gateway never expects less than its own requests that travel, with any messages."""
        for name, queue in self.queues.items():
            own = [one.request for one in self.travelling if one.gateway == name]
            load = queue.load(0.0, 0)
            assert load.num_pending + load.num_background >= len(own)

    @invariant()
    def with_the_last_message_all_know_the_true_queue(self) -> None:
        """What was published last, and what has not arrived, are all requests, each once."""
        self.publish()
        for name, queue in self.queues.items():
            self.deliver_all(name)
            own = [one.request for one in self.travelling if one.gateway == name]
            true = self.work.load(0.0)
            load = queue.load(0.0, 0)
            seconds = {
                kind: sum(one.work_s for one in own if one.is_background is kind)
                for kind in (False, True)
            }
            assert load.pending_s == pytest.approx(true.pending_s + seconds[False])
            assert load.background_s == pytest.approx(true.background_s + seconds[True])
            pending = load.num_pending + load.num_background
            assert pending == true.num_pending + true.num_background + len(own)


class DelayedQueue(SharedQueue):
    """As ``SharedQueue``, but the last message may not have come."""

    with_the_last_message_all_know_the_true_queue = None  # type: ignore[assignment]


TestSharedQueue = SharedQueue.TestCase
TestDelayedQueue = DelayedQueue.TestCase
TestSharedQueue.settings = TestDelayedQueue.settings = settings(stateful_step_count=25)


@given(pending_s=st.floats(0, 100), waited_s=st.floats(0, 1000))
def test_an_engine_stalls_if_its_queue_stays_longer_than_its_work_takes(
    pending_s: float, waited_s: float
) -> None:
    queue = EngineQueue("gateway")
    assert not queue.is_stalled(waited_s, 0.0), "it has published nothing"
    queue.publish(EngineLoad(pending_s, num_pending=1), AcceptedNumbers(), 0.0)
    queue.hear(waited_s)
    assert queue.is_stalled(waited_s, 0.0) == (waited_s > MIN_STALL_S + STALL_RATIO * pending_s)
    assert not queue.is_stalled(waited_s, waited_s), "it has just sent something"
    queue.publish(EngineLoad(pending_s, num_pending=1), AcceptedNumbers(), waited_s)
    assert not queue.is_stalled(waited_s, 0.0), "its queue has just changed"


def test_a_silent_feed_stalls_an_engine_that_sends_nothing() -> None:
    queue = EngineQueue("gateway")
    queue.publish(EngineLoad(1000.0, num_pending=1), AcceptedNumbers(), 0.0)
    later_s = STALL_SILENCE_S + 0.1
    assert queue.is_stalled(later_s, 0.0)
    assert not queue.is_stalled(later_s, later_s - 1.0)
