"""Waits until vLLM runs no request, before the engine's container is stopped.

The container's preStop hook runs ``python -m ragcache_engine.drain``, so that a rolling update or a
scale-down interrupts no answer. First it waits until DNS caches and gateways no longer use the
engine's address. If the server has already stopped, it does not wait.

It imports nothing large, because the time to stop a container is limited.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import ssl
import sys
import time
import urllib.request
from collections.abc import Callable

METRICS_ADDRESS = "127.0.0.1:8000/metrics"
SETTLE_S = 8.0
"""Time until no client uses the engine's address: DNS caches it for 5 s, gateways for 2 s."""
POLL_S = 0.5
_ANSWER_TIMEOUT_S = 5.0
_GAUGES = ("vllm:num_requests_running", "vllm:num_requests_waiting")


def count_unfinished(metrics: str) -> int:
    """Return how many requests run or wait, from metrics in Prometheus' text format."""
    total = 0.0
    for line in metrics.splitlines():
        name, _, _ = line.replace("{", " ").partition(" ")
        if name in _GAUGES:
            total += float(line.rsplit(maxsplit=1)[1])
    return int(total)


def fetch_metrics(url: str, timeout_s: float = _ANSWER_TIMEOUT_S) -> str | None:
    """Return the server's metrics, or None if there is no server.

    Raises:
        TimeoutError: The server is too busy to answer.
    """
    # The server is in this container, so never use a proxy.
    # And its certificate has another name than the loopback address.
    opener = urllib.request.build_opener(
        urllib.request.ProxyHandler({}),
        urllib.request.HTTPSHandler(context=ssl._create_unverified_context()),
    )
    try:
        with opener.open(url, timeout=timeout_s) as reply:
            return str(reply.read().decode(errors="replace"))
    except OSError as error:  # includes urllib's own errors
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
    """Wait until the server has no requests. Return why the wait ended.

    Args:
        fetch: Returns the server's metrics, as ``fetch_metrics`` does.
        settle_s: How long to wait before the first poll.
        deadline_s: Longest wait, including ``settle_s``.
        clock: Returns seconds.
        sleep: Waits for seconds.
    """
    began = clock()
    sleep(min(settle_s, deadline_s))
    left, idle = "unknown", False
    while True:
        with contextlib.suppress(TimeoutError):
            metrics = fetch()
            if metrics is None:
                return "there is no server"
            left = str(count_unfinished(metrics))
        # Twice in a row: a request that has just arrived is in neither gauge for a short time.
        if left == "0" and idle:
            return "no request is left"
        idle = left == "0"
        if clock() - began + POLL_S > deadline_s:
            return f"time is up, requests left: {left}"
        sleep(POLL_S)


def main() -> int:
    """Run the command. It always succeeds, because the container is stopped in any case."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    scheme = "https" if os.environ.get("RAGCACHE_TLS_DIR") else "http"
    parser.add_argument("--url", default=f"{scheme}://{METRICS_ADDRESS}", help="vLLM's metrics")
    parser.add_argument("--deadline-s", type=float, required=True, help="longest wait in seconds")
    parser.add_argument(
        "--settle-s", type=float, default=SETTLE_S, help="wait in seconds before the first poll"
    )
    arguments = parser.parse_args()
    ended = drain(
        lambda: fetch_metrics(arguments.url),
        settle_s=arguments.settle_s,
        deadline_s=arguments.deadline_s,
    )
    print(f"ragcache_engine.drain: {ended}", file=sys.stderr)
    return 0


if __name__ == "__main__":
    sys.exit(main())
