"""The cache store as a process: starting, stopping, being killed."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest

from harness.processes import free_port
from ragcache_core.errors import Unavailable
from ragcache_kv.store_client.client import StoreClient
from tests.kit.store import TIMEOUT_S, get_value, key, put_value, value
from tests.kit.wait import wait_until


def environment(folder: Path, port: int) -> dict[str, str]:
    return os.environ | {
        "RAGCACHE_LISTEN": f"127.0.0.1:{port}",
        "RAGCACHE_DATA_DIR": str(folder),
        "RAGCACHE_MEMORY_BYTES": "8000000",
        "RAGCACHE_DISK_BYTES": "1000000000",
        "RAGCACHE_DATA_LISTEN": "127.0.0.1:0",
        "RAGCACHE_DATA_SOCKET": str(folder.parent / f"{port}.sock"),
    }


def command() -> list[str]:
    return [sys.executable, "-m", "ragcache_cachestore"]


@pytest.fixture
def port() -> int:
    return free_port()


@contextmanager
def running(folder: Path, port: int) -> Iterator[tuple[subprocess.Popen[bytes], StoreClient]]:
    """Run a process until it answers, and kill it afterwards unless it has ended."""
    process = subprocess.Popen(command(), env=environment(folder, port))
    client = StoreClient(f"127.0.0.1:{port}")
    try:

        def answers() -> bool:
            try:
                client.stats()
            except Unavailable:
                assert process.poll() is None
                return False
            return True

        wait_until(answers, "a store")
        yield process, client
    finally:
        client.close()
        process.kill()
        process.wait()


def size_of(number: int) -> int:
    """Mostly small values, and some of many pages."""
    return 1 + number * 7919 % 30_000 if number % 20 else 1_000_000 * (1 + number // 20 % 3)


def test_a_stop_keeps_accepted_values(tmp_path: Path, port: int) -> None:
    with running(tmp_path, port) as (process, client):
        for number in range(20):
            put_value(client, key(number), value(100_000, number))
        assert client.transport == "shared"
        process.send_signal(signal.SIGTERM)
        assert process.wait(TIMEOUT_S) == 0
    with running(tmp_path, port) as (_, client):
        for number in range(20):
            assert get_value(client, key(number)) == value(100_000, number)


def test_a_process_on_a_damaged_database_starts_empty(tmp_path: Path, port: int) -> None:
    with running(tmp_path, port) as (process, client):
        put_value(client, key(0), value(size_of(0)))
        process.send_signal(signal.SIGTERM)
        process.wait(TIMEOUT_S)
    (tmp_path / "records" / "CURRENT").write_bytes(b"nonsense")
    with running(tmp_path, port) as (_, client):
        stats = client.stats(TIMEOUT_S)
        assert (stats.variants, stats.reset_at_ms > 0) == (0, True)
        assert "CURRENT file does not end with newline" in stats.reset_reason
        put_value(client, key(0), value(size_of(0)))


def test_health_is_served_over_http(tmp_path: Path, port: int) -> None:
    health = f"127.0.0.1:{free_port()}"
    env = environment(tmp_path, port) | {"RAGCACHE_HEALTH_LISTEN": health}
    process = subprocess.Popen(command(), env=env)
    try:

        def is_ready() -> bool:
            status = status_of(f"http://{health}/readyz")
            assert status in {None, 503, 200}
            return status == 200

        wait_until(is_ready)
        assert status_of(f"http://{health}/healthz") == 200
        taken = environment(tmp_path / "b", 0) | {"RAGCACHE_HEALTH_LISTEN": health}
        assert "RAGCACHE_HEALTH_LISTEN" in failed_start(taken)
        process.send_signal(signal.SIGTERM)
        assert process.wait(TIMEOUT_S) == 0
    finally:
        process.kill()
        process.wait()


def status_of(url: str) -> int | None:
    """Return the status, or None if no server listens."""
    try:
        return httpx.get(url, trust_env=False, timeout=60).status_code
    except httpx.ConnectError:
        return None


def failed_start(env: dict[str, str]) -> str:
    """Return the output of a start that must fail."""
    done = subprocess.run(
        command(), env=env, capture_output=True, text=True, timeout=TIMEOUT_S, check=False
    )
    assert done.returncode == 2
    assert "Traceback" not in done.stderr
    return done.stderr


def test_a_second_process_on_the_folder_is_refused(tmp_path: Path, port: int) -> None:
    with running(tmp_path, port) as (_, client):
        assert "in use by another process" in failed_start(environment(tmp_path, 0))
        put_value(client, key(1), b"the first goes on")


def test_a_port_in_use_is_refused(tmp_path: Path, port: int) -> None:
    with running(tmp_path / "a", port):
        taken = environment(tmp_path / "b", port)
        # The socket of the first process is left unchanged.
        assert "RAGCACHE_DATA_SOCKET" in failed_start(taken)
        taken |= {"RAGCACHE_DATA_SOCKET": str(tmp_path / "b.sock")}
        assert f"RAGCACHE_LISTEN: 127.0.0.1:{port}" in failed_start(taken)


def test_an_invalid_setting_is_named(tmp_path: Path) -> None:
    wrong = environment(tmp_path, 0) | {"RAGCACHE_DISK_BYTES": "plenty"}
    assert "RAGCACHE_DISK_BYTES: is 'plenty'" in failed_start(wrong)
