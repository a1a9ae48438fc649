"""A stand-in for every part of a platform: a small real process behind a real pod spec.

Run as a script it says over HTTP that it is well, where probes ask for that, and misbehaves as it
is told.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from ragcache_operator.builders import build_children
from ragcache_operator.builders.metadata import WORKLOADS
from ragcache_operator.builders.placement import PlatformPlacement
from ragcache_operator.spec.ragcache import RagCache

HABITS = ("dies", "dies-once", "ignores-term", "has-child", "never-ready", "no-answers")


def stand_in(
    cache: RagCache, site: PlatformPlacement, habits: Mapping[str, str] | None = None
) -> list[dict[str, Any]]:
    """The children of cache with every command replaced by this script.

    habits: one of HABITS by component.
    """
    children = build_children(cache, site)
    for child in children:
        if child["kind"] not in WORKLOADS:
            continue
        pod = child["spec"]["template"]["spec"]
        # So long that the platform's own bound on it is what a test sees.
        pod["terminationGracePeriodSeconds"] = 3600
        [container] = pod["containers"]
        for probe in ("startupProbe", "readinessProbe", "livenessProbe"):
            container[probe]["httpGet"]["scheme"] = "HTTP"  # as stand-ins serve it
        component = container["name"]
        container["command"] = [
            *("python", str(Path(__file__).resolve())),
            str(container["readinessProbe"]["httpGet"]["port"]),
            (habits or {}).get(component, ""),
        ]
        container["args"] = []
    return children


def stand_ins(**habits: str) -> Callable[[RagCache, PlatformPlacement], list[dict[str, Any]]]:
    """Something to put in the place of build_children."""
    return lambda cache, site: stand_in(cache, site, habits)


def living(pids: list[int]) -> list[int]:
    """Those of the processes that run."""
    import psutil

    return [
        pid
        for pid in pids
        if psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    ]


def _serve(port: int, habit: str) -> None:
    import signal
    import subprocess

    print(f"part on port {port}, habit {habit!r}", flush=True)
    if habit == "dies":
        print("this part has no luck", flush=True)
        sys.exit(3)
    if habit == "dies-once" and not Path("died").exists():
        Path("died").touch()
        sys.exit(4)
    if habit == "has-child":
        sleeper = "import time; time.sleep(1000)"
        child = subprocess.Popen([sys.executable, "-c", sleeper])
        Path("child.pid").write_text(str(child.pid))
    if habit == "never-ready":
        signal.pause()
    _serve_http(port, deaf=habit == "ignores-term", answers=habit != "no-answers")


def _serve_http(port: int, *, deaf: bool, answers: bool) -> None:
    import signal
    from http.server import BaseHTTPRequestHandler, HTTPServer

    class Healthy(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            is_status = self.path == "/v1/status"
            has_answer = is_status or not self.path.startswith("/v1/")
            succeeds = has_answer and (answers or not is_status or Path("answers").exists())
            self.send_response(200 if succeeds else 503)
            self.end_headers()
            self.wfile.write(
                b'{"parts": {}}' if succeeds else b'{"error": {"message": "no engine"}}'
            )

    server = HTTPServer(("127.0.0.1", port), Healthy)
    signal.signal(signal.SIGTERM, signal.SIG_IGN if deaf else lambda *_: sys.exit(0))
    server.serve_forever(poll_interval=0.05)


if __name__ == "__main__":
    _serve(int(sys.argv[1]), sys.argv[2])
