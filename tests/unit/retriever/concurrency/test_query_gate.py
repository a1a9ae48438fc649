"""Work of ingestion waits while a query is answered, and does not stop for ever."""

from __future__ import annotations

import threading

from ragcache_retriever.concurrency.query_gate import QueryGate


def test_without_a_query_nothing_waits() -> None:
    gate = QueryGate(clock=lambda: 0.0)
    gate.wait()
    with gate.query():
        pass
    gate.wait()


def test_work_waits_until_the_last_query_is_answered(monkeypatch) -> None:  # type: ignore[no-untyped-def]
    monkeypatch.setattr("ragcache_retriever.concurrency.query_gate.MAX_WAIT_S", 60.0)
    gate = QueryGate()
    order: list[str] = []

    def work() -> None:
        gate.wait()
        order.append("work")

    worker = threading.Thread(target=work)
    with gate.query():
        with gate.query():
            worker.start()
        order.append("one query")
        worker.join(0.05)
        order.append("both queries")
    worker.join(60)
    assert order == ["one query", "both queries", "work"]


def test_queries_without_end_do_not_stop_the_work() -> None:
    gate = QueryGate()
    with gate.query():
        gate.wait()  # it returns


def test_after_a_wait_some_work_is_done_before_the_next() -> None:
    now_s = [0.0]
    readings: list[float] = []

    def clock() -> float:
        readings.append(now_s[0])
        return now_s[0]

    gate = QueryGate(clock)
    with gate.query():
        gate.wait()
        assert len(readings) == 2  # before and after the wait
        now_s[0] += 0.001
        gate.wait()
        assert len(readings) == 3  # too early to wait
        now_s[0] += 0.005
        gate.wait()
        assert len(readings) == 5
