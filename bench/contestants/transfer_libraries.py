"""Mooncake's store over TCP, and NIXL over shared memory."""

from __future__ import annotations

import multiprocessing
import os
import shutil
from collections import Counter
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np

from bench.contestants.contestant import Absent, Contestant, Server, free_port

_SEGMENT_BYTES = 768 << 20


def _address(buffer: memoryview) -> int:
    return int(np.frombuffer(buffer, dtype=np.uint8).__array_interface__["data"][0])


def _whole(buffer: memoryview) -> tuple[int, int]:
    """Address and size of the array that buffer is a window of.

    It is made known to the library once, as an engine does with its memory.
    """
    whole: Any = np.frombuffer(buffer, dtype=np.uint8)
    while isinstance(whole, np.ndarray) and whole.base is not None:
        whole = whole.base.obj if isinstance(whole.base, memoryview) else whole.base
    array = np.asarray(whole)
    return int(array.__array_interface__["data"][0]), int(array.nbytes)


def _mooncake(master: str, segment_bytes: int) -> Any:
    from mooncake.store import MooncakeDistributedStore  # noqa: PLC0415

    store = MooncakeDistributedStore()
    code = store.setup(
        f"127.0.0.1:{free_port()}", "P2PHANDSHAKE", segment_bytes, 64 << 20, "tcp", "", master
    )
    if code:
        raise Absent(f"mooncake does not start: setup gave {code}")
    return store


def _hold_mooncake(master: str, ready: Connection) -> None:
    store = _mooncake(master, _SEGMENT_BYTES)
    ready.send(True)
    ready.recv()
    store.close()


class HeldMemory(Contestant):
    """Values in the memory of another process, and buffers that the library knows."""

    def _start_holder(self, hold: Callable[..., None], *words: str) -> None:
        context = multiprocessing.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(target=hold, args=(*words, theirs), daemon=True)
        self._process.start()
        self._registered: list[tuple[int, int]] = []
        if not self._pipe.poll(30):
            self.close()
            raise Absent("the process that holds the memory does not start")

    def close(self) -> None:
        self._process.terminate()
        self._process.join(10)

    def _register(self, buffer: memoryview, register: Callable[[int, int], object]) -> None:
        """Register the whole array that a buffer is a window of, once."""
        if (whole := _whole(buffer)) not in self._registered:
            register(*whole)
            self._registered.append(whole)


class Mooncake(HeldMemory):
    """Mooncake's store: a master, a process that lends memory, and a client without any."""

    def __init__(self, folder: Path) -> None:
        import mooncake  # noqa: PLC0415

        master = Path(mooncake.__file__).parent / "mooncake_master"
        port, metrics = free_port(), free_port()
        argv = [str(master), f"--rpc_port={port}", f"--metrics_port={metrics}"]
        if shutil.which(argv[0]) is None:
            os.chmod(argv[0], 0o755)
        self._server = Server(argv, port)
        self._start_holder(_hold_mooncake, f"127.0.0.1:{port}")
        self._store = _mooncake(f"127.0.0.1:{port}", 0)
        self._puts: Counter[int] = Counter()

    def prepare_put(self, number: int, value: memoryview) -> None:
        """Remove the old value, because an object does not change."""
        if self._puts[number]:
            self._store.remove(self._key(number))
        self._puts[number] += 1

    def put(self, number: int, value: memoryview) -> None:
        if self._store.put(self._key(number), value):
            raise OSError("mooncake refused a put")

    def get(self, number: int, buffer: memoryview) -> None:
        self._register(buffer, self._store.register_buffer)
        found = self._store.get_into(self._key(number), _address(buffer), len(buffer))
        if found != len(buffer):
            raise OSError(f"mooncake gave {found}")

    def close(self) -> None:
        super().close()
        self._server.end()

    def _key(self, number: int) -> str:
        return f"{number}-{self._puts[number]}"


def _nixl_agent(name: str) -> Any:
    from nixl_cu12._api import nixl_agent, nixl_agent_config  # noqa: PLC0415

    try:
        return nixl_agent(name, nixl_agent_config(backends=["UCX"]))
    except Exception as error:
        raise Absent(f"nixl does not start: {error}") from error


def _hold_nixl(pipe: Connection) -> None:
    memory = np.zeros(_SEGMENT_BYTES, dtype=np.uint8)
    agent = _nixl_agent("holder")
    agent.register_memory([(memory.ctypes.data, memory.nbytes, 0, "")], "DRAM")
    pipe.send((agent.get_agent_metadata(), memory.ctypes.data))
    pipe.recv()


class Nixl(HeldMemory):
    """One-sided reads and writes of another process's registered memory, by UCX."""

    def __init__(self, folder: Path) -> None:
        self._agent = _nixl_agent("client")
        self._start_holder(_hold_nixl)
        metadata, self._remote = self._pipe.recv()
        self._peer = self._agent.add_remote_agent(metadata)

    def put(self, number: int, value: memoryview) -> None:
        self._move("WRITE", number, value)

    def get(self, number: int, buffer: memoryview) -> None:
        self._move("READ", number, buffer)

    def _move(self, how: str, number: int, buffer: memoryview) -> None:
        start, num_bytes = _address(buffer), len(buffer)
        self._register(
            buffer, lambda *whole: self._agent.register_memory([(*whole, 0, "")], "DRAM")
        )
        slots = _SEGMENT_BYTES // num_bytes
        remote = self._remote + number % slots * num_bytes
        local = self._agent.get_xfer_descs([(start, num_bytes, 0)], "DRAM")
        far = self._agent.get_xfer_descs([(remote, num_bytes, 0)], "DRAM")
        handle = self._agent.initialize_xfer(how, local, far, self._peer)
        state = self._agent.transfer(handle)
        while state == "PROC":
            state = self._agent.check_xfer_state(handle)
        self._agent.release_xfer_handle(handle)
        if state != "DONE":
            raise OSError(f"nixl ended a transfer as {state}")
