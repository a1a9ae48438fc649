"""Starts the real services as processes and stops them, for benchmarks and tests."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn, TypedDict

import grpc
import httpx
from grpc_health.v1 import health_pb2, health_pb2_grpc
from typing_extensions import Unpack

from harness.engine_forks import EngineForks, Fork
from ragcache_wire.settings.gateway import EngineAddress

START_TIMEOUT_S = 300.0
STOP_TIMEOUT_S = 60.0
MAX_SOCKET_PATH_BYTES = 107  # unix(7), without the byte that ends it
_SPIN_S = 1.2
"""How long vLLM's workers poll after a step before they sleep, with a margin."""

KV_TRANSFER = {
    "kv_connector": "RagCacheConnector",
    "kv_role": "kv_both",
    "kv_load_failure_policy": "recompute",
}


COMPUTES_PLAIN = {"RAGCACHE_PLAIN_PREFIXES": "off"}
"""Setting with which an engine computes prompts without a plan. Comparisons need it, because the
store would serve these prompts as well."""


engine_forks: EngineForks | None = None
"""What starts engines in place of new processes: in tests, which measure no speed."""


def let_engines_sleep() -> None:
    """Wait until idle engines use no CPU, before another one is timed.

    Their workers share the CPUs, so one that still polls for its next step would halve the speed of
    the measured one.
    """
    time.sleep(_SPIN_S)


def free_port() -> int:
    """Reserve a loopback port for a server that starts later, while this process lives.

    The port stays bound here without listening. The kernel then assigns it to no other socket and
    refuses connections, but a server that sets SO_REUSEADDR can listen on it, repeatedly. Without
    this, another test's server could take the port and answer in its stead.
    """
    kept = socket.socket()
    kept.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    kept.bind(("127.0.0.1", 0))
    port = int(kept.getsockname()[1])
    kept.detach()  # stays open
    return port


def _end(*_: object) -> NoReturn:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # the services are being stopped
    raise KeyboardInterrupt


