"""Starts vLLM's server as a fork of a process that has imported vLLM already.

An engine has three processes, and the import of vLLM and torch takes each of them 11 s of a core:
three quarters of its start. Here one process imports them, and starts no thread. Each engine is a
fork of it that runs vLLM's server as ``python -m`` would. The engine's own processes are forks as
well, of a second process that is forked before the server begins.

Each engine computes with one thread, which is bound to no core. Its processes sleep while they wait
for each other: as vLLM has it, they poll for a second after each step, and take the CPUs from
everything else that a test runs.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import multiprocessing.context
import os
import runpy
import select
import signal
import socket
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Mapping, Sequence
from multiprocessing import forkserver, resource_tracker, spawn
from pathlib import Path
from typing import Any, BinaryIO, Final, NamedTuple

ROOT: Final = Path(__file__).resolve().parent.parent
_IMPORTED: Final = (
    "ragcache_engine.connector",
    "ragcache_engine.plugin",
    "ragcache_engine.telemetry.step_logger",
    "vllm.entrypoints.launchers.api_server.entry",
    "vllm.model_executor.models.llama",
    "vllm.v1.engine.async_llm",
    "vllm.v1.engine.core",
    "vllm.v1.executor.multiproc_executor",
    "vllm.v1.worker.cpu_worker",
)
_WITHOUT_THREADS: Final = {
    "JE_ARROW_MALLOC_CONF": "background_thread:false",
    "OMP_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
}
"""Environment in which no library starts a thread when it is imported. A fork would lose it."""

_SIZE_BYTES: Final = 4


class Fork:
    """A running engine, with what a service uses of ``Popen``. Its parent is another process."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self._descriptor = os.pidfd_open(pid)
        weakref.finalize(self, os.close, self._descriptor)

    def poll(self) -> int | None:
        """Return 0 once it has ended. The real status is unknown."""
        return self._status(0)

    def wait(self, timeout: float | None = None) -> int:
        """Wait until it has ended. Raises TimeoutExpired after so many seconds."""
        if self._status(None if timeout is None else timeout * 1000) is None:
            raise subprocess.TimeoutExpired("engine", timeout or 0)
        return 0

    def terminate(self) -> None:
        """Ask it to end."""
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(self._descriptor, signal.SIGTERM)

    def _status(self, limit_ms: float | None) -> int | None:
        ended = select.poll()
        ended.register(self._descriptor, select.POLLIN)
        return 0 if ended.poll(limit_ms) else None


class _Start(NamedTuple):
    """What a fork shall run."""

    module: str
    arguments: list[str]
    env: dict[str, str]


class EngineForks:
    """The process that imports vLLM once. It starts with the first engine."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._connection: socket.socket | None = None
        self._process: subprocess.Popen[bytes] | None = None

    def start(
        self, module: str, arguments: Sequence[str], env: Mapping[str, str], output: BinaryIO
    ) -> Fork:
        """Run a module as ``python -m`` does, in a process group of its own.

        Args:
            env: The whole environment.
            output: File for all that it prints. The first one also has the errors of the imports.
        """
        request = json.dumps(_Start(module, list(arguments), dict(env))).encode()
        with self._lock:
            connection = self._connection or self._begin(output)
            size = len(request).to_bytes(_SIZE_BYTES, "big")
            socket.send_fds(connection, [size], [output.fileno()])
            connection.sendall(request)
            return Fork(int.from_bytes(_read(connection, _SIZE_BYTES), "big"))

    def close(self) -> None:
        """End the process. Engines that run go on."""
        if self._connection is not None and self._process is not None:
            self._connection.close()
            self._process.kill()
            self._process.wait()

    def _begin(self, output: BinaryIO) -> socket.socket:
        self._connection, other = socket.socketpair()
        with other:
            self._process = subprocess.Popen(
                [sys.executable, "-m", __name__, str(other.fileno())],
                cwd=ROOT,
                env={**os.environ, **_WITHOUT_THREADS},
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                pass_fds=[other.fileno()],
                start_new_session=True,
            )
        return self._connection


def _read(connection: socket.socket, size: int) -> bytes:
    found = b""
    while len(found) < size:
        part = connection.recv(size - len(found))
        if not part:
            raise EOFError("the process that forks engines has ended; the first log says why")
        found += part
    return found


def _fork_engines(connection: socket.socket) -> _Start | None:
    """Fork for each request. Returns it in the fork, and None when the requests end."""
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # no engine stays a zombie
    while True:
        head, descriptors, _, _ = socket.recv_fds(connection, _SIZE_BYTES, 1)
        if not head:
            return None
        start = _Start(*json.loads(_read(connection, int.from_bytes(head, "big"))))
        pid = os.fork()
        if pid == 0:
            connection.close()
            os.setsid()
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            for number in (1, 2):
                os.dup2(descriptors[0], number)
            os.close(descriptors[0])
            return start
        os.close(descriptors[0])
        connection.sendall(pid.to_bytes(_SIZE_BYTES, "big"))


def _set_environment(env: Mapping[str, str]) -> None:
    os.environ.clear()
    os.environ.update(env)


def _fork_in_place_of_spawn() -> None:
    """Let ``multiprocessing`` ask a forkserver where it would spawn, with the same environment."""
    contexts: Any = vars(multiprocessing.context)["_concrete_contexts"]
    contexts["spawn"] = contexts["forkserver"]
    described, prepare = spawn.get_preparation_data, spawn.prepare

    def describe(name: str) -> dict[str, Any]:
        return {**described(name), "environment": dict(os.environ)}

    def prepare_fork(data: Mapping[str, Any]) -> None:
        _set_environment(data["environment"])
        prepare(dict(data))

    spawn.get_preparation_data, spawn.prepare = describe, prepare_fork


def _start_forkserver() -> None:
    """Fork the parent of the processes that this one starts."""
    known: Any = vars(forkserver)["_forkserver"]
    known.ensure_running = resource_tracker.ensure_running  # by no process another forkserver
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind("")  # an abstract address that is free
        listener.listen()
        alive, known._forkserver_alive_fd = os.pipe()
        if os.fork() == 0:
            os.close(known._forkserver_alive_fd)
            forkserver.main(listener.fileno(), alive, [])
            os._exit(0)
        os.close(alive)
        known._forkserver_address = listener.getsockname()


def _wait_asleep() -> None:
    """Do what the plugin ``WAITS_ASLEEP`` does in engines that start otherwise."""
    from vllm.distributed.device_communicators import shm_broadcast

    shm_broadcast.sched_yield = lambda: time.sleep(50e-6)


def main() -> None:
    """Run the command."""
    import setproctitle

    setproctitle.setproctitle("engine forks")  # later it would not find where the title is
    for name in _IMPORTED:
        importlib.import_module(name)
    _wait_asleep()
    assert len(os.listdir("/proc/self/task")) == 1, "a fork would lose a thread"
    start = _fork_engines(socket.socket(fileno=int(sys.argv[1])))
    if start is None:
        return
    _set_environment(start.env)
    _fork_in_place_of_spawn()
    _start_forkserver()
    sys.argv = [start.module, *start.arguments]
    runpy.run_module(start.module, run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
