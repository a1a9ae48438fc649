"""What an engine's container waits for before it is stopped."""

from __future__ import annotations

import socket
import ssl
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from ragcache_engine.drain import count_unfinished, drain, fetch_metrics
from tests.kit.certificates import issue, write
from tests.kit.clock import ManualClock

METRICS = """\
# HELP vllm:num_requests_running Number of requests in model execution batches.
# TYPE vllm:num_requests_running gauge
vllm:num_requests_running{{engine="0",model_name="tinyrag"}} {running}.0
vllm:num_requests_waiting{{engine="0",model_name="tinyrag"}} {waiting}.0
vllm:num_requests_waiting_by_reason{{engine="0",model_name="tinyrag",reason="capacity"}} {waiting}.0
vllm:prompt_tokens_total{{engine="0"}} 123.0
"""


def metrics(running: int = 0, waiting: int = 0) -> str:
    return METRICS.format(running=running, waiting=waiting)


def test_running_and_waiting_requests_are_counted_once() -> None:
    assert count_unfinished(metrics(2, 3)) == 5
    assert count_unfinished(metrics()) == 0
    assert count_unfinished("") == 0


def run(polls: list[str | None], deadline_s: float = 100) -> tuple[str, float]:
    """Return why the wait ended, and when. The last poll repeats."""
    clock, shown = ManualClock(), iter(polls)
    last = polls[-1]
    ended = drain(
        lambda: next(shown, last), settle_s=8, deadline_s=deadline_s, clock=clock, sleep=clock.sleep
    )
    return ended, clock.now


def test_it_waits_for_clients_to_leave_and_then_for_idleness() -> None:
    ended, after = run([metrics(1), metrics(0, 2), metrics(), metrics(1), metrics()])
    assert ended == "no request is left"
    assert after == 8 + 5 * 0.5


def test_an_idle_engine_delays_the_stop_as_little_as_possible() -> None:
    assert run([metrics()]) == ("no request is left", 8.5)


@pytest.mark.parametrize("deadline_s", [1, 8, 30])
def test_the_wait_is_bounded(deadline_s: float) -> None:
    ended, after = run([metrics(3)], deadline_s)
    assert ended == "time is up, requests left: 3"
    assert after <= deadline_s


def test_it_does_not_wait_for_a_dead_server() -> None:
    assert run([metrics(1), None])[0] == "there is no server"


def test_it_waits_for_a_server_that_is_too_busy_to_answer() -> None:
    def busy() -> str:
        raise TimeoutError

    clock = ManualClock()
    ended = drain(busy, settle_s=8, deadline_s=20, clock=clock, sleep=clock.sleep)
    assert (ended, clock.now) == ("time is up, requests left: unknown", 20)
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        silent.listen()
        with pytest.raises(TimeoutError):
            fetch_metrics(f"http://127.0.0.1:{silent.getsockname()[1]}/metrics", timeout_s=0.1)


@contextmanager
def serving(polls: list[str], certificate: Path | None = None) -> Iterator[str]:
    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            body = (polls.pop(0) if len(polls) > 1 else polls[0]).encode()
            self.send_response(200)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        if certificate is not None:
            context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
            context.load_cert_chain(certificate / "tls.crt", certificate / "tls.key")
            server.socket = context.wrap_socket(server.socket, server_side=True)
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        try:
            yield f"http{'s' * (certificate is not None)}://127.0.0.1:{server.server_port}/metrics"
        finally:
            server.shutdown()
            thread.join()


def test_an_encrypted_server_is_asked_too(tmp_path: Path) -> None:
    with serving([metrics(2)], write(tmp_path / "tls", issue())) as url:
        text = fetch_metrics(url)
    assert text is not None
    assert count_unfinished(text) == 2


def command(url: str, *more: str) -> list[str]:
    return [sys.executable, "-m", "ragcache_engine.drain", "--url", url, "--settle-s", "0", *more]


def test_the_command_waits_for_a_real_server() -> None:
    polls = [metrics(1), metrics(1), metrics()]
    with serving(polls) as url:
        done = subprocess.run(
            command(url, "--deadline-s", "120"),
            capture_output=True,
            text=True,
            timeout=200,
            check=True,
        )
    assert "no request is left" in done.stderr
    assert polls == [metrics()], "it has asked again while there was a request"


def test_the_command_succeeds_without_a_server_and_starts_fast() -> None:
    done = subprocess.run(
        command("http://127.0.0.1:9/metrics", "--deadline-s", "30"),
        capture_output=True,
        text=True,
        timeout=200,
        check=True,
    )
    assert "there is no server" in done.stderr
    heavy = "{'torch', 'vllm', 'grpc', 'numpy'}"
    code = f"import ragcache_engine.drain, sys; assert not {heavy} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], timeout=200, check=True)
