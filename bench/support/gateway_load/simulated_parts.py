"""The parts around a gateway under measurement: a simulated engine and stand-ins, as processes."""

from __future__ import annotations

import contextlib
import json
import os
import sys
from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import httpx
import psutil

from bench.support.processes import Service, free_port
from tests.kit.model import make_tiny_model

HOST: Final = "127.0.0.1"
GATEWAY: Final = ("-m", "ragcache_gateway")
"""Arguments of Python that run the gateway."""

_ROOT: Final = Path(__file__).resolve().parents[3]
_PROGRAMS: Final = "bench.support.gateway_load"


@dataclass(slots=True)
class SimulatedParts:
    """A simulated engine, and stand-ins of the retriever and of the engine's records.

    Args:
        folder: Has the logs of the processes.
        model: The model that gateways serve.
    """

    folder: Path
    model: Path
    engine_port: int = field(default_factory=free_port)
    grpc_port: int = field(default_factory=free_port)
    services: dict[str, Service] = field(default_factory=dict)

    def start(self) -> None:
        """Start the processes and wait until they serve."""
        engine = self._start("engine", ["-m", f"{_PROGRAMS}.simulated_engine", self.engine_port])
        command = ["-m", f"{_PROGRAMS}.stand_ins", self.grpc_port, self.model]
        stand_ins = self._start("stand_ins", command)
        engine.wait_until("serving", lambda: answers(f"http://{HOST}:{self.engine_port}/health"))
        stand_ins.wait_until("serving", lambda: "serving" in stand_ins.log.read_text())

    def start_gateway(
        self, name: str, port: int, program: Sequence[str] = GATEWAY, **settings: str
    ) -> Service:
        """Start a gateway in front of the parts; ``wait_for_gateway`` waits for it.

        Args:
            program: Arguments of Python.
            settings: More variables of its environment.
        """
        return self._start(
            name,
            program,
            RAGCACHE_LISTEN=f"{HOST}:{port}",
            RAGCACHE_RETRIEVER=f"{HOST}:{self.grpc_port}",
            RAGCACHE_ENGINES=f"http://{HOST}:{self.engine_port};records={self.grpc_port}",
            RAGCACHE_CACHESTORE=f"{HOST}:9",
            RAGCACHE_MODEL=str(self.model),
            RAGCACHE_MODEL_NAME="tiny",
            RAGCACHE_MAX_MODEL_LEN="65536",
            RAGCACHE_MAX_QUESTIONS="4096",
            **settings,
        )

    async def set_rate(self, tokens_per_s: int) -> None:
        """Set the token rate of the simulated engine."""
        await self._set("rate", tokens_per_s)

    async def set_first_token(self, first_token_s: float) -> None:
        """Set the time from a streamed request to its first token."""
        await self._set("first", first_token_s)

    async def _set(self, name: str, value: float) -> None:
        async with httpx.AsyncClient(trust_env=False) as client:
            url = f"http://{HOST}:{self.engine_port}/{name}"
            (await client.post(url, content=str(value))).raise_for_status()

    def _start(self, name: str, arguments: Sequence[object], **settings: str) -> Service:
        path = os.pathsep.join(filter(None, (os.environ.get("PYTHONPATH"), str(_ROOT))))
        command = [sys.executable, *map(str, arguments)]
        service = Service(
            name, command, {"PYTHONPATH": path} | settings, self.folder / f"{name}.log"
        )
        self.services[name] = service
        return service


@contextlib.contextmanager
def simulated_parts(folder: Path) -> Generator[SimulatedParts, None, None]:
    """Run the parts until the block ends, and stop the gateways that were started."""
    parts = SimulatedParts(folder, make_tiny_model(folder / "model"))
    try:
        parts.start()
        yield parts
    finally:
        for service in reversed(parts.services.values()):
            service.stop()


def wait_for_gateway(gateway: Service, port: int) -> None:
    """Wait until a gateway serves. Raises RuntimeError if it ends."""
    gateway.wait_until("serving", lambda: answers(f"http://{HOST}:{port}/v1/status"))


def answers(url: str) -> bool:
    """Whether a server answers with the status 200."""
    try:
        return httpx.get(url, trust_env=False).status_code == httpx.codes.OK
    except httpx.TransportError:
        return False


def cpu_s(pid: int) -> float:
    """Return the CPU time that a process and its children have used, in seconds."""
    process = psutil.Process(pid)
    total = 0.0
    for one in (process, *process.children(recursive=True)):
        used = one.cpu_times()
        total += used.user + used.system
    return total


def chat_request(port: int, **fields: Any) -> bytes:
    """Return the bytes of a question to a gateway; without retrieval by default."""
    body = {
        "messages": [{"role": "user", "content": "Which region does the service run in?"}],
        "ragcache": {"retrieve": False},
        **fields,
    }
    return http_request(port, "/v1/chat/completions", body)


def http_request(port: int, path: str, body: Mapping[str, Any]) -> bytes:
    """Return the bytes of a POST request."""
    content = json.dumps(body).encode()
    head = (
        f"POST {path} HTTP/1.1\r\nhost: {HOST}:{port}\r\ncontent-type: application/json\r\n"
        f"content-length: {len(content)}\r\n\r\n"
    )
    return head.encode() + content
