"""``python -m ragcache_engine.drain``: what an engine's container runs before it is stopped.

Waits until vLLM runs no request and none waits, so that a rolling update or a scale-down ends no
answer in the middle. First it waits until whoever chooses engines by name has stopped choosing this
one. A server that is dead has no requests to wait for.

Imports nothing heavy: the container is being stopped, and every second counts.
"""

from __future__ import annotations

import argparse
import contextlib
import sys
import time
import urllib.request
from collections.abc import Callable

METRICS_URL = "http://127.0.0.1:8000/metrics"
SETTLE_S = 8.0
"""For the engine's address to go out of use: DNS caches it for 5 s, gateways for 2 s."""
POLL_S = 0.5
_ANSWER_TIMEOUT_S = 5.0
_GAUGES = ("vllm:num_requests_running", "vllm:num_requests_waiting")


def unfinished(metrics: str) -> int:
    """Requests that run or wait, from Prometheus' text."""
    found = 0.0
    for line in metrics.splitlines():
        name, _, _ = line.replace("{", " ").partition(" ")
        if name in _GAUGES:
            found += float(line.rsplit(maxsplit=1)[1])
    return int(found)


def fetch(url: str, timeout_s: float = _ANSWER_TIMEOUT_S) -> str | None:
    """The server's metrics; None if there is none. Raises TimeoutError if it is too busy to say."""
    # Never through a proxy: the server is in this container.
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with opener.open(url, timeout=timeout_s) as reply:
            return str(reply.read().decode(errors="replace"))
    except OSError as error:  # urllib's own are among these
        if isinstance(getattr(error, "reason", error), TimeoutError):
            raise TimeoutError from error
        return None


def drain(
    fetch: Callable[[], str | None],
    *,
    settle_s: float,
    deadline_s: float,
    clock: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], None] = time.sleep,
) -> str:
    """Wait; returns what ended the wait. deadline_s: from the start, settling included."""
    began = clock()
    sleep(min(settle_s, deadline_s))
    left, idle = "some", False
    while True:
        with contextlib.suppress(TimeoutError):
            metrics = fetch()
            if metrics is None:
                return "there is no server"
            left = str(unfinished(metrics))
        # Twice in a row: a request that has only just come in is in neither gauge for a moment.
        if left == "0" and idle:
            return "no request is left"
        idle = left == "0"
        if clock() - began + POLL_S > deadline_s:
            return f"time is up, requests left: {left}"
        sleep(POLL_S)


def main() -> int:
    """Entry point; whatever it finds, the container is to be stopped."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--url", default=METRICS_URL, help="vLLM's metrics")
    parser.add_argument("--deadline-s", type=float, required=True, help="longest wait in all")
    parser.add_argument(
        "--settle-s", type=float, default=SETTLE_S, help="wait before the first look"
    )
    given = parser.parse_args()
    ended = drain(lambda: fetch(given.url), settle_s=given.settle_s, deadline_s=given.deadline_s)
    print(f"ragcache_engine.drain: {ended}", file=sys.stderr)
    return 0


if __name__ == "__main__":
    sys.exit(main())