class Service:
    """A process in its own process group, with its output in a file.

    Its group does not end with this process. A SIGTERM without a handler therefore raises
    KeyboardInterrupt, as Ctrl-C does, so that the services are stopped.

    Args:
        forks: Starts it, if its command is ``python -m MODULE ...``.
    """

    def __init__(
        self,
        name: str,
        command: Sequence[str],
        env: Mapping[str, str],
        log: Path,
        forks: EngineForks | None = None,
    ) -> None:
        in_main = threading.current_thread() is threading.main_thread()
        if in_main and signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:
            signal.signal(signal.SIGTERM, _end)
        self.name = name
        self.log = log
        env = {**os.environ, **env}
        self._process: subprocess.Popen[bytes] | Fork
        with log.open("ab") as output:
            if forks is not None:
                self._process = forks.start(command[2], command[3:], env, output)
                return
            self._process = subprocess.Popen(
                command,
                env=env,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def has_ended(self) -> bool:
        return self._process.poll() is not None

    def cpu_s(self) -> float:
        """Return the CPU time that the process and its children have used, in seconds."""
        import psutil  # a machine that only starts services may lack it

        used_s = 0.0
        root = psutil.Process(self.pid)
        for process in (root, *root.children(recursive=True)):
            with contextlib.suppress(psutil.NoSuchProcess):
                times = process.cpu_times()
                used_s += times.user + times.system
        return used_s

    def wait_until(self, ready: str, probe: object) -> None:
        """Wait until probe() is true. Raises RuntimeError with the log's end if it dies first."""
        assert callable(probe)
        deadline = time.monotonic() + START_TIMEOUT_S
        while not probe():
            if self._process.poll() is not None or time.monotonic() > deadline:
                tail = self.log.read_text(errors="replace")[-3000:]
                raise RuntimeError(f"{self.name} did not become {ready}:\n{tail}")
            time.sleep(0.05)

    def freeze(self) -> None:
        """Stop the whole group, as a machine that hangs would; return once all threads stopped."""
        os.killpg(self._process.pid, signal.SIGSTOP)
        while not all(state in "TZX" for state in _thread_states(self._process.pid)):
            time.sleep(0.0005)

    def thaw(self) -> None:
        """Let a frozen group go on. Does nothing if it has ended."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGCONT)

    def kill(self) -> None:
        """Kill the whole group, as a crash would; vLLM has child processes."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()

    def stop(self) -> None:
        """Ask it to end, then kill the rest of its group."""
        if self._process.poll() is None:
            self._process.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(STOP_TIMEOUT_S)
        self.kill()


def _thread_states(pid: int) -> Iterator[str]:
    """Yield the state of each thread of a process, as proc(5) names it."""
    for stat in Path(f"/proc/{pid}/task").glob("*/stat"):
        with contextlib.suppress(OSError):
            yield stat.read_text().rpartition(")")[2].split()[0]


@dataclass(frozen=True, slots=True)
class CacheStore:
    """A running cache store."""

    service: Service
    address: str


@dataclass(frozen=True, slots=True)
class Engine:
    """A running vLLM server. records: address of its record service, or None."""

    service: Service
    url: str
    records: str | None

    @property
    def address(self) -> EngineAddress:
        """The address as a gateway's settings have it."""
        records = None if self.records is None else int(self.records.rpartition(":")[2])
        return EngineAddress.of_url(self.url, records)


@contextlib.contextmanager
def running_cachestore(folder: Path, **settings: Any) -> Iterator[CacheStore]:
    """A cache store with its data in folder/data. settings: see launch_cachestore."""
    store = start_cachestore(folder, **settings)
    try:
        yield store
    finally:
        store.service.stop()


def start_cachestore(folder: Path, **settings: Any) -> CacheStore:
    """Start a cache store and wait until it serves. settings: see launch_cachestore."""
    store = launch_cachestore(folder, **settings)
    wait_for_cachestore(store)
    return store


def launch_cachestore(
    folder: Path,
    *,
    memory_bytes: int = 256 << 20,
    disk_bytes: int = 4 << 30,
    port: int | None = None,
    shared: bool = True,
    members: str = "",
    env: Mapping[str, str] | None = None,
) -> CacheStore:
    """Start a cache store, and do not wait for it.

    ``shared`` also offers shared memory, unless the path is too long for a Unix socket.
    members: RAGCACHE_CACHESTORE, for one shard of several. env: further settings.
    """
    folder.mkdir(parents=True, exist_ok=True)
    address = f"127.0.0.1:{port or free_port()}"
    settings = {
        "RAGCACHE_LISTEN": address,
        "RAGCACHE_DATA_LISTEN": f"127.0.0.1:{free_port()}",
        "RAGCACHE_DATA_DIR": str(folder / "data"),
        "RAGCACHE_MEMORY_BYTES": str(memory_bytes),
        "RAGCACHE_DISK_BYTES": str(disk_bytes),
    }
    data_socket = folder.resolve() / "lane"
    if shared and len(os.fsencode(data_socket)) <= MAX_SOCKET_PATH_BYTES:
        settings["RAGCACHE_DATA_SOCKET"] = str(data_socket)
    if members:
        settings |= {"RAGCACHE_CACHESTORE": members, "RAGCACHE_OWN_ADDRESS": address}
    command = [sys.executable, "-m", "ragcache_cachestore"]
    service = Service("cachestore", command, settings | dict(env or {}), folder / "cachestore.log")
    return CacheStore(service, address)


def wait_for_cachestore(store: CacheStore) -> None:
    """Wait until a launched cache store serves."""
    try:
        store.service.wait_until("ready", lambda: is_serving(store.address))
    except BaseException:
        store.service.stop()
        raise


def vllm_cache_root(folder: Path) -> Path:
    """Return a new cache folder for vLLM, without measured profiles and compiled models.

    It shares what vLLM knows about model classes with other engines of this user. To find that out
    again takes a process that imports vLLM once more.
    """
    shared = Path("~/.cache/vllm/modelinfos").expanduser()
    shared.mkdir(parents=True, exist_ok=True)
    root = folder / "vllm"
    root.mkdir(parents=True, exist_ok=True)
    if not (root / "modelinfos").exists():
        (root / "modelinfos").symlink_to(shared)
    return root


def launch_engine(
    folder: Path,
    model: Path,
    cachestore: str | None,
    *arguments: str,
    max_length: int = 4096,
    settings: Mapping[str, str] | None = None,
    port: int | None = None,
    records_port: int | None = None,
    number_type: str = "bfloat16",
) -> Engine:
    """Start vLLM without waiting for it. cachestore None: plain vLLM without our connector.

    settings: further environment. port, records_port: those of an engine that ended, to start it
    again.
    """
    folder.mkdir(parents=True, exist_ok=True)
    port = port or free_port()
    env = {
        "VLLM_CPU_KVCACHE_SPACE": "1",
        # vLLM reserves one core more when there is a connector; then the two engines compared would
        # differ in threads, and with the order of sums in tokens too.
        "VLLM_CPU_NUM_OF_RESERVED_CPU": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "DO_NOT_TRACK": "1",
        "HF_HUB_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "false",
        **(settings or {}),
    }
    command = [
        *(sys.executable, "-m", "vllm.entrypoints.openai.api_server"),
        *("--model", str(model), "--served-model-name", "model"),
        *("--host", "127.0.0.1", "--port", str(port)),
        *("--dtype", number_type, "--max-model-len", str(max_length)),
        *("--enforce-eager", "--enable-prompt-tokens-details"),
        *arguments,
    ]
    records = None
    if cachestore is not None:
        records = f"127.0.0.1:{records_port or free_port()}"
        # Small models are computed as fast as they are loaded, and loading is what is looked at.
        ours = {"RAGCACHE_CACHESTORE": cachestore, "RAGCACHE_LOAD_ALWAYS": "on"}
        env = {**ours, "RAGCACHE_RECORDS_LISTEN": records, **env}
        command += ["--kv-transfer-config", json.dumps(KV_TRANSFER)]
        command += ["--scheduling-policy", "priority"]
    # A fork has already imported modules, so another path comes too late.
    forks = None if "PYTHONPATH" in env else engine_forks
    service = Service("engine", command, env, folder / f"engine-{port}.log", forks)
    return Engine(service, f"http://127.0.0.1:{port}", records)


def wait_for_engine(engine: Engine) -> None:
    """Wait until a launched engine serves."""
    try:
        engine.service.wait_until("ready", lambda: answers(f"{engine.url}/health"))
    except BaseException:
        engine.service.stop()
        raise


class EngineOptions(TypedDict, total=False):
    """The options of ``launch_engine``."""

    max_length: int
    settings: Mapping[str, str] | None
    port: int | None
    records_port: int | None
    number_type: str


@contextlib.contextmanager
def running_engine(
    folder: Path,
    model: Path,
    cachestore: str | None,
    *arguments: str,
    **options: Unpack[EngineOptions],
) -> Iterator[Engine]:
    """An engine that serves, with the options of ``launch_engine``."""
    engine = launch_engine(folder, model, cachestore, *arguments, **options)
    try:
        wait_for_engine(engine)
        yield engine
    finally:
        engine.service.stop()


def answers(url: str) -> bool:
    """Return whether a server answers with the status 200."""
    try:
        # Without `verify`, httpx would make a TLS context each time, which takes 20 ms.
        reply = httpx.get(url, timeout=10, verify=False, trust_env=False)
    except httpx.HTTPError:
        return False
    return reply.status_code == httpx.codes.OK


def is_serving(address: str) -> bool:
    """Return whether the gRPC service at an address reports that it serves."""
    with grpc.insecure_channel(address) as channel:
        stub = health_pb2_grpc.HealthStub(channel)
        try:
            reply = stub.Check(health_pb2.HealthCheckRequest(), timeout=10)
        except grpc.RpcError:
            return False
        return bool(reply.status == health_pb2.HealthCheckResponse.SERVING)
